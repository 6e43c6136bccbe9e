"""The steps of several ranks side by side, and what the steps of a run wait for and share."""

from __future__ import annotations

from msgspec import Struct


class RankWork(Struct, frozen=True):
    """One rank's mean step. `own_ms` is in phases in which it waits for nobody, `exchange_ms` in the others."""

    rank: int
    wall_ms: float
    own_ms: float
    exchange_ms: float
    phases_ms: dict[str, float]
    samples: float | None  # of a step


class RanksFacts(Struct, frozen=True):
    """Steady training steps that all ranks took, the n-th of each beside the n-th of the others.

    `exchange` are the phases in which ranks wait for each other, `exchange_source` how that is known. The excess is the
    slowest rank's own work less the median of the others', mean over steps; `least_excess_ms` is the smallest mean of a
    quarter of the run; `most_excess_ms` is its part of the step where that was largest, times the mean step.
    `waited_ms` is what the others spend longer in `exchange` than the slowest (their median).
    `slow` are the slowest and all that work longer than the others' median by at least half as much.
    `longest_own_ms` is the own work of whichever rank works longest in a step, mean over steps.
    """

    ranks: tuple[RankWork, ...]
    steps: int
    exchange: tuple[str, ...]
    exchange_source: str
    slowest: int
    excess_ms: float
    least_excess_ms: float
    waited_ms: float
    slowest_share: float  # of the steps in which that rank worked longest
    excess_by_phase_ms: dict[str, float]  # phases of own work; sums to about the excess
    most_excess_ms: float = 0.0
    slow: tuple[int, ...] = ()
    longest_own_ms: float = 0.0

    def of(self, rank: int) -> RankWork:
        """The mean step of a rank of `ranks`."""
        return next(work for work in self.ranks if work.rank == rank)


class RankWait(Struct, frozen=True):
    """One rank's mean step, and its wait for data."""

    rank: int
    wall_ms: float
    wait_ms: float


class Pipeline(Struct, frozen=True):
    """The chain behind a steady training step: loader workers, the main thread, the other ranks.

    `wait_at_most_ms`: the wait for data in the quarter of the run in which it was the largest part of the step, as
    that part of the mean step. `workers_ms`: work of all loader workers for one step. `contended_ms`: what the main
    thread was ready but had no core because the run's own threads and processes held them.
    """

    mean_ms: float
    wait_ms: float | None
    wait_at_most_ms: float | None
    workers: int | None  # 0: batches are made in the training process
    workers_ms: float | None
    cores: float | None  # of one rank
    contended_ms: float | None  # None without telemetry
    ranks: tuple[RankWait, ...]
