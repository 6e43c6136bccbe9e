"""What is put into torch: attributes replaced by wrappers, global hooks, and the exact originals put back.

A wrapper that someone else has wrapped since cannot be taken out any more; it then passes everything straight through.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable

from stepscope.record.agent.compiling import is_compiling_check
from stepscope.record.agent.wrapper_importlib_bootstrap import Answer, Call, make_wrapper

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.guard import After, Before, Guard, Pair

    Refused = Callable[[Call, BaseException], Any]


class Patch:
    """`owner.name` wrapped by `wrap(original)`, until `remove`."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner = owner
        self._name = name
        self._inherited = name not in vars(owner)
        self._original = vars(owner)[name] if not self._inherited else getattr(owner, name)
        self._wrapper = wrap(self._original)
        setattr(owner, name, self._wrapper)

    def remove(self) -> bool:
        """Restore the original. False when someone else has wrapped it since, so that it must stay."""
        if vars(self._owner).get(self._name) is not self._wrapper:
            return False
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
        return True


class Patches:
    """Wrappers that look on. One that could not be removed goes quiet instead, and wakes up on `install`."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._stuck: list[Patch] = []
        self.enabled = False

    def install(self, make: Callable[[], Any]) -> None:
        """Run `make`, which calls `around`, unless the wrappers of an earlier time are still in place."""
        self.enabled = True
        if not self._stuck:
            make()

    def around(self, owner: Any, name: str, pair: Pair, refused: Refused | None = None) -> bool:
        """Call the hooks of `pair` around `owner.name`; False where there is no such function."""
        if getattr(owner, name, None) is None:
            return False
        self.replace(owner, name, lambda original: make_wrapper(self, original, pair, refused))
        return True

    def replace(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Have `wrap(original)` in the place of `owner.name`."""
        self._patches.append(Patch(owner, name, wrap))

    def remove(self) -> None:
        """Take all wrappers out, the newest first."""
        self.enabled = False
        self._stuck.extend(patch for patch in reversed(self._patches) if not patch.remove())
        self._patches.clear()


class Probe:
    """Something installed in torch; this one wraps functions. `name` is what guard and fault injection know it by."""

    name = ""
    _agent: Agent

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self, agent: Agent) -> None:
        """Put everything in. May be called again after `uninstall`."""
        self._agent = agent
        self._patches.install(self._wrap_all)

    def uninstall(self) -> None:
        """Take everything out and restore the originals."""
        self._patches.remove()

    def _wrap_all(self) -> None:
        """Call `_around` for every function that is wrapped."""

    def _around(self, owner: Any, name: str, before: Before, after: After | None = None) -> bool:
        """Have `before` and `after` called around `owner.name`; False where there is no such function."""
        return self._patches.around(owner, name, self._agent.guard.pair(self.name, before, after))


class ModuleHook:
    """A global hook on calls of modules, `call(module)` before them or `call(module, output)` after, while it is in.

    In what Dynamo traces it folds away. Global hooks slow every module down and make Dynamo compile anew.
    """

    def __init__(self, call: Callable[..., Any], after: bool = False) -> None:
        self._call = call
        self._after = after
        self._handle: Any = None

    @property
    def is_in(self) -> bool:
        """Whether modules are listened to."""
        return self._handle is not None

    def add(self) -> None:
        """Put it in, where it is not."""
        if self._handle is not None:
            return
        from torch.nn.modules import module as modules

        is_compiling, call = is_compiling_check(), self._call

        def forward(module: Any, _inputs: Any, *output: Any) -> None:
            if not is_compiling():
                call(module, *output)

        after, before = modules.register_module_forward_hook, modules.register_module_forward_pre_hook
        self._handle = (after if self._after else before)(forward)

    def remove(self) -> None:
        """Take it out, where it is in."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class CallPatches(Patches):
    """Wrappers that change calls, on the guard's switch `name`: once it has failed, calls pass straight through."""

    def __init__(self, guard: Guard, name: str) -> None:
        super().__init__()
        self._guard = guard
        self._name = name
        self.enabled = True

    def look(self, owner: Any, name: str, before: Before, after: After | None = None) -> bool:
        """Have `before` and `after` called around `owner.name`. False where there is no such function."""
        return self.around(owner, name, self._guard.pair(self._name, before, after))

    def change(
        self,
        owner: Any,
        name: str,
        change: Callable[..., Call | Answer | None],
        after: Callable[[Call, Any], Any] | None = None,
        refused: Refused | None = None,
    ) -> bool:
        """Have calls of `owner.name` go through `change`; None of it leaves a call alone. False without it.

        `after(call, result)` is told of changed calls that returned. With `refused`, an error of a changed call makes
        it once more with the arguments it was given: only for functions that have no effect before they refuse, and use
        up no argument (iterators must have been unfolded).
        """

        def returned(call: Call | None, result: Any, error: BaseException | None) -> None:
            if call is not None and error is None and after is not None:
                after(call, result)

        pair = self._guard.pair(self._name, change, None if after is None else returned)
        return self.around(owner, name, pair, None if refused is None else self._guard.wrap(self._name, refused))


class Arguments:
    """The arguments of one call by name, wherever they were given; made for functions with named parameters.

    `names` are the parameters in order, a method's `self` included (see `parameter_names`), as `args` begins with it.
    """

    def __init__(self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._names = names
        self.args = list(args)
        self.kwargs = dict(kwargs)

    def get(self, name: str, default: Any = None) -> Any:
        """What the caller gave for `name`, else `default`."""
        index = self._index(name)
        return self.args[index] if index is not None else self.kwargs.get(name, default)

    def set(self, name: str, value: Any) -> None:
        """Give `value` for `name`, in the place where the caller gave it."""
        index = self._index(name)
        if index is not None:
            self.args[index] = value
        else:
            self.kwargs[name] = value

    def call(self, token: Any = None) -> Call:
        """The call as it now is."""
        return Call(tuple(self.args), self.kwargs, token)

    def _index(self, name: str) -> int | None:
        index = self._names.index(name) if name in self._names else len(self.args)
        return index if index < len(self.args) else None


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that may be given by position, in order; a wrapper's are those of what it wraps."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, found in inspect.signature(function).parameters.items() if found.kind in kinds]
