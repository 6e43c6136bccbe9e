"""What benchmarks/read.py measured → medians, ratios, verdicts, Markdown. Standard library only.

Ratios pair the rounds: both sides of one were measured within the same round, seconds apart. A limit holds where every
round keeps it, is missed where none does, and is undecided between.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HTA_FACTOR, HTA_AIM = 4.0, 10.0  # our tables against HTA's load
SMALL_SHARE, LARGE_SHARE = 0.33, 0.40  # of the speed of decoding alone
READ_MB = 400.0  # reading, any size
WHOLE_MB, WHOLE_LARGE_MB = 400.0, 1200.0  # nesting, links and analysis: up to 100 MB of trace, and at 1 GB
ANALYZE_FACTOR = 5.0  # everything, against the fastest peer

ARMS = ("gunzip", "decode", "decode_fast", "read", "build", "again", "analyze", "hta", "hta_analyze", "tb_plugin")
PEERS = ("hta", "tb_plugin")
ANALYZING_PEERS = ("hta_analyze", "tb_plugin")
LIMIT_PAIRS = (("decode", "build"), ("decode_fast", "build"), ("decode_fast", "read"))


@dataclass(frozen=True)
class Sample:
    """One run: seconds without imports, seconds of the whole process, peak memory, what was read.

    `cpu_seconds` far below `seconds` tells that something else had the processor.
    """

    seconds: float
    process_seconds: float
    cpu_seconds: float
    peak_mb: float
    events: int | None = None
    bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s (CPU {self.cpu_seconds:.3f} s), {self.peak_mb:.0f} MB"


@dataclass(frozen=True)
class Failure:
    """Why there is no figure."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Subject:
    """What is read: one trace, or two side by side. `reference` is the one that stands for 60 MB."""

    name: str
    paths: tuple[Path, ...]
    rounds: int
    large: bool = False
    reference: bool = False


@dataclass(frozen=True)
class Figure:
    """One result, for the JSON file."""

    subject: str
    arm: str
    result: Sample | Failure


@dataclass
class Measured:
    """All results, by subject and arm, in the order of the rounds."""

    results: dict[tuple[str, str], list[Sample | Failure]] = field(default_factory=dict)

    def add(self, subject: Subject, arm: str, result: Sample | Failure) -> None:
        """Keep one result."""
        self.results.setdefault((subject.name, arm), []).append(result)

    def samples(self, subject: Subject, arm: str) -> list[Sample]:
        """The runs that gave figures."""
        return [r for r in self.results.get((subject.name, arm), []) if isinstance(r, Sample)]

    def failure(self, subject: Subject, arm: str) -> str | None:
        """Why an arm ended without a figure, if it did."""
        return next((r.reason for r in self.results.get((subject.name, arm), []) if isinstance(r, Failure)), None)

    def of(self, subject: Subject) -> Iterator[tuple[str, Sample | Failure]]:
        """Every result of a subject with its arm."""
        for (name, arm), results in self.results.items():
            if name == subject.name:
                yield from ((arm, result) for result in results)

    def ratios(self, subject: Subject, above: str, below: str, *, process: bool = False) -> list[float]:
        """Time of `above` over time of `below`, one per round that has both."""
        pairs = zip(self.samples(subject, above), self.samples(subject, below), strict=False)
        if process:
            return [a.process_seconds / b.process_seconds for a, b in pairs]
        return [a.seconds / b.seconds for a, b in pairs]


# -------------------------------------------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Line:
    """A limit, what was measured in each round of the subject that does worst, and where that was."""

    limit: str
    values: Sequence[float]
    subject: str
    keeps: Callable[[float], bool]
    show: Callable[[float], str]

    def verdict(self) -> str:
        """holds | missed | undecided | not measured."""
        if not self.values:
            return "not measured"
        kept = sum(map(self.keeps, self.values))
        if kept == len(self.values):
            return "holds"
        return "missed" if not kept else f"undecided: kept in {kept} of {len(self.values)} rounds"


