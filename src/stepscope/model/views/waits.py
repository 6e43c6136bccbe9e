"""Sampled time joined with steps: waiting taken apart, slow steps against typical ones, what came before steady state."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.model.findings import Place


@dataclass(frozen=True)
class WaitPart:
    """A part of the time in which the main process waits for its loader. Parts of one rank exclude each other.

    `kind`: "worker_busy" (a worker makes batches, at `place`), "workers_idle" (no worker works and nothing is under way),
    "transfer" (a batch is packed, sent or unpacked), "pinning", "loading_here" (no workers: the main process loads at
    `place`), "unknown" (no sample of the workers at that time).
    """

    kind: str
    place: Place | None
    ms_per_step: float | None
    share: float  # of the wait
    samples: int


@dataclass(frozen=True)
class LoaderWait:
    """How a rank's wait for its loader is made up. `simultaneous`: worker and main process were seen at the same moments.

    Otherwise worker samples of the same period stand for what workers did meanwhile.
    """

    rank: int
    process: str
    wait_ms_per_step: float | None
    wait_share: float | None  # of the sampled time of the main thread's loop
    simultaneous: bool
    parts: tuple[WaitPart, ...]
    source: str


@dataclass(frozen=True)
class SlowLine:
    """A line of the user's, sampled in slow steps and in typical ones, in ms of the main thread per step of either."""

    place: Place
    phase: str
    slow_ms_per_step: float
    typical_ms_per_step: float
    extra_ms_per_step: float  # slow - typical
    only_slow: bool  # hardly ever sampled in typical steps
    samples: int
    leaf: str | None  # the function most often on top


@dataclass(frozen=True)
class SlowSteps:
    """Lines that make the slow steps slow. `threshold_ms`: wall time from which a step counts as slow."""

    slow_steps: int
    typical_steps: int
    threshold_ms: float
    median_ms: float
    slow_mean_ms: float
    typical_mean_ms: float
    lines: tuple[SlowLine, ...]
    source: str


@dataclass(frozen=True)
class StageTime:
    """Sampled main-thread time of all ranks in one stage of the run.

    `stage`: "import", "compile", "startup" (before the first step, neither of the two), "warmup", "steady", "other" (between
    steps, evaluation, after the last step).
    """

    stage: str
    samples: int
    share: float
    waiting_share: float | None


@dataclass(frozen=True)
class RankLine:
    """A line of the user's in which ranks differ: its ms per step (or share of samples) by rank."""

    place: Place
    phase: str | None
    by_rank: dict[int, float]
    spread: float  # largest - smallest
    most: int  # the rank that spends most there
    waiting: bool
    leaf: str | None


@dataclass(frozen=True)
class RankLines:
    """Where ranks differ. `unit`: "ms per step" or "share of samples". `verdict` names straggler and waiters, if any."""

    unit: str
    ranks: tuple[int, ...]
    lines: tuple[RankLine, ...]
    straggler: int | None
    straggler_place: Place | None
    waiters: tuple[int, ...]
    waiter_place: Place | None
    verdict: str
    source: str


@dataclass(frozen=True)
class SampledViews:
    """What sampled stacks say beyond hot lines. `absent` gives the reason for every part that is None."""

    stages: tuple[StageTime, ...]
    phases: dict[str, float]  # phase -> share of the steady loop's samples, main threads of ranks
    waits: tuple[LoaderWait, ...]
    slow_steps: SlowSteps | None
    rank_lines: RankLines | None
    absent: dict[str, str]
