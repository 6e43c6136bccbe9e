"""The first pass over a source: its clock, its steps, its tracks and their names.

What it keeps grows with the number of steps and tracks, not of events; only a cut to steps needs two integers of every
launch.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct, field

from stepscope.export.entry import DECODING_ERRORS, FLOWS, Entry, Timed, safe

MEMORY = "[memory]"
STEP = re.compile(r"ProfilerStep#(\d{1,18})")
DEVICE_ANNOTATION = "gpu_user_annotation"
_LAUNCHES = re.compile(r"Runtime|(?:\w+_)?(?:runtime|driver)")
_DEVICE = frozenset(("kernel", "memcpy", "memset", "mtia_ccp_events"))
_LABELS = {  # metadata events that are kept, and the one argument each is kept for
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
_MAX_LABEL_CHARS = 400
_MAX_CATEGORIES = 1000
_STRAY_NS = 60 * 10**9  # what stands further before the first slice is damage, not the trace's start
Track = tuple[bytes, bytes]


class _Argument(msgspec.Struct, gc=False):
    name: Any = None
    labels: Any = None
    sort_index: Any = None


class _Correlation(msgspec.Struct, gc=False):
    correlation: Any = None


_DECODE_ARGUMENT = msgspec.json.Decoder(_Argument).decode
_DECODE_CORRELATION = msgspec.json.Decoder(_Correlation).decode


def correlation_of(entry: Entry) -> int | None:
    """The correlation id in the arguments, if it fits 64 bits and is one (0 and below stand for none)."""
    try:
        value = _DECODE_CORRELATION(entry.args).correlation
    except DECODING_ERRORS:
        return None
    return value if type(value) is int and 0 < value < 2**63 else None


def is_launch(category: Any) -> bool:
    """Whether slices of `category` are calls that start device work."""
    return isinstance(category, str) and _LAUNCHES.fullmatch(category) is not None


def is_device(category: Any) -> bool:
    """Whether slices of `category` are work of a device."""
    return isinstance(category, str) and category.lower().removeprefix("gpu_") in _DEVICE


def step_of(entry: Entry) -> int | None:
    """The N of a `ProfilerStep#N` annotation."""
    name = entry.name
    if isinstance(name, str) and name.startswith("ProfilerStep#"):
        match = STEP.fullmatch(name)
        return int(match[1]) if match else None
    return None


class Survey(Struct):
    """What one pass over a source tells. Times are ns as the file counts them: add `base_ns` for the epoch's."""

    base_ns: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)  # allow-listed keys only
    first_ns: int | None = None  # None: nothing with a time in it
    last_ns: int = 0
    entries: int = 0  # that can be exported, metadata events included
    slices: int = 0
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)  # number -> start and end, of host annotations
    optimizer_ends: array[int] = field(default_factory=lambda: array("q"))  # of the host's Optimizer.step annotations
    categories: set[str] = field(default_factory=set)
    tracks: set[Track] = field(default_factory=set)
    labels: dict[tuple[str, bytes, bytes], str | int] = field(default_factory=dict)  # (kind, pid, tid) -> value
    launches: tuple[array[int], array[int]] = field(default_factory=lambda: (array("q"), array("q")))  # start, id
    counts: Counter[str] = field(default_factory=Counter)  # lost, unsupported
    problems: tuple[str, ...] = ()  # what was wrong with the file, in words


class Surveyor:
    """Fills a `Survey`."""

    def __init__(self, *, launches: bool) -> None:
        self.result = Survey()
        self._with_launches = launches
        self._first_slice: int | None = None
        self._first_other: int | None = None

    def run(self, entries: Iterable[Timed]) -> Survey:
        """Take all entries; `base_ns` and `metadata` are the caller's to fill in."""
        survey = self.result
        for entry, start, duration in entries:
            survey.entries += 1
            if entry.ph == "M":
                self._label(entry)
                continue
            survey.tracks.add(entry.track)
            end = start + duration
            if end > survey.last_ns:
                survey.last_ns = end
            if entry.ph != "X":
                self._other(entry)
                if self._first_other is None or start < self._first_other:
                    self._first_other = start
                continue
            survey.slices += 1
            if self._first_slice is None or start < self._first_slice:
                self._first_slice = start
            self._slice(entry, start, end)
        survey.first_ns = self._start()
        return survey

    def _start(self) -> int | None:
        slices, others = self._first_slice, self._first_other
        if slices is None or others is None:
            return others if slices is None else slices
        return others if slices - _STRAY_NS < others < slices else slices

    def _other(self, entry: Entry) -> None:
        """Instants of the allocator can be asked for by a name of their own; arrows go with their slices."""
        if entry.name == MEMORY:
            self.result.categories.add("memory")
        elif entry.ph not in FLOWS:
            self._category(entry.cat)

    def _category(self, category: Any) -> None:
        if isinstance(category, str) and len(self.result.categories) < _MAX_CATEGORIES:
            self.result.categories.add(category)

    def _slice(self, entry: Entry, start: int, end: int) -> None:
        survey, category = self.result, entry.cat
        self._category(category)
        if self._with_launches and is_launch(category):
            correlation = correlation_of(entry)
            if correlation is not None:
                survey.launches[0].append(start)
                survey.launches[1].append(correlation)
        if category == DEVICE_ANNOTATION:
            return
        if entry.name.startswith("Optimizer.step#"):
            survey.optimizer_ends.append(end)
        number = step_of(entry)
        if number is not None:
            known = survey.steps.get(number, (start, end))
            survey.steps[number] = min(known[0], start), max(known[1], end)

    def _label(self, entry: Entry) -> None:
        key = _LABELS.get(entry.name) if isinstance(entry.name, str) else None
        if key is None:
            return
        try:
            value = getattr(_DECODE_ARGUMENT(entry.args), key)
        except DECODING_ERRORS:
            return
        pid, tid = entry.track
        place = (entry.name, pid, tid if entry.name.startswith("thread") else b"")
        if key == "sort_index":
            if type(value) is int and abs(value) < 2**31:
                self.result.labels[place] = value
        elif isinstance(value, str) and value:
            self.result.labels[place] = safe(value, _MAX_LABEL_CHARS)
