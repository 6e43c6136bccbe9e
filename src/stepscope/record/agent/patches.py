"""What is put into torch: attributes replaced by wrappers, global hooks, and the exact originals put back.

A wrapper that someone else has wrapped since cannot be taken out any more; it then passes everything straight through.

Two things are needed to stay out of torch.compile's way. Inside a region that Dynamo traces, a hook of ours must fold
away: it asks `is_compiling_check()()` first, which Dynamo replaces by True. Outside, our functions run as ordinary
frames under Dynamo's frame callback, which would compile them like the user's; `skip_own_code` tells it not to.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from inspect import signature
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

from stepscope.record.agent.wrapper_importlib_bootstrap import Answer, Call, make_wrapper

if TYPE_CHECKING:
    import inspect

    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.guard import After, Before, Guard, Pair

    Refused = Callable[[Call, BaseException], Any]


class Patches:
    """Wrappers on the guard's switch `name`: once it has failed, calls pass straight through.

    One that could not be removed goes quiet instead, and wakes up on `install`.
    """

    def __init__(self, guard: Guard, name: str) -> None:
        self._guard = guard
        self._name = name
        self._patches: list[tuple[Any, str, Any, Any]] = []  # (owner, name, its own original or None, wrapper)
        self._is_stuck = False  # someone else has wrapped one of ours
        self.enabled = False

    def install(self, make: Callable[[], Any]) -> None:
        """Run `make`, which puts wrappers in, unless those of an earlier time are still in place."""
        self.enabled = True
        if not self._is_stuck:
            make()

    def look(self, owner: Any, name: str, before: Before, after: After | None = None) -> bool:
        """Have `before` and `after` called around `owner.name`. False where there is no such function."""
        return self._around(owner, name, self._guard.pair(self._name, before, after), None)

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

        def returned(call: Call, result: Any, error: BaseException | None) -> None:
            if error is None and after is not None:
                after(call, result)

        guarded = None if refused is None else self._guard.wrap(self._name, refused)
        return self._around(owner, name, self._guard.pair(self._name, change, returned), guarded)

    def replace(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
        """Have `wrap(original)` in the place of `owner.name`, which may be inherited."""
        self.enabled = True
        own = vars(owner).get(name)
        original = getattr(owner, name) if own is None else own
        wrapper = wrap(original)
        if isinstance(owner, ModuleType):  # pickle knows a function by its names, which must lead to it
            wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
        if isinstance(wrapper, FunctionType) and isinstance(original, FunctionType):  # of C, reading it takes 20 ms
            with suppress(TypeError, ValueError):
                wrapper.__signature__ = signature(original)  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)
        self._patches.append((owner, name, own, wrapper))

    def remove(self) -> None:
        """Take all wrappers out, the newest first."""
        self.enabled = False
        for owner, name, own, wrapper in reversed(self._patches):
            if vars(owner).get(name) is not wrapper:
                self._is_stuck = True
            elif own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._patches.clear()

    def _around(self, owner: Any, name: str, pair: Pair, refused: Refused | None) -> bool:
        if getattr(owner, name, None) is None:
            return False
        self.replace(owner, name, lambda original: make_wrapper(self, original, pair, refused))
        return True


class Probe:
    """Something installed in torch; this one wraps functions. `name` is what guard and fault injection know it by.

    It is made once, which is when it asks the agent to be called, and may go in and out several times.
    """

    name = ""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._patches = Patches(agent.guard, self.name)
        self._around = self._patches.look
        self._handles: Sequence[Any] = ()  # of hooks that torch itself keeps

    def install(self) -> None:
        """Put everything in. May be called again after `uninstall`."""
        self._patches.install(self._wrap_all)

    def uninstall(self) -> None:
        """Take everything out and restore the originals."""
        self._patches.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def module_imported(self, name: str) -> None:
        """The module `name`, one of `imports.FRAMEWORK_MODULES`, has just been imported as a whole."""

    def _wrap_all(self) -> None:
        """Call `_around` for every function that is wrapped."""


class ModuleHook:
    """A global hook on calls of modules while it is in, `call(module)` before or `call(module, inputs, output)` after.

    In what Dynamo traces it folds away. Global hooks slow every module down and make Dynamo compile anew.
    """

    def __init__(self, call: Callable[..., Any], after: bool = False) -> None:
        self._call = call
        self._after = after
        self._handle: Any = None
        self._forward: Any = None
        self.is_in = False  # modules are listened to

    def add(self) -> None:
        """Put it in, where it is not."""
        if self.is_in:
            return
        self.is_in = True
        hooks = None if self._handle is None else self._handle.hooks_dict_ref()
        if hooks is not None:  # as `register_…` does, in a tenth of the time: once a step in loops without a loader
            hooks[self._handle.id] = self._forward
            return
        from torch.nn.modules import module as modules

        is_compiling, call = is_compiling_check(), self._call

        def forward(module: Any, *told: Any) -> None:
            if not is_compiling():
                call(module, *(told if len(told) > 1 else ()))

        after, before = modules.register_module_forward_hook, modules.register_module_forward_pre_hook
        self._handle, self._forward = (after if self._after else before)(forward), forward

    def remove(self) -> None:
        """Take it out, where it is in."""
        if self.is_in:
            self.is_in = False
            self._handle.remove()


def is_whole(module: str) -> bool:
    """Whether `module` is imported, and not in the middle of it."""
    loaded = sys.modules.get(module)
    return loaded is not None and not getattr(getattr(loaded, "__spec__", None), "_initializing", False)


def scaler_home(torch: Any) -> Any:
    """Where GradScaler is: before torch 2.3 there is that of CUDA alone."""
    return torch.amp if hasattr(torch.amp, "GradScaler") else torch.cuda.amp


def tell_torchscript(function: Any) -> None:
    """TorchScript knows operators by identity: what stands for `function.__wrapped__` is the same one."""
    known = sys.modules.get("torch.jit._builtins")
    operators = getattr(known, "_builtin_ops", [])
    for operator in [name for original, name in operators if original is function.__wrapped__]:
        operators.append((function, operator))
        if known is not None and known._builtin_table is not None:  # made of the list when first asked for
            known._builtin_table[id(function)] = operator


def has_torch_modes() -> Callable[[], bool]:
    """Whether a mode of the script hears what any tensor is asked."""
    inside = getattr(sys.modules.get("torch"), "_C", None)
    return getattr(inside, "_is_torch_function_mode_enabled", lambda: True)  # an older one does not tell


def root_of(tensors: Any) -> Any:
    """What `backward` is called on, alone in a list as well."""
    return tensors[0] if tensors.__class__ in (list, tuple) and len(tensors) == 1 else tensors


def bound(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call by name (`inspect.BoundArguments`); None where they do not fit, as the call will say."""
    try:
        return signature.bind_partial(*args, **kwargs)
    except TypeError:
        return None


