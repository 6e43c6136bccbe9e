"""Clocks of hosts: what they show at a true time, in microseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranks_simulated.scenario import Floats, Scenario


@dataclass(frozen=True)
class TrueClock:
    """slews: (begin, length, amount), in microseconds; what is set at once has the length 0."""

    offset_us: float
    drift_ppm: float
    slews: tuple[tuple[float, float, float], ...] = ()

    def ahead(self, time_us: Floats | float) -> Floats:
        """What it is ahead of the true time."""
        time = np.asarray(time_us, np.float64)
        ahead = self.offset_us + self.drift_ppm * 1e-6 * time
        for begin, length, amount in self.slews:
            ahead = ahead + amount * (np.clip((time - begin) / length, 0, 1) if length else time >= begin)
        return ahead

    def rate_ppm(self, begin_us: float, end_us: float) -> float:
        """Its mean rate between two true times."""
        return float((self.ahead(end_us) - self.ahead(begin_us)) / (end_us - begin_us) * 1e6)

    def changes(self, begin_us: float, end_us: float) -> bool:
        """Whether it is slewed or set between two true times."""
        return any(begin < end_us and begin + length > begin_us for begin, length, _ in self.slews)


def clocks(scenario: Scenario, length_us: float, middles: list[float]) -> list[TrueClock]:
    """A clock for each host. A step comes between the middles of two windows, where there are two."""
    rng = np.random.default_rng([scenario.seed, 3])
    wanted = scenario.clocks
    stepped = int(rng.integers(scenario.hosts)) if wanted.step_ms else None
    found = []
    for host in range(scenario.hosts):
        slews = []
        if rng.random() < wanted.slews:
            amount = float(rng.uniform(-3000, 3000))
            slews.append((float(rng.uniform(0, length_us)), abs(amount) / float(rng.uniform(1e-4, 5e-4)), amount))
        if host == stepped:
            low, high = (middles[0], middles[-1]) if len(middles) > 1 else (0.0, length_us)
            amount = wanted.step_ms * 1000 * (1 if rng.random() < 0.5 else -1)
            slews.append((float(rng.uniform(low, high)), 0.0, amount))
        offset, drift = wanted.offset_ms * 1000, wanted.drift_ppm
        found.append(TrueClock(float(rng.uniform(-offset, offset)), float(rng.uniform(-drift, drift)), tuple(slews)))
    return found
