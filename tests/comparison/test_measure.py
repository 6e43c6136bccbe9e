"""A run reduced to what a comparison needs: which steps count, and that the parts sum to the whole.

Of the first steps enough are dropped where there is warm-up, few where there is none, never more than allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from stepscope.analyze import analyze
from stepscope.comparison.measure import RESTART, measure, of_overviews
from stepscope.comparison.measured_steps import warmup_end
from stepscope.comparison.thresholds import WARMUP_WINDOW
from stepscope.model.comparison import Measure
from stepscope.model.trace import SpanRef
from stepscope.model.views import Overview, StepBreakdown, Summary
from stepscope.tables.schema import Tables
from tests.builders import MS, PHASE_COLUMNS, T0, make_tables, step_rows
from tests.records import some


def measured(tables: Tables, **options: Any) -> Measure:
    return some(measure(tables, analyze(tables), label="a", path="/runs/a", **options))


def parts(found: Measure) -> dict[str, float]:
    return {part.category: part.ms for part in found.phases}


def of_steps(rows: list[dict[str, Any]], **tables: Any) -> Measure:
    return measured(make_tables(steps=rows, **tables))


def test_equal_steps_are_their_own_mean() -> None:
    found = of_steps(step_rows(30))

    assert (found.label, found.path, found.started_ns) == ("a", "/runs/a", T0 - 1000 * MS)
    assert (found.steps, found.dropped) == (29, 1)  # the first step is always warm-up
    assert (found.mean_ms, found.median_ms, found.p95_ms) == pytest.approx((10, 10, 10))
    assert parts(found) == pytest.approx({"data_wait": 1, "forward": 3, "backward": 4, "optimizer": 1, "other": 1})
    assert found.signal == "optimizer"
    assert found.fixed_cost_s == pytest.approx(1.0)


def test_what_a_user_pays_stays_in() -> None:
    """A stall, an epoch's first batch and a collection are part of the mean, not of the median."""
    rows = step_rows(100)
    rows[60].update(data_wait_ns=101 * MS, wall_ns=110 * MS, first_batch=True)
    found = of_steps(rows)

    assert found.mean_ms == pytest.approx(10 + 100 / found.steps)
    assert found.median_ms == pytest.approx(10)
    assert parts(found)["data_wait"] == pytest.approx(1 + 100 / found.steps)


def test_warm_up_is_dropped_and_its_price_told() -> None:
    rows = [*step_rows(5, forward_ms=93), *step_rows(60, first_step=5, start_ns=T0 + 500 * MS)]
    found = of_steps(rows)

    assert (found.dropped, found.steps) == (5, 60)
    assert found.mean_ms == pytest.approx(10)
    assert found.warmup_s == pytest.approx(5 * 0.090)


def test_a_run_that_was_profiled_throughout_is_measured_and_says_so() -> None:
    found = of_steps([{**row, "in_window": True} for row in step_rows(30)])

    assert found.mean_ms == pytest.approx(10)
    assert [(flag.name, flag.withholds) for flag in found.flags] == [("profiled", False)]


def test_steps_beyond_the_limit_do_not_count() -> None:
    rows = [*step_rows(40), *step_rows(4, first_step=40, forward_ms=500)]
    found = of_steps(rows, manifests=[{"options": {"max_steps": 40}}])

    assert (found.steps, found.p95_ms) == (39, pytest.approx(10))


def loader_event(time_ns: int, made_ms: float, process: str = "rank-0", **fields: Any) -> dict[str, Any]:
    usual = {"kind": "loader", "id": 1, "num_workers": 2, "batch_size": 8}
    return {**usual, "time_ns": time_ns, "duration_ns": round(made_ms * MS), "process": process, **fields}


def two_epochs(gap_ms: float) -> list[dict[str, Any]]:
    return [*step_rows(50), *step_rows(50, first_step=50, start_ns=T0 + round((500 + gap_ms) * MS), epoch=1)]


def test_iterating_the_loader_again_is_paid_for_between_steps() -> None:
    """Of 200 ms between two epochs, 40 made the new iterator; 60 at most ended the old one, the rest is other work."""
    found = of_steps(two_epochs(200), journal=[loader_event(T0 - 50 * MS, 30), loader_event(T0 + 660 * MS, 40)])

    assert parts(found)[RESTART] == pytest.approx(100 / 99)
    assert found.mean_ms == pytest.approx(10 + 100 / 99)
    assert found.median_ms == pytest.approx(10)
    assert sum(parts(found).values()) == pytest.approx(found.mean_ms)


def test_an_iterator_for_evaluation_is_none_of_training() -> None:
    evaluation = step_rows(5, kind="eval", first_step=50, start_ns=T0 + 600 * MS)
    rows = [*step_rows(50), *evaluation, *step_rows(50, first_step=55, start_ns=T0 + 800 * MS)]
    found = of_steps(rows, journal=[loader_event(T0 + 550 * MS, 40, id=2), loader_event(T0 + 700 * MS, 20)])

    assert parts(found)[RESTART] == pytest.approx((20 + 30) / 99)


def overview(walls_ms: list[float], worker: str = "a", run: str = "", *, has_steps: bool = True) -> Overview:
    """A trace of these steps, of each three tenths data and the rest Python."""
    steps = tuple(
        StepBreakdown(
            str(i), T0, round(ms * MS), {}, {"host_data": round(0.3 * ms * MS), "host_python": round(0.7 * ms * MS)}
        )
        for i, ms in enumerate(walls_ms)
    )
    some = Summary(0.0, 0.0, 0.0, 0.0)
    return Overview(SpanRef(worker, 1, 0, worker, f"{worker}.json", run), steps, some, {}, {}, 0, has_steps, "host")


