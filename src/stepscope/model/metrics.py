"""What the run learned, in figures: its series, where they stop being finite, leap, or change their level, and why.

What happened in the same steps stands beside each: it is no proof of a cause, and is never called one. A part is None
or empty where nothing tells of it.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place

RATES = "train/lr/"  # what the names of learning rates begin with; of any optimizer but the first, its number follows


class StepBatch(Struct, frozen=True):
    """A batch that a step was trained on.

    step: The step that used it.
    suspect: It is of the step of the alarm, and where the step had several batches and that is known, of the value.
    epoch: How often its loader had been iterated before.
    batch: Its position in the loader's order, from 0.
    samples: How many the sampler named; more than `indices` where these were cut.
    indices: Of its samples in the data set, None where they are not known, for the `reason`.
    files: Names of the samples, where a plain list of the data set has them; None for each that has none.
    targets: Their classes, where the data set has them in a plain list.
    loader: Where the script makes the loader.
    """

    step: int
    suspect: bool
    epoch: int | None
    batch: int | None
    samples: int | None
    indices: tuple[int, ...] | None
    files: tuple[str | None, ...] | None
    targets: tuple[int | str | None, ...] | None
    reason: str | None
    loader: Place | None


class StepData(Struct, frozen=True):
    """What a step of one process was trained on.

    rank: Its number.
    batches: Those that came before it first.
    """

    rank: int
    process: str
    batches: tuple[StepBatch, ...]


class Origin(Struct, frozen=True):
    """Where a value that is not finite was made, as far as the recorder could see it.

    where: `parameters`, `forward`, `inputs` or `gradients`; None where it is not known, for the `reason`.
    module: Its name in the model; of inputs, the one they were given to. Of a forward pass outside of all, None.
    parameter: Of parameters and gradients, the last in order of definition that is not finite, unless all are not.
    operator: Of a forward pass, what made it; of inputs, what they were given to.
    behind: The module that was called before, where `module` does not tell it.
    again: The step that told, where it was a later one in which the value came again.
    not_finite: Parameters, or gradients, that are not finite.
    looked_at: Of so many.
    place: The line of the script that calls the operator, or the module.
    sentence: All of this but the line.
    """

    where: str | None
    module: str | None
    parameter: str | None
    operator: str | None
    behind: str | None
    again: int | None
    not_finite: int | None
    looked_at: int | None
    reason: str | None
    place: Place | None
    sentence: str


class Alarm(Struct, frozen=True):
    """A value that is not finite, or leaps.

    rank: Its number.
    step: None where the step was never finished.
    time_ns: When the value was known.
    value: A text where it is not finite: nan, inf, -inf.
    low: The lowest of the (at most 200) values before it, None where they were too few to say what is usual.
    high: The highest of them.
    place: The line of the script that calls backward, where the value is a loss.
    batches: Those that came before it first.
    origin: Of a value that is not finite.
    """

    rank: int
    process: str
    step: int | None
    time_ns: int
    series: str
    value: float | str
    low: float | None
    high: float | None
    place: Place | None
    batches: tuple[StepBatch, ...]
    origin: Origin | None = None


class CurveSummary(Struct, frozen=True):
    """A curve of a run in one line. Values are in the unit that its name ends in; NaN and infinities are counted.

    rank: Whose values they are; missing for what is measured of the machine.
    points: Values that it has.
    first (in unit): The first value that is finite.
    last (in unit): The last that is.
    lowest (in unit): The lowest of them.
    median (in unit): Their median.
    highest (in unit): The highest of them.
    not_finite: How many values are NaN or infinite.
    not_finite_step: The step of the first of these.
    first_step: Step of the first value that lies in one or behind one.
    last_step: Step of the last.
    """

    name: str
    source: str
    rank: int | None
    process: str | None
    points: int
    first: float | None
    last: float | None
    lowest: float | None
    median: float | None
    highest: float | None
    not_finite: int
    not_finite_step: int | None
    first_step: int | None
    last_step: int | None


class Happening(Struct, frozen=True):
    """What happened near a step: an lr jump, a recompilation, a checkpoint. `text` names it with its line.

    step: Step it began in.
    """

    # lr | compile | gc | save | evaluation | epoch | batch | optimizer | throttling | scale | others | window | device
    kind: str
    step: int | None
    text: str
    place: Place | None = None


class NonFinite(Struct, frozen=True):
    """The first value that is NaN or infinite, of all ranks and series; one that a GradScaler caught is none.

    `stage` says where it shows first: forward (a loss), backward (a norm), scaler, or logged by the script alone.
    `sure` is False where an earlier pass may have made it, whose norm nobody took. `place` calls backward, `origin` is
    what the recorder saw of where it was made.

    step: Step of it, or the one begun last before it; missing before the first.
    rank: Rank that had it.
    losses: Values of the loss from there on.
    losses_lost: Of these, those that are not finite either.
    """

    name: str
    value: str  # "nan", "inf" or "-inf"
    stage: str
    step: int | None
    rank: int | None
    losses: int
    losses_lost: int
    sure: bool
    skipped: bool  # GradScaler left the update out
    place: Place | None
    origin: Origin | None
    happenings: tuple[Happening, ...]
    sentence: str


class Spike(Struct, frozen=True):
    """A loss or norm far above what it was before, that came down again.

    rank: Rank that had it.
    step: Its first step.
    steps: Values it lasted for.
    value (as the series): Its highest.
    usual (as the series): The median of the 200 values before.
    score (standard deviations): How far above that, by the robust spread of the same values.
    """

    name: str
    rank: int | None
    step: int | None
    steps: int
    value: float
    usual: float
    score: float
    happenings: tuple[Happening, ...]
    sentence: str


class LevelChange(Struct, frozen=True):
    """A series that goes on at another level, of the first rank that has it.

    rank: Rank it is of.
    step: First step of the new level.
    before (as the series): Median before.
    after (as the series): Median after.
    change (share): What is added, by the level before; 0.4 is 40 % more.
    """

    name: str
    rank: int | None
    step: int | None
    before: float
    after: float
    change: float
    happenings: tuple[Happening, ...]
    sentence: str


class Clipping(Struct, frozen=True):
    """Norms that gradients were clipped by, of the first rank that has any.

    updates: Norms that were taken to clip by.
    clipped_share: Of these, those above the largest norm allowed.
    median_norm (as the series): Their median.
    median_factor (ratio): What is left of the gradients in the median clipped update.
    """

    updates: int
    clipped_share: float
    median_norm: float
    median_factor: float | None


class Scaling(Struct, frozen=True):
    """A GradScaler's scale, and the updates that it left out; the first are its search for a scale, and not counted.

    updates: Updates after the search.
    skipped: Of these, those it left out.
    skipped_share: The same by updates.
    least (ratio): The least scale after the search.
    last (ratio): The last one.
    collapsed_step: First step after the search with a scale below 1; missing without any.
    """

    updates: int
    skipped: int
    skipped_share: float
    least: float | None
    last: float | None
    collapsed_step: int | None


class Accumulation(Struct, frozen=True):
    """A loss whose gradients are added up over several passes of an update.

    `node` is the last operator of what `backward` was called on, as autograd names it; `logged` is the name that the
    script logs its loss by.

    passes: Backward passes of an update.
    updates: Updates looked at.
    share: Of these, those with that many passes.
    divided: What `backward` is called on is divided by their number.
    logged_ratio (ratio): The sum of the losses of an update by what is logged, in the median; missing where nothing is.
    """

    name: str
    passes: int
    updates: int
    share: float
    divided: bool
    node: str
    logged: str | None
    logged_ratio: float | None
    place: Place | None


class Watched(Struct, frozen=True):
    """A module or parameter whose values stay out of the healthy range.

    value (as the series): Median over the later half of its values.
    count: Values in that half.
    """

    name: str
    value: float
    count: int


HOOKS = "hooks of modules"  # as a tool that logs: the user's own functions
ANOMALY = "torch's anomaly detection"  # as a tool that logs: it keeps the stack of every operator


class LoggingCost(Struct, frozen=True):
    """What a logging tool takes of the main thread in steady steps, called from one line of the user's.

    ms_per_step: Sampled time in a steady step.
    at_most_ms_per_step: The same with what chance (95 %) and missed samples may add.
    samples: Samples it stands on.
    waiting_share: Of these, samples in which the thread waited.
    """

    tool: str
    function: str  # the tool's, that is called
    place: Place | None
    ms_per_step: float
    at_most_ms_per_step: float
    samples: int
    waiting_share: float | None


class MetricFacts(Struct, frozen=True):
    """All that is known of what a run learned.

    `zeros` and `update_ratios` hold every module and parameter that was watched.
    """

    series: tuple[CurveSummary, ...]
    non_finite: NonFinite | None
    spikes: tuple[Spike, ...]
    changes: tuple[LevelChange, ...]
    clipping: Clipping | None
    scaling: Scaling | None
    accumulation: tuple[Accumulation, ...] | None  # None where no update has several passes
    zeros: tuple[Watched, ...]
    update_ratios: tuple[Watched, ...]
