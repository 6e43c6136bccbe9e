"""Durations that cannot be true.

Writers leave slices that end before they begin, that last for weeks (an overflow), or, where a device reports the end
of its work late, that reach over work which came after them: a stream is serial, so what began and ended on it inside
another slice proves that slice's end wrong. One neighbour that begins a little early proves nothing: kernels of
recent GPUs may begin while the one before them drains.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepscope.tables.nesting import by_value

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LONGEST_NS = 7 * 24 * 3600 * 10**9
# Slices that must begin and end inside another before its end is taken for late, and for how much of it.
_PROOFS = 2
_LATE_NS = 10_000_000
_LOOKED_AT = 64  # slices behind a suspect
_MAX_START_NS = 2**62


def repair(
    track: npt.NDArray[np.integer], start_ns: Int64, duration_ns: Int64, *, is_device: Bools, serial: bool = True
) -> int:
    """Correct `duration_ns` in place and return how many were wrong.

    Negative ones become 0, those over a week end where the next slice of their track begins. A device slice whose end
    came late is cut to where the next slice of its stream begins, if `serial`.
    """
    np.clip(start_ns, -_MAX_START_NS, _MAX_START_NS, out=start_ns)
    negative = duration_ns < 0
    endless = duration_ns > LONGEST_NS
    repaired = int(negative.sum()) + int(endless.sum())
    duration_ns[negative] = 0
    if endless.any():
        _end_at_next(track, start_ns, duration_ns, endless)
    if serial and is_device.any():
        rows = np.flatnonzero(is_device)
        for stream in by_value(track[rows]):
            repaired += _late_ends(rows[stream], start_ns, duration_ns)
    return repaired


def _end_at_next(track: npt.NDArray[np.integer], start_ns: Int64, duration_ns: Int64, wrong: Bools) -> None:
    for rows in by_value(track):
        if not wrong[rows].any():
            continue
        starts = np.unique(start_ns[rows])
        mine = rows[wrong[rows]]
        after = np.searchsorted(starts, start_ns[mine], side="right")
        ends = np.append(starts, 0)[after]
        duration_ns[mine] = np.where(after < len(starts), ends - start_ns[mine], 0)


def _late_ends(rows: Int64, start_ns: Int64, duration_ns: Int64) -> int:
    rows = rows[np.argsort(start_ns[rows], kind="stable")]
    starts = start_ns[rows]
    ends = starts + duration_ns[rows]
    suspects = np.flatnonzero(ends[:-1] - starts[1:] > _LATE_NS)
    repaired = 0
    for i in suspects.tolist():
        last = min(int(np.searchsorted(starts, ends[i])), i + 1 + _LOOKED_AT)
        inside = np.flatnonzero((ends[i + 1 : last] <= ends[i]) & (starts[i + 1 : last] > starts[i]))
        if len(inside) >= _PROOFS:
            duration_ns[rows[i]] = starts[i + 1 + inside[0]] - starts[i]
            repaired += 1
    return repaired
