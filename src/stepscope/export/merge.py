"""From sources to the file: one clock, one numbering, metadata events first, then every event that stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.export import output
from stepscope.export.cut import FOREVER_NS, Cut
from stepscope.export.entry import FLOWS, Encoder, arguments, renumbered_arguments, safe_value
from stepscope.export.numbers import ID_ARGUMENTS, Ids, Numbering, RankTracks
from stepscope.export.selection import Selection, Window, select
from stepscope.export.sources import Progress, Source, Sources, clock_offset_ns, entries, find, survey

_ONE_RANK_ONLY = frozenset(("distributedInfo",))


class Exported(Struct, frozen=True):
    """What was written; `problems` are sentences about what could not be taken along."""

    path: Path
    bytes: int
    slices: int
    ranks: int
    lost: int
    problems: tuple[str, ...]


def export(
    paths: Sequence[Path],
    out: Path,
    cut: Cut = Cut(),  # noqa: B008  # immutable
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write what `cut` asks for of the traces below `paths` to `out`, packed if its name ends in .gz.

    `progress` gets the share done, 0 to 1. Raises UsageError, UnreadableInputError or EnvironmentRefusal, and then
    leaves `out` as it was.
    """
    output.check(out, list(paths), force=force)
    sources = find(list(paths), cut.ranks)
    output.check(out, [source.path for source in sources.traces], force=force)
    passes = _Passes(sources, 2 if cut.whole else 3, progress or (lambda _: None))
    traces = _surveyed(sources, cut, passes)
    start_ns = min(source.survey.base_ns + (source.survey.first_ns or 0) for source in traces)
    parts = _parts(traces, sources, cut, start_ns, passes)
    numbering = _numbering(parts, sources)
    with output.atomic(out, force=force) as sink:
        sink.write(_head(parts, start_ns))
        _write(parts, numbering, start_ns, sink, passes)
        sink.write(b"\n]}\n")
    return Exported(
        path=out,
        bytes=sink.written,
        slices=sum(part.slices for part in parts),
        ranks=len({part.source.rank for part in parts}),
        lost=sum(source.survey.counts["lost"] for source in traces),
        problems=tuple(sources.problems),
    )


class _Passes:
    """Turns progress within one pass over one file into the share of all work."""

    def __init__(self, sources: Sources, count: int, report: Progress) -> None:
        self._total = count * len(sources.traces)
        self._done = 0
        self._report = report

    def next(self) -> Progress:
        """The callback of the next pass over a file."""
        before, self._done = self._done, self._done + 1
        return lambda share: self._report((before + min(1.0, share)) / self._total)


class _Part(Struct, frozen=True):
    """A source with what stays of it; without a selection, that is all."""

    source: Source
    selection: Selection | None

    @property
    def slices(self) -> int:
        return self.source.survey.slices if self.selection is None else self.selection.slices


def _surveyed(sources: Sources, cut: Cut, passes: _Passes) -> list[Source]:
    good = []
    for source in sources.traces:
        try:
            survey(source, launches=cut.steps is not None, progress=passes.next())
        except UnreadableInputError as error:
            if len(sources.traces) == 1:
                raise
            sources.problems.append(f"left out: {error}")
            continue
        sources.problems.extend(f"{source.path.name}: {problem}" for problem in source.survey.problems)
        if source.survey.first_ns is not None:
            good.append(source)
    if not good:
        what = sources.traces[0].path if len(sources.traces) == 1 else "these traces"
        raise UnreadableInputError(f"{what}: nothing with a time in it; give traces that torch.profiler wrote")
    return good


# ------------------------------------------------------------------------------------------------------- choosing


def _parts(traces: list[Source], sources: Sources, cut: Cut, start_ns: int, passes: _Passes) -> list[_Part]:
    if cut.whole:
        return [_Part(source, None) for source in traces]
    _require_categories(traces, cut)
    windows = [_window(source, sources, cut, start_ns) for source in traces]
    if cut.steps is not None and not any(windows):
        raise UsageError(f"--steps {_span(cut.steps)}: {_known_steps(traces, sources)}")
    without = {source.path.name for source, window in zip(traces, windows, strict=True) if window is None}
    sources.problems.extend(f"{name}: has none of these steps" for name in sorted(without))
    parts = []
    for source, window in zip(traces, windows, strict=True):
        advance = passes.next()
        if window is not None:
            selection = select(entries(source, advance), window, source.survey)
            if selection.events:
                parts.append(_Part(source, selection))
    if not parts:
        end_ns = max(source.survey.base_ns + source.survey.last_ns for source in traces)
        raise UsageError(
            f"no event is in that cut; the traces end {(end_ns - start_ns) / 10**6:.3f} ms after they start"
        )
    return parts


