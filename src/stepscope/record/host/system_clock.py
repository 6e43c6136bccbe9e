"""What the kernel says of this machine's clock: whether it was set, and how fast it is made to run. Nobody is asked
over a network, and nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from stepscope.record.host.hardware import Metric

_READINGS = 5  # only every fifth reading of telemetry looks at it
_LOOKS = 3  # at two clocks; the one in which least time went by between counts
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SCALE = 65_536.0  # of the frequency, which counts 2^-16 ppm
_RAW = getattr(time, "CLOCK_MONOTONIC_RAW", None)


class _Timex(ctypes.Structure):
    """struct timex of Linux, as far as it is read here."""

    _fields_ = (
        ("modes", ctypes.c_int),  # 0: nothing is set
        *((name, ctypes.c_long) for name in ("offset", "frequency", "max_error", "estimated_error")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "fraction", "tick")),
        ("rest", ctypes.c_byte * 256),
    )


# (state, frequency in 2^-16 ppm, largest error in us, length of a tick in us), None where the kernel does not tell.
KernelState = Callable[[], "tuple[int, int, int, int] | None"]


def kernel_state() -> tuple[int, int, int, int] | None:
    """`adjtimex` without a change; None on other systems, and where a sandbox forbids it."""
    try:
        call = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    told = _Timex()
    state = call(ctypes.byref(told))
    return None if state < 0 else (state, told.frequency, told.max_error, told.tick)


class SystemClock:
    """Readings of the clock that stamps traces, in every fifth call of `metrics`."""

    def __init__(
        self, read: Callable[[int], int] = time.clock_gettime_ns, state: KernelState | None = kernel_state
    ) -> None:
        self._read, self._state = read, state
        self._count = 0
        self._first: dict[str, int] = {}

    def metrics(self) -> list[Metric]:
        self._count += 1
        if self._count % _READINGS != 1:
            return []
        found: list[Metric] = []
        # what setting it does, and what making it faster or slower does
        for name, clock, steady in (
            ("clock_set_ns", time.CLOCK_REALTIME, time.CLOCK_MONOTONIC),
            ("clock_slewed_ns", time.CLOCK_MONOTONIC, _RAW),
        ):
            if steady is not None:
                apart = self._apart(clock, steady)
                found.append((name, "ns", float(apart - self._first.setdefault(name, apart)), None, None))
        told = None if self._state is None else self._state()
        if told is None:
            self._state = None
            return found
        state, frequency, max_error, tick = told
        usual = 1_000_000 / _TICKS_PER_SECOND
        ppm = frequency / _SCALE + (1e6 * (tick - usual) / usual if tick > 0 else 0.0)
        found += [
            ("clock_state", "number", float(state), None, None),
            ("clock_frequency_ppm", "ppm", round(ppm, 4), None, None),
            ("clock_max_error_us", "us", float(max_error), None, None),
        ]
        return found

    def _apart(self, clock: int, steady: int) -> int:
        """What one clock shows more than the other, read at nearly the same moment."""
        looks = []
        for _ in range(_LOOKS):
            before, middle, after = self._read(steady), self._read(clock), self._read(steady)
            looks.append((after - before, middle - (before + after) // 2))
        return min(looks)[1]