def times(value: float) -> str:
    """A ratio as a factor."""
    return f"{value:.1f} ×"


def percent(value: float) -> str:
    """A fraction as percent."""
    return f"{value * 100:.0f} %"


def megabytes(value: float) -> str:
    """Memory."""
    return f"{value:.0f} MB"


def lines(subjects: Sequence[Subject], measured: Measured) -> list[Line]:
    """The limits, each on the subject that is furthest from keeping it."""
    single = [subject for subject in subjects if len(subject.paths) == 1]
    small, large = [s for s in single if not s.large], [s for s in single if s.large]
    found = [
        _lowest(small, f"tables at least {HTA_FACTOR:.0f} × as fast as HTA's load (aim {HTA_AIM:.0f} ×)", HTA_FACTOR,
                times, lambda s: measured.ratios(s, "hta", "build")),
        _lowest(small, f"tables at least {percent(SMALL_SHARE)} of the speed of decoding alone", SMALL_SHARE, percent,
                lambda s: measured.ratios(s, "decode", "build")),
        _lowest(small, f"the same of the fastest decoding we know, at least {percent(SMALL_SHARE)}", SMALL_SHARE,
                percent, lambda s: measured.ratios(s, "decode_fast", "build")),
        _lowest(large, f"tables at least {percent(LARGE_SHARE)} of the speed of decoding alone on the large trace",
                LARGE_SHARE, percent, lambda s: measured.ratios(s, "decode", "build")),
        _lowest(large, f"the same of the fastest decoding we know, at least {percent(LARGE_SHARE)}", LARGE_SHARE,
                percent, lambda s: measured.ratios(s, "decode_fast", "build")),
        _highest(single, f"reading at most {megabytes(READ_MB)}", READ_MB, lambda s: _peaks(measured, s, "read")),
        _highest(small, f"tables and analysis at most {megabytes(WHOLE_MB)}", WHOLE_MB,
                 lambda s: _peaks(measured, s, "analyze")),
        _highest(large, f"the same on the large trace, at most {megabytes(WHOLE_LARGE_MB)}", WHOLE_LARGE_MB,
                 lambda s: _peaks(measured, s, "analyze")),
    ]  # fmt: skip
    reference = [subject for subject in small if subject.reference]
    for what, process in (("imports left out", False), ("whole processes", True)):
        limit = f"analyze, everything, at least {ANALYZE_FACTOR:.0f} × as fast as the fastest peer ({what})"
        found.append(_lowest(reference, limit, ANALYZE_FACTOR, times, _against_fastest(measured, process=process)))
    return found


def _peaks(measured: Measured, subject: Subject, arm: str) -> list[float]:
    return [sample.peak_mb for sample in measured.samples(subject, arm)]


def _against_fastest(measured: Measured, *, process: bool) -> Callable[[Subject], list[float]]:
    def ratios(subject: Subject) -> list[float]:
        peers = [measured.ratios(subject, peer, "analyze", process=process) for peer in ANALYZING_PEERS]
        return [min(pair) for pair in zip(*(p for p in peers if p), strict=False)]

    return ratios


Values = Callable[[Subject], list[float]]


def _lowest(subjects: Sequence[Subject], limit: str, least: float, show: Callable[[float], str], of: Values) -> Line:
    return _worst(subjects, limit, of, lambda value: value >= least, show, worst=min)


def _highest(subjects: Sequence[Subject], limit: str, most: float, of: Values) -> Line:
    return _worst(subjects, limit, of, lambda value: value <= most, megabytes, worst=max)


def _worst(
    subjects: Sequence[Subject],
    limit: str,
    of: Values,
    keeps: Callable[[float], bool],
    show: Callable[[float], str],
    *,
    worst: Callable[..., tuple[float, str, list[float]]],
) -> Line:
    ranked = [(statistics.median(values), subject.name, values) for subject in subjects if (values := of(subject))]
    _, name, values = worst(ranked) if ranked else (0.0, "–", [])
    return Line(limit, values, name, keeps, show)