def _require_categories(traces: list[Source], cut: Cut) -> None:
    there = {name.casefold(): name for source in traces for name in source.survey.categories}
    for name in cut.categories:
        if name.casefold() not in there:
            known = ", ".join(sorted(there.values())[:20])
            raise UsageError(f"--categories {name}: no event is of that category; there are {known}")


def _window(source: Source, sources: Sources, cut: Cut, start_ns: int) -> Window | None:
    """What is wanted of `source`, on its own clock; None where it has none of the steps."""
    base = source.survey.base_ns
    categories = frozenset(name.casefold() for name in cut.categories) or None
    if cut.steps is not None:
        known = _steps_of(source, sources)
        asked = [times for number, times in known.items() if cut.steps[0] <= number <= cut.steps[1]]
        if not asked:
            return None
        start, end = min(times[0] for times in asked), max(times[1] for times in asked)
        return Window(
            start, end, of_steps=True, steps=cut.steps if known is source.survey.steps else None, categories=categories
        )
    start, end = cut.range_ns or (0, FOREVER_NS)
    offset = start_ns - base
    return Window(start + offset, min(end + offset, FOREVER_NS), categories=categories)


def _steps_of(source: Source, sources: Sources) -> dict[int, tuple[int, int]]:
    """Start and end of the steps in `source` on its own clock: those of its run's journal, else its annotations."""
    rank, taken = sources.ranks[source.rank], source.survey
    if not rank.steps:
        return taken.steps
    shift = taken.base_ns + clock_offset_ns(rank, taken)
    journal = {number: (start - shift, end - shift) for number, (start, end) in rank.steps.items()}
    first = taken.first_ns or 0
    return {number: times for number, times in journal.items() if times[0] < taken.last_ns and times[1] > first}


def _span(steps: tuple[int, int]) -> str:
    return f"{steps[0]}" if steps[0] == steps[1] else f"{steps[0]}:{steps[1]}"


def _known_steps(traces: list[Source], sources: Sources) -> str:
    """In words, what steps there are."""
    known = {number for source in traces for number in _steps_of(source, sources)}
    if not known:
        return "the traces mark no steps; cut by time with --range"
    return f"no such step in the traces, which hold steps {_span((min(known), max(known)))}"


# -------------------------------------------------------------------------------------------------------- writing


def _numbering(parts: list[_Part], sources: Sources) -> Numbering:
    tracks: dict[int, RankTracks] = {}
    for part in parts:
        taken, rank = part.source.survey, part.source.rank
        rank_tracks = tracks.setdefault(rank, RankTracks(sources.ranks[rank].label))
        rank_tracks.add(taken, taken.tracks if part.selection is None else part.selection.tracks)
    return Numbering(tracks)


def _head(parts: list[_Part], base_ns: int) -> bytes:
    """The beginning of the file up to the event list: the metadata that all sources agree on."""
    first, *others = (part.source.survey.metadata for part in parts)
    several = len({part.source.rank for part in parts}) > 1
    kept: dict[str, Any] = {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others) and not (several and key in _ONE_RANK_ONLY)
    }
    kept["baseTimeNanoseconds"] = base_ns
    return msgspec.json.encode(safe_value(kept)).removesuffix(b"}") + b',"traceEvents":['


def _write(parts: list[_Part], numbering: Numbering, base_ns: int, sink: output.Sink, passes: _Passes) -> int:
    """Write the metadata events, then what stays of every part; returns how many of the latter."""
    separator = b"\n"
    for event in numbering.metadata():
        sink.write(separator + event)
        separator = b",\n"
    count = 0
    encoder = Encoder()
    for number, part in enumerate(parts):
        for event in _events(part, Ids(number, len(parts)), numbering, base_ns, encoder, passes.next()):
            sink.write(separator + event)
            separator = b",\n"
            count += 1
    return count


def _events(
    part: _Part, ids: Ids, numbering: Numbering, base_ns: int, encoder: Encoder, progress: Progress
) -> Iterator[bytes]:
    """Every entry of `part` that stays, as JSON on the common clock."""
    source, survey_ = part.source, part.source.survey
    kept = part.selection.kept if part.selection is not None else None
    first_ns = survey_.first_ns or 0
    index = -1
    for index, taken in enumerate(entries(source, progress)):
        entry, start, _ = taken
        if entry.ph == "M" or start < first_ns or (kept is not None and not (index < len(kept) and kept[index])):
            continue
        pid, tid = numbering.track(source.rank, entry.track)
        args = arguments(entry) if ids.unchanged else renumbered_arguments(entry, ID_ARGUMENTS, ids.number)
        identifier = ids.arrow(bytes(entry.id)) if entry.ph in FLOWS else b""
        yield encoder.entry(taken, base_ns - survey_.base_ns, pid, tid, identifier, args)
    if index + 1 != survey_.entries:
        raise UnreadableInputError(f"{source.path}: changed while it was read; try again when it is complete")
