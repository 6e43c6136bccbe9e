"""Snapshots of PyTorch's caching allocator, as torch.cuda.memory._dump_snapshot writes them: pickles of plain data.

A snapshot holds the allocator's segments and blocks at one moment, and of each device the last events before it, each
with its stack. A stack stands in the file once for each event, as a list of frames that are shared; here equal stacks
get one number. Records that are not as they should be are left out and counted.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, field

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
    found = tuple(_recordings(snapshot, stem(path)))
    if not found:
        raise UnreadableInputError(
            f"{path}: the snapshot is empty; call torch.cuda.memory._record_memory_history() first and use the device"
        )
    return found


def _recordings(snapshot: dict[Any, Any], name: str) -> Iterator[MemoryRecording]:
    stacks = _Stacks()
    states: dict[int, _State] = {}
    broken = 0
    for segment in _list(snapshot.get("segments")):
        number = _natural(segment.get("device", 0)) if isinstance(segment, dict) else None
        if number is None or number >= MAX_DEVICES:
            broken += 1
            continue
        states.setdefault(number, _State()).add(segment, stacks)
    traces = _list(snapshot.get("device_traces"))[:MAX_DEVICES]
    histories = {number: _history(events, stacks) for number, events in enumerate(traces) if _list(events)}
    for number in sorted({*states, *histories}):
        history, state = histories.get(number, _History()), states.get(number, _State())
        if not history.kind and not state.sizes and not history.lost:
            continue
        yield _recording(name, number, history, state, stacks, broken)
        broken = 0


def _recording(
    name: str, number: int, history: _History, state: _State, stacks: _Stacks, broken: int
) -> MemoryRecording:
    timed = history.untimed == 0
    count = len(history.kind)
    problems = [f"{kinds} events of unknown kind {what!r}" for what, kinds in history.unknown.most_common(3)]
    lost = history.lost + state.lost + broken
    if lost:
        problems.append(f"{lost} records could not be read")
    return MemoryRecording(
        source="snapshot",
        worker=name,
        device=f"cuda:{number}",
        clock="epoch" if timed else "order",
        kind=history.kind,
        time_ns=history.time_ns if timed else array("q", range(count)),
        bytes=history.bytes,
        address=history.address,
        stack=history.stack,
        category=array("b", [-1]) * count,
        stacks=stacks.found,
        blocks=state.rows(),
        segments=tuple(state.sizes),
        out_of_memory_free=history.free,
        problems=tuple(problems),
    )


class _History(Struct):
    """The events of a device as columns."""

    kind: array[int] = field(default_factory=lambda: array("b"))
    time_ns: array[int] = field(default_factory=lambda: array("q"))
    bytes: array[int] = field(default_factory=lambda: array("q"))
    address: array[int] = field(default_factory=lambda: array("q"))
    stack: array[int] = field(default_factory=lambda: array("q"))
    free: dict[int, int] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    untimed: int = 0
    lost: int = 0


def _history(events: Any, stacks: _Stacks) -> _History:
    history = _History()
    for event in _list(events):
        action = event.get("action") if isinstance(event, dict) else None
        kind = _KINDS.get(action) if isinstance(action, str) else None
        if kind is None:
            if not isinstance(action, str):
                history.lost += 1
            elif action not in _SILENT:
                history.unknown[clean(action[:40])] += 1
            continue
        size, address = _natural(event.get("size")), integer(event.get("addr"))
        if size is None or (address is None and kind != OUT_OF_MEMORY):
            history.lost += 1
            continue
        time_us, free = integer(event.get("time_us")), _natural(event.get("device_free"))
        time_ns = moment_ns(time_us * 1000) if time_us is not None else None
        history.untimed += time_ns is None
        if kind == OUT_OF_MEMORY and free is not None:
            history.free[len(history.kind)] = free
        history.kind.append(kind)
        history.time_ns.append(time_ns or 0)
        history.bytes.append(size)
        history.address.append(-1 if address is None else address)
        history.stack.append(stacks.number(event.get("frames")))
    return history


class _State:
    """The blocks of a device as columns, and the sizes of its segments."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.lost = 0
        self._columns = {name: array("q") for name in ("address", "bytes", "requested", "state", "segment", "stack")}

    def rows(self) -> BlockRows | None:
        return BlockRows(**self._columns) if self.sizes else None

    def add(self, segment: dict[Any, Any], stacks: _Stacks) -> None:
        size, address = _natural(segment.get("total_size")), integer(segment.get("address"))
        if size is None:
            self.lost += 1
            return
        filled = 0
        for block in _list(segment.get("blocks")):
            held = _natural(block.get("size")) if isinstance(block, dict) else None
            state = _STATES.get(str(block.get("state"))[:40]) if held is not None else None
            if held is None or state is None:
                self.lost += 1
                continue
            requested, frames = _asked(block)
            own = integer(block.get("address"))
            own = address if own is None else own  # older ones give the segment's alone
            values = (own, held, min(requested, held), state, len(self.sizes), stacks.number(frames))
            for column, value in zip(self._columns.values(), values, strict=True):
                column.append(-1 if value is None else value)
            address = own + held if own is not None else None
            filled += held
        self.lost += filled > size
        self.sizes.append(max(size, filled))


def _asked(block: dict[Any, Any]) -> tuple[int, Any]:
    """What was asked for, and the stack; before torch 2.1 both lay in the block's history."""
    past = _list(block.get("history"))
    last = past[0] if past and isinstance(past[0], dict) else {}
    size = _natural(block.get("requested_size"))
    if size is None:
        size = _natural(last.get("real_size"))
    if size is None:
        size = _natural(block.get("size"))
    return size or 0, block.get("frames", last.get("frames"))


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
