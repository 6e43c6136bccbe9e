"""The traces an export is made from: which files, of which ranks, and the steps their run's journal knows."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from msgspec import Struct, field

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.export.entry import Timed, timed
from stepscope.export.survey import Survey, Surveyor
from stepscope.read import read_paths
from stepscope.read.kineto import raw_events
from stepscope.read.raw import RawRank, RawRun
from stepscope.read.text import moment_ns, whole_number

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
        distances = []
        for end in rank.optimizer_ends:
            right = min(bisect_left(seen, end), len(seen) - 1)
            distances.append(min((end - seen[i] for i in (max(right - 1, 0), right)), key=abs))
    offset = int(median(distances))
    return offset if _NEGLIGIBLE_NS < abs(offset) <= _MAX_OFFSET_NS else 0


def survey(source: Source, *, launches: bool, progress: Progress) -> None:
    """Fill in `source.survey`; raises UnreadableInputError when the file has no event in it."""
    surveyor = Surveyor(launches=launches)
    events = raw_events(source.path, progress=_share(progress))
    result = source.survey = surveyor.run(timed(events, surveyor.result.counts))
    result.metadata = events.metadata()
    base_ns = moment_ns(whole_number(result.metadata.pop("baseTimeNanoseconds", None))) or 0
    result.base_ns = 0 if (result.first_ns or 0) > _SINCE_1970_NS else base_ns
    quality = events.quality()
    result.counts["lost"] += quality.lost
    result.problems = quality.problems


def entries(source: Source, progress: Progress) -> Iterator[Timed]:
    """The same entries in the same order as the survey saw them."""
    return timed(raw_events(source.path, progress=_share(progress)), Counter())


def _share(progress: Progress) -> Callable[[int, int], None]:
    return lambda consumed, size: progress(consumed / max(size, 1))
