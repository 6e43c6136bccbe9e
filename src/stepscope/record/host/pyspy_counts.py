"""From the histories of threads to counts of samples and stretches of time, for one py-spy and segment.

py-spy tells when a stack was first met and how many samples it took in all, not when each was taken. So a thread gets
its share of the samples by the time it lived, and each of its stretches by how long it lasted, at least one, for one
sample did meet it. A change is seen `gap` too late on average, the gaps between samples being exponential: stretches
begin that much earlier, half-way to the change before where that is nearer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from stepscope.record.host.pyspy_trace import ThreadHistory, Trace

_FARTHEST_LENDER = 64  # stretches away; beyond it any that can spare a sample lends one


class Stretch(NamedTuple):
    """A thread stood in `record`; microseconds since py-spy's start."""

    record: int
    start_us: int
    end_us: int


@dataclass(frozen=True)
class Counted:
    """One py-spy's segment: the raw records with their counts, and when each thread stood in which."""

    records: tuple[str, ...]
    counts: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    last_us: int


def count(
    trace: Trace, samples: int, *, rate_hz: float, last_seen_us: Callable[[ThreadHistory], int | None]
) -> Counted:
    """Distribute the `samples` (of all threads together) that py-spy has reported.

    `last_seen_us` tells when a thread was there last, None where it lives on. The counts sum to `samples`, or to the
    number of stretches should that be higher.
    """
    gap_us = 1e6 / rate_hz
    for thread in trace.threads:
        seen_us = last_seen_us(thread)
        if seen_us is not None:
            thread.end_us = min(thread.end_us, max(seen_us, thread.starts_us[-1] + round(gap_us)))
    lives = [max(1, thread.end_us - thread.starts_us[0]) for thread in trace.threads]
    least = [len(thread.records) for thread in trace.threads]
    shares = apportion(max(samples, sum(least)), lives, least)
    real_gap_us = sum(lives) / sum(shares) if trace.threads else gap_us
    counts = [0] * len(trace.records)
    stretches: list[Stretch] = []
    for thread, share in zip(trace.threads, shares, strict=True):
        edges = _edges(thread, trace.first_us, real_gap_us)
        durations = [end - start for start, end in pairwise(edges)]
        for record, number in zip(thread.records, along(durations, share), strict=True):
            counts[record] += number
        stretches += map(Stretch, thread.records, edges, edges[1:])
    stretches.sort(key=lambda stretch: stretch.start_us)
    return Counted(tuple(trace.records), tuple(counts), tuple(stretches), trace.last_us)


def apportion(total: int, weights: Sequence[int], least: Sequence[int]) -> list[int]:
    """`total` in whole numbers by `weights`, by largest remainder, entry i at least `least[i]`; they sum to `total`.

    `total` must not be below the sum of `least`.
    """
    shares = list(least)
    free = list(range(len(weights)))
    rest, weight = total, sum(weights) or 1
    while short := {i for i in free if rest * weights[i] < least[i] * weight}:
        free = [i for i in free if i not in short]
        rest -= sum(least[i] for i in short)
        weight = sum(weights[i] for i in free) or 1
    exact = {i: divmod(rest * weights[i], weight) for i in free}
    for i in free:
        shares[i] = exact[i][0]
    missing = total - sum(shares)
    for i in sorted(free, key=lambda i: -exact[i][1])[:missing]:
        shares[i] += 1
    return shares


def along(durations: Sequence[int], total: int) -> list[int]:
    """`total` samples laid evenly over consecutive stretches, each of which has one at least.

    A stretch that came away empty gets one from the nearest that has more: the sums over any longer time stay true to
    the time. `total` must not be below the number of stretches.
    """
    whole = sum(durations) or 1
    passed = given = 0
    counts = []
    for duration in durations:
        passed += duration
        reached = (2 * total * passed + whole) // (2 * whole)
        counts.append(reached - given)
        given = reached
    if given < total and counts:
        counts[-1] += total - given
    empty = [i for i, number in enumerate(counts) if number == 0]
    for distance in range(1, _FARTHEST_LENDER):
        empty = [i for i in empty if not _lend(counts, i, distance)]
        if not empty:
            return counts
    lenders = [i for i, number in enumerate(counts) for _ in range(number - 1)]
    for i, lender in zip(empty, lenders, strict=False):
        counts[i] += 1
        counts[lender] -= 1
    return counts


def _lend(counts: list[int], borrower: int, distance: int) -> bool:
    """Move one sample to `borrower` from a stretch at `distance` that has more than one."""
    for lender in (borrower - distance, borrower + distance):
        if 0 <= lender < len(counts) and counts[lender] > 1:
            counts[lender] -= 1
            counts[borrower] += 1
            return True
    return False


def _edges(thread: ThreadHistory, first_us: int, gap_us: float) -> list[int]:
    """Where the thread's stretches begin, and the end of the last; each holds the moment it was met at."""
    met = thread.starts_us
    edges = [max(first_us, met[0] - round(gap_us))]
    edges += [now - round(min(gap_us, (now - before) / 2)) for before, now in pairwise(met)]
    return [*edges, max(thread.end_us, met[-1])]
