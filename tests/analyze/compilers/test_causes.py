"""Causes: what is one cause, its line, what changed step by step, its time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.model import Place
from stepscope.model.compilers import Change, CompilerCause
from tests.analyze.compilers.scenes import STEP_MS, TORCH, TRAIN, Row, compile_row, growing, view
from tests.builders import MS, T0, step_rows


def one(causes: tuple[CompilerCause, ...], kind: str) -> CompilerCause:
    (found,) = [cause for cause in causes if cause.kind == kind]
    return found


def test_a_growing_dimension_is_one_cause_with_its_values_in_order() -> None:
    rows = growing(1, 5)
    cause = one(view(steps=step_rows(20), compiles=[compile_row(0), *reversed(rows)]).causes, "recompile")
    assert cause.count == 5
    assert cause.steps == (1, 2, 3, 4, 5)
    assert (cause.first_step, cause.last_step, cause.step_count) == (1, 5, 5)
    assert cause.subject == "x.size(0)"
    assert cause.changes[0] == Change(1, "8", "12", "x.size(0)")
    assert [change.new for change in cause.changes] == ["12", "16", "20", "24", "28"]
    assert (cause.cache_entries, cause.limit) == (5, 8)
    assert cause.text == "tensor 'x' size mismatch at index 0. expected 24, actual 28"
    assert cause.total_ms == pytest.approx(20)
    assert cause.longest_ms == pytest.approx(4)
    assert cause.in_main_steps_ms == pytest.approx(20)
    assert cause.kinds == ("train",)


def test_the_line_to_blame_is_the_users() -> None:
    named = compile_row(1, kind="recompile", cause="constant", file=TRAIN, line=18)
    in_torch = compile_row(2, kind="recompile", cause="shape", file=TORCH, line=5)
    uncalled = compile_row(3, kind="recompile", cause="shape", call_file=None, call_line=None)
    nowhere = compile_row(4, kind="recompile", cause="shape", call_file=None, def_file=TORCH, def_line=7)
    causes = {c.first_step: c for c in view(steps=step_rows(9), compiles=[named, in_torch, uncalled, nowhere]).causes}
    assert causes[1].place == Place(TRAIN, 18)
    assert causes[2].place == Place(TRAIN, 40) == causes[2].call
    assert causes[3].place == Place(TRAIN, 12, "forward") == causes[3].definition
    assert causes[4].place is None
    assert causes[4].definition == Place(TORCH, 7, "forward")


def test_ids_stay_the_same_on_another_machine_and_with_other_times() -> None:
    def ids(file: str, ms: float, more: list[Row]) -> set[str]:
        rows = [row | {"file": file, "line": 18} for row in growing(1, 3)]
        rows = [row | {"duration_ns": round(ms * MS)} for row in rows]
        return {cause.id for cause in view(steps=step_rows(9), compiles=[*rows, *more]).causes}

    here = ids(TRAIN, 4, [])
    assert len(here) == 1
    assert here == ids("/home/user/project/src/train.py", 1, [])
    assert here < ids(TRAIN, 4, [compile_row(0)])
    assert not here & ids("/home/user/project/other.py", 4, [])


def test_files_of_one_name_have_ids_of_their_own() -> None:
    rows = [
        compile_row(1, kind="recompile", cause="shape", file=f"/home/user/project/{folder}/model.py", line=3)
        for folder in ("one", "two")
    ]
    causes = view(steps=step_rows(9), compiles=rows).causes
    assert len({cause.id for cause in causes}) == 2


def test_a_limit_hit_takes_function_and_line_of_the_recompilations_before_it() -> None:
    line: Row = {"cause": "int_attribute", "subject": "s.calls", "file": TRAIN, "line": 18}
    other = compile_row(8, kind="recompile", cause="shape", graph="1/7", function="other", file=TRAIN, line=99)
    hit = {"step": 9, "kind": "limit_hit", "graph": "2/8", "cause": "int_attribute", "limit": 8, "duration_ns": MS}
    rows = [compile_row(n, kind="recompile", graph=f"2/{n}", **line) for n in range(1, 8)]
    cause = one(view(steps=step_rows(20), compiles=[*rows, other, hit | {"time_ns": T0 + 90 * MS}]).causes, "limit_hit")
    assert cause.place == Place(TRAIN, 18)
    assert (cause.function, cause.subject, cause.limit) == ("forward", "s.calls", 8)
    assert cause.definition == Place(TRAIN, 12, "forward")


def test_a_limit_hit_of_another_cause_takes_no_line_from_it() -> None:
    before = compile_row(
        1, kind="recompile", graph="2/1", cause="int_attribute", subject="s.calls", file=TRAIN, line=18
    )
    hit = {"step": 9, "kind": "limit_hit", "graph": "2/8", "cause": "shape", "subject": "x.size(0)"}
    cause = one(view(steps=step_rows(20), compiles=[before, hit | {"time_ns": T0 + 90 * MS}]).causes, "limit_hit")
    assert (cause.function, cause.subject) == ("forward", "x.size(0)")
    assert cause.place == Place(TRAIN, 40)


spans = st.tuples(st.integers(0, 5), st.floats(0, 30), st.floats(0, 30), st.sampled_from("ab"), st.integers(0, 1))


@settings(deadline=None, max_examples=60)  # a busy machine is no failure
@given(st.lists(spans, min_size=1, max_size=12))
def test_times_are_unions_and_counts_add_up(drawn: list[tuple[int, float, float, str, int]]) -> None:
    rows = [
        compile_row(step, ms=ms, at_ms=at, function=name, rank=rank, process=f"rank-{rank}")
        for step, at, ms, name, rank in drawn
    ]
    steps = [row for rank in (0, 1) for row in step_rows(6, rank=rank, process=f"rank-{rank}")]
    found = view(steps=steps, compiles=rows)
    facts = found.backends[0]
    assert facts.compiles == len(rows) == sum(cause.count for cause in found.causes)
    total = sum(ms for _, _, ms, _, _ in drawn)
    assert facts.compile_ms is not None
    assert facts.in_steps_ms is not None
    assert facts.compile_ms <= total + 1e-3
    assert facts.in_steps_ms <= min(facts.compile_ms, 2 * 6 * STEP_MS) + 1e-6
    assert facts.compile_ms <= sum(cause.total_ms or 0 for cause in found.causes) + 1e-6
    for cause in found.causes:
        assert cause.total_ms is not None
        assert cause.in_main_steps_ms is not None
        assert 0 <= cause.in_main_steps_ms <= cause.total_ms + 1e-6


def test_the_reason_is_told_without_what_other_fields_hold() -> None:
    reason = "2/7: s.calls == 7           # s.calls += 1  # train.py:18 in forward (HINT: make it a tensor)\nmore"
    (cause,) = view(steps=step_rows(9), compiles=[compile_row(1, kind="recompile", reason=reason)]).causes
    assert cause.text == "s.calls == 7"
