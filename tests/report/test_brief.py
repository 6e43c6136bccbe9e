"""Answers of bounded size: always whole JSON, never half a row or half a command, and what is missing is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import UsageError
from stepscope.report import brief
from stepscope.report.brief import LEAST_BYTES, Page, answer
from stepscope.report.document import build
from tests.report.fabricate import analysis, diagnosis

TEXTS = st.text(max_size=30) | st.integers(0, 400).map(lambda size: "w\u202e" * size)
VALUES = TEXTS | st.none() | st.booleans() | st.integers() | st.floats() | st.lists(TEXTS, max_size=60)
ROWS = st.lists(st.dictionaries(st.sampled_from(["name", "file", "prove"]), VALUES) | st.lists(VALUES, max_size=5))


@given(ROWS, st.integers(0, 20), st.integers(1, 9) | st.none(), st.integers(LEAST_BYTES, 9_000), TEXTS)
def test_any_answer_is_json_of_at_most_its_size(
    rows: list[Any], offset: int, limit: int | None, size: int, text: str
) -> None:
    try:
        made = answer({"head": text}, "rows", rows, Page(offset, limit, size))
    except UsageError:  # not even a row whose texts are cut
        return
    assert len(made) <= size
    assert "\u202e" not in made.decode()
    document = json.loads(made, parse_constant=pytest.fail)
    shown, wanted = document["rows"], rows[offset:][:limit]
    assert len(shown) <= len(wanted)
    assert bool(shown) == bool(wanted)
    assert "left_out" in document or len(shown) == len(rows)
    whole = [json.loads(answer({}, "rows", [row], Page(max_bytes=200_000)))["rows"][0] for row in wanted[: len(shown)]]
    assert "cut" in document or shown == whole


def test_a_command_is_whole_or_missing() -> None:
    command = ["python", "train.py", *(f"--option-{number}" for number in range(200))]
    row = {"fix": "f" * 9_000, "prove": " ".join(command)}
    sizes = range(LEAST_BYTES, 12_000, 250)
    found = [json.loads(answer({"command": command}, "rows", [row], Page(max_bytes=size))) for size in sizes]
    assert {document["rows"][0]["prove"] for document in found} == {None, row["prove"]}
    assert all(document["command"] in (None, command) for document in found)
    assert all(f"max_bytes={size}" not in document.get("cut", "") for size, document in zip(sizes, found, strict=True))


def test_findings_say_what_they_cost_where_why_and_how_to_prove_the_fix(folder: Path) -> None:
    report = build(analysis(folder), diagnosis(folder))
    document = json.loads(brief.findings(report, Page()))
    rows = document["findings"]
    assert [row["cost_ms_per_step"] for row in rows] == [row["cost_ms_per_step"] for row in report.findings]
    for row, of in zip(rows, report.findings, strict=True):
        assert {key: row[key] for key in ("id", "rule", "title", "share", "gain_ceiling", "confidence")} == {
            key: of[key] for key in ("id", "rule", "title", "share", "gain_ceiling", "confidence")
        }
        assert (row["fix"], row["falsified_by"]) == (of["fix"], of["falsified_by"])
        file, _, line = row["at"].rpartition(":")
        assert (str(folder / file), int(line)) == (of["where"][0]["file"], of["where"][0]["line"])
    first = json.loads(brief.findings(report, Page(), only=rows[0]["id"], detail=True))["findings"]
    assert [row["id"] for row in first] == [rows[0]["id"]]
    assert [each[:2] for each in first[0]["evidence"]] == [
        [each["metric"], each["value"]] for each in report.findings[0]["evidence"]
    ]
    with pytest.raises(UsageError, match=re.escape(rows[0]["id"])):
        brief.findings(report, Page(), only="no such")


def test_the_proof_is_an_experiment_where_knobs_do_it_and_else_two_runs() -> None:
    run = {"command": ["python", "train a.py"], "folder": "/runs/a"}
    of = {"try": [{"knob": "loader.num_workers", "value": "2"}]}
    assert brief.proof(of, run) == "stepscope experiment --try loader.num_workers=2 -- python 'train a.py'"
    assert "--together" in str(brief.proof({"try": of["try"] * 2}, run))
    by_hand = "stepscope run --out /runs/a-after -- python 'train a.py'; stepscope compare /runs/a /runs/a-after"
    assert brief.proof({"try": []}, run) == by_hand
    assert brief.proof(of, {"command": []}) is None
