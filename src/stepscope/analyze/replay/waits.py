"""Which calls of the host wait for the device, and for which of its work.

What a call waits for is taken from what it is, as far as that is certain: a copy between the host's pageable memory and
the device for itself, a synchronisation of the device for all work launched before it, one of a stream for the work
ahead of it there. Everything else that seems to wait (a synchronisation with an event, a launch into a full queue, a
call that lasts while the device works) may become shorter when the device is done earlier, but never longer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from msgspec import Struct, field

from stepscope.analyze.replay.graph import NONE, Slices, Waits
from stepscope.engine.device_work import COPY
from stepscope.engine.scene import Scene
from stepscope.tables.arrays import Bools, Int64

RETURN_NS = 10_000  # a call returns about as long after the device is done; also by how much clocks may disagree
LONG_NS = 100_000  # of a call: ten times what a launch takes
QUEUED = 500  # launched but not begun; CUDA's queue takes 1,024, and a launch into a full one lasts as long as a kernel
FULL_NS = 20_000  # of a launch: twice what it takes
LOOKED_AT = 1_000  # slices, to find the one a call waited for; more are launched meanwhile only by other threads
_DEVICE = re.compile(r"^(cuda|cu|hip)(Device|Ctx)Synchronize")
_STREAM = re.compile(r"^(cuda|cu|hip)StreamSynchronize")
_EVENT = re.compile(r"^(cuda|cu|hip)EventSynchronize")
_COPY = re.compile(r"^(cuda|cu|hip)Memcpy(?!.*async)", re.IGNORECASE)
_ON_DEVICE, _ON_STREAM, _ON_EVENT, _ON_COPY, _OTHER = range(5)
Awaited = list[tuple[int, int]]


class _Group(Struct):
    """Calls that overlap: one wait."""

    begin: int
    finish: int
    awaited: Awaited = field(default_factory=list)
    soft: bool = True


def waits_of(scene: Scene, slices: Slices, calls: Int64) -> Waits:
    """Waits among `calls`, rows of the runtime on the training thread and those that work for it."""
    found = _Calls(scene, slices)
    groups: list[_Group] = []
    for row, kind in found.chosen(calls):
        begin, finish = int(scene.span.start_ns[row]), int(scene.span.start_ns[row] + scene.span.duration_ns[row])
        awaited, soft = found.awaited(row, kind, begin, finish)
        if not awaited or finish <= begin:
            continue
        if not groups or begin >= groups[-1].finish:
            groups.append(_Group(begin, finish))
        group = groups[-1]
        group.finish = max(group.finish, finish)
        group.awaited += awaited
        group.soft &= soft
    return _as_arrays(slices, groups)


def _as_arrays(slices: Slices, groups: list[_Group]) -> Waits:
    begin = np.asarray([group.begin for group in groups], np.int64)
    finish = np.asarray([group.finish for group in groups], np.int64)
    awaited = [_begun_before(slices, group) for group in groups]
    done = np.asarray([max((_over(slices, *one) for one in each), default=NONE) for each in awaited], np.int64)
    ready = np.maximum(begin, done)
    soft = np.asarray([group.soft for group in groups], bool)
    return Waits(begin, finish, finish - ready, ready - begin, soft, awaited)


def _begun_before(slices: Slices, group: _Group) -> Awaited:
    """What a group waits for. Where clocks disagree a slice may be recorded to end after the call that waited for it
    did: then the wait is for as much of it as had run, or a replay of the recording would be later than the recording.
    """
    found: Awaited = []
    for number, reach in group.awaited:
        run = group.finish - int(slices.start_ns[number])
        if run > 0:
            found.append((number, run if run < slices.duration_ns[number] else reach))
    return found


def _over(slices: Slices, number: int, reach: int) -> int:
    return int(slices.start_ns[number]) + min(int(slices.duration_ns[number]), reach)


class _Calls:
    """Looks up what calls wait for."""

    def __init__(self, scene: Scene, slices: Slices) -> None:
        self.scene, self.slices = scene, slices
        self.end_ns = slices.end_ns
        self.by_end = np.argsort(self.end_ns, kind="stable")
        self.ends = self.end_ns[self.by_end]
        self.streams: list[tuple[int, Int64, Int64]] = []  # device; slices in order of launch; their launches
        for one in range(int(slices.stream.max(initial=NONE)) + 1):
            own = np.flatnonzero(slices.stream == one)
            own = own[np.argsort(slices.launch_ns[own], kind="stable")]
            self.streams.append((int(slices.device[own[0]]), own, slices.launch_ns[own]))
        known = slices.launch >= 0
        self.last_of = dict(zip(slices.launch[known].tolist(), np.flatnonzero(known).tolist(), strict=True))
        self.devices = len(np.unique(slices.device))

    @cached_property
    def below(self) -> dict[int, list[int]]:
        """Operator -> slices launched right below it, in order of launch."""
        rows, numbers = (np.fromiter(values, np.int64) for values in (self.last_of.keys(), self.last_of.values()))
        order = np.argsort(self.slices.launch_ns[numbers], kind="stable")
        found: dict[int, list[int]] = {}
        for parent, number in zip(self.scene.span.parent[rows[order]].tolist(), numbers[order].tolist(), strict=True):
            found.setdefault(parent, []).append(number)
        return found

    def chosen(self, calls: Int64) -> Iterator[tuple[int, int]]:
        """Calls that may wait, in order of time, with their kind."""
        span, slices = self.scene.span, self.slices
        calls = calls[np.argsort(span.start_ns[calls], kind="stable")]
        codes = span.names.codes[calls]
        kinds = np.full(len(span.names.values) + 1, _OTHER)
        for code in np.unique(codes[codes >= 0]).tolist():
            name = span.names.values[code]
            patterns = ((_DEVICE, _ON_DEVICE), (_STREAM, _ON_STREAM), (_EVENT, _ON_EVENT), (_COPY, _ON_COPY))
            kinds[code] = next((kind for pattern, kind in patterns if pattern.search(name)), _OTHER)
        kind = kinds[codes]
        kind[(kind == _OTHER) & self._pageable()[calls]] = _ON_COPY
        lasting = span.duration_ns[calls]
        launched = np.searchsorted(np.sort(slices.launch_ns), span.start_ns[calls], side="right")
        begun = np.searchsorted(slices.start_ns, span.start_ns[calls], side="right")
        launches: Bools = np.zeros(len(span), bool)
        launches[slices.launch[slices.launch >= 0]] = True
        full = launches[calls] & (lasting >= FULL_NS) & (launched - begun >= QUEUED)
        other = (~launches[calls] & (lasting >= LONG_NS)) | full
        wanted = (kind != _OTHER) | other
        yield from zip(calls[wanted].tolist(), kind[wanted].tolist(), strict=True)

    def _pageable(self) -> Bools:
        """Rows of calls that launched a copy of which one side is pageable memory."""
        names, slices = self.scene.span.names, self.slices
        flags = names.pick(["Pageable" in name for name in names.values])
        copies = (slices.kind == COPY) & (slices.launch >= 0) & flags[slices.row]
        rows: Bools = np.zeros(len(self.scene.span), bool)
        rows[slices.launch[copies]] = True
        return rows

    def awaited(self, row: int, kind: int, begin: int, finish: int) -> tuple[Awaited, bool]:
        """What a call waits for, and whether it is not certain."""
        if kind == _ON_COPY:
            number = self.last_of.get(row, NONE)
            if number >= 0 and self.slices.start_ns[number] < finish:
                return [(number, finish - int(self.slices.start_ns[number]))], False
        if kind == _ON_DEVICE:
            return self._on_device(begin, finish), False
        last = self._ended_last(begin, finish)
        if kind == _ON_STREAM and last < 0:
            last = self._same_operator(row, begin, finish)
        return ([self._whole(last)] if last >= 0 else []), kind not in (_ON_STREAM, _ON_COPY)

    def _whole(self, number: int) -> tuple[int, int]:
        """A wait for all of a slice, whatever it lasts."""
        return number, np.iinfo(np.int64).max

    def _on_device(self, begin: int, finish: int) -> Awaited:
        last = self._ended_last(begin, finish)
        if self.devices > 1 and last < 0:
            return []  # nobody tells which device
        wanted = int(self.slices.device[last]) if last >= 0 else None
        found = []
        for device, own, launched in self.streams:
            at = int(np.searchsorted(launched, begin, side="right")) - 1
            if at >= 0 and wanted in (None, device) and self.end_ns[own[at]] <= finish + RETURN_NS:
                found.append(self._whole(int(own[at])))
        return found

    def _ended_last(self, begin: int, finish: int) -> int:
        """Of the slices launched before a call that end while it lasts the last one, NONE for none."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        last = int(np.searchsorted(self.ends, finish, side="right"))
        for at in range(last - 1, max(first, last - LOOKED_AT) - 1, -1):
            number = int(self.by_end[at])
            if self.slices.launch_ns[number] <= begin:
                return number
        return NONE

    def _same_operator(self, row: int, begin: int, finish: int) -> int:
        """The last slice that the operator around a call launched before it, as `.item()` copies and then waits."""
        around = int(self.scene.span.parent[row])
        if around < 0 or not self.scene.span.is_operator[around]:
            return NONE
        launched = self.below.get(around, [])
        last = bisect_right(launched, begin, key=lambda one: int(self.slices.launch_ns[one]))
        for number in reversed(launched[max(0, last - LOOKED_AT) : last]):
            if self.end_ns[number] <= finish + RETURN_NS:
                return number
        return NONE
