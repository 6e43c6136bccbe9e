"""The whole path on simulated runs: seldom a difference where there is none, mostly found where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stepscope.model.comparison import FASTER, SLOWER, Outcome

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def outcomes(
    seed: int,
    sessions: int,
    *,
    share: float = 0.0,
    fixed: int | None = None,
    blocks: bool = True,
    spike_ms: float = 30.0,
) -> Iterator[Outcome]:
    """Of so many sessions with runs of 120 steps."""
    import simulation

    machine, change = simulation.Machine(spike_ms=spike_ms), simulation.Change(share=share)
    sides = simulation.order(fixed or 10, blocks=blocks)
    for session in simulation.sessions(np.random.default_rng(seed), sessions, sides, 120, machine, change):
        limits = {"least": fixed, "most": fixed} if fixed else {}
        yield simulation.judge(session, sides, **limits)


def words(
    seed: int, sessions: int, *, share: float = 0.0, fixed: int | None = None, blocks: bool = True
) -> Counter[str]:
    """Verdicts with spikes of 30 ms."""
    found = outcomes(seed, sessions, share=share, fixed=fixed, blocks=blocks)
    return Counter(one.verdict.word for one in found)


def test_equal_programs_seldom_get_a_verdict() -> None:
    """At most 6 % is the aim; 13 % of 100 leaves room for chance."""
    found = words(1, 100)
    assert found[FASTER] + found[SLOWER] <= 13
    assert found.total() == 100


def test_where_long_spikes_blur_the_mean_the_median_decides() -> None:
    """The mean alone shows 4 % in half of the sessions at most, even at p < 0.05."""
    import simulation

    found = list(outcomes(4, 60, share=0.04, fixed=6, spike_ms=200.0))
    by_mean = sum(simulation.excludes_one(one.effects["mean_ms"]) for one in found)
    by_median = sum(map(simulation.by_median, found))
    slower = sum(one.verdict.word == SLOWER for one in found)
    assert by_mean <= 30
    assert by_median >= 25
    assert slower >= 42
    assert not any(one.verdict.word == FASTER for one in found)


def test_the_other_order_takes_drift_for_a_difference() -> None:
    """What the blocks are for; it also shows that the simulation has something to find."""
    assert words(3, 40, fixed=6, blocks=False)[SLOWER] >= 14


def test_the_folder_of_the_benchmark_does_not_hide_pythons_own_module() -> None:
    code = "import statistics; assert statistics.median([1, 2, 9]) == 2"
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
