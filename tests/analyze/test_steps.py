"""Step statistics: what counts, what is left out and why, the partition, the series."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.model import PHASES, StepFacts
from tests.builders import MS, T0, make_tables, step_rows


def train(**tables: Any) -> StepFacts:
    return analyze(make_tables(**tables)).steps[0]


def test_steps_are_left_out_by_reason() -> None:
    rows = step_rows(40, first_batch=False)
    for number in (0, 1):
        rows[number]["wall_ns"] = 90 * MS
    for number in (10, 11):
        rows[number]["in_window"] = True
    rows[20] |= {"first_batch": True, "wall_ns": 50 * MS}
    rows[25]["wall_ns"] = 70 * MS
    compiling = {"kind": "compile", "step": 30, "count": 1, "time_ns": T0}
    monitor = {"kind": "monitor", "step": 25, "measured": ["norms"], "time_ns": T0}
    facts = train(steps=rows, journal=[compiling, monitor])
    assert facts.excluded == {"warmup": 2, "window": 2, "first_batch": 1, "compile": 1, "monitor": 1}
    assert facts.mean_ms == pytest.approx(10)
    assert facts.first_batch_ms == pytest.approx(50)
    assert len(facts.series) == 40


@pytest.mark.parametrize(
    ("columns", "count"),
    [({"first_batch": True}, 1), ({"in_window": True}, 3), ({"first_batch": True, "in_window": True}, 3)],
)
def test_a_short_run_falls_back_and_says_so(columns: dict[str, Any], count: int) -> None:
    facts = train(steps=step_rows(count, **columns))
    assert facts.count == count
    assert facts.low_confidence


def test_ranks_are_pooled_and_their_samples_add_up() -> None:
    rows: list[dict[str, Any]] = []
    for rank, forward in ((0, 3), (1, 13)):
        more = {"rank": rank, "process": f"rank-{rank}", "samples": 10, "first_batch": False}
        rows += step_rows(21, forward_ms=forward, **more)
    facts = train(steps=rows)
    assert facts.ranks == (0, 1)
    assert facts.mean_ms == pytest.approx(15)
    assert facts.samples_per_second == pytest.approx(1000 + 500)


phase_ns = st.one_of(st.none(), st.integers(0, 10**10))


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.integers(1, 10**10), *(phase_ns for _ in PHASES)), min_size=1, max_size=8))
def test_the_partition_sums_to_the_mean_step(steps: list[tuple[int | None, ...]]) -> None:
    rows = [
        {"wall_ns": wall, **dict(zip((f"{phase}_ns" for phase in PHASES), phases, strict=True))}
        for wall, *phases in steps
    ]
    facts = train(steps=rows)
    assert sum(part.share for part in facts.partition) == pytest.approx(1)
    assert sum(part.ms for part in facts.partition) == pytest.approx(facts.mean_ms)
    assert all(0 <= part.share <= 1 + 1e-9 for part in facts.partition)
    assert len({part.category for part in facts.partition}) == len(facts.partition)


def test_fixed_costs() -> None:
    rows = step_rows(20, first_batch=False)
    rows[0]["wall_ns"] = 510 * MS
    window = {"kind": "window", "trace": "t.json", "stop_duration_ns": 200 * MS, "export_duration_ns": 300 * MS}
    fixed = analyze(make_tables(steps=rows, journal=[window])).fixed
    assert fixed.before_first_step_s == pytest.approx(1)
    assert fixed.first_step_s == pytest.approx(0.51)
    assert fixed.warmup_s == pytest.approx(0.5)
    assert fixed.windows_s == pytest.approx(0.5)
    assert fixed.total_s == pytest.approx(1 + 0.5 + 0.5)
