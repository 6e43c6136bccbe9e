"""Runs laid against each other: what is measured of one run, the effect of a change, and the word for it.

The run is the unit of replication. An effect comes from pairs of runs that lie next to each other; steps of one run are
not independent of each other, so a single pair has no interval and gets no verdict. An experiment (what is tried, how
it is measured, and what came of it) is made of such comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from stepscope.model.run_facts import Settings, SourceFiles
from stepscope.schema import Knob

FASTER = "faster"
SLOWER = "slower"
NO_DIFFERENCE = "no_difference"
UNDECIDED = "undecided"
LESS, MORE = "less", "more"  # energy
VOID = "void"  # a knob was not applied, a run failed, or a flag withholds the verdict

COMPARISON_SCHEMA = "stepscope.comparison/1"
EXPERIMENT_SCHEMA = "stepscope.experiment/1"


class AppliedKnob(Struct, frozen=True):
    """What became of a knob in one process of a run.

    `observed` is what was read back from torch, the loader or the process after it was applied; `reason` says why it
    was not. `file` and `line` are the user's place that the knob stands for, where it is known.

    line: Number of the user's line that the knob stands for.
    rank: Rank of the process that reported it; missing where none did.
    """

    knob: str
    value: str
    applied: bool
    observed: str | None = None
    reason: str | None = None
    file: str | None = None
    line: int | None = None
    rank: int | None = None


class Flag(Struct, frozen=True):
    """Something about a run that makes its timing doubtful. `withholds`: no verdict may rest on it."""

    name: str
    text: str
    source: str
    withholds: bool


class PhaseTime(Struct, frozen=True):
    """One exclusive part of the mean measured step; all parts of a measure sum to its mean.

    ms: Mean time of the part. Parts exclude each other and sum to the mean step: the phases of the journal, what of the
        step is of no known phase (unattributed), and between steps ending a loader's workers and making its next
        iterator (loader_restart). Of traces, the parts of the overview.
    """

    category: str
    ms: float


class SteadyStep(Struct, frozen=True):
    """The step as `analyze` tells it of the same run: of `steps` steady steps out of `of`.

    A measure is of more steps: a user also pays for stalls, first batches and restarts of the loader.

    steps: Steady steps: what `steps.count` of the run's report is.
    of: All steps of the kind, those left out included.
    mean_ms: Mean of the steady steps, as in the report; `mean_ms` of the measure has stalls in it too.
    median_ms: Their median, as in the report.
    p95_ms: Their 95th percentile, as in the report.
    """

    steps: int
    of: int
    mean_ms: float
    median_ms: float
    p95_ms: float


class Measure(Struct, frozen=True):
    """One run, reduced to what a comparison needs.

    steps: Measured steps: all after warm-up but those under a profiler, each counted once for all ranks.
    dropped: Steps before them, dropped as warm-up: until the step time is at the level of the later steps.
    mean_ms: Mean wall time of the measured steps, stalls and first batches of epochs included, mean over ranks; with
        the time between two steps that iterating the loader again took.
    median_ms: Median of the measured steps, without the time between steps.
    p95_ms: 95th percentile of the same.
    samples_per_step: Mean rows of the batches of a measured step, summed over ranks.
    samples_per_second: The same by the mean step.
    fixed_cost_s: From the start of the command to the first step.
    losses (loss): (step, value) of the first rank that has any, over all steps.
    started_ns: Start of the recording, since the epoch.
    warmup_s: How much longer the dropped steps took than as many measured ones.
    conditions (mixed): Figures of the machine during the measured steps, see below.
    steady (mixed): The steady step of the same run as `analyze` tells it, see below.
    joules_per_step (J): Energy while the measured steps ran, by steps, of the devices that `energy_sources` name.
    joules_per_sample (J): The same by the rows of the batches.
    cost_per_1000_steps (currency): Energy and GPUs of 1,000 measured steps, at the user's prices.
    """

    label: str
    path: str
    steps: int
    dropped: int
    mean_ms: float
    median_ms: float
    p95_ms: float
    samples_per_step: float | None
    samples_per_second: float | None
    fixed_cost_s: float | None
    phases: tuple[PhaseTime, ...]
    losses: tuple[tuple[int, float], ...] = ()
    knobs: tuple[AppliedKnob, ...] = ()
    flags: tuple[Flag, ...] = ()
    started_ns: int | None = None
    warmup_s: float | None = None
    signal: str | None = None  # what cut most of the steps
    conditions: dict[str, float] = field(default_factory=dict)
    settings: Settings | None = None  # of the framework that runs the loop
    steady: SteadyStep | None = None
    joules_per_step: float | None = None
    joules_per_sample: float | None = None
    cost_per_1000_steps: float | None = None
    energy_sources: tuple[str, ...] = ()  # only sums of the same may be compared
    energy_absent: str | None = None  # why no energy is known


class Effect(Struct, frozen=True):
    """Candidate over baseline of one figure: the geometric mean of the ratios of pairs.

    ratio: Candidate over baseline: the geometric mean over pairs. Below 1 a time is shorter.
    low (ratio): Lower end of the 95 % interval, by Student of the log ratios; missing with too few pairs.
    high (ratio): Upper end of the same.
    pairs: Pairs of runs, one of each side, that lie next to each other.
    spread (ratio): Standard deviation of the log ratios; missing of a single pair.
    p_value (probability): Of a log ratio as far from 0 as this or farther if there were no effect, corrected for the
        number of candidates (Holm).
    """

    ratio: float
    low: float | None
    high: float | None
    pairs: int
    spread: float | None = None
    p_value: float | None = None


class Verdict(Struct, frozen=True):
    """The word for an effect, and a sentence that says it in full.

    `figure` names what it rests on where that is not the headline.

    resolution (ratio): X of `no difference larger than X`, as a fraction of the baseline.
    pairs_needed: Further pairs that would decide it, if the spread stays what it is.
    """

    word: str
    text: str
    resolution: float | None = None
    pairs_needed: int | None = None
    figure: str | None = None


class PhaseEffect(Struct, frozen=True):
    """What a phase of the step changed by, in ms: candidate less baseline, with 95 % limits where pairs allow it.

    baseline_ms: Mean of the phase in the baseline's runs.
    candidate_ms: The same in the candidate's.
    difference_ms: Candidate less baseline, mean over pairs.
    low_ms: Lower end of its 95 % interval, from the differences between pairs; missing with fewer than three of them.
    high_ms: Upper end of its 95 % interval, from the differences between pairs; missing with fewer than three of them.
    """

    category: str
    baseline_ms: float
    candidate_ms: float
    difference_ms: float
    low_ms: float | None = None
    high_ms: float | None = None


class Equivalence(Struct, frozen=True):
    """Whether a candidate trains like the baseline.

    `judged` is False where a loss is not known; `equal` says that all compared losses are the same bit for bit.

    difference (ratio): Relative difference of the mean loss over the compared steps.
    band (ratio): The most that is accepted; wider where the baseline's runs differ among themselves.
    steps: Steps whose losses were compared.
    """

    judged: bool
    within: bool | None
    equal: bool
    difference: float | None
    band: float
    steps: int
    text: str


class Outcome(Struct, frozen=True):
    """One candidate against the baseline. `effects` by figure: mean_ms (the headline), median_ms, p95_ms,
    samples_per_second, fixed_cost_s, joules_per_sample or else joules_per_step, cost_per_1000_steps; a figure that
    either side lacks is missing. `energy` is what the joules show, or why they show nothing; None where no run has any.
    """

    knobs: tuple[Knob, ...]
    verdict: Verdict
    effects: dict[str, Effect]
    phases: tuple[PhaseEffect, ...]
    pairs: tuple[tuple[Measure, Measure], ...]  # (baseline, candidate)
    left_out: tuple[Measure, ...] = ()  # runs that a flag keeps out of the pairs
    flags: tuple[Flag, ...] = ()
    equivalence: Equivalence | None = None
    headline: str = "mean_ms"  # samples_per_second where the batch size differs
    energy: Verdict | None = None  # its word is less, more, no_difference or undecided


class Change(Struct, frozen=True):
    """One row of what grew, shrank, came or went. Values are per step in `unit`; None where a side has none of it.

    difference (mixed): Candidate less baseline, in the row's unit.
    line: Number of the user's line that the row is about.
    """

    kind: str  # phase, category, function, operator, kernel, line, finding, utilisation, environment, window
    name: str
    baseline: Any
    candidate: Any
    difference: float | None
    unit: str
    status: str  # grew, shrank, new, gone, changed, same
    file: str | None = None
    line: int | None = None
    rule: str | None = None  # of a finding


class SideFacts(Struct, frozen=True):
    """One side of a comparison: its runs or traces, and the knobs or names that describe it.

    `roots` are the folders that the files of changes are relative to.

    figures (mixed): Means over its compared runs, by the names of a measured run's figures; also percentiles of their
        steps.
    """

    label: str
    measures: tuple[Measure, ...]
    paths: tuple[str, ...]
    notes: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    roots: tuple[str, ...] = ()
    source_files: SourceFiles = field(default_factory=SourceFiles)


class Comparison(Struct, frozen=True):
    """`compare A B`: one outcome (None where a side has no steps) and all that changed beside it.

    `absent` says for each kind of change that could not be told, why.
    """

    baseline: SideFacts
    candidate: SideFacts
    outcome: Outcome | None
    changes: tuple[Change, ...]
    absent: dict[str, str]
    notes: tuple[str, ...] = ()
    schema: str = COMPARISON_SCHEMA


class Left(Struct, frozen=True):
    """A finding that a run of a history still has.

    cost_ms_per_step: What it costs in a mean step, as in the run's report.
    """

    rule: str
    title: str
    cost_ms_per_step: float


class Version(Struct, frozen=True):
    """A run of a script's history, and what differs from the one before it; of the first, nothing does.

    `changed` are rows of the environment, and of kind "source" the files of the user's that are not what they were;
    `new` and `gone` are titles of findings. A rule that was not judged in one of the two runs tells neither.

    started_ns: Start of the recording, since the epoch.
    mean_ms: Mean of the measured steps, as `compare` tells it: warm-up and profiler windows left out, stalls not.
    samples_per_second: Rows of the batches of a mean step, by its time.
    ratio: The mean step over that of the run before. One run of each: no interval.
    of_first (ratio): The mean step over that of the first run.
    """

    label: str
    path: str
    started_ns: int | None
    mean_ms: float | None
    samples_per_second: float | None
    ratio: float | None = None
    of_first: float | None = None
    changed: tuple[Change, ...] = ()
    findings: tuple[Left, ...] = ()
    new: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class HostHistory(Struct, frozen=True):
    """A host over several runs, by the verdicts that their reports hold; runs that were not judged say nothing of it.

    A stage, a rotating cause and what slows all ranks together are no host's.

    runs: In which it took part.
    judged: Of them, those in which its ranks were compared with others'.
    late: Of these, those in which a rank of it, the host or a link to it kept the others waiting.
    late_share: The same as a part of the judged ones.
    excess_ms: Own work of its late ranks beyond that of their peers, mean over the runs in which it was late; of each
        the finding that cost most.
    cost_ms: What a step would have been shorter without it, mean over the same runs.
    most_cost_ms: The largest of these.
    causes: Of its findings in these runs, how many have which cause.
    last_seen_ns: Start of the last run with it, since the epoch.
    last_late_ns: The same of the last one in which it was late.
    """

    host: str
    runs: int
    judged: int
    late: int
    late_share: float | None
    excess_ms: float | None
    cost_ms: float | None
    most_cost_ms: float | None
    causes: dict[str, int]
    last_seen_ns: int | None
    last_late_ns: int | None


APPLIED, PARTLY, REFUSED = "applied", "partly", "not applied"


class TrialFacts(Struct, frozen=True):
    """Knobs as each process reported them, one entry for each place; those that no process reported are not applied.

    seed: The number that the generators of Python, numpy and torch were started from.
    skipped: Entries of the recording about knobs that make no sense.
    """

    knobs: tuple[AppliedKnob, ...]
    seed: int | None
    skipped: int = 0


def standing(reports: Sequence[AppliedKnob]) -> str:
    """What became of one knob by all reports of it: APPLIED, PARTLY (not at every place), or REFUSED.

    It has to be applied at some place of every rank. A refusal without a place is of the knob as a whole, whatever was
    reported before it.
    """
    applied = {report.rank for report in reports if report.applied}
    refused = [report for report in reports if not report.applied]
    if not applied or any(report.file is None or report.rank not in applied for report in refused):
        return REFUSED
    return PARTLY if refused else APPLIED


class Candidate(Struct, frozen=True):
    """A set of knobs to try together, and the finding it is from; None where it is not from one.

    ceiling (ratio): The most that the diagnosis allows it to gain, as a fraction of the mean step.
    """

    name: str
    knobs: tuple[Knob, ...]
    ceiling: float | None = None
    finding: str | None = None


class Skipped(Struct, frozen=True):
    """A candidate that is not tried, and why."""

    name: str
    knobs: tuple[Knob, ...]
    reason: str


class ByHand(Struct, frozen=True):
    """A loss that no knob reaches: what the diagnosis says of it, the user's line, and what to edit there.

    line: Number of the user's line to change.
    ceiling (ratio): The most that the diagnosis allows it to gain, as a fraction of the mean step.
    """

    title: str
    fix: str
    file: str | None = None
    line: int | None = None
    ceiling: float | None = None
    finding: str | None = None


class Protocol(Struct, frozen=True):
    """How candidates are measured.

    warmup_steps: Steps that may be dropped as warm-up, at most.
    measured_steps: Steps to measure after them.
    least_pairs: Pairs before the interval's width is looked at.
    most_pairs: Pairs after which a candidate is left undecided.
    width (ratio): Pairs end when half of the interval is narrower.
    threshold (ratio): Effects below it are not worth a verdict.
    loss_band (ratio): Relative difference of the mean loss up to which two runs train alike.
    seed: Seed of the first block of runs; each further block has the next.
    budget_s: Time after which no further run is started; missing without a budget.
    rate_hz (Hz): Samples of stacks per second.
    """

    command: tuple[str, ...]
    warmup_steps: int
    measured_steps: int
    least_pairs: int
    most_pairs: int
    width: float
    threshold: float
    loss_band: float
    seed: int | None
    quiet_machine: bool
    budget_s: float | None
    rate_hz: float
    base_knobs: tuple[Knob, ...] = ()  # of every run, baseline included


class Tried(Struct, frozen=True):
    """A candidate, what came of it, and what to write into the script for it."""

    candidate: Candidate
    outcome: Outcome
    applied: tuple[AppliedKnob, ...]
    change: tuple[str, ...]  # one sentence per knob, with the user's line where it is known


class MainEffect(Struct, frozen=True):
    """What one knob does on average over all settings of the others, in a two-level design.

    `with_knobs` were turned together with it, because they mean nothing without it.

    ratio: With the knob over without it, mean over all settings of the other knobs.
    low (ratio): Lower end of the 95 % interval.
    high (ratio): Upper end of the same.
    runs: Runs that it stands on.
    ceiling (ratio): The most that the diagnosis allows it to gain, as a fraction of the mean step.
    """

    knob: Knob
    ratio: float
    low: float | None
    high: float | None
    runs: int
    with_knobs: tuple[Knob, ...] = ()
    ceiling: float | None = None


class Noise(Struct, frozen=True):
    """What this machine lets an experiment see. `unchanged` names settings of it that were left as they are, and why.

    smallest_effect (ratio): Half of the interval between equal runs: smaller effects cannot be told from none.
    pairs: Pairs of equal runs that it stands on.
    """

    smallest_effect: float | None
    pairs: int
    settings: tuple[tuple[str, str], ...] = ()
    unchanged: tuple[tuple[str, str], ...] = ()


class Experiment(Struct, frozen=True):
    """`experiment.json`. `baseline` are its runs; `finished` is False while runs are to come, `stopped` says why it
    ended early (budget, interrupt); `repeat` is the command line that makes it again.

    `source` is the run whose findings were tried, `by_hand` those of its losses that no knob reaches.

    runs: Runs that were made, the unusable ones included.
    wall_s: Time that the experiment took, breaks not counted.
    """

    protocol: Protocol
    baseline: tuple[Measure, ...]
    tried: tuple[Tried, ...]
    skipped: tuple[Skipped, ...]
    effects: tuple[MainEffect, ...]
    noise: Noise | None
    repeat: str
    finished: bool
    stopped: str | None = None
    runs: int = 0
    wall_s: float | None = None
    schema: str = EXPERIMENT_SCHEMA
    by_hand: tuple[ByHand, ...] = ()
    notes: tuple[str, ...] = ()
    source: str | None = None
    folder: str | None = None
    cwd: str | None = None  # of the command; files below it are shown relative to it