# --------------------------------------------------------------------------------------------------------- Markdown


def text(subjects: Sequence[Subject], measured: Measured, command: str, about: dict[str, str]) -> str:
    """The result as Markdown."""
    single = [subject for subject in subjects if len(subject.paths) == 1]
    rounds = " and ".join(sorted({str(subject.rounds) for subject in subjects}, reverse=True))
    parts = [
        f"Made with `{command}`: medians of {rounds} rounds.",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        "Seconds, imports left out:",
        _table(single, measured, lambda sample: sample.seconds, seconds),
        "Peak memory in MB, of the whole process, imports included:",
        _table(single, measured, lambda sample: sample.peak_mb, lambda value: f"{value:.0f}"),
        "How far from the peers and from the limit:",
        _ratio_table(single, measured),
        *_pool(subjects, measured),
        _verdicts(lines(subjects, measured)),
        *_failures(subjects, measured),
    ]
    return "\n\n".join(parts)


def seconds(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_row(head), "|" + "---|" * len(head), *map(_row, rows)])


def _median(values: Sequence[float], show: Callable[[float], str]) -> str:
    return show(statistics.median(values)) if values else "–"


def _table(
    subjects: Sequence[Subject], measured: Measured, of: Callable[[Sample], float], show: Callable[[float], str]
) -> str:
    rows = []
    for subject in subjects:
        unpacked = [sample.bytes / 1e6 for sample in measured.samples(subject, "gunzip") if sample.bytes]
        entries = [sample.events / 1e3 for sample in measured.samples(subject, "decode") if sample.events]
        cells = [_median([of(sample) for sample in measured.samples(subject, arm)], show) for arm in ARMS]
        rows.append([subject.name, _median(unpacked, "{:.0f}".format), _median(entries, "{:.0f}".format), *cells])
    return _markdown(["trace", "MB", "thousand entries", *ARMS], rows)


def _ratio_table(subjects: Sequence[Subject], measured: Measured) -> str:
    head = [
        "trace",
        "hta / build",
        "tb_plugin / build",
        "decode / build",
        "decode_fast / build",
        "decode_fast / read",
        "build, MB/s",
    ]
    rows = []
    for subject in subjects:
        sizes, builds = measured.samples(subject, "gunzip"), measured.samples(subject, "build")
        speeds = [(size.bytes or 0) / 1e6 / build.seconds for size, build in zip(sizes, builds, strict=False)]
        rows.append(
            [
                subject.name,
                *(_median(measured.ratios(subject, peer, "build"), times) for peer in PEERS),
                *(_median(measured.ratios(subject, *pair), percent) for pair in LIMIT_PAIRS),
                _median(speeds, "{:.0f}".format),
            ]
        )
    return _markdown(head, rows)


def _pool(subjects: Sequence[Subject], measured: Measured) -> list[str]:
    said = []
    for subject in subjects:
        gain = measured.ratios(subject, "one process", "two processes")
        if len(subject.paths) > 1 and gain:
            one, two = (
                _median([s.seconds for s in measured.samples(subject, arm)], seconds)
                for arm in ("one process", "two processes")
            )
            said.append(
                f"A pool of two on {subject.name}: {two} s instead of {one} s, {statistics.median(gain):.2f} × as fast."
            )
    return said


def _verdicts(found: Sequence[Line]) -> str:
    rows = [
        [
            line.limit,
            _median(line.values, line.show),
            f"{line.show(min(line.values))} to {line.show(max(line.values))}" if line.values else "–",
            line.subject,
            line.verdict(),
        ]
        for line in found
    ]
    return _markdown(["limit", "median", "rounds", "on the worst trace", "verdict"], rows)


def _failures(subjects: Sequence[Subject], measured: Measured) -> list[str]:
    said = [
        f"- {subject.name}, {arm}: {result}"
        for subject in subjects
        for arm, result in measured.of(subject)
        if isinstance(result, Failure)
    ]
    return ["No figure for:\n" + "\n".join(said)] if said else []
