"""Sampled time joined with steps: waiting taken apart, slow steps against typical ones, what came before them."""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place


class WaitPart(Struct, frozen=True):
    """A part of the time in which the main process is in its loader. Parts of one rank exclude each other.

    `kind`: "worker_busy" (a worker makes batches, at `place`), "worker_start" (no worker works yet, one is starting),
    "workers_idle" (no worker works and nothing is under way), "transfer" (a batch is packed, sent or unpacked),
    "pinning", "loading_here" (the main process works in its loader itself, at `place`: it has no workers, or runs a
    sampler), "unknown" (no sample of the workers at that time).

    `place` is the innermost line of the user's below the loader, None where there is none or the part sums up several;
    `lines` says how many there are. `leaf` is the library function most often on top, as "file:function".
    """

    kind: str
    place: Place | None
    ms_per_step: float | None
    share: float  # of the wait
    samples: int  # of the main thread in its loader, as many as the share stands for
    lines: int = 0
    leaf: str | None = None


class LoaderWait(Struct, frozen=True):
    """How a rank's wait for its loader is made up. `simultaneous`: workers and main process were seen at the same time.

    Otherwise worker samples of the same period stand for what workers did meanwhile, each worker by itself.
    """

    rank: int
    process: str
    wait_ms_per_step: float | None
    wait_share: float | None  # of the sampled time of the main thread's loop
    simultaneous: bool
    parts: tuple[WaitPart, ...]
    source: str
    samples: int = 0  # of the main thread in its loader
    loop_samples: int = 0  # of the main thread's loop
    idle_sampled: bool | None = None  # False: waiting threads were left out, so the wait is understated


class SlowLine(Struct, frozen=True):
    """A line of the user's, sampled in slow steps and in typical ones, in ms of the main thread per step of either."""

    place: Place
    phase: str
    slow_ms_per_step: float
    typical_ms_per_step: float
    extra_ms_per_step: float  # slow - typical
    only_slow: bool  # hardly ever sampled in typical steps
    samples: int  # in slow steps
    leaf: str | None  # the function most often on top, as "file:function"; None where it is the line itself


class SlowSteps(Struct, frozen=True):
    """Lines that make the slow steps slow. `threshold_ms`: wall time from which a step counts as slow."""

    slow_steps: int
    typical_steps: int
    threshold_ms: float
    median_ms: float
    slow_mean_ms: float
    typical_mean_ms: float
    lines: tuple[SlowLine, ...]
    source: str


class StageTime(Struct, frozen=True):
    """Sampled main-thread time of all ranks in one stage of the run.

    `stage`: "import", "compile", "startup" (before the first step, neither of the two), "warmup" (steps in which
    something compiled included), "steady" (first batches of epochs included), "other" (between steps, profiled steps,
    evaluation, after the last step).
    """

    stage: str
    samples: int
    share: float
    waiting_share: float | None


class RankLine(Struct, frozen=True):
    """A line of the user's in which ranks differ: its ms per step (or share of samples) by rank."""

    place: Place
    phase: str | None
    by_rank: dict[int, float]
    spread: float  # largest - smallest
    most: int  # the rank that spends most there
    waiting: bool  # the time there is time in which ranks wait for each other
    leaf: str | None


class RankLines(Struct, frozen=True):
    """Where ranks differ. `unit`: "ms per step" or "share of samples". `verdict` names straggler and waiters."""

    unit: str
    ranks: tuple[int, ...]
    lines: tuple[RankLine, ...]
    straggler: int | None
    straggler_place: Place | None
    waiters: tuple[int, ...]
    waiter_place: Place | None
    verdict: str
    source: str


class CallerLine(Struct, frozen=True):
    """A line of the user's below which another of theirs was sampled. `share`: of the inner line's samples."""

    caller: Place
    callee: Place
    samples: int
    share: float


class SampledViews(Struct, frozen=True):
    """What sampled stacks say beyond hot lines. `absent` gives the reason for every part that is None or empty."""

    stages: tuple[StageTime, ...]
    phases: dict[str, float]  # phase -> share of the steady loop's samples, main threads of ranks
    waits: tuple[LoaderWait, ...]
    slow_steps: SlowSteps | None
    rank_lines: RankLines | None
    absent: dict[str, str]
    callers: tuple[CallerLine, ...] = ()  # in the loop, on the main threads of ranks
