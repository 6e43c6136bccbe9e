"""Two sides laid against each other: runs, sets of runs, traces or spans → `Comparison`. Pure.

Sets are paired in the order in which their runs started, so that runs that lie next to each other share what the
machine did meanwhile. The step time is that of the journals; where a side is a trace, the steps under the profiler
stand in on both sides, if both have some: a profiled step and one that was not are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from msgspec import Struct

from stepscope.comparison import outcomes
from stepscope.comparison.changes import changes
from stepscope.comparison.flags import with_flags_of_set
from stepscope.comparison.measure import QUANTILES
from stepscope.comparison.profile import STEP_TIME, Profile, Steps
from stepscope.comparison.thresholds import Limits
from stepscope.model.comparison import Comparison, Measure, SideFacts
from stepscope.model.counted import things
from stepscope.model.run_facts import SourceFiles
from stepscope.schema import Knob

NOISE_UNKNOWN = (
    "one run each: how much two runs of the same program differ here is not known, so nothing below is a verdict; "
    "compare sets of three runs or more, or use stepscope experiment"
)
PROFILED = "step times are of steps under the profiler, which slows them and may slow one side more than the other"
FEW_PROFILED = 10  # a mean over fewer steps moves by several percent between windows
STEADY = "steady_ms"  # the figure that `analyze` gives of each run

Pairs = Sequence[tuple[Profile, Profile]]


class Side(Struct, frozen=True):
    """Profiles of one side in any order, how it is called, and what must be said of it."""

    label: str
    profiles: tuple[Profile, ...]
    notes: tuple[str, ...] = ()


def compare(baseline: Side, candidate: Side, limits: Limits | None = None) -> Comparison:
    """What changed from `baseline` to `candidate`; both have at least one profile."""
    ours, theirs = (
        # by start; those whose start is not known last, by path
        sorted(side.profiles, key=lambda one: (one.started_ns is None, one.started_ns or 0, one.path))
        for side in (baseline, candidate)
    )
    pairs = list(zip(ours, theirs, strict=False))
    notes: list[str] = []
    longer, shorter = sorted((baseline, candidate), key=lambda side: -len(side.profiles))
    more = len(longer.profiles) - len(shorter.profiles)
    if more:  # runs that have no partner
        runs = "run" if more == 1 else f"{more} runs"
        notes.append(
            f"{longer.label} holds {things(len(longer.profiles), 'run')} and {shorter.label} {len(shorter.profiles)}: "
            f"the last {runs} of {longer.label} {'is' if more == 1 else 'are'} left out"
        )
    steps = _known((one.measured, other.measured) for one, other in pairs)
    profiled = not steps  # journals where any pair has both; else the profiled steps of both
    steps = steps or _known((one.profiled, other.profiled) for one, other in pairs)
    measures = [(one.measure, other.measure) for one, other in steps]
    if profiled and measures:
        notes.append(PROFILED)
        few = min(measure.steps for pair in measures for measure in pair)
        if few < FEW_PROFILED:
            notes.append(f"{things(few, 'profiled step')} on a side: their mean and their 95th percentile are rough")
    elif measures:
        measures = list(zip(*with_flags_of_set(*zip(*measures, strict=True)), strict=True))
        lacking = len(pairs) - len(measures)
        if lacking:
            notes.append(f"{lacking} of {things(len(pairs), 'pair')} left out: a run without steps")
    if len(measures) == 1:
        notes.append(NOISE_UNKNOWN)
    rows, absent, said = changes(pairs, measures, profiled=profiled and bool(measures))
    outcome = outcomes.outcome(_knobs(measures), measures, limits or Limits()) if measures else None
    clean = outcome.pairs if outcome is not None and outcome.pairs else measures
    return Comparison(
        baseline=_facts(baseline, ours, [one for one, _ in clean], [one.spread for one, _ in steps]),
        candidate=_facts(candidate, theirs, [other for _, other in clean], [other.spread for _, other in steps]),
        outcome=outcome,
        changes=rows,
        absent=absent if measures else {STEP_TIME: _why(pairs), **absent},
        notes=tuple(dict.fromkeys((*notes, *said))),
    )


def _known(pairs: Iterable[tuple[Steps | None, Steps | None]]) -> list[tuple[Steps, Steps]]:
    return [(one, other) for one, other in pairs if one is not None and other is not None]


def _why(pairs: Pairs) -> str:
    """Why no step time can be compared."""
    one, other = pairs[0]
    known = [f"{side.label} {side.absent[STEP_TIME]}" for side in (one, other) if STEP_TIME in side.absent]
    lacking = known or [
        f"{side.side}: {'no steps were recorded' if side.recorded else 'the trace marks no steps'}"
        for side in (one, other)
        if side.measured is None and side.profiled is None
    ]
    if lacking:
        return "; ".join(lacking)
    run = one if one.profiled is None else other
    return (
        f"{run.side} has no profiled steps, and those of a trace are slowed by the profiler: record the run with a "
        "window, or compare runs"
    )


def _knobs(pairs: Sequence[tuple[Measure, Measure]]) -> list[Knob]:
    """What all runs of the candidate were started with and none of the baseline's."""
    ours = {(one.knob, one.value) for base, _ in pairs for one in base.knobs}
    theirs = [dict.fromkeys((one.knob, one.value) for one in candidate.knobs) for _, candidate in pairs]
    return [Knob(*name) for name in theirs[0] if name not in ours and all(name in side for side in theirs)]


def _facts(
    side: Side, profiles: Sequence[Profile], measures: Sequence[Measure], spreads: Sequence[Mapping[str, float]]
) -> SideFacts:
    names = (*outcomes.FIGURES, *outcomes.ENERGY, outcomes.COST)
    of_runs = [{name: getattr(measure, name) for name in names} for measure in measures]
    steady = [{STEADY: measure.steady.mean_ms if measure.steady is not None else None} for measure in measures]
    files = [profile.source_files for profile in profiles]
    return SideFacts(
        label=side.label,
        measures=tuple(measures),
        paths=tuple(profile.path for profile in profiles),
        notes=side.notes,
        figures={**_means(names, of_runs), **_means([STEADY], steady), **_means(QUANTILES, spreads)},
        roots=tuple(dict.fromkeys(root for profile in profiles for root in profile.roots)),
        source_files=SourceFiles(  # what may be quoted of all runs
            tuple(dict.fromkeys(root for one in files for root in one.roots)),
            SourceFiles.agreed(pair for one in files for pair in one.hashes.items()),
        ),
    )


def _means(names: Iterable[str], runs: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    known = {name: [value for run in runs if (value := run.get(name)) is not None] for name in names}
    return {name: fmean(values) for name, values in known.items() if values and len(values) == len(runs)}
