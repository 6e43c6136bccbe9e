"""Snapshots of PyTorch's caching allocator, as torch.cuda.memory._dump_snapshot writes them: pickles of plain data.

A snapshot holds the allocator's segments and blocks at one moment, and of each device the last events before it, each
with its stack. A stack stands in the file once for each event, as a list of frames that are shared; here equal stacks
get one number. Records that are not as they should be are left out and counted.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from stepscope.errors import UnreadableInputError
from stepscope.model.findings import Place
from stepscope.model.memory import (
    ALLOCATED,
    FREE,
    IN_USE,
    OUT_OF_MEMORY,
    PENDING,
    RELEASED,
    SEGMENT_ADDED,
    SEGMENT_REMOVED,
    BlockRows,
    MemoryRecording,
)
from stepscope.read.plain_pickle import loads
from stepscope.read.streams import read_whole, stem
from stepscope.read.text import clean, integer, moment_ns

MAX_FRAMES = 2_000  # of one stack
MAX_DEVICES = 4_096
MAX_BYTES = 2**48  # of a block; the most that can be addressed
_ENDINGS = (".pickle", ".pkl")
_KEYS = (b"segments", b"device_traces", b"total_size")
_KINDS = {
    "alloc": ALLOCATED,
    "free": RELEASED,
    "free_requested": RELEASED,  # from here on the allocator no longer counts it as allocated
    "segment_alloc": SEGMENT_ADDED,
    "segment_map": SEGMENT_ADDED,
    "segment_free": SEGMENT_REMOVED,
    "segment_unmap": SEGMENT_REMOVED,
    "oom": OUT_OF_MEMORY,
}
_SILENT = frozenset({"free_completed", "snapshot", "user_defined", "workspace_snapshot"})
_STATES = {
    "active_allocated": IN_USE,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,
    "inactive": FREE,
}


def is_memory_snapshot(path: Path, head: bytes) -> bool:
    """Whether the file is a pickle that looks like a snapshot, by its name or its first (unpacked) bytes."""
    if path.name.removesuffix(".gz").endswith(_ENDINGS):
        return True
    return head[:1] == b"\x80" and head[1:2] <= b"\x05" and any(key in head for key in _KEYS)


def read_memory_snapshot(path: Path) -> tuple[MemoryRecording, ...]:
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


def _recordings(snapshot: dict[Any, Any], name: str) -> tuple[MemoryRecording, ...]:
    stacks = _Stacks()
    devices: defaultdict[int, _Device] = defaultdict(_Device)
    broken = 0  # segments that name no device
    for segment in _list(snapshot.get("segments")):
        number = _natural(segment.get("device", 0)) if isinstance(segment, dict) else None
        if number is None or number >= MAX_DEVICES:
            broken += 1
        else:
            devices[number].add_segment(segment, stacks)
    for number, events in enumerate(_list(snapshot.get("device_traces"))[:MAX_DEVICES]):
        for event in _list(events):
            devices[number].add_event(event, stacks)
    told = sorted((number, device) for number, device in devices.items() if device)
    return tuple(
        device.recording(name, number, stacks.found, 0 if place else broken)
        for place, (number, device) in enumerate(told)
    )


_EVENT = {"kind": "b", "time_ns": "q", "bytes": "q", "address": "q", "stack": "q"}


class _Device:
    """The events of a device and its blocks as columns, and the sizes of its segments."""

    def __init__(self) -> None:
        self._events = {name: array(code) for name, code in _EVENT.items()}
        self._blocks = {name: array("q") for name in BlockRows.__struct_fields__}
        self._sizes: list[int] = []
        self._free: dict[int, int] = {}
        self._unknown: Counter[str] = Counter()
        self._untimed = 0
        self._lost_events = 0
        self._lost_blocks = 0

    def __bool__(self) -> bool:
        return bool(self._events["kind"] or self._sizes or self._lost_events)

    def add_event(self, event: Any, stacks: _Stacks) -> None:
        action = event.get("action") if isinstance(event, dict) else None
        kind = _KINDS.get(action) if isinstance(action, str) else None
        if kind is None:
            if not isinstance(action, str):
                self._lost_events += 1
            elif action not in _SILENT:
                self._unknown[clean(action[:40])] += 1
            return
        size, address = _natural(event.get("size")), integer(event.get("addr"))
        if size is None or (address is None and kind != OUT_OF_MEMORY):
            self._lost_events += 1
            return
        time_us, free = integer(event.get("time_us")), _natural(event.get("device_free"))
        time_ns = moment_ns(time_us * 1000) if time_us is not None else None
        self._untimed += time_ns is None
        if kind == OUT_OF_MEMORY and free is not None:
            self._free[len(self._events["kind"])] = free
        _append(self._events, (kind, time_ns or 0, size, address, stacks.number(event.get("frames"))))

    def add_segment(self, segment: dict[Any, Any], stacks: _Stacks) -> None:
        size, address = _natural(segment.get("total_size")), integer(segment.get("address"))
        if size is None:
            self._lost_blocks += 1
            return
        filled = 0
        for block in _list(segment.get("blocks")):
            held = _natural(block.get("size")) if isinstance(block, dict) else None
            state = _STATES.get(str(block.get("state"))[:40]) if held is not None else None
            if held is None or state is None:
                self._lost_blocks += 1
                continue
            # Before torch 2.1 what was asked for and the stack both lay in the block's history.
            past = _list(block.get("history"))
            last = past[0] if past and isinstance(past[0], dict) else {}
            asked = (_natural(given) for given in (block.get("requested_size"), last.get("real_size")))
            requested = min(next((given for given in asked if given is not None), held), held)
            own = integer(block.get("address"))
            own = address if own is None else own  # older ones give the segment's alone
            stack = stacks.number(block.get("frames", last.get("frames")))
            _append(self._blocks, (own, held, requested, state, len(self._sizes), stack))
            address = own + held if own is not None else None
            filled += held
        self._lost_blocks += filled > size
        self._sizes.append(max(size, filled))

    def recording(self, name: str, number: int, stacks: tuple[tuple[Place, ...], ...], broken: int) -> MemoryRecording:
        """All of it; `broken` are lost records that belong to no device."""
        events: dict[str, Any] = self._events
        count = len(events["kind"])
        if self._untimed:
            events = {**events, "time_ns": array("q", range(count))}
        problems = [f"{kinds} events of unknown kind {what!r}" for what, kinds in self._unknown.most_common(3)]
        lost = self._lost_events + self._lost_blocks + broken
        return MemoryRecording(
            source="snapshot",
            worker=name,
            device=f"cuda:{number}",
            clock="order" if self._untimed else "epoch",
            **events,
            category=array("b", [-1]) * count,
            stacks=stacks,
            blocks=BlockRows(**self._blocks) if self._sizes else None,
            segments=tuple(self._sizes),
            out_of_memory_free=self._free,
            problems=(*problems, *([f"{lost} records could not be read"] if lost else [])),
        )


def _append(columns: dict[str, array[int]], values: tuple[int | None, ...]) -> None:
    """Add a row; what is missing is -1."""
    for column, value in zip(columns.values(), values, strict=True):
        column.append(-1 if value is None else value)


class _Stacks:
    """Numbers for equal stacks. Frames and lists are told apart by identity, which is why they must stay alive."""

    def __init__(self) -> None:
        self._lists: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._frames: dict[int, int] = {}  # identity of a dict -> number of the place
        self._places: dict[Place, int] = {}

    @property
    def found(self) -> tuple[tuple[Place, ...], ...]:
        """The stacks by number, innermost first."""
        places = list(self._places)
        return tuple(tuple(places[number] for number in stack) for stack in self._stacks)

    def number(self, frames: Any) -> int:
        """The number of a stack, -1 for none."""
        if type(frames) is not list or not frames:
            return -1
        known = self._lists.get(id(frames))
        if known is None:
            get = self._frames.get
            places = [get(id(frame)) for frame in frames[:MAX_FRAMES]]
            if None in places:
                places = [self._frame(frame) for frame in frames[:MAX_FRAMES]]
            stack = tuple(place for place in places if place is not None and place >= 0)
            known = self._stacks.setdefault(stack, len(self._stacks)) if stack else -1
            self._lists[id(frames)] = known
        return known

    def _frame(self, frame: Any) -> int:
        number = self._frames.get(id(frame))
        if number is None:
            told = frame if isinstance(frame, dict) else {}
            file, line, function = told.get("filename"), integer(told.get("line")), told.get("name")
            number = -1
            if isinstance(file, str) and isinstance(function, str):
                place = Place(clean(file), line if line is not None and line > 0 else None, clean(function))
                number = self._places.setdefault(place, len(self._places))
            self._frames[id(frame)] = number
        return number


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _natural(value: Any) -> int | None:
    number = integer(value)
    return number if number is not None and 0 <= number <= MAX_BYTES else None
