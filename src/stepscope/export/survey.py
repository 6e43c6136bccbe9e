"""The first pass over a source: its clock, its steps, its tracks and their names.

What it keeps grows with the number of steps and tracks, not of events; only a cut to steps needs two integers of every
launch.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct, field

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.export.entry import DECODING_ERRORS, FLOWS, Entry, Timed, safe, timed
from stepscope.read import read_paths
from stepscope.read.kineto import RawEvents
from stepscope.read.raw import RawRank, RawRun
from stepscope.read.text import moment_ns, whole_number

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
        if self._with_launches and isinstance(category, str) and _LAUNCHES.fullmatch(category):  # starts device work
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


Progress = Callable[[float], None]
# As in the reader: times later than this are since 1970, whatever base the file names.
_SINCE_1970_NS = 10**18
_MIN_ANCHORS = 2
_NEGLIGIBLE_NS = 1_000_000  # a profiler with stacks makes 0.3 to 0.5 ms of leaving an optimizer's step
_MAX_OFFSET_NS = 2_000_000_000


class Source(Struct):
    """One trace file; `rank` is the position of its rank among the ranks of the export."""

    path: Path
    rank: int
    survey: Survey = field(default_factory=Survey)


class Rank(Struct, frozen=True):
    """A rank of the export.

    `steps` are its journal's, number -> start and end on the journal's clock, or nothing without one. `optimizer_ends`
    are the ends of those of them that an optimizer's step ended while a trace was recorded.
    """

    label: str
    steps: dict[int, tuple[int, int]]
    optimizer_ends: tuple[int, ...] = ()


class Sources(Struct, frozen=True):
    """All traces of an export; `problems` are sentences about what could not be taken along."""

    ranks: tuple[Rank, ...]
    traces: tuple[Source, ...]
    problems: list[str]


def find(paths: list[Path], wanted: tuple[int, ...]) -> Sources:
    """The traces below `paths`, of the ranks `wanted` or of all; raises UnreadableInputError or UsageError."""
    run = read_paths(paths)
    chosen = [rank for rank in run.ranks if rank.traces and (not wanted or rank.rank in wanted)]
    if not any(rank.traces for rank in run.ranks):
        raise UnreadableInputError(f"{run.folder}: no trace in it; nothing to export, record one with a window")
    _require_ranks(run, wanted)
    ranks = tuple(_rank(rank) for rank in chosen)
    traces = tuple(Source(ref.path, position) for position, rank in enumerate(chosen) for ref in rank.traces)
    return Sources(ranks, traces, _guesses(run) if len(chosen) > 1 else [])


def _guesses(run: RawRun) -> list[str]:
    """In words, where a trace's rank is not what its own metadata says."""
    files = run.losses.files
    said = {"duplicate_ranks": "names the rank of another trace", "guessed_ranks": "names no rank"}
    return [f"{file}: {why}; it got the next free one" for kind, why in said.items() for file in files.get(kind, ())]


def _require_ranks(run: RawRun, wanted: tuple[int, ...]) -> None:
    there = sorted({rank.rank for rank in run.ranks if rank.traces})
    missing = sorted(set(wanted) - set(there))
    if missing:
        raise UsageError(f"--rank {missing[0]}: no trace of that rank; there are ranks {_numbers(there)}")


def _numbers(numbers: list[int]) -> str:
    """`0 to 7`, or the first few of numbers with gaps."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def _rank(rank: RawRank) -> Rank:
    steps = {row["step"]: (row["start_ns"], row["start_ns"] + row["wall_ns"]) for row in rank.steps}
    ended = (row["step"] for row in rank.steps if row["in_window"] and row["signal"] == "optimizer")
    label = rank.name.replace("rank-", "rank ", 1)
    return Rank(label, steps, tuple(steps[number][1] for number in ended))


def clock_offset_ns(rank: Rank, survey: Survey) -> int:
    """What to add to a trace's times to get its journal's.

    The two clocks part when time of day is corrected. Both saw the same optimizer steps end; the median distance of
    each to the nearest is the offset, unless it is too small to matter or too large to be a clock's.
    """
    seen = sorted(end + survey.base_ns for end in survey.optimizer_ends)
    if len(seen) < _MIN_ANCHORS or len(rank.optimizer_ends) < _MIN_ANCHORS:
        return 0
    if len(seen) == len(rank.optimizer_ends):
        distances = [end - other for end, other in zip(sorted(rank.optimizer_ends), seen, strict=True)]
    else:
        after = [(end, min(bisect_left(seen, end), len(seen) - 1)) for end in rank.optimizer_ends]
        distances = [min(end - seen[max(right - 1, 0)], end - seen[right], key=abs) for end, right in after]
    offset = int(median(distances))
    return offset if _NEGLIGIBLE_NS < abs(offset) <= _MAX_OFFSET_NS else 0


def survey(source: Source, *, launches: bool, progress: Progress) -> None:
    """Fill in `source.survey`; raises UnreadableInputError when the file has no event in it."""
    surveyor = Surveyor(launches=launches)
    events = RawEvents(source.path, progress=_share(progress))
    result = source.survey = surveyor.run(timed(events, surveyor.result.counts))
    result.metadata = events.metadata()
    base_ns = moment_ns(whole_number(result.metadata.pop("baseTimeNanoseconds", None))) or 0
    result.base_ns = 0 if (result.first_ns or 0) > _SINCE_1970_NS else base_ns
    result.counts["lost"] += events.lost
    result.problems = events.problems


def entries(source: Source, progress: Progress) -> Iterator[Timed]:
    """The same entries in the same order as the survey saw them."""
    return timed(RawEvents(source.path, progress=_share(progress)), Counter())


def _share(progress: Progress) -> Callable[[int, int], None]:
    return lambda consumed, size: progress(consumed / max(size, 1))
