"""An experiment: what is tried, how it is measured, and what came of it."""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.comparison import EXPERIMENT_SCHEMA, AppliedKnob, Measure, Outcome
from stepscope.schema import Knob


class Candidate(Struct, frozen=True):
    """A set of knobs to try together. `ceiling` is the most that the diagnosis allows it to gain, as a fraction of the
    baseline's mean step, and `finding` the finding it is from; None where it is not from one.

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
    """What this machine lets an experiment see. `smallest_effect` is the half-width after `pairs` pairs of equal runs;
    `unchanged` names settings of the machine that were left as they are, and why.

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
