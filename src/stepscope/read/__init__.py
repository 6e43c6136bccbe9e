"""Files to rows: one file per format, and visible tables that say which reader takes a path.

Run folders are read here; `read.traces` finds traces that others recorded and `read.formats` opens one; `read.stacks`
does both for files of sampled stacks. Readers check every value and never raise on a bad record: they skip it, count
it, and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stepscope.errors import UnreadableInputError
from stepscope.read.raw import RawRun
from stepscope.read.run_folder import is_run_folder, read_run_folder

__all__ = ["READERS", "RawRun", "is_run_folder", "read_foreign", "read_paths", "read_run"]

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


def read_paths(paths: Sequence[Path]) -> RawRun:
    """One run folder, or what `read_foreign` takes; raises UnreadableInputError as `read_run` does."""
    if len(paths) == 1 and is_run_folder(paths[0]):
        return read_run(paths[0])
    return read_foreign(paths)


def read_foreign(paths: Sequence[Path]) -> RawRun:
    """Traces, or files of sampled stacks, that others recorded: files and folders of them.

    Raises UnreadableInputError as `read_run` does, and where traces and files of stacks are named in one call.
    """
    from stepscope.read.formats import read_head
    from stepscope.read.stacks.files import holds_stacks, read_stack_files
    from stepscope.read.stacks.formats import is_stack_file, open_stacks
    from stepscope.read.traces import holds_traces, read_traces

    if not paths:
        raise UnreadableInputError("no path given; give a run folder, traces or files of sampled stacks")
    try:
        folders = [path for path in paths if path.is_dir()]
        stacks = [path for path in paths if is_stack_file(path)]
        others = [path for path in paths if path not in folders and path not in stacks]
        if stacks and others:
            raise UnreadableInputError(f"{others[0]}: no sampled stacks, as {stacks[0]} is; give one kind at a time")
        for path in others:
            if path.is_file() and not read_head(path).lstrip().startswith((b"{", b"[")):
                open_stacks(path)  # no trace either: raises with what the file is
        if stacks or (not others and not holds_traces(folders) and holds_stacks(folders)):
            return read_stack_files(paths)
        return read_traces(paths)
    except OSError as error:
        raise UnreadableInputError(f"{paths[0]}: {error.strerror or error}; check its permissions") from error


def _what_is_wrong(folder: Path) -> str:
    if not folder.exists():
        return "no such file or folder; give the folder that `stepscope run` printed"
    if folder.is_dir() and not any(folder.iterdir()):
        return "an empty folder; give the folder that `stepscope run` printed"
    return "not a run folder (no host-* or rank-* in it); give the folder that `stepscope run` printed"
