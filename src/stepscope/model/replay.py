"""What it took to run one operator of a recorded run alone (`stepscope replay`)."""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place

SCHEMA = "stepscope.replay/1"


class Variant(Struct, frozen=True):
    """Where and how an operator is run: `device` as torch names it; None for `dtype` as recorded.

    threads: Of torch's operators on the CPU; None: as many as torch takes by itself.
    """

    device: str
    threads: int | None = None
    dtype: str | None = None


class ReplayTimes(Struct, frozen=True):
    """Calls of one list of inputs in one variant. Without times `reason` says why.

    per_call_ns: Median over rounds of the mean call of a round, called again and again; on a GPU until it has ended
        there.
    low_ns: Lower end of the median's 95 % interval, by order statistics; none below six rounds.
    high_ns: Its upper end.
    per_step_ns: per_call_ns times the calls in a profiled step.
    rounds: Rounds that were timed, in turns with those of the other variants.
    ratio: per_call_ns over that of the first variant that has one.
    """

    variant: Variant
    per_call_ns: float | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    per_step_ns: float | None = None
    rounds: int = 0
    ratio: float | None = None
    reason: str | None = None


class ReplayedCall(Struct, frozen=True):
    """All recorded calls with one list of input shapes, and what a call like them takes alone.

    calls_per_step: Calls in a profiled step of the recording.
    recorded_ns: Mean duration of a call on the host as it was recorded, the profiler's own time in it included.
    layouts: How many combinations of strides, types and values the recording holds for these shapes, of which the
        first was replayed.
    """

    shapes: str
    types: str
    calls_per_step: float | None
    recorded_ns: float | None
    layouts: int
    times: tuple[ReplayTimes, ...] = ()
    reason: str | None = None


class ReplayedStep(Struct, frozen=True):
    """All replayed calls of a profiled step in one variant.

    per_step_ns: Sum of per_step_ns over the lists of input shapes, where every one of them was timed.
    """

    variant: Variant
    per_step_ns: float


class OperatorReplay(Struct, frozen=True):
    """The replay of one operator. `notes` say what was left out and what differs from the training."""

    operator: str
    place: Place | None
    calls: tuple[ReplayedCall, ...]
    steps: tuple[ReplayedStep, ...] = ()
    torch: str | None = None
    gpus: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class OperatorReplays(Struct, frozen=True):
    """RUN/replay.json: the newest replay of each operator."""

    schema: str
    replays: tuple[OperatorReplay, ...]