def test_a_trace_has_the_parts_of_its_overview() -> None:
    found = of_overviews([overview([10, 20, 30])], label="t", path="t.json")

    assert (found.steps, found.dropped, found.mean_ms, found.median_ms) == (3, 0, pytest.approx(20), pytest.approx(20))
    assert parts(found) == pytest.approx({"host_data": 6, "host_python": 14})
    assert (found.samples_per_step, found.fixed_cost_s, found.flags) == (None, None, ())


LONGEST_NS = 10 * 366 * 86_400 * 10**9  # that a reader lets pass
LENGTHS = st.none() | st.integers(-5, 40)
STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "wall_ns": st.integers(0, 200).map(lambda ms: ms * MS) | st.just(LONGEST_NS),
            "timed": st.booleans(),
            "samples": st.none() | st.integers(0, 64),
            "in_window": st.booleans() | st.none(),
            "rank": st.integers(0, 2),
            "step": st.integers(0, 12),
            "kind": st.sampled_from(["train", "train", "eval", None]),
            **{name: LENGTHS.map(lambda ms: None if ms is None else ms * MS) for name in PHASE_COLUMNS},
        }
    ),
    max_size=30,
)


def in_ranks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With a process and a start, seldom in order and sometimes over each other."""
    plain = [{name: value for name, value in row.items() if name != "timed"} for row in rows]
    return [{**row, "process": f"rank-{row['rank']}", "start_ns": T0 + row["step"] * 100 * MS} for row in plain]


BARE = analyze(make_tables())  # what an analysis adds to the measure is tested above


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 2**31), st.none() | st.integers(0, 20), st.lists(st.integers(-5, 130), max_size=5))
def test_parts_sum_to_the_mean_and_the_order_of_rows_is_nothing(
    rows: list[dict[str, Any]], seed: int, limit: int | None, iterated: list[int]
) -> None:
    full = in_ranks(rows)
    events = [loader_event(T0 + time * 10 * MS, 5.0 + time, f"rank-{time % 2}") for time in iterated]
    made = make_tables(steps=full, journal=events)
    timed = pl.Series([row["timed"] for row in rows], dtype=pl.Boolean)
    steps = made.steps.with_columns(start_ns=pl.when(timed).then(pl.col("start_ns")))
    tables, again = (
        Tables(**{**asdict(made), "steps": each})
        for each in (steps, steps.sample(fraction=1.0, shuffle=True, seed=seed))
    )
    found, other = (measure(each, BARE, label="a", path="a", warmup_limit=limit) for each in (tables, again))

    assert (found is None) == (not any(row["wall_ns"] > 0 and row["kind"] for row in full))
    assert found == other
    if found is not None:
        assert sum(part.ms for part in found.phases) == pytest.approx(found.mean_ms)
        assert all(part.ms >= 0 for part in found.phases)
        assert found.steps >= 1
        assert found.mean_ms > 0


walls = st.lists(st.floats(min_value=0.001, max_value=1e6), max_size=200)


def noisy(count: int, seed: int, noise: float = 0.03) -> list[float]:
    rng = np.random.default_rng(seed)
    return list(100 * (1 + noise * rng.standard_normal(count)))


def test_noise_alone_drops_next_to_nothing() -> None:
    dropped = [warmup_end(noisy(320, seed)) for seed in range(200)]
    assert np.mean(dropped) < 1
    assert np.quantile(dropped, 0.95) <= WARMUP_WINDOW


@pytest.mark.parametrize("slow", [1, 4, 12, 30])
def test_slow_steps_in_noise_are_found(slow: int) -> None:
    for seed in range(20):
        run = noisy(200, seed)
        run[:slow] = [time * 1.6 for time in run[:slow]]
        assert slow <= warmup_end(run) <= slow + WARMUP_WINDOW


@given(walls, st.one_of(st.none(), st.integers(-3, 300)))
def test_never_more_than_the_limit_or_a_third(run: list[float], limit: int | None) -> None:
    dropped = warmup_end(run, limit=limit)
    assert 0 <= dropped <= len(run) / 3
    if limit is not None:
        assert dropped <= max(0, limit)


def with_stalls(stall: float, steps: Iterable[int], count: int) -> list[float]:
    run = [100.0] * count
    for step in steps:
        run[step] = stall
    return run


@pytest.mark.parametrize(
    ("run", "least", "most"),
    [
        ([9_000.0, *with_stalls(4_000, [14], 119)], 16, 16),  # a second compilation never comes again: no stall
        ([100 + 80 * math.exp(-step / 8) for step in range(300)], 15, 35),  # slow steps that settle
        ([*[40.0] * 14, *[100.0] * 150], 10, 14),  # fast ones, from a full queue
        *((with_stalls(400, range(first, 240, every), 240), 0, 0) for every in (2, 3, 4, 5, 10) for first in (0, 1)),
        *(([100 * (1 + by * step / 300) for step in range(300)], 0, 0) for by in (0.04, 0.5, 2, -0.04, -0.5)),  # drift
        *((run, 0, 0) for run in ([*[100.0] * 30, math.nan, math.inf], [math.nan] * 9, [], [5.0])),
    ],
)
def test_what_counts_as_warm_up(run: list[float], least: int, most: int) -> None:
    assert least <= warmup_end(run) <= most


@given(st.integers(1, 30), st.floats(5.0, 500.0), st.sampled_from([0.25, 4.0, 1024.0]))
def test_compilation_before_a_steady_run_is_dropped_and_no_more_in_any_unit(
    steps: int, factor: float, unit: float
) -> None:
    assert warmup_end([100.0 * factor * unit] * steps + [100.0 * unit] * 100) == steps
