"""The one function whose frame stands between the user's code and torch.

A warning torch raises "for the caller" (`stacklevel=2`) must name the user's line and not ours. Python leaves frames
out of that count when their file name holds both "importlib" and "_bootstrap"; hence the name of this file. Exceptions
pass with our frame taken off their traceback again (Python 3.11 and later; before, a traceback has one line more).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable, Optional

if TYPE_CHECKING:
    from typing import Protocol

    class Enabled(Protocol):
        """Whoever owns the wrapper; it passes everything straight through while `enabled` is False."""

        enabled: bool


Before = Callable[..., Any]  # called with the arguments; its result is handed to After
After = Callable[[Any, Any, Optional[BaseException]], Any]  # (what before returned, result, exception)


def make_wrapper(owner: Enabled, original: Callable[..., Any], before: Before, after: After) -> Callable[..., Any]:
    """`original` with `before` and `after` (both guarded) around it; it is called exactly once, arguments untouched."""

    @functools.wraps(original)
    def stepscope_wrapper(*args: Any, **kwargs: Any) -> Any:
        if not owner.enabled:
            return original(*args, **kwargs)
        token = before(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            after(token, None, error)
            traceback = error.__traceback__
            if traceback is not None:
                error.__traceback__ = traceback.tb_next
            raise
        after(token, result, None)
        return result

    return stepscope_wrapper
