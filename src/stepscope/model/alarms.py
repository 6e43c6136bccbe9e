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


class Alarm(Struct, frozen=True):
    """A value that is not finite, or leaps.

    step: None where the step was never finished.
    value: A text where it is not finite: nan, inf, -inf.
    low: The lowest of the (at most 200) values before it, None where they were too few to say what is usual.
    high: The highest of them.
    place: The line of the script that calls backward, where the value is a loss.
    batches: Those that came before it first.
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
