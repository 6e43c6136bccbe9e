"""Two sides laid against each other: runs, sets of runs, traces or spans → `Comparison`. Pure.

Sets are paired in the order in which their runs started, so that runs that lie next to each other share what the
machine did meanwhile. The step time is that of the journals; where a side is a trace, the steps under the profiler
stand in on both sides, if both have some: a profiled step and one that was not are never compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from stepscope.comparison import flags, outcomes
from stepscope.comparison.changes import changes
from stepscope.comparison.measure import QUANTILES
from stepscope.comparison.profile import STEP_TIME, Profile
from stepscope.comparison.thresholds import LOSS_BAND, THRESHOLD, WIDTH
from stepscope.model.comparison import Comparison, Measure, Outcome, SideFacts
from stepscope.model.run_facts import SourceFiles
from stepscope.schema import Knob

NOISE_UNKNOWN = (
    "one run each: how much two runs of the same program differ here is not known, so nothing below is a verdict; "
    "compare sets of three runs or more, or use stepscope experiment"
)
PROFILED = "step times are of steps under the profiler, which slows them and may slow one side more than the other"
FEW_PROFILED = 10  # a mean over fewer steps moves by several percent between windows
STEADY = "steady_ms"  # the figure that `analyze` gives of each run


class Limits(Struct, frozen=True):
    """What counts as a difference; fractions of the baseline."""

    threshold: float = THRESHOLD
    width: float = WIDTH
    loss_band: float = LOSS_BAND


class Side(Struct, frozen=True):
    """Profiles of one side in any order, how it is called, and what must be said of it."""

    label: str
    profiles: tuple[Profile, ...]
    notes: tuple[str, ...] = ()


class _Steps(Struct, frozen=True):
    """The pairs of measures that are comparable, and how."""

    pairs: tuple[tuple[Measure, Measure], ...]
    profiled: bool
    absent: str | None = None
    spreads: tuple[tuple[Mapping[str, float], Mapping[str, float]], ...] = ()
    notes: tuple[str, ...] = ()


def compare(baseline: Side, candidate: Side, limits: Limits | None = None) -> Comparison:
    """What changed from `baseline` to `candidate`; both have at least one profile."""
    limits = limits or Limits()
    sides = [_in_order(side.profiles) for side in (baseline, candidate)]
    pairs = list(zip(*sides, strict=False))
    steps = _steps(pairs)
    found = changes(pairs, steps.pairs, profiled=steps.profiled)
    absent = dict(found.absent)
    if steps.absent is not None:
        absent = {STEP_TIME: steps.absent, **absent}
    notes = [*_left_out(baseline, candidate), *steps.notes, *found.notes]
    outcome = _outcome(steps, limits)
    clean = outcome.pairs if outcome is not None and outcome.pairs else steps.pairs
    return Comparison(
        baseline=_facts(baseline, sides[0], [one for one, _ in clean], [one for one, _ in steps.spreads]),
        candidate=_facts(candidate, sides[1], [other for _, other in clean], [other for _, other in steps.spreads]),
        outcome=outcome,
        changes=found.rows,
        absent=absent,
        notes=tuple(dict.fromkeys(notes)),
    )


def _in_order(profiles: Sequence[Profile]) -> list[Profile]:
    """By start; those whose start is not known last, by path."""
    return sorted(profiles, key=lambda one: (one.started_ns is None, one.started_ns or 0, one.path))


def _steps(pairs: Sequence[tuple[Profile, Profile]]) -> _Steps:
    """Journals where any pair has both; else the profiled steps of both."""
    journals = [(one.measure, other.measure) for one, other in pairs]
    known = tuple((one, other) for one, other in journals if one is not None and other is not None)
    if known:
        known = flags.flagged_pairs(known)
        lacking = len(pairs) - len(known)
        notes = [f"{lacking} of {len(pairs)} pairs left out: a run without steps"] if lacking else []
        spreads = tuple((one.spread, other.spread) for one, other in pairs if one.measure and other.measure)
        return _Steps(known, profiled=False, notes=(*notes, *_noise(len(known))), spreads=spreads)
    traced = tuple(
        (one.profiled, other.profiled)
        for one, other in pairs
        if one.profiled is not None and other.profiled is not None
    )
    if not traced:
        return _Steps((), profiled=False, absent=_why(pairs))
    few = min(measure.steps for pair in traced for measure in pair)
    notes = [PROFILED]
    if few < FEW_PROFILED:
        notes.append(f"{few} profiled steps on a side: their mean and their 95th percentile are rough")
    spreads = tuple((one.profiled_spread, other.profiled_spread) for one, other in pairs)
    return _Steps(traced, profiled=True, notes=(*notes, *_noise(len(traced))), spreads=spreads)


def _noise(pairs: int) -> tuple[str, ...]:
    return (NOISE_UNKNOWN,) if pairs == 1 else ()


def _why(pairs: Sequence[tuple[Profile, Profile]]) -> str:
    """Why no step time can be compared."""
    one, other = pairs[0]
    known = [f"{side.label} {side.absent[STEP_TIME]}" for side in (one, other) if STEP_TIME in side.absent]
    if known:
        return "; ".join(known)
    lacking = [side for side in (one, other) if side.measure is None and side.profiled is None]
    if lacking:
        return "; ".join(
            f"{side.side}: {'no steps were recorded' if side.recorded else 'the trace marks no steps'}"
            for side in lacking
        )
    run = one if one.profiled is None else other
    return (
        f"{run.side} has no profiled steps, and those of a trace are slowed by the profiler: record the run with a "
        "window, or compare runs"
    )


def _left_out(baseline: Side, candidate: Side) -> list[str]:
    """Runs that have no partner."""
    longer, shorter = sorted((baseline, candidate), key=lambda side: -len(side.profiles))
    more = len(longer.profiles) - len(shorter.profiles)
    if not more:
        return []
    runs = "run" if more == 1 else f"{more} runs"
    return [
        f"{longer.label} holds {len(longer.profiles)} runs and {shorter.label} {len(shorter.profiles)}: "
        f"the last {runs} of {longer.label} {'is' if more == 1 else 'are'} left out"
    ]


def _outcome(steps: _Steps, limits: Limits) -> Outcome | None:
    if not steps.pairs:
        return None
    knobs = _knobs(steps.pairs)
    return outcomes.outcome(
        knobs, steps.pairs, threshold=limits.threshold, width=limits.width, loss_band=limits.loss_band
    )


def _means(names: Iterable[str], runs: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Of the figures that all runs have."""
    found = {}
    for name in names:
        values = [value for run in runs if (value := run.get(name)) is not None]
        if values and len(values) == len(runs):
            found[name] = math.fsum(values) / len(values)
    return found


