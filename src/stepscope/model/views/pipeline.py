"""What the steps of a run wait for and share: the figures a replay of the step without one loss stands on."""

from __future__ import annotations

from msgspec import Struct


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
