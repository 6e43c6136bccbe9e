"""Decoded entries of an event list, collected into a `TraceChunk`.

Slices are grouped by what their category says about their arguments (see `records`): every group's arguments are
decoded at once and fill the columns that the kind can have; the others stay missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stepscope.read import records
from stepscope.read.collectives import collective_text
from stepscope.read.columns import (
    Codes,
    Numbers,
    argument_text,
    attribute,
    decimals,
    id_text,
    integers,
    json_text,
    name_text,
    track_text,
    volumes,
)
from stepscope.read.text import LONGEST_NS
from stepscope.read.times import nanoseconds
from stepscope.read.trace import MISSING, Flows, Int32, Int64, MemoryEvents, Slices, TraceChunk

CHUNK_ENTRIES = 65_536
_FLOW_PHASES = frozenset("stf")
_INSTANT_PHASES = frozenset("iI")
_INTEGERS = (
    "correlation", "external_id", "sequence", "forward_thread", "device", "stream", "bytes", "python_module", "blocks",
    "threads", "registers", "shared_memory",
)  # fmt: skip
_FLOATS = ("blocks_per_sm", "warps_per_sm", "occupancy")
_TEXTS = ("shapes", "types", "call_stack", "collective")
_MEMORY = ("address", "bytes", "device_type", "device", "allocated_bytes", "reserved_bytes")
_DERIVED = {"blocks": "grid", "threads": "block"}


def _ids(events: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip([event.pid for event in events], [event.tid for event in events], strict=True)


class Names:
    """What metadata entries call threads and processes."""

    def __init__(self) -> None:
        self.threads: dict[str, str] = {}
        self.processes: dict[str, str] = {}
        self._labels: dict[str, str] = {}

    def add(self, events: Sequence[Any]) -> None:
        for event, args in zip(events, records.decode_args(records.NameArgs, [e.args for e in events]), strict=True):
            if event.name == "thread_name" and isinstance(args.name, str):
                self.threads[track_text((event.pid, event.tid))] = name_text(args.name)
            elif event.name == "process_name" and isinstance(args.name, str):
                self.processes.setdefault(id_text(event.pid), name_text(args.name))
            elif event.name == "process_labels" and isinstance(args.labels, str) and args.labels:
                self._labels[id_text(event.pid)] = name_text(args.labels)

    def named_processes(self) -> dict[str, str]:
        return {**self.processes, **self._labels}


class ChunkBuilder:
    """Collects entries; `take` hands out a chunk once there are enough. Counts what it cannot use."""

    def __init__(self) -> None:
        self.names = Names()
        self.events = 0
        self.lost = 0
        self.unsupported = 0
        self._reset()

    def _reset(self) -> None:
        self._slices = _SliceColumns()
        self._flows: dict[str, Any] = {
            "kind": Codes(), "id": Numbers(np.int64), "finish": Numbers(np.bool_), "track": Codes(),
            "time_ns": Numbers(np.int64),
        }  # fmt: skip
        self._memory: dict[str, Any] = {name: Numbers(np.int64) for name in ("time_ns", *_MEMORY)}
        self._memory["track"] = Codes()
        self._pending = 0

    def add(self, events: list[Any]) -> None:
        """Sort entries by what they are and append them."""
        self.events += len(events)
        self._pending += len(events)
        slices = [event for event in events if event.ph == "X"]
        if slices:
            self.lost += self._slices.add(slices)
        if len(slices) == len(events):
            return
        others = [event for event in events if event.ph != "X"]
        flows = [event for event in others if event.ph in _FLOW_PHASES]
        if flows:
            self._add_flows(flows)
        if len(flows) == len(others):
            return
        memory = [event for event in others if event.name == "[memory]" and event.ph in _INSTANT_PHASES]
        named = [event for event in others if event.ph == "M"]
        self.unsupported += len(others) - len(flows) - len(memory) - len(named)
        if memory:
            self._add_memory(memory)
        if named:
            self.names.add(named)

    def full(self) -> bool:
        return self._pending >= CHUNK_ENTRIES

    def take(self) -> TraceChunk:
        """Everything collected since the last one."""
        flows = self._flows
        memory = self._memory
        chunk = TraceChunk(
            self._slices.finish(),
            Flows(
                kind=flows["kind"].text(name_text),
                id=flows["id"].array(),
                finish=flows["finish"].array(),
                track=flows["track"].text(track_text),
                time_ns=flows["time_ns"].array(),
            ),
            MemoryEvents(
                track=memory["track"].text(track_text),
                **{name: column.array() for name, column in memory.items() if name != "track"},
            ),
        )
        self._reset()
        return chunk

    def _add_flows(self, flows: list[Any]) -> None:
        times, ok = nanoseconds([event.ts for event in flows])
        ids = integers([event.id for event in flows])
        ok &= ids != MISSING
        flows, times, ids = self._keep(flows, ok, times, ids)
        self._flows["kind"].add([event.cat or event.name for event in flows], len(flows))
        self._flows["id"].add(ids)
        self._flows["finish"].add(np.fromiter(map("f".__eq__, [event.ph for event in flows]), np.bool_, len(flows)))
        self._flows["track"].add(_ids(flows), len(flows))
        self._flows["time_ns"].add(times)

    def _add_memory(self, events: list[Any]) -> None:
        times, ok = nanoseconds([event.ts for event in events])
        events, times = self._keep(events, ok, times)
        args = records.decode_args(records.MemoryArgs, [event.args for event in events])
        self._memory["track"].add(_ids(events), len(events))
        self._memory["time_ns"].add(times)
        for name in _MEMORY:
            self._memory[name].add(attribute(name, args))

    def _keep(self, events: list[Any], ok: npt.NDArray[np.bool_], *columns: Any) -> Any:
        if ok.all():
            return (events, *columns)
        self.lost += int(len(ok) - ok.sum())
        kept = [event for event, good in zip(events, ok.tolist(), strict=True) if good]
        return (kept, *(column[ok] for column in columns))


class _SliceColumns:
    """The columns of `Slices` while they grow."""

    def __init__(self) -> None:
        self._category = Codes()
        self._name = Codes()
        self._track = Codes()
        self._start = Numbers(np.int64)
        self._duration = Numbers(np.int64)
        self._numbers = {name: Numbers(np.int64) for name in _INTEGERS}
        self._numbers |= {name: Numbers(np.float64) for name in _FLOATS}
        self._texts = {name: Codes() for name in _TEXTS}
        self._kinds: list[type[msgspec.Struct]] = []  # of the arguments, by category code

    def add(self, events: list[Any]) -> int:
        """Append slices; returns how many had no usable name or time."""
        start, ok = nanoseconds([event.ts for event in events])
        duration, duration_ok = nanoseconds([event.dur for event in events])
        ok &= duration_ok & (duration >= 0) & (duration <= LONGEST_NS)
        names = [event.name for event in events]
        if None in names:
            ok &= np.fromiter((name is not None for name in names), np.bool_, len(names))
        lost = int(len(ok) - ok.sum())
        if lost:
            events = [event for event, good in zip(events, ok.tolist(), strict=True) if good]
            start, duration, names = start[ok], duration[ok], [event.name for event in events]
        size = len(events)
        self._start.add(start)
        self._duration.add(duration)
        self._name.add(names, size)
        self._track.add(_ids(events), size)
        codes = self._category.add([event.cat for event in events], size)
        self._add_arguments(events, codes, size)
        return lost

    def _add_arguments(self, events: list[Any], codes: Any, size: int) -> None:
        known = self._category.values()
        for category in known[len(self._kinds) :]:
            self._kinds.append(records.ARGS_BY_CATEGORY.get(category.lower(), records.AnyArgs))
        # The last for a missing category, whose code is -1.
        kinds: list[type[msgspec.Struct]] = [*self._kinds, records.AnyArgs]
        columns = _Part(size, self._texts)
        for kind in set(kinds):
            wanted = np.array([each is kind for each in kinds])
            at = np.flatnonzero(wanted[codes])
            if len(at):
                columns.fill(kind, at, [events[i].args for i in at.tolist()])
        filled: dict[str, Any] = {**columns.integers, **columns.floats}
        for name, column in self._numbers.items():
            if name in filled:
                column.add(filled[name])
            else:
                column.add_missing(size)
        for name, text in self._texts.items():
            text.add_codes(columns.texts.get(name), size)

    def finish(self) -> Slices:
        numbers = {name: column.array() for name, column in self._numbers.items()}
        return Slices(
            category=self._category.text(name_text),
            name=self._name.text(name_text),
            track=self._track.text(track_text),
            start_ns=self._start.array(),
            duration_ns=self._duration.array(),
            shapes=self._texts["shapes"].text(json_text),
            types=self._texts["types"].text(json_text),
            call_stack=self._texts["call_stack"].text(argument_text),
            collective=self._texts["collective"].text(str),
            **numbers,
        )


class _Part:
    """The argument columns of one stretch of slices, filled group by group."""

    def __init__(self, size: int, codes: dict[str, Codes]) -> None:
        self.size = size
        self.integers: dict[str, Int64] = {}
        self.floats: dict[str, Any] = {}
        self.texts: dict[str, Int32] = {}
        self._codes = codes

    def fill(self, kind: type[msgspec.Struct], at: Int64, raws: list[msgspec.Raw]) -> None:
        """Decode the arguments `raws` of the slices `at` as `kind` and put them into the columns."""
        args = records.decode_args(kind, raws)
        fields = set(kind.__struct_fields__)
        for name in _INTEGERS:
            source = _DERIVED.get(name, name)
            if source in fields:
                values = volumes([getattr(a, source) for a in args]) if name in _DERIVED else attribute(name, args)
                if name == "external_id" and (values == MISSING).any():
                    values = np.where(values == MISSING, attribute("external_old", args), values)
                self.integers.setdefault(name, np.full(self.size, MISSING, np.int64))[at] = values
        for name in _FLOATS:
            if name in fields:
                self.floats.setdefault(name, np.full(self.size, np.nan))[at] = decimals(name, args)
        if "shapes" in fields:
            shapes = self._raw("shapes", "shapes", args)
            if (shapes < 0).any():
                shapes = np.where(shapes < 0, self._raw("shapes", "shapes_old", args), shapes)
            self._put("shapes", at, shapes)
            self._put("types", at, self._raw("types", "types", args))
            stacks = map(attrgetter("call_stack"), args)
            self._put("call_stack", at, self._codes["call_stack"].codes(stacks, len(args)))
        if "collective" in fields:
            self._collectives(at, args, raws)

    def _raw(self, name: str, field: str, args: list[Any]) -> Int32:
        return self._codes[name].codes(map(bytes, map(attrgetter(field), args)), len(args))

    def _put(self, name: str, at: Int64, codes: Int32) -> None:
        if (codes >= 0).any():
            self.texts.setdefault(name, np.full(self.size, -1, np.int32))[at] = codes

    def _collectives(self, at: Int64, args: list[Any], raws: list[msgspec.Raw]) -> None:
        given = [args_of_one.collective for args_of_one in args]
        if any(given):
            texts = [collective_text(raws[i]) if each else None for i, each in enumerate(given)]
            self._put("collective", at, self._codes["collective"].codes(texts, len(texts)))
