"""Files that tell of memory and are no traces: who knows one by its first bytes, and who reads it.

To add a format, write a file with a detector and a reader that returns recordings, and add its line here.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.model.memory import CHANGED, EXISTING, MemoryRecording
from stepscope.read.jsonl import decode
from stepscope.read.memory_snapshot import is_memory_snapshot, read_memory_snapshot
from stepscope.read.streams import read_head, read_whole, stem
from stepscope.read.text import integer

# In the order of torch.profiler's numbers.
CATEGORIES = (
    *("parameter", "optimizer_state", "input", "temporary"),
    *("activation", "gradient", "autograd_detail", "unknown"),
)
UNNAMED_DEVICE = "unknown"
MAX_CATEGORIES = 64
MAX_BYTES = 2**48
_PREEXISTING, _CREATE, _INCREMENT_VERSION, _DESTROY = range(1, 5)
_BEGINNING = re.compile(rb"\s*\[\s*\[\s*(?:-?\d+\s*[,\]]|\]\s*,\s*\[)")
_PICTURE = b"GPU Memory Timeline HTML"
_EARLIEST_EPOCH_NS = 10**18  # 2001; smaller times count from elsewhere
_LATEST_NS = 4 * 10**18


def is_memory_timeline(path: Path, head: bytes) -> bool:
    """Whether the first (unpacked) bytes are those of a timeline; `[]` is one only by its name."""
    if _BEGINNING.match(head) or _PICTURE in head:
        return True
    return path.name.endswith((".raw.json.gz", ".raw.json")) and head.strip() == b"[]"


def read_memory_timeline(path: Path) -> tuple[MemoryRecording, ...]:
    """The recording; raises UnreadableInputError where the file holds none."""
    text = read_whole(path)
    if _PICTURE in text[:65_536]:
        raise UnreadableInputError(
            f"{path}: a picture without figures; call export_memory_timeline with .json.gz instead"
        )
    try:
        value = decode(text)
    except ValueError:
        raise UnreadableInputError(f"{path}: no valid JSON, perhaps cut off; export the timeline again") from None
    rows: list[_Row | None] = []
    if isinstance(value, list) and len(value) == 2 and _is_table(value[0], value[1]):
        rows.extend(_by_category(value[0], value[1]))
    elif isinstance(value, list):
        rows.extend(map(_row, value))
    good = [row for row in rows if row is not None]
    if not good:
        raise UnreadableInputError(f"{path}: no row of a memory timeline in it; give a file of export_memory_timeline")
    kind, time_ns, size, category = zip(*good, strict=True)
    first = min((time for time in time_ns if time >= 0), default=0)
    none = array("q", [-1]) * len(good)
    more = (f"category {number}" for number in range(len(CATEGORIES), max(category) + 1))
    recording = MemoryRecording(
        source="timeline",
        worker=stem(path),
        device=UNNAMED_DEVICE,
        clock="epoch" if first >= _EARLIEST_EPOCH_NS else "start",
        kind=array("b", kind),
        time_ns=array("q", [first if time < 0 else time for time in time_ns]),
        bytes=array("q", size),
        address=none,
        stack=none,
        category=array("b", category),
        categories=(*CATEGORIES, *more),
        problems=(f"{len(rows) - len(good)} rows could not be read",) if len(good) < len(rows) else (),
    )
    return (recording,)


_Row = tuple[int, int, int, int]  # kind of event, ns, bytes, category


def _is_table(times: Any, sizes: Any) -> bool:
    """Whether this is the form by category: numbers, and lists of sizes."""
    return (
        isinstance(times, list)
        and isinstance(sizes, list)
        and len(times) == len(sizes)
        and all(isinstance(row, list) for row in sizes)
        and not any(isinstance(time, list) for time in times)
    )


def _row(row: Any) -> _Row | None:
    """A row of the raw form; None for one that cannot be read."""
    numbers = [integer(cell) for cell in row] if isinstance(row, list) and len(row) == 4 else [None] * 4
    time, action, size, category = numbers
    if time is None or action is None or size is None or category is None or not _plausible(time, size, category):
        return None
    if action == _PREEXISTING:
        return EXISTING, -1, size, category
    return (CHANGED, time, size, category) if action in (_CREATE, _INCREMENT_VERSION, _DESTROY) else None


def _by_category(times: list[Any], sizes: list[list[Any]]) -> Iterator[_Row | None]:
    """Sizes by category, of which the first column is always 0, as changes from one row to the next."""
    before: list[Any] = []
    for time, row in zip(times, sizes, strict=True):
        moment = integer(time)
        now = [integer(cell) for cell in row[: MAX_CATEGORIES + 1]]
        if moment is None or None in now or not all(_plausible(moment * 1000, cell or 0, 0) for cell in now):
            yield None
            continue  # the next row's changes count from the last good one
        past = [*before, *[0] * (len(now) - len(before))]
        for category, (old, new) in enumerate(zip(past[1:], now[1:], strict=False)):
            change = (new or 0) - old
            if change or category == 0:  # one row at least, so that the moment is kept
                yield CHANGED, moment * 1000 if moment >= 0 else -1, change, category
        before = row


def _plausible(time_ns: int, size: int, category: int) -> bool:
    return time_ns <= _LATEST_NS and abs(size) <= MAX_BYTES and 0 <= category < MAX_CATEGORIES


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
    found: list[tuple[Path, MemoryRecording]] = []
    others: list[Path] = []
    names: Counter[str] = Counter()  # of files; a file's recordings have one
    for path in paths:
        try:
            head = read_head(path) if path.is_file() else None
        except OSError:
            head = None
        read = next((read for detect, read in MEMORY_FORMATS if head is not None and detect(path, head)), None)
        if read is None:
            others.append(path)
            continue
        recordings = read(path)
        names[recordings[0].worker] += 1
        found.extend((path, recording) for recording in recordings)
    # Where two files have one name, with their folders in front of it.
    told_apart = (
        recording
        if names[recording.worker] == 1
        else msgspec.structs.replace(recording, worker=f"{path.absolute().parent.name}/{recording.worker}")
        for path, recording in found
    )
    return tuple(told_apart), tuple(others)
