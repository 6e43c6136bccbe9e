"""Files that tell of memory and are no traces: who knows one by its first bytes, and who reads it.

To add a format, write a file with a detector and a reader that returns recordings, and add its line here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stepscope.model.memory import MemoryRecording
from stepscope.read.formats import read_head
from stepscope.read.memory_snapshot import is_memory_snapshot, read_memory_snapshot
from stepscope.read.memory_timeline import is_memory_timeline, read_memory_timeline

Detect = Callable[[Path, bytes], bool]
Read = Callable[[Path], tuple[MemoryRecording, ...]]

# Tried in order; the first detector that says yes decides.
MEMORY_FORMATS: tuple[tuple[Detect, Read], ...] = (
    (is_memory_snapshot, read_memory_snapshot),
    (is_memory_timeline, read_memory_timeline),
)


def read_recordings(paths: Sequence[Path]) -> tuple[tuple[MemoryRecording, ...], tuple[Path, ...]]:
    """The recordings in those of `paths` that are one, and the other paths, in their order.

    Folders and files that cannot be opened are among the others. Raises UnreadableInputError where a file is a
    recording but cannot be read.
    """
    found: list[tuple[Path, tuple[MemoryRecording, ...]]] = []
    others: list[Path] = []
    for path in paths:
        reader = _reader(path)
        if reader is None:
            others.append(path)
        else:
            found.append((path, reader(path)))
    return _told_apart(found), tuple(others)


def _reader(path: Path) -> Read | None:
    try:
        head = read_head(path) if path.is_file() else None
    except OSError:
        return None
    if head is None:
        return None
    return next((read for detect, read in MEMORY_FORMATS if detect(path, head)), None)


def _told_apart(found: list[tuple[Path, tuple[MemoryRecording, ...]]]) -> tuple[MemoryRecording, ...]:
    """All recordings; where two files have one name, with their folders in front of it."""
    names = Counter(recordings[0].worker for _, recordings in found)
    result: list[MemoryRecording] = []
    for path, recordings in found:
        for recording in recordings:
            name = recording.worker
            folder = path.absolute().parent.name
            result.append(
                msgspec.structs.replace(recording, worker=f"{folder}/{name}") if names[name] > 1 else recording
            )
    return tuple(result)
