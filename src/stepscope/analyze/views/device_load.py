"""A figure that many slices add to while they run, summed over time: busy multiprocessors, queued launches, bytes.

Kernels start and end millions of times, so a load is one sweep over all changes; its integral up to any time is then a
look-up, for the whole window or for each of many buckets.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from stepscope.tables.arrays import Floats, Int64

_FIXED = 1_000_000_000  # amounts are summed as whole billionths: what was added goes away again exactly


class Load(Struct, frozen=True):
    """`integral[i]` is the sum of the load over time, in its unit times ns, up to `times[i]`, ns since `origin_ns`."""

    origin_ns: int
    times: Floats
    integral: Floats

    def until(self, points_ns: Int64) -> Floats:
        """The integral up to each of these times."""
        if not len(self.times):
            return np.zeros(len(points_ns))
        return np.interp((points_ns - self.origin_ns).astype(np.float64), self.times, self.integral)

    def mean(self, edges_ns: Int64) -> Floats:
        """The mean load between each two of these times; no two are the same."""
        return np.diff(self.until(edges_ns)) / np.diff(edges_ns)


def load(start_ns: Int64, end_ns: Int64, amount: Floats, *, limit: float | None = None) -> Load:
    """The load of slices that each add `amount` (at most a billion) from start to end, never above `limit` in sum."""
    lasting = end_ns > start_ns
    starts, ends, amounts = start_ns[lasting], end_ns[lasting], amount[lasting]
    if not len(starts):
        return Load(0, np.empty(0), np.empty(0))
    origin = int(starts.min())
    fixed = np.rint(amounts * _FIXED).astype(np.int64)
    times = np.concatenate([starts, ends]) - origin
    order = np.argsort(times, kind="stable")
    times = times[order]
    level = np.cumsum(np.concatenate([fixed, -fixed])[order])[:-1] / _FIXED
    if limit is not None:
        np.minimum(level, limit, out=level)
    integral = np.concatenate([[0.0], np.cumsum(level * np.diff(times))])
    return Load(origin, times.astype(np.float64), integral)
