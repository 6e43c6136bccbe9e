"""Collectives of one rank, and what several workers tell together."""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.views.spans import SpanRef


class CollectiveRow(Struct, frozen=True):
    """Calls of one collective with one group, data type and size, on one rank. Bandwidth is None where sizes are.

    `overlapped_ns` is plainly summed over calls; `exposed_ns` counts a moment of several collectives once. What is left
    of `total_ns` ran beside an earlier collective.
    """

    span: SpanRef
    name: str  # "all_reduce"
    library: str | None  # "nccl" (of AMD's as well), "gloo" …
    group: str | None
    group_size: int | None
    dtype: str | None  # "bfloat16"
    message_bytes: int | None  # of a call: the larger of what the rank puts in and gets out
    calls: int
    total_bytes: int | None
    total_ns: int
    mean_ns: float
    min_ns: int
    max_ns: int
    overlapped_ns: int  # while kernels of computation ran
    exposed_ns: int
    algorithm_bytes_per_s: float | None
    bus_bytes_per_s: float | None


class WorkerShare(Struct, frozen=True):
    """One worker's mean step: computation alone, computation and communication at once, communication alone, the rest.
    The four sum to `wall_ns`.

    Of the time in collectives that were matched over workers, overlapped or not, `transferring_ns` is what the fastest
    worker needed for each and `synchronizing_ns` the rest: waiting for others. None where nothing was matched.
    """

    span: SpanRef
    steps: int
    wall_ns: int
    computation_ns: int
    overlap_ns: int
    communication_ns: int
    other_ns: int
    synchronizing_ns: int | None
    transferring_ns: int | None


class CollectiveOverWorkers(Struct, frozen=True):
    """One kind of collective in one group over all workers: who waits for whom. Means are over calls and workers."""

    name: str
    group: str | None
    calls: int  # matched over workers
    workers: int
    total_bytes: int | None  # of all matched calls; each call counts once, as the largest of its workers' messages
    mean_ns: float
    transferring_ns: float  # mean of the shortest of each match
    synchronizing_ns: float  # mean of the rest
    last_rank: int | None  # that others waited for longest altogether: its calls were the shortest, so it came last


class Distributed(Struct, frozen=True):
    """Several workers side by side. `missing_ranks` are known from the group's size and have no trace."""

    workers: tuple[WorkerShare, ...]
    collectives: tuple[CollectiveOverWorkers, ...]
    missing_ranks: tuple[int, ...]
    matched: int
    unmatched: int
    notes: tuple[str, ...]
