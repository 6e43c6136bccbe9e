"""The steps of several ranks side by side, and what the steps of a run wait for and share."""

from __future__ import annotations

from msgspec import Struct


class RankWork(Struct, frozen=True):
    """One rank's mean step.

    rank: Number of the rank.
    wall_ms: Mean step: the sum of its phases.
    own_ms: Mean time in phases in which it waits for no other rank.
    exchange_ms: Mean time in the other phases: own work, transfer and waiting together.
    phases_ms: phase -> mean time.
    samples: Mean samples of a step; missing where a step's are unknown.
    """

    rank: int
    wall_ms: float
    own_ms: float
    exchange_ms: float
    phases_ms: dict[str, float]
    samples: float | None


class RanksFacts(Struct, frozen=True):
    """Steady training steps that all ranks took, the n-th of each beside the n-th of the others.

    `exchange` are the phases in which ranks wait for each other, `exchange_source` how that is known. `waited_ms` is
    what the others spend longer in `exchange` than the slowest (their median).

    steps: Training steps that are steady on all ranks: the n-th step of each rank stands beside the n-th of the others.
    slowest: The rank whose own work is longest, mean over steps.
    excess_ms: Own work of the slowest rank less the median of the others' in the same step, mean over steps.
    least_excess_ms: The smallest of that mean over the four quarters of the steps.
    slow: Ranks with at least half of the slowest one's excess over the median of the others.
    most_excess_ms: Its part of the step in the quarter where that was largest, times the mean step.
    longest_own_ms: Own work of whichever rank works longest in a step, mean over steps.
    waited_ms: Median over the other ranks of their time in phases of the exchange, less that of the slowest rank; mean
        over steps.
    slowest_share: Steps in which the slowest rank's own work was the longest of all.
    excess_by_phase_ms: phase of own work -> the slowest rank's time less the median of the others'.
    """

    ranks: tuple[RankWork, ...]
    steps: int
    exchange: tuple[str, ...]
    exchange_source: str
    slowest: int
    excess_ms: float
    least_excess_ms: float
    waited_ms: float
    slowest_share: float
    excess_by_phase_ms: dict[str, float]
    most_excess_ms: float = 0.0
    slow: tuple[int, ...] = ()
    longest_own_ms: float = 0.0

    def of(self, rank: int) -> RankWork:
        """The mean step of a rank of `ranks`."""
        return next(work for work in self.ranks if work.rank == rank)


class RankWait(Struct, frozen=True):
    """One rank's mean step, and its wait for data.

    rank: Number of the rank.
    wall_ms: Its mean steady step.
    wait_ms: Of it, the wait for data.
    """

    rank: int
    wall_ms: float
    wait_ms: float


class Pipeline(Struct, frozen=True):
    """The chain behind a steady training step: loader workers, the main thread, the other ranks.

    mean_ms: The mean steady step.
    wait_ms: Of it, the wait for data.
    wait_at_most_ms: The wait's part of the step in the quarter of the run where it was largest, times the mean step.
    workers: Worker processes of the DataLoader; 0 loads in the training process.
    workers_ms: Work of all of them for one step.
    cores (count): Cores of one rank: those the process may use by the ranks of its host.
    contended_ms: In a mean step, what the main thread could run but had no core, held by the run's own threads.
    """

    mean_ms: float
    wait_ms: float | None
    wait_at_most_ms: float | None
    workers: int | None
    workers_ms: float | None
    cores: float | None
    contended_ms: float | None
    ranks: tuple[RankWait, ...]
