"""Steps one by one: what each is made of, how long they are, and the longest with what happened in them.

Times are ms. `reason` is "steady", or why a step counts for no statistics: "warmup", "first_batch", "window" or
"compile".
"""

from __future__ import annotations

from msgspec import Struct


class StepPhases(Struct, frozen=True):
    """Steps of one process and kind in order, thinned so that the longest stay. All sequences are equally long.

    `parts_ms` is by phase, "unattributed" what no phase explains; empty where no phase is known.
    """

    process: str
    kind: str
    steps: tuple[int, ...]
    wall_ms: tuple[float, ...]
    reasons: tuple[str, ...]
    parts_ms: dict[str, tuple[float | None, ...]]
    total: int  # steps before thinning


class StepDistribution(Struct, frozen=True):
    """How many steps of a kind take how long: `counts[i]` lie from `edges_ms[i]` to the next edge.

    Bins are equally wide, but the last one also holds everything `longer`: all above its lower edge.
    """

    edges_ms: tuple[float, ...]  # one more than counts
    steady: tuple[int, ...]
    others: tuple[int, ...]  # of all other reasons
    longer: bool
    longest_ms: float


class ProcessSteps(Struct, frozen=True):
    """Steps of one kind of one process. Statistics are of steady steps; None without any."""

    process: str
    rank: int | None
    kind: str
    steps: int
    steady: int
    mean_ms: float | None
    median_ms: float | None
    p95_ms: float | None
    longest_ms: float


class StepEvent(Struct, frozen=True):
    """Something the recorder noted in a step, with the time it took."""

    kind: str
    name: str | None
    ms: float


class LongStep(Struct, frozen=True):
    """A step among the longest. `extra_ms` is above the median of its process and kind.

    `phase` is the one that is longest above its own median, by `phase_extra_ms`; None where phases are not known or
    none is longer than usual. `events` took the most time in the step, the longest first.
    """

    process: str
    step: int
    wall_ms: float
    extra_ms: float
    reason: str
    phase: str | None
    phase_extra_ms: float | None
    events: tuple[StepEvent, ...]
