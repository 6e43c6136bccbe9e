"""Files that tell of memory and are no traces: snapshots of the allocator, and timelines of export_memory_timeline.

A snapshot (torch.cuda.memory._dump_snapshot) is a pickle of plain data: segments and blocks at one moment, and of each
device the last events before it, each with its stack; equal stacks get one number. A format is known by its first
bytes; to add one, write a detector and a reader that returns recordings, and add its line to `MEMORY_FORMATS`.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.model import memory
from stepscope.model.findings import Place
from stepscope.read.plain_pickle import StackNumbers, loads
from stepscope.read.streams import decode_json, read_head, read_whole, stem
from stepscope.read.text import clean, integer, moment_ns, within

MAX_FRAMES = 2_000  # of one stack
MAX_DEVICES = 4_096
MAX_BYTES = 2**48  # of a block; the most that can be addressed
_ENDINGS = (".pickle", ".pkl")
_KEYS = (b"segments", b"device_traces", b"total_size")
_KINDS = {
    "alloc": memory.ALLOCATED,
    "free": memory.RELEASED,
    "free_requested": memory.RELEASED,  # from here on the allocator no longer counts it as allocated
    "segment_alloc": memory.SEGMENT_ADDED,
    "segment_map": memory.SEGMENT_ADDED,
    "segment_free": memory.SEGMENT_REMOVED,
    "segment_unmap": memory.SEGMENT_REMOVED,
    "oom": memory.OUT_OF_MEMORY,
}
_SILENT = frozenset({"free_completed", "snapshot", "user_defined", "workspace_snapshot"})
_STATES = {
    "active_allocated": memory.IN_USE,
    "active_pending_free": memory.PENDING,
    "active_awaiting_free": memory.PENDING,
    "inactive": memory.FREE,
}


def is_memory_snapshot(path: Path, head: bytes) -> bool:
    """Whether the file is a pickle that looks like a snapshot, by its name or its first (unpacked) bytes."""
    if path.name.removesuffix(".gz").endswith(_ENDINGS):
        return True
    return head[:1] == b"\x80" and head[1:2] <= b"\x05" and any(key in head for key in _KEYS)


def read_memory_snapshot(path: Path) -> tuple[memory.MemoryRecording, ...]:
    """A recording for each device of which the snapshot says anything.

    Raises UnreadableInputError where the file cannot be read, is no snapshot, or holds no block and no event.
    """
    data = read_whole(path)
    try:
        snapshot = loads(data)
    except UnreadableInputError as error:
        raise type(error)(f"{path}: {error}") from None
    if isinstance(snapshot, list):
        snapshot = {"segments": snapshot}  # older ones are the segments alone
    if not isinstance(snapshot, dict) or not ("segments" in snapshot or "device_traces" in snapshot):
        raise UnreadableInputError(
            f"{path}: no snapshot of memory; give one that torch.cuda.memory._dump_snapshot wrote"
        )
    found = _recordings(snapshot, stem(path))
    if not found:
        raise UnreadableInputError(
            f"{path}: the snapshot is empty; call torch.cuda.memory._record_memory_history() first and use the device"
        )
    return found


def _recordings(snapshot: dict[Any, Any], name: str) -> tuple[memory.MemoryRecording, ...]:
    stacks = StackNumbers({}, _place, MAX_FRAMES)
    devices: defaultdict[int, _Device] = defaultdict(_Device)
    broken = 0  # segments that name no device
    for segment in _list(snapshot.get("segments")):
        number = within(segment.get("device", 0), MAX_BYTES) if isinstance(segment, dict) else None
        if number is None or number >= MAX_DEVICES:
            broken += 1
        else:
            devices[number].add_segment(segment, stacks)
    for number, events in enumerate(_list(snapshot.get("device_traces"))[:MAX_DEVICES]):
        for event in _list(events):
            devices[number].add_event(event, stacks)
    told = sorted((number, device) for number, device in devices.items() if device)
    return tuple(
        device.recording(name, number, tuple(stacks.stacks), 0 if place else broken)
        for place, (number, device) in enumerate(told)
    )


_EVENT = {"kind": "b", "time_ns": "q", "bytes": "q", "address": "q", "stack": "q"}


class _Device:
    """The events of a device and its blocks as columns, and the sizes of its segments."""

    def __init__(self) -> None:
        self._events = {name: array(code) for name, code in _EVENT.items()}
        self._blocks = {name: array("q") for name in memory.BlockRows.__struct_fields__}
        self._sizes: list[int] = []
        self._free: dict[int, int] = {}
        self._unknown: Counter[str] = Counter()
        self._untimed = 0
        self._lost_events = 0
        self._lost_blocks = 0

    def __bool__(self) -> bool:
        return bool(self._events["kind"] or self._sizes or self._lost_events)

    def add_event(self, event: Any, stacks: StackNumbers) -> None:
        action = event.get("action") if isinstance(event, dict) else None
        kind = _KINDS.get(action) if isinstance(action, str) else None
        if kind is None:
            if not isinstance(action, str):
                self._lost_events += 1
            elif action not in _SILENT:
                self._unknown[clean(action[:40])] += 1
            return
        size, address = within(event.get("size"), MAX_BYTES), integer(event.get("addr"))
        if size is None or (address is None and kind != memory.OUT_OF_MEMORY):
            self._lost_events += 1
            return
        time_us, free = integer(event.get("time_us")), within(event.get("device_free"), MAX_BYTES)
        time_ns = moment_ns(time_us * 1000) if time_us is not None else None
        self._untimed += time_ns is None
        if kind == memory.OUT_OF_MEMORY and free is not None:
            self._free[len(self._events["kind"])] = free
        _append(self._events, (kind, time_ns or 0, size, address, stacks.number(event.get("frames"))))

    def add_segment(self, segment: dict[Any, Any], stacks: StackNumbers) -> None:
        size, address = within(segment.get("total_size"), MAX_BYTES), integer(segment.get("address"))
        if size is None:
            self._lost_blocks += 1
            return
        filled = 0
        for block in _list(segment.get("blocks")):
            held = within(block.get("size"), MAX_BYTES) if isinstance(block, dict) else None
            state = _STATES.get(str(block.get("state"))[:40]) if held is not None else None
            if held is None or state is None:
                self._lost_blocks += 1
                continue
            # Before torch 2.1 what was asked for and the stack both lay in the block's history.
            past = _list(block.get("history"))
            last = past[0] if past and isinstance(past[0], dict) else {}
            asked = (within(given, MAX_BYTES) for given in (block.get("requested_size"), last.get("real_size")))
            requested = min(next((given for given in asked if given is not None), held), held)
            own = integer(block.get("address"))
            own = address if own is None else own  # older ones give the segment's alone
            stack = stacks.number(block.get("frames", last.get("frames")))
            _append(self._blocks, (own, held, requested, state, len(self._sizes), stack))
            address = own + held if own is not None else None
            filled += held
        self._lost_blocks += filled > size
        self._sizes.append(max(size, filled))

    def recording(
        self, name: str, number: int, stacks: tuple[tuple[Place, ...], ...], broken: int
    ) -> memory.MemoryRecording:
        """All of it; `broken` are lost records that belong to no device."""
        events: dict[str, Any] = self._events
        count = len(events["kind"])
        if self._untimed:
            events = {**events, "time_ns": array("q", range(count))}
        problems = [f"{kinds} events of unknown kind {what!r}" for what, kinds in self._unknown.most_common(3)]
        lost = self._lost_events + self._lost_blocks + broken
        return memory.MemoryRecording(
            source="snapshot",
            worker=name,
            device=f"cuda:{number}",
            clock="order" if self._untimed else "epoch",
            **events,
            category=array("b", [-1]) * count,
            stacks=stacks,
            blocks=memory.BlockRows(**self._blocks) if self._sizes else None,
            segments=tuple(self._sizes),
            out_of_memory_free=self._free,
            problems=(*problems, *([f"{lost} records could not be read"] if lost else [])),
        )


def _append(columns: dict[str, array[int]], values: tuple[int | None, ...]) -> None:
    """Add a row; what is missing is -1."""
    for column, value in zip(columns.values(), values, strict=True):
        column.append(-1 if value is None else value)


def _place(frame: Any) -> Place | None:
    told = frame if isinstance(frame, dict) else {}
    file, line, function = told.get("filename"), integer(told.get("line")), told.get("name")
    if not isinstance(file, str) or not isinstance(function, str):
        return None
    return Place(clean(file), line if line is not None and line > 0 else None, clean(function))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# In the order of torch.profiler's numbers.
_CATEGORIES = "parameter optimizer_state input temporary activation gradient autograd_detail unknown"
CATEGORIES = tuple(_CATEGORIES.split())
UNNAMED_DEVICE = "unknown"
MAX_CATEGORIES = 64
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


def read_memory_timeline(path: Path) -> tuple[memory.MemoryRecording, ...]:
    """The recording; raises UnreadableInputError where the file holds none."""
    text = read_whole(path)
    if _PICTURE in text[:65_536]:
        raise UnreadableInputError(
            f"{path}: a picture without figures; call export_memory_timeline with .json.gz instead"
        )
    try:
        value = decode_json(text)
    except ValueError:
        raise UnreadableInputError(f"{path}: no valid JSON, perhaps cut off; export the timeline again") from None
    rows: list[_Row | None] = []
    times, sizes = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if (
        isinstance(times, list)
        and isinstance(sizes, list)
        and len(times) == len(sizes)
        and all(isinstance(row, list) for row in sizes)
        and not any(isinstance(time, list) for time in times)
    ):
        rows.extend(_by_category(times, sizes))
    elif isinstance(value, list):
        rows.extend(map(_row, value))
    good = [row for row in rows if row is not None]
    if not good:
        raise UnreadableInputError(f"{path}: no row of a memory timeline in it; give a file of export_memory_timeline")
    kind, time_ns, size, category = zip(*good, strict=True)
    first = min((time for time in time_ns if time >= 0), default=0)
    none = array("q", [-1]) * len(good)
    more = (f"category {number}" for number in range(len(CATEGORIES), max(category) + 1))
    recording = memory.MemoryRecording(
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


def _row(row: Any) -> _Row | None:
    numbers = [integer(cell) for cell in row] if isinstance(row, list) and len(row) == 4 else [None] * 4
    time, action, size, category = numbers
    if time is None or action is None or size is None or category is None or not _plausible(time, size, category):
        return None
    if action == _PREEXISTING:
        return memory.EXISTING, -1, size, category
    return (memory.CHANGED, time, size, category) if action in (_CREATE, _INCREMENT_VERSION, _DESTROY) else None


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
                yield memory.CHANGED, moment * 1000 if moment >= 0 else -1, change, category
        before = row


def _plausible(time_ns: int, size: int, category: int) -> bool:
    return time_ns <= _LATEST_NS and abs(size) <= MAX_BYTES and 0 <= category < MAX_CATEGORIES


Detect = Callable[[Path, bytes], bool]
Read = Callable[[Path], tuple[memory.MemoryRecording, ...]]

# Tried in order; the first detector that says yes decides.
MEMORY_FORMATS: tuple[tuple[Detect, Read], ...] = (
    (is_memory_snapshot, read_memory_snapshot),
    (is_memory_timeline, read_memory_timeline),
)


def read_recordings(paths: Sequence[Path]) -> tuple[tuple[memory.MemoryRecording, ...], tuple[Path, ...]]:
    """The recordings in those of `paths` that are one, and the other paths, in their order.

    Folders and files that cannot be opened are among the others. Raises UnreadableInputError where a file is a
    recording but cannot be read.
    """
    found: list[tuple[Path, memory.MemoryRecording]] = []
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
