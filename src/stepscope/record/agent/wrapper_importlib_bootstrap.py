"""The one function whose frame stands between the user's code and torch.

A warning torch raises "for the caller" (`stacklevel=2`) must name the user's line and not ours. Python leaves frames
out of that count when their file name holds both "importlib" and "_bootstrap"; hence the name of this file. Exceptions
pass with our frame taken off their traceback again (Python 3.11 and later; before, a traceback has one line more).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

if TYPE_CHECKING:
    from types import TracebackType

    from stepscope.record.agent.guard import Pair
    from stepscope.record.agent.patches import Patches


# What torch raises when it will not take an argument.
_REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError, AssertionError)


class Call(NamedTuple):
    """From `before`: call the original with these arguments instead. `token` is for `after` and `refused`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    token: Any = None


class Answer(NamedTuple):
    """From `before`: do not call the original; its caller gets `result`."""

    result: Any = None


def make_wrapper(
    owner: Patches,
    original: Callable[..., Any],
    pair: Pair,
    refused: Callable[[Call, BaseException], Any] | None = None,
) -> Callable[..., Any]:
    """`original` with the hooks of `pair`, guarded, around it; called exactly once, arguments untouched.

    While the owner is not `enabled` everything passes straight through. `after` is called only where `before` returned
    something, which it gets. Where that is a `Call` or an `Answer`, it is done instead; where `before` fails, the call
    is as it was. With `refused`, a changed call that raises is made once more as it was given, without `after`.
    """
    switch, before, after = pair.switch, pair.before, pair.after

    @functools.wraps(original)
    def stepscope_wrapper(*args: Any, **kwargs: Any) -> Any:
        if switch.off or not owner.enabled:
            return original(*args, **kwargs)
        token = None
        try:
            token = before(*args, **kwargs)
        except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
            switch.trip(defect)
        try:
            if token.__class__ is Answer:
                return token.result
            if token.__class__ is not Call:
                result = original(*args, **kwargs)
            elif refused is None:
                result = original(*token.args, **token.kwargs)
            else:
                result, token = _offer(original, token, args, kwargs, refused)
        except BaseException as error:
            if token is not None and not switch.off:
                try:
                    after(token, None, error)
                except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                    switch.trip(defect)
            error.__traceback__ = _beyond_this_file(error.__traceback__)
            raise
        if token is not None and not switch.off:
            try:
                after(token, result, None)
            except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                switch.trip(defect)
        return result

    return stepscope_wrapper


def make_told_wrapper(owner: Patches, original: Callable[..., Any], pair: Pair) -> Callable[..., Any]:
    """`original`, a method, with the first hook of `pair`, guarded, told of each call that returned (self, result)."""
    switch, told = pair.switch, pair.before

    @functools.wraps(original)
    def stepscope_wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            error.__traceback__ = _beyond_this_file(error.__traceback__)
            raise
        if not switch.off and owner.enabled:
            try:
                told(self, result)
            except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                switch.trip(defect)
        return result

    return stepscope_wrapper


def make_traceable_wrapper(
    owner: Patches, original: Callable[..., Any], pair: Pair, is_compiling: Callable[[], bool], first: bool
) -> Callable[..., Any]:
    """`original`, with the first hook of `pair`, guarded, told of each call (args, kwargs, result).

    It is told when the call has returned, or `first`, with None for the result. Dynamo traces through it as through the
    user's code, which the name of the inner function stands for.
    """
    switch, told = pair.switch, pair.before

    @functools.wraps(original)
    def inside(*args: Any, **kwargs: Any) -> Any:
        result = None if first else original(*args, **kwargs)
        if not (is_compiling() or switch.off or not owner.enabled):
            try:
                told(args, kwargs, result)
            except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                switch.trip(defect)
        return original(*args, **kwargs) if first else result

    return inside


def _offer(
    original: Callable[..., Any],
    changed: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    refused: Callable[[Call, BaseException], Any],
) -> tuple[Any, Call | None]:
    """(result, the changed call where it was taken). One that is refused is made again as it was given."""
    try:
        return original(*changed.args, **changed.kwargs), changed
    except _REFUSALS as error:
        refusal = error
    result = original(*args, **kwargs)  # raises where the script itself is wrong, and then nothing was refused
    refused(changed, refusal)
    return result, None


def _beyond_this_file(traceback: TracebackType | None) -> TracebackType | None:
    # Not in the wrapper itself, whose frame would then be held by what it holds.
    while traceback is not None and traceback.tb_frame.f_code.co_filename == _offer.__code__.co_filename:
        traceback = traceback.tb_next
    return traceback
