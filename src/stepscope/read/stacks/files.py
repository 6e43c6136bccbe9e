"""Files of stacks that others recorded, and folders of them, as a run without steps: one segment for each file.

Nothing says which host or rank a file is of; the tables make processes of the chains of process ids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepscope.errors import UnreadableInputError
from stepscope.read.raw import FrameNames, Losses, RawHost, RawRun, RawSegment
from stepscope.read.stacks.formats import is_stack_file, open_stacks
from stepscope.read.stacks.source import FileSource

MAX_FILES = 10_000
MAX_DEPTH = 8


def read_stack_files(paths: Sequence[Path]) -> RawRun:
    """Files of stacks, and folders in which every file of stacks is taken, as one run.

    Counts `foreign_files` of folders. Raises UnreadableInputError for a given file that holds none, and when not one
    record of all files can be read.
    """
    if not paths:
        raise UnreadableInputError("no path given; give a file of sampled stacks or a folder of them")
    losses = Losses()
    root = os.path.commonpath([str((path if path.is_dir() else path.parent).absolute()) for path in paths])
    sources: dict[str, FileSource] = {}
    for path in paths:
        for file in _files_in(path, losses):
            source = open_stacks(file, _below(root, file))
            sources.setdefault(os.path.realpath(file), source)
    if not any(_has_stack(source.path) for source in sources.values()):
        raise UnreadableInputError(f"{paths[0]}: {_nothing(found=bool(sources))}")
    segments = tuple(_segment(number, source) for number, source in enumerate(sources.values()))
    host = RawHost(name="", manifest=None, agents=(), processes=(), system=(), segments=segments)
    return RawRun(folder=Path(root), hosts=(host,), ranks=(), losses=losses)


def holds_stacks(folders: Sequence[Path]) -> bool:
    """Whether there is a file of stacks in one of the folders; looks no further than to the first."""
    return any(True for folder in folders for _ in _files_in(folder, Losses()))


def _segment(number: int, source: FileSource) -> RawSegment:
    return RawSegment(
        number=number,
        file=source.label,
        source=source.tool,
        pid=None,
        start_ns=None,
        end_ns=None,
        rate_hz=None,
        idle=source.idle,
        blocking=None,
        errors=None,
        status="ok",
        stacks=source,
    )


def _files_in(path: Path, losses: Losses) -> Iterator[Path]:
    """`path` itself, or the files of stacks in it, in the order of their names."""
    if not path.is_dir():
        yield path
        return
    count = 0
    for folder, folders, names in os.walk(path):
        depth = len(Path(folder).relative_to(path).parts)
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=_natural)
        if depth >= MAX_DEPTH:
            folders.clear()
        for name in sorted((name for name in names if not name.startswith(".")), key=_natural):
            file = Path(folder) / name
            count += 1
            if count > MAX_FILES:
                return
            label = str(file.relative_to(path))
            try:
                if is_stack_file(file):
                    yield file
                else:
                    losses.add("foreign_files", label)
            except OSError:
                losses.add("unreadable_files", label)


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", text)]


def _has_stack(path: Path) -> bool:
    """Whether one record at least can be read; of a file of lines only the beginning is."""
    return any(True for _ in open_stacks(path).read(FrameNames(), Losses()))


def _below(root: str, path: Path) -> str:
    return Path(os.path.relpath(path.absolute(), root)).as_posix()


def _nothing(*, found: bool) -> str:
    if found:
        return "not one stack in it can be read; record again"
    return "no file of sampled stacks in it; give files of `py-spy record --format raw`, collapsed stacks or speedscope"
