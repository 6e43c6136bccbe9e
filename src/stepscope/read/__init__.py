"""Files to rows: one file per format, and visible tables that say which reader takes a path.

Run folders are read here; `read.traces` finds traces that others recorded and `read.formats` opens one; `read.stacks`
does both for files of sampled stacks, `read.xla` for reports and logs of torch_xla. Readers check every value and never
raise on a bad record: they skip it, count it, and go on.
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
    """Traces, files of sampled stacks, or reports of torch_xla, that others recorded: files and folders of them.

    Raises UnreadableInputError as `read_run` does, and where two of these kinds are named in one call.
    """
    from stepscope.read.stacks.sampled_files import holds_stacks, is_stack_file, open_stacks, read_stack_files
    from stepscope.read.traces import holds_traces, read_traces
    from stepscope.read.xla import holds_xla, is_xla_file, read_xla_files

    if not paths:
        raise UnreadableInputError("no path given; give a run folder, traces, files of sampled stacks or of torch_xla")
    try:
        folders = [path for path in paths if path.is_dir()]
        files = [path for path in paths if path not in folders]
        for is_ours, read in ((is_xla_file, read_xla_files), (is_stack_file, read_stack_files)):
            ours = [path for path in files if is_ours(path)]
            others = [path for path in files if path not in ours]
            if ours and others:
                raise UnreadableInputError(f"{others[0]}: another kind of file than {ours[0]}; give one kind at a time")
            if ours:
                return read(paths)
        for path in files:
            if path.is_file() and not _may_be_trace(path):
                open_stacks(path)  # nothing we know: raises with what the file is
        if folders and not files and not holds_traces(folders):
            if holds_stacks(folders):
                return read_stack_files(paths)
            if holds_xla(folders):
                return read_xla_files(paths)
        return read_traces(paths)
    except OSError as error:
        raise UnreadableInputError(f"{paths[0]}: {error.strerror or error}; check its permissions") from error


def _may_be_trace(path: Path) -> bool:
    from stepscope.read.formats import read_head

    return read_head(path).lstrip().startswith((b"{", b"["))


def _what_is_wrong(folder: Path) -> str:
    if not folder.exists():
        return "no such file or folder; give the folder that `stepscope run` printed"
    if folder.is_dir() and not any(folder.iterdir()):
        return "an empty folder; give the folder that `stepscope run` printed"
    return "not a run folder (no host-* or rank-* in it); give the folder that `stepscope run` printed"
