"""Files to rows: one file per format; what a path holds is told by its first bytes.

Readers check every value and never raise on a bad record: they skip it, count it, and go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepscope.errors import UnreadableInputError, readable
from stepscope.read.raw import Losses, RawRun
from stepscope.read.run_folder import Chosen, is_run_folder, read_run_folder

__all__ = ["Chosen", "RawRun", "is_run_folder", "read_paths", "read_run", "read_third_party"]

_WHICH = "give the folder that `stepscope run` printed"


def read_run(folder: Path, chosen: Chosen | None = None) -> RawRun:
    """Read a run folder, or what is chosen of it; raises UnreadableInputError when nothing in it can be read."""
    with readable(folder, "check its permissions"):
        if is_run_folder(folder):
            return read_run_folder(folder, chosen)
        if not folder.exists():
            raise UnreadableInputError(f"{folder}: no such file or folder; {_WHICH}")
        if folder.is_dir() and not any(folder.iterdir()):
            raise UnreadableInputError(f"{folder}: an empty folder; {_WHICH}")
    raise UnreadableInputError(f"{folder}: not a run folder (no host-* or rank-* in it); {_WHICH}")


def read_paths(paths: Sequence[Path]) -> RawRun:
    """One run folder, or what `read_third_party` takes; raises UnreadableInputError as `read_run` does."""
    if len(paths) == 1 and is_run_folder(paths[0]):
        return read_run(paths[0])
    return read_third_party(paths)


def read_third_party(paths: Sequence[Path]) -> RawRun:
    """Traces, files of sampled stacks, event files of TensorBoard, or reports of torch_xla, and folders of them.

    Raises UnreadableInputError as `read_run` does, and where two of these kinds are named in one call.
    """
    from stepscope.read.kineto import begins_as_trace, holds_traces, read_traces

    if paths and all(map(begins_as_trace, paths)):
        return read_traces(paths)
    from stepscope.read.event_files import is_event_file, read_event_files
    from stepscope.read.sampled_files import is_stack_file, open_stacks, read_stack_files
    from stepscope.read.streams import known_files, read_head
    from stepscope.read.xla_files import is_xla_file, read_xla_files

    if not paths:
        raise UnreadableInputError("no path given; give a run folder, traces, files of sampled stacks or of torch_xla")
    with readable(paths[0], "check its permissions"):
        folders = [path for path in paths if path.is_dir()]
        files = [path for path in paths if path not in folders]
        kinds = ((is_event_file, read_event_files), (is_xla_file, read_xla_files), (is_stack_file, read_stack_files))
        for is_ours, read in kinds:
            ours = [path for path in files if is_ours(path)]
            others = [path for path in files if path not in ours]
            if ours and others:
                raise UnreadableInputError(f"{others[0]}: another kind of file than {ours[0]}; give one kind at a time")
            if ours:
                return read(paths)
        for path in files:
            if path.is_file() and not read_head(path).lstrip().startswith((b"{", b"[")):
                open_stacks(path)  # no format is known: raises with what the file is
        if folders and not files and not holds_traces(folders):
            for is_ours, read in reversed(kinds):
                if any(known_files(folders, is_ours, Losses())):
                    return read(paths)
        return read_traces(paths)
