"""What more threads than cores cost, from counts that real runs left behind and from counts made to be told apart."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.model.machine import CpuFacts, PoolFacts
from stepscope.tables.schema import Tables
from tests.analyze.test_machine import SECOND, telemetry
from tests.builders import T0, make_tables, rank_info, step_rows
from tests.records import some

TWO_CORES = {"hardware": {"affinity": [0, 1]}}


def pool_tables(
    *,
    main: float,
    delay: float,
    slices: float = 0.0,
    pool: float,
    pool_delay: float,
    pool_slices: float = 0.0,
    others: float | None = 0.0,
    threads: int | None = 16,
    step_ms: int = 100,
    seconds: int = 40,
    **more: Any,
) -> Tables:
    """A run on two cores: shares of wall time that the main thread and the pool used and waited, slices per step."""
    per_second = 1e3 / step_ms
    rates = {"main_cpu_ns": main * 1e9, "run_delay_ns": delay * 1e9, "main_timeslices": slices * per_second}
    rates |= {"pool_cpu_ns": pool * 1e9, "pool_delay_ns": pool_delay * 1e9}
    rates |= {"pool_timeslices": pool_slices * per_second, "migrations": 3.0, "voluntary_switches": 400.0}
    system = telemetry(seconds, rates, levels={"cpu_pct": 100.0 * (main + pool)})
    if others is not None:
        system += [
            {"metric": "busy_cores", "time_ns": T0 + second * SECOND, "value": main + pool + others}
            for second in range(seconds)
        ]
    steps = step_rows(seconds * 1000 // step_ms, forward_ms=step_ms - 7)
    ranks = [rank_info(threads=threads)]
    return make_tables(**{"steps": steps, "system": system, "ranks": ranks, "manifests": [TWO_CORES], **more})


def cpu_of(tables: Tables) -> CpuFacts:
    machine = analyze(tables).machine
    assert machine.cpu is not None
    return machine.cpu


def pool_of(tables: Tables) -> PoolFacts:
    return some(cpu_of(tables).pool)


def lost(tables: Tables) -> tuple[float, float]:
    pool = pool_of(tables)
    assert pool.lost_ms_per_step is not None
    assert pool.at_most_ms_per_step is not None
    return pool.lost_ms_per_step, pool.at_most_ms_per_step


Counts = dict[str, Any]
# Counts of hand-made loops with 16 threads on two cores, steps of 100 ms: what a step took with fewer threads is known.
LARGE: Counts = {"main": 0.18, "delay": 0.38, "slices": 111, "pool": 1.56, "pool_delay": 5.85, "pool_slices": 1655}
SMALL: Counts = {"main": 0.23, "delay": 0.58, "slices": 652, "pool": 0.77, "pool_delay": 6.55, "pool_slices": 10640}


IDLE: Counts = {"main": 0.29, "delay": 0.37, "slices": 909, "pool": 1.23, "pool_delay": 5.1, "pool_slices": 13436}


@pytest.mark.parametrize(
    ("counts", "least", "saved", "most"),
    [
        (LARGE, 10, 17, 35),  # with two threads, though the main thread waited 82 ms: the pool's work is no loss
        ({**SMALL, "others": 1.0}, 50, 69, 95),  # with one thread, on the one core that others left: waking is one
        (IDLE, 45, 80, 95),  # with two; 68 with one
    ],
)
def test_the_loss_lies_around_what_fewer_threads_saved(counts: Counts, least: int, saved: int, most: int) -> None:
    cost, at_most = lost(pool_tables(**counts))
    assert least < cost <= at_most < most
    assert saved <= at_most


def test_a_step_is_not_lost_to_threads_where_others_have_the_cores() -> None:
    cost, _ = lost(
        pool_tables(main=0.06, delay=0.62, slices=20, pool=0.5, pool_delay=7.0, pool_slices=200, others=1.44)
    )
    assert cost < 5
    cost, _ = lost(pool_tables(main=0.4, delay=0.6, pool=0.0, pool_delay=0.0, others=1.6))
    assert cost == 0


@pytest.mark.parametrize("threads", [1, 2, None])
def test_threads_that_fit_and_unknown_ones_lose_nothing(threads: int | None) -> None:
    pool = pool_of(pool_tables(**LARGE, threads=threads))
    assert (pool.lost_ms_per_step, pool.at_most_ms_per_step) == (None, None)


def test_without_the_processors_use_only_what_the_run_used_counts_as_there() -> None:
    alone, unknown = (pool_of(pool_tables(**SMALL, others=others)) for others in (0.0, None))
    assert unknown.others_cores is None
    assert unknown.cores == pytest.approx(1.0)
    assert alone.cores == pytest.approx(2.0)