def _knobs(pairs: Sequence[tuple[Measure, Measure]]) -> list[Knob]:
    """What all runs of the candidate were started with and none of the baseline's."""
    ours = {(one.knob, one.value) for base, _ in pairs for one in base.knobs}
    theirs = [dict.fromkeys((one.knob, one.value) for one in candidate.knobs) for _, candidate in pairs]
    return [Knob(*name) for name in theirs[0] if name not in ours and all(name in side for side in theirs)]


def _facts(
    side: Side, profiles: Sequence[Profile], measures: Sequence[Measure], spreads: Sequence[Mapping[str, float]]
) -> SideFacts:
    of_runs = [{name: getattr(measure, name) for name in outcomes.FIGURES} for measure in measures]
    steady = [{STEADY: measure.steady.mean_ms if measure.steady is not None else None} for measure in measures]
    figures = {
        **_means(outcomes.FIGURES, of_runs),
        **_means([STEADY], steady),
        **_means(QUANTILES, spreads),
    }
    return SideFacts(
        label=side.label,
        measures=tuple(measures),
        paths=tuple(profile.path for profile in profiles),
        notes=side.notes,
        figures=figures,
        roots=tuple(dict.fromkeys(root for profile in profiles for root in profile.roots)),
        source_files=_source_files([profile.source_files for profile in profiles]),
    )


def _source_files(of_runs: Sequence[SourceFiles]) -> SourceFiles:
    """What may be quoted of all runs."""
    hashes = SourceFiles.agreed(pair for files in of_runs for pair in files.hashes.items())
    return SourceFiles(tuple(dict.fromkeys(root for files in of_runs for root in files.roots)), hashes)
