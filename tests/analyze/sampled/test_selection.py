"""Which stacks a view is made of: nothing disappears without being counted under a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze.host.stack_selection import PROCESSES, StackSelection, check, choose
from stepscope.errors import UsageError
from stepscope.tables.schema import Tables
from tests.builders import make_tables

WAIT = ("run (threading.py:1)", "Condition.wait (threading.py:327)")
CAST: list[dict[str, Any]] = [
    {"role": "rank", "rank": 0, "phase": "forward", "samples": 1},
    {"role": "rank", "rank": 0, "phase": "data_wait", "samples": 2, "waiting": True},
    {"role": "rank", "rank": 0, "thread": "7", "main_thread": False, "phase": None, "samples": 4, "waiting": True},
    {"role": "rank", "rank": 0, "thread": "8", "main_thread": False, "phase": None, "samples": 8},
    {"role": "rank", "rank": 1, "pid": 101, "phase": "forward", "samples": 16},
    {"role": "loader_worker", "rank": 0, "pid": 102, "samples": 32},
    {"role": "launcher", "rank": None, "pid": 103, "samples": 64},
    {"role": "helper", "rank": None, "pid": 104, "samples": 128},
    {"role": "other", "rank": None, "pid": 105, "samples": 256},
]


def test_by_default_all_stay_but_launchers_helpers_and_parked_threads() -> None:
    found = choose(make_tables(stacks=CAST), StackSelection())
    assert found.rows["samples"].to_list() == [1, 2, 8, 16, 32, 256]
    assert found.left_out == {"launchers": 64, "helper processes": 128, "parked threads": 4}


def test_threads_that_are_not_told_apart_all_stay() -> None:
    unknown = {"thread": None, "thread_name": None, "waiting": True}
    rows = [{**unknown, "main_thread": main, "samples": 1} for main in (None, False, True)]
    assert choose(make_tables(stacks=rows), StackSelection()).rows.height == 3


def test_a_sample_counts_under_its_first_reason_only() -> None:
    rows = [{"role": "launcher", "rank": None, "thread": "9", "main_thread": False, "waiting": True, "samples": 5}]
    assert choose(make_tables(stacks=rows), StackSelection(rank=3)).left_out == {"launchers": 5}


def test_no_stacks() -> None:
    found = choose(make_tables(), StackSelection(rank=1, phase="forward"))
    assert found.rows.is_empty()
    assert found.left_out == {}


stack_rows = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["rank", "loader_worker", "launcher", "helper", "other", None]),
        "rank": st.sampled_from([0, 1, None]),
        "pid": st.sampled_from([1, 2, None]),
        "thread": st.sampled_from(["1", "2", None]),
        "main_thread": st.sampled_from([True, False, None]),
        "waiting": st.booleans(),
        "phase": st.sampled_from(["forward", "startup", None]),
        "stage": st.sampled_from(["import", "compile", None]),
        "samples": st.integers(0, 1000),
        "rate_hz": st.sampled_from([100.0, None]),
        "frames": st.sampled_from([(), ("<module> (train.py:3)",), WAIT, ("mkl_gemm (libmkl.so)",), ("f",)]),
    }
)
selections = st.builds(
    StackSelection,
    phase=st.sampled_from([None, "forward", "nowhere"]),
    rank=st.sampled_from([None, 0, 1, 7]),
    process=st.sampled_from(PROCESSES),
    parked=st.booleans(),
)


@given(st.lists(stack_rows, max_size=12), selections)
def test_every_sample_is_chosen_or_counted(rows: list[dict[str, Any]], selection: StackSelection) -> None:
    found = choose(make_tables(stacks=rows), selection)
    assert found.rows["samples"].sum() + sum(found.left_out.values()) == sum(row["samples"] for row in rows)
    assert all(found.left_out.values())


class TestCheck:
    @pytest.fixture
    def tables(self) -> Tables:
        return make_tables(stacks=CAST)

    def test_what_there_is_passes(self, tables: Tables) -> None:
        check(tables, StackSelection(phase="forward", rank=1, process="main"))

    @pytest.mark.parametrize(
        ("selection", "said"),
        [
            (StackSelection(rank=7), "ranks with samples: 0, 1"),
            (StackSelection(phase="forwards"), "phases with samples: data_wait, forward"),
            (StackSelection(process="worker"), "main, workers, all"),
        ],
    )
    def test_what_there_is_not_is_named(self, tables: Tables, selection: StackSelection, said: str) -> None:
        with pytest.raises(UsageError, match=said):
            check(tables, selection)

    def test_no_rank_at_all(self) -> None:
        with pytest.raises(UsageError, match="no ranks are known here"):
            check(make_tables(), StackSelection(rank=0))
