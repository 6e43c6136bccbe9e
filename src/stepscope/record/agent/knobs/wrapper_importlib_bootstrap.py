"""The frame that stands between the user's code and a function of torch whose call a knob changes.

The file's name is chosen as that of the probes' wrapper: warnings that torch raises "for the caller" then name the
user's line. Exceptions pass with our frame taken off their traceback again.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from types import TracebackType

    from stepscope.record.agent.guard import Pair
    from stepscope.record.agent.probes.wrapper_importlib_bootstrap import Enabled

# What torch raises when it will not take an argument.
_REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError, AssertionError)


def make_changing_wrapper(
    owner: Enabled,
    original: Callable[..., Any],
    pair: Pair,
    tells_after: bool,
    refused: Callable[[Any, BaseException], Any] | None,
) -> Callable[..., Any]:
    """`original`, called as `pair.before` says: a `Call` with other arguments, an `Answer` without one, None as given.

    A defect in `before` leaves the call as it was. `pair.after` is called after changed calls that returned.
    """
    switch, before, after = pair.switch, pair.before, pair.after

    @functools.wraps(original)
    def stepscope_wrapper(*args: Any, **kwargs: Any) -> Any:
        if switch.off or not owner.enabled:
            return original(*args, **kwargs)
        changed = None
        try:
            changed = before(*args, **kwargs)
        except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
            pair.trip(defect)
        if changed is not None and len(changed) == 1:  # an Answer
            return changed[0]
        accepted = changed is not None
        try:
            if changed is None:
                return original(*args, **kwargs)
            if refused is None:
                result = original(*changed[0], **changed[1])
            else:
                result, accepted = _offer(original, changed, args, kwargs, refused)
        except BaseException as error:
            error.__traceback__ = _beyond_this_file(error.__traceback__)
            raise
        if accepted and tells_after and not switch.off:
            try:
                after(changed, result, None)
            except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                pair.trip(defect)
        return result

    return stepscope_wrapper


def _offer(
    original: Callable[..., Any],
    changed: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    refused: Callable[[Any, BaseException], Any],
) -> tuple[Any, bool]:
    """(result, whether the changed call was taken). One that is refused is made again as it was given."""
    try:
        return original(*changed[0], **changed[1]), True
    except _REFUSALS as error:
        refusal = error
    result = original(*args, **kwargs)  # raises where the script itself is wrong, and then nothing was refused
    refused(changed, refusal)
    return result, False


def _beyond_this_file(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == _offer.__code__.co_filename:
        traceback = traceback.tb_next
    return traceback
