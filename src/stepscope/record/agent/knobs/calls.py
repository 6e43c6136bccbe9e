"""Changing how one function of torch is called, and putting the exact original back.

`probes.patch` looks on and touches nothing; here a knob may hand other arguments to the call, or answer instead of it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, Union

from stepscope.record.agent.knobs.wrapper_importlib_bootstrap import make_changing_wrapper
from stepscope.record.agent.probes.patch import Patch

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class Call(NamedTuple):
    """Call the original with these arguments instead. `token` is handed to `after` and `refused`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    token: Any = None


class Answer(NamedTuple):
    """Do not call the original; its caller gets `result`."""

    result: Any = None


Change = Callable[..., Optional[Union[Call, Answer]]]  # called with the arguments; None leaves the call alone
After = Callable[[Call, Any], Any]  # after a changed call has returned: (call, result)
Refused = Callable[[Call, BaseException], Any]  # a changed call raised and is made again as it was


class CallPatches:
    """The changing wrappers of a knob or family `name`, on its switch: once it fails, calls pass straight through."""

    def __init__(self, agent: Agent, name: str) -> None:
        self._guard = agent.guard
        self._probe = "knob." + name
        self._patches: list[Patch] = []
        self.enabled = True

    def change(
        self, owner: Any, name: str, change: Change, after: After | None = None, refused: Refused | None = None
    ) -> bool:
        """Have calls of `owner.name` go through `change`; False where there is no such function.

        With `refused`, an error of the changed call makes the call once more with the arguments it was given: only for
        functions that have no effect before they refuse, and use up no argument (iterators must have been unfolded).
        """
        if getattr(owner, name, None) is None:
            return False
        pair = self._guard.pair(self._probe, change, None if after is None else _without_error(after))
        tell = None if refused is None else self._guard.wrap(self._probe, refused)
        self._patches.append(
            Patch(owner, name, lambda original: make_changing_wrapper(self, original, pair, after is not None, tell))
        )
        return True

    def remove(self) -> None:
        """Take all wrappers out, the newest first; one that others have wrapped since passes straight through."""
        self.enabled = False
        for patch in reversed(self._patches):
            patch.remove()
        self._patches.clear()


def _without_error(after: After) -> Callable[[Any, Any, BaseException | None], Any]:
    return lambda call, result, _error: after(call, result)


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
        if name not in self._names:
            return None
        index = self._names.index(name)
        return index if index < len(self.args) else None


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that may be given by position, in order; a wrapper's are those of what it wraps."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, found in inspect.signature(function).parameters.items() if found.kind in kinds]
