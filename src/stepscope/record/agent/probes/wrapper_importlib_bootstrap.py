"""The one function whose frame stands between the user's code and torch.

A warning torch raises "for the caller" (`stacklevel=2`) must name the user's line and not ours. Python leaves frames
out of that count when their file name holds both "importlib" and "_bootstrap"; hence the name of this file. Exceptions
pass with our frame taken off their traceback again (Python 3.11 and later; before, a traceback has one line more).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from typing import Protocol

    from stepscope.record.agent.guard import Pair

    class Enabled(Protocol):
        """Whoever owns the wrapper; it passes everything straight through while `enabled` is False."""

        enabled: bool


def make_wrapper(owner: Enabled, original: Callable[..., Any], pair: Pair) -> Callable[..., Any]:
    """`original` with the hooks of `pair`, guarded, around it; it is called exactly once, arguments untouched."""
    switch, before, after = pair.switch, pair.before, pair.after

    @functools.wraps(original)
    def stepscope_wrapper(*args: Any, **kwargs: Any) -> Any:
        if switch.off or not owner.enabled:
            return original(*args, **kwargs)
        token = None
        try:
            token = before(*args, **kwargs)
        except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
            pair.trip(defect)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            _tell(pair, token, error)
            traceback = error.__traceback__
            if traceback is not None:
                error.__traceback__ = traceback.tb_next
            raise
        if not switch.off:
            try:
                after(token, result, None)
            except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                pair.trip(defect)
        return result

    return stepscope_wrapper


def _tell(pair: Pair, token: Any, error: BaseException) -> None:
    """The call raised."""
    if not pair.switch.off:
        try:
            pair.after(token, None, error)
        except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
            pair.trip(defect)
