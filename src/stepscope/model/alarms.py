"""What the recorder noticed in a loss or a norm while the run went on, and the data of the step."""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place


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
