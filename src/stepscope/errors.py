"""Every error a user can see, one line each: what happened and what to do.

    StepscopeError            exit 1   the check failed
    ├── UsageError            exit 2   the command line or configuration cannot be used
    ├── UnreadableInputError  exit 3   nothing could be read from a file or run folder
    └── EnvironmentRefusal    exit 4   this machine lacks or refuses something

They are caught once, in `stepscope.cli.main`, and printed without a traceback.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Iterator, Mapping

if TYPE_CHECKING:
    from pathlib import Path


class StepscopeError(Exception):
    """Base of all errors; `str(error)` is one line that says what happened and what to do."""

    exit_code = 1


class UsageError(StepscopeError):
    """Options or configuration that contradict themselves or cannot be parsed."""

    exit_code = 2


class NotThere(UsageError):
    """A run, a page or a slice that there is not, or no longer."""


class UnreadableInputError(StepscopeError):
    """A path from which not a single event or step could be read."""

    exit_code = 3


class EnvironmentRefusal(StepscopeError):
    """A missing program, permission or dependency."""

    exit_code = 4


def refuse(wrong: Mapping[str, bool]) -> None:
    """Raise a UsageError with the first text of which what it says is so."""
    for text, is_so in wrong.items():
        if is_so:
            raise UsageError(text)


@contextlib.contextmanager
def readable(path: Path, advice: str = "check the path and its permissions") -> Iterator[None]:
    """Within, an OSError says what it means to whoever gave `path`: an UnreadableInputError, with what to do."""
    try:
        yield
    except OSError as error:
        raise UnreadableInputError(f"{path}: {error.strerror or error}; {advice}") from error
