"""Files to rows: one file per format, and one table that says which reader takes a path.

To add a format, write a file with a detector and a reader that returns a `RawRun`, and add its line to `READERS`.
Readers check every value and never raise on a bad record: they skip it, count it in `RawRun.losses`, and go on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepscope.errors import UnreadableInputError
from stepscope.read.raw import RawRun
from stepscope.read.run_folder import is_run_folder, read_run_folder

__all__ = ["READERS", "RawRun", "read_run"]

# Tried in order; the first detector that says yes decides.
READERS: tuple[tuple[Callable[[Path], bool], Callable[[Path], RawRun]], ...] = ((is_run_folder, read_run_folder),)


def read_run(folder: Path) -> RawRun:
    """Read what `folder` holds; raises UnreadableInputError when no reader knows it or nothing in it can be read."""
    try:
        for detect, read in READERS:
            if detect(folder):
                return read(folder)
    except OSError as error:
        raise UnreadableInputError(f"{folder}: {error.strerror or error}; check its permissions") from error
    raise UnreadableInputError(f"{folder}: {_what_is_wrong(folder)}")


def _what_is_wrong(folder: Path) -> str:
    if not folder.exists():
        return "no such file or folder; give the folder that `stepscope run` printed"
    if folder.is_dir() and not any(folder.iterdir()):
        return "an empty folder; give the folder that `stepscope run` printed"
    return "not a run folder (no host-* or rank-* in it); give the folder that `stepscope run` printed"
