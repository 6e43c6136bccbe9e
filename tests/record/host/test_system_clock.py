"""The state of the machine's clock in telemetry, from a kernel that is made up."""

from __future__ import annotations

import os
import time

from stepscope.record.host.meters import SystemClock

TICK = 1_000_000 // os.sysconf("SC_CLK_TCK")


class Kernel:
    """Clocks that show what they are told to; each look takes 100 ns."""

    def __init__(self) -> None:
        self.now = self.ahead = self.slewed = 0
        self.state: tuple[int, int, int, int] | None = (0, 10 * 65_536, 1500, TICK)
        self.asked = 0

    def read(self, clock: int) -> int:
        self.now += 100
        if clock == time.CLOCK_REALTIME:
            return self.now + self.slewed + self.ahead
        return self.now + (self.slewed if clock == time.CLOCK_MONOTONIC else 0)

    def told(self) -> tuple[int, int, int, int] | None:
        self.asked += 1
        return self.state


def looks(clock: SystemClock, count: int) -> list[dict[str, float]]:
    """What `count` readings of telemetry hold, those without anything left out."""
    found = [{str(name): float(value) for name, _, value, *_ in clock.metrics()} for _ in range(count)]
    return [one for one in found if one]


def test_a_clock_that_is_set_and_one_that_is_slewed_are_told_apart() -> None:
    kernel = Kernel()
    clock = SystemClock(kernel.read, kernel.told)
    (first,) = looks(clock, 5)
    kernel.ahead += 5_000_000
    (second,) = looks(clock, 5)
    kernel.slewed += 300_000
    (third,) = looks(clock, 5)

    assert (first["clock_set_ns"], second["clock_set_ns"], third["clock_set_ns"]) == (0, 5_000_000, 5_000_000)
    assert third["clock_slewed_ns"] - second["clock_slewed_ns"] == 300_000
    assert (first["clock_state"], first["clock_frequency_ppm"], first["clock_max_error_us"]) == (0, 10, 1500)


def test_a_longer_tick_is_a_faster_clock() -> None:
    kernel = Kernel()
    kernel.state = (5, -(65_536), 16_000_000, TICK + 1)
    (only,) = looks(SystemClock(kernel.read, kernel.told), 1)
    assert only["clock_frequency_ppm"] == round(1e6 / TICK - 1, 4)
    assert only["clock_state"] == 5


def test_a_kernel_that_does_not_tell_is_asked_once_and_the_clocks_are_still_compared() -> None:
    kernel = Kernel()
    kernel.state = None
    found = looks(SystemClock(kernel.read, kernel.told), 20)
    assert kernel.asked == 1
    assert [sorted(one) for one in found] == [["clock_set_ns", "clock_slewed_ns"]] * 4


def test_this_machine_is_read_without_an_error() -> None:
    found = looks(SystemClock(), 6)
    assert len(found) == 2
    assert abs(found[1]["clock_set_ns"]) < 1e9
