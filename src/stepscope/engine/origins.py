"""What the name of a Python function in a trace, or a recorded call stack, says of whose code it is."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.engine.slice_names import python_frame
from stepscope.engine.user_code import UserCode

MAX_FRAMES = 2_000  # of one recorded call stack


class Origin(NamedTuple):
    """A function or line found on the way up. `exact`: the line is the call's, not the definition's."""

    file: str
    function: str
    line: int | None
    exact: bool
    guess: bool


def origin_of(text: str, code: UserCode, *, exact: bool = False) -> Origin | None:
    """The user's function, or as a guess a library's outside torch; None for all others."""
    frame = python_frame(text)
    file = code.resolve(frame.file) if frame else None
    short = code.library(frame.file) if frame and file is None else None
    if frame is None or (file or short) is None:
        return None
    return Origin(file or short or "", frame.function, frame.line, exact, file is None)


def origins_of_stack(stack: str, code: UserCode) -> tuple[Origin | None, Origin | None]:
    """The innermost of the user's frames in a call stack as old traces hold it, and of a library's up to there."""
    library: Origin | None = None
    for text in stack.split(";", MAX_FRAMES)[:MAX_FRAMES]:
        found = origin_of(text.strip(), code, exact=True)
        if found is not None and not found.guess:
            return found, library
        library = library or found
    return None, library