# Functions of ours that stand for the user's: a function decorated with `region` is compiled like any other.
USER_SIDE = frozenset(["inside"])
# Functions of ours that call what they stand for: torch's own functions, or the user's.
PASSES_ON = frozenset(
    [
        "stepscope_wrapper",
        "call",
        "nvtx_range",
        "export_chrome_trace",
        "exec_module",
        "__enter__",
        "__exit__",
        "_run_on_profiler_stop",
    ]
)


def is_compiling_check(name: str = "is_compiling") -> Callable[[], bool]:
    """torch's own "am I being traced" function, without importing Dynamo."""
    torch = sys.modules.get("torch")
    older = getattr(getattr(torch, "_utils", None), "is_compiling", bool)  # bool(): False
    check: Callable[[], bool] = getattr(getattr(torch, "compiler", None), name, None) or older
    return check


def is_dynamo_compiling_check() -> Callable[[], bool]:
    """Like `is_compiling_check`, of Dynamo alone where torch can tell: a third of the time, for calls in every step."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return is_compiling_check("is_dynamo_compiling" if hasattr(compiler, "is_dynamo_compiling") else "is_compiling")


def unless_compiling(hook: Callable[..., Any]) -> Callable[..., None]:
    """`hook` of an optimizer's step, left out in what Dynamo traces."""
    is_compiling = is_dynamo_compiling_check()

    def step_hook(*args: Any) -> None:
        if not is_compiling():
            hook(*args)

    return step_hook


def skip_own_code() -> None:
    """Have Dynamo run every function of stepscope's recorder as it is. Repeat after loading more of it."""
    skip = _skip_function()
    if skip is None:
        return
    for name, module in sys.modules.copy().items():
        if name.startswith("stepscope.record.") and module is not None:
            for code in _codes_of(vars(module), name):
                if code.co_name not in USER_SIDE:
                    skip(code)


def _skip_function() -> Callable[[CodeType], None] | None:
    """Dynamo's own way to leave a code object alone, from its C part, which `import torch` has loaded already."""
    dynamo = sys.modules.get("torch._C._dynamo.eval_frame")
    names = ("_FrameExecStrategy", "_FrameAction", "set_code_exec_strategy")
    strategy, action, assign = (getattr(dynamo, name, None) for name in names)
    skip: Callable[[CodeType], None] | None = getattr(dynamo, "skip_code", None)  # before torch 2.7
    if skip is not None or strategy is None or action is None or assign is None:
        return skip

    def skip_code(code: CodeType) -> None:
        # What a hook calls (the standard library, a profiler of ours) is left alone as well; what a wrapper calls is
        # the user's or torch's.
        inside = action.DEFAULT if code.co_name in PASSES_ON else action.SKIP
        assign(code, strategy(action.SKIP, inside))

    return skip_code


def _codes_of(namespace: dict[str, Any] | Any, module: str) -> Iterator[CodeType]:
    for value in list(namespace.values()):
        value = getattr(value, "__func__", value)
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, FunctionType):
            waiting = [value.__code__]
            while waiting:
                code = waiting.pop()
                yield code
                waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        elif isinstance(value, type) and value.__module__ == module:
            yield from _codes_of(vars(value), module)
