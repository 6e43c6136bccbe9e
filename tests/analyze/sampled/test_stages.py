"""How the sampled time of main threads divides into the stages of a run; no sample is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.host import sampled_stacks
from tests.builders import MS, T0, make_tables, step_rows

# 100 steps of 10 ms from T0 on, the first of which is slow: warm-up
STEPS = [*step_rows(1, data_wait_ms=91, first_batch=False), *step_rows(99, start_ns=T0 + 100 * MS, first_step=1)]
MAIN = ["<module> (train.py:3)", "main (train.py:9)"]


def stack(samples: int, start_ms: float, end_ms: float, **more: Any) -> dict[str, Any]:
    times = {"start_ns": T0 + round(start_ms * MS), "end_ns": T0 + round(end_ms * MS)}
    return {"frames": MAIN, "samples": samples, **times, **more}


def found(**tables: Any) -> dict[str, int]:
    return {each.stage: each.samples for each in sampled_stacks.stages(Context(make_tables(**tables)))}


def test_time_before_the_first_step_is_startup_and_the_rest_goes_by_step() -> None:
    stacks = [
        stack(40, -400, 0, segment=0, phase="startup"),
        stack(10, 0, 100, segment=1),
        stack(50, 200, 700, segment=2),
        stack(20, 1090, 1290, segment=3),
    ]
    assert found(steps=STEPS, stacks=stacks) == {"startup": 40, "warmup": 10, "steady": 50, "other": 20}


def test_a_segment_that_spans_stages_is_divided_by_time() -> None:
    # 100 ms before the first step, 100 ms of warm-up, 200 ms of steady steps
    assert found(steps=STEPS, stacks=[stack(40, -100, 300)]) == {"startup": 10, "warmup": 10, "steady": 20}


def test_a_file_without_time_tells_imports_and_compilation_alone() -> None:
    timeless = {"start_ns": None, "end_ns": None, "frames": MAIN}
    stacks = [{**timeless, "samples": 9, "stage": "import"}, {**timeless, "samples": 4}]
    assert found(stacks=stacks) == {"import": 9, "other": 4}


def test_waiting_is_unknown_where_it_was_not_sampled() -> None:
    tables = make_tables(steps=STEPS, stacks=[stack(30, 200, 700)])
    (steady,) = sampled_stacks.stages(Context(_without_idle(tables)))
    assert steady.waiting_share is None


def _without_idle(tables: Any) -> Any:
    import polars as pl

    from tests.records import replace

    return replace(tables, segments=tables.segments.with_columns(idle=pl.lit(False)))


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "samples": st.integers(1, 10**6),
            "start": st.integers(-2000, 3000),
            "length": st.integers(0, 3000),
            "stage": st.sampled_from([None, "import", "compile"]),
            "phase": st.sampled_from(["forward", "other", "startup", "data_wait", None]),
            "waiting": st.booleans(),
            "timed": st.booleans(),
            "main": st.sampled_from([True, True, False, None]),
            "role": st.sampled_from(["rank", "rank", "loader_worker"]),
            "seen": st.lists(st.tuples(st.integers(-2000, 3000), st.integers(0, 500)), max_size=3),
        }
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.booleans())
def test_no_sample_is_lost(rows: list[dict[str, Any]], with_steps: bool) -> None:
    stacks, stretches = [], []
    for number, row in enumerate(rows):
        common = {"frames": [f"f{number} (train.py:{number + 1})"], "role": row["role"], "main_thread": row["main"]}
        common |= {"stage": row["stage"], "phase": row["phase"], "waiting": row["waiting"]}
        times = (row["start"], row["start"] + row["length"])
        made = stack(row["samples"], *times, **common)
        stacks.append(made if row["timed"] else made | {"start_ns": None, "end_ns": None})
        stretches += [stack(1, at, at + length, **common) for at, length in row["seen"]]
    steps = STEPS if with_steps else []
    tables = make_tables(steps=steps, stacks=stacks, stretches=stretches)
    facts = sampled_stacks.stages(Context(tables))
    wanted = sum(row["samples"] for row in rows if row["role"] == "rank" and row["main"])
    assert sum(each.samples for each in facts) == wanted
    assert all(each.samples > 0 for each in facts)
    assert sum(each.share for each in facts) == pytest.approx(1.0 if wanted else 0.0)
    assert all(each.waiting_share is None or 0 <= each.waiting_share <= 1 for each in facts)
    if not with_steps:
        assert {each.stage for each in facts} <= {"import", "compile", "other"}
