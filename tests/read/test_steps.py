"""The step journal: headers of other versions, torn lines, bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.model import STEP_COLUMNS, STEPS_SCHEMA
from stepscope.read.raw import Losses
from stepscope.read.run_folder import read_steps
from tests.builders import MS, T0, full_steps, step_rows

HEADER = {"schema": STEPS_SCHEMA, "columns": list(STEP_COLUMNS)}


def rows(count: int = 3, **columns: Any) -> list[list[Any]]:
    return [[row[name] for name in STEP_COLUMNS] for row in full_steps(step_rows(count, **columns))]


def read(tmp_path: Path, lines: list[Any], tail: str = "") -> tuple[list[dict[str, Any]], Losses]:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    losses = Losses()
    return read_steps(path, losses, "steps.jsonl"), losses


def test_rows_by_name_without_the_torn_last_line(tmp_path: Path):
    for lines in ([HEADER, *rows()], rows()):  # without a header the known columns hold
        steps, losses = read(tmp_path, lines, tail='[3,"train",0,17500')
        assert [step["step"] for step in steps] == [0, 1, 2]
        assert steps[0]["data_wait_ns"] == MS
        assert (steps[0]["first_batch"], steps[1]["first_batch"], steps[0]["in_window"]) == (True, False, False)
        assert losses.counts == {"torn_lines": 1}


def test_newer_and_older_columns(tmp_path: Path):
    newer = {"columns": [*STEP_COLUMNS, "energy_j"]}
    steps, losses = read(tmp_path, [newer, *[[*row, 7] for row in rows()]])
    assert len(steps) == 3
    assert "energy_j" not in steps[0]
    older = {"columns": ["step", "kind", "start_ns", "wall_ns"]}
    steps, losses = read(tmp_path, [older, [0, "train", T0, MS]])
    assert steps[0]["wall_ns"] == MS
    assert steps[0]["forward_ns"] is None
    assert not losses.counts


def test_bad_rows_are_skipped_one_by_one(tmp_path: Path):
    good = rows(6)
    good[1][STEP_COLUMNS.index("wall_ns")] = -5
    good[2][STEP_COLUMNS.index("start_ns")] = 10**30
    good[3][STEP_COLUMNS.index("samples")] = "many"
    good[4] = good[4][:-1]
    steps, losses = read(tmp_path, [HEADER, *good, 17, None])
    assert [step["step"] for step in steps] == [0, 5]
    assert losses.counts == {"bad_steps": 6}


def test_repeated_and_unordered_steps(tmp_path: Path):
    first, second, third = rows()
    steps, losses = read(tmp_path, [HEADER, first, third, second, second])
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert losses.counts == {"unordered_steps": 1, "bad_steps": 1}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(values, max_size=8), st.binary(max_size=30))
def test_never_raises(tmp_path: Path, lines: list[Any], tail: bytes):
    path = tmp_path / "steps.jsonl"
    path.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + tail)
    losses = Losses()
    for step in read_steps(path, losses, "x"):
        assert step["wall_ns"] >= 0
