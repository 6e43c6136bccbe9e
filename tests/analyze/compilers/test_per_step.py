"""What compiling took of the steps: unions, kinds, windows, warm-up; the points over the run; the limit's cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.model.compilers import CompilerSteps, CompilersView
from tests.analyze.compilers.scenes import compile_row, growing, view, xla_compiles, xla_counters
from tests.builders import MS, T0, make_tables, step_rows


def of_kind(found: CompilersView, kind: str = "train") -> CompilerSteps:
    (steps,) = [steps for steps in found.steps if steps.kind == kind]
    return steps


def test_nested_and_overlapping_rows_count_once() -> None:
    rows = [
        compile_row(2, ms=6, at_ms=1),
        compile_row(2, ms=2, at_ms=2, function="inner"),
        compile_row(2, ms=4, at_ms=5, function="other"),
    ]
    steps = of_kind(view(steps=step_rows(20), compiles=rows))
    assert steps.compile_ms == pytest.approx(8)
    assert steps.wall_ms == pytest.approx(200)
    assert steps.share == pytest.approx(0.04)
    assert (steps.steps, steps.compiling_steps, steps.compiles) == (20, 1, 3)


def test_kinds_are_apart_and_each_has_its_own_warm_up() -> None:
    train = step_rows(30)
    evaluation = step_rows(12, first_step=30, start_ns=T0 + 300 * MS, kind="eval")
    rows = [compile_row(0), *(compile_row(step, kind="recompile", cause="shape") for step in range(31, 42))]
    found = view(steps=train + evaluation, compiles=rows)
    assert [steps.kind for steps in found.steps] == ["train", "eval"]
    assert (of_kind(found).compiling_steps, of_kind(found).recompiles) == (1, 0)
    evals = of_kind(found, "eval")
    assert (evals.compiling_steps, evals.recompiles) == (11, 11)
    assert evals.share == pytest.approx(44 / 120)
    assert evals.late_compile_ms == pytest.approx(8)
    assert evals.late_wall_ms == pytest.approx(20)
    assert evals.late_share == pytest.approx(0.4)
    assert of_kind(found).late_share == 0
    assert {cause.kind: cause.kinds for cause in found.causes} == {"compile": ("train",), "recompile": ("eval",)}


def test_steps_of_a_report_are_estimated_by_its_rates() -> None:
    per_step = [2] + [1] * 14
    found = view(compiles=xla_compiles(per_step), counters=xla_counters(per_step, step=14))
    steps = of_kind(found)
    assert steps.estimated
    assert (steps.steps, steps.compiling_steps, steps.compiles) == (15, 15, 16)
    assert steps.wall_ms == pytest.approx(7500)
    assert steps.share == pytest.approx(4800 / 7500)
    assert steps.late_compile_ms == pytest.approx(1500)
    assert (steps.recompiles, steps.breaks) == (None, None)
    assert found.backends[0].step_estimate_ms == pytest.approx(500)
    assert [point.compiles for point in found.points] == per_step
    assert {point.wall_ms for point in found.points} == {None}


def test_a_long_run_keeps_the_points_that_recompiled() -> None:
    count = 1500
    rows: list[dict[str, Any]] = [compile_row(step, ms=1) for step in range(count)]
    recompiled = {7, 700, 1499}
    for step in recompiled:
        rows[step]["kind"] = "recompile"
    points = view(steps=step_rows(count), compiles=rows).points
    assert len(points) == 500
    assert recompiled <= {point.step for point in points}
    assert [point.step for point in points] == sorted(point.step for point in points)


def test_steps_after_the_limit_are_compared_with_those_before_it() -> None:
    rows = step_rows(40)
    for row in rows[:9]:
        row["wall_ns"] = 100 * MS
    start = T0
    for row in rows:
        row["start_ns"] = start
        start += row["wall_ns"]
    compiles = [row | {"time_ns": T0 + (step * 100 + 1) * MS} for step, row in enumerate(growing(0, 8), 0)]
    for row in compiles:
        row["duration_ns"] = 94 * MS
    hit = compile_row(8, ms=90, kind="limit_hit", limit=8) | {"time_ns": T0 + 801 * MS}
    found = view(steps=rows, compiles=[*compiles, hit])
    (limit,) = found.limits
    assert limit.cause == next(cause.id for cause in found.causes if cause.kind == "limit_hit")
    assert limit.step == 8
    assert limit.before_compiling
    assert (limit.before_ms, limit.before_steps) == pytest.approx((6, 7))
    assert (limit.after_ms, limit.after_steps) == pytest.approx((10, 31))


@pytest.mark.parametrize("kind", ["compile", "recompile", "limit_hit"])
@pytest.mark.parametrize("backend", ["torch.compile", "torch_xla"])
def test_steps_that_compile_are_not_steady(kind: str, backend: str) -> None:
    row = compile_row(20, kind=kind, backend=backend)
    (facts,) = analyze(make_tables(steps=step_rows(40, first_batch=False), compiles=[row])).steps
    assert facts.excluded == {"warmup": 1, "compile": 1}


event = st.tuples(
    st.integers(0, 9), st.floats(0, 25), st.floats(0, 25), st.sampled_from(["compile", "recompile", "limit_hit"])
)


@settings(deadline=None, max_examples=60)  # a busy machine is no failure
@given(st.lists(event, max_size=10), st.integers(1, 9))
def test_shares_are_shares_and_parts_add_up(drawn: list[tuple[int, float, float, str]], evals: int) -> None:
    rows = step_rows(10)
    for row in rows[10 - evals :]:
        row["kind"] = "eval"
    compiles = [compile_row(step, at_ms=at, ms=ms, kind=kind) for step, at, ms, kind in drawn]
    found = view(steps=rows, compiles=[compile_row(0), *compiles])
    assert sum(steps.steps for steps in found.steps) == 10
    for steps in found.steps:
        assert steps.share is not None
        assert 0 <= steps.share <= 1
        assert steps.compile_ms is not None
        assert steps.wall_ms is not None
        assert steps.compile_ms <= steps.wall_ms + 1e-9
        assert steps.compiling_steps is not None
        assert 0 <= steps.compiling_steps <= steps.steps
    inside = sum(steps.compile_ms or 0 for steps in found.steps)
    assert inside == pytest.approx(found.backends[0].in_steps_ms)
    assert inside == pytest.approx(sum(point.compile_ms or 0 for point in found.points))
    assert sum(steps.compiles for steps in found.steps) == sum(point.compiles for point in found.points)


def test_copies_that_traces_tell_are_per_traced_step() -> None:
    rows = step_rows(40)
    for row in rows[10:14]:
        row["in_window"] = True
    copies = [
        {"step": step, "kind": "transfer", "backend": "cuda", "count": 3, "source": "trace: Memcpy DtoH"}
        for step in range(10, 14)
    ]
    events = [{"step": step} for step in range(10, 14)]
    found = view(steps=rows, compiles=copies, events=events)
    steps = of_kind(found)
    assert (steps.backend, steps.steps, steps.transfers) == ("cuda", 4, 12)
    assert (found.backends[0].transfers, found.backends[0].recompiles) == (12, None)
    assert found.storms == ()
    assert any("only the steps these cover" in note for note in found.notes)
