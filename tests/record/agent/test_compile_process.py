"""torch.compile in real processes: what is told of each compilation, and that nothing changes for the script.

STEPSCOPE_TEST_PYTHONS may name interpreters with other versions of torch, separated as in PATH.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .processes import SCRIPTS, SOURCE, Outcome, line_of, run_script

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.process]

PYTHONS = [sys.executable, *filter(None, os.environ.get("STEPSCOPE_TEST_PYTHONS", "").split(os.pathsep))]
# What differs between two runs of the same script: time and process, ids and addresses.
VARYING = re.compile(
    r"[0-9a-f]{8}([-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}"  # first: it may begin with digits alone
    r"|\d{4} \d\d:\d\d:\d\d\.\d{6} \d+|0x[0-9a-f]{6,}|\b\d{7,16}\b|latency = [\d.]+ us|, \d+\.\d{4}\b"
)


def usual(text: str) -> list[str]:
    return VARYING.sub("_", text).splitlines()


CAUSES = (SCRIPTS / "compile_causes.py").read_text()


def by_step(outcome: Outcome, events: list[dict[str, Any]]) -> Counter[int]:
    """How many events began in which step, by their time, as the tables do it."""
    rows = outcome.steps()
    return Counter(
        row["step"]
        for event in events
        for row in rows
        if row["start_ns"] <= event["time_ns"] < row["start_ns"] + row["wall_ns"]
    )


@pytest.fixture(params=PYTHONS)
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_cause_is_told_with_its_step_and_the_users_output_is_untouched(tmp_path: Path, python: str) -> None:
    logs = {"TORCH_LOGS": "graph_breaks,recompiles"}
    with_us = run_script(tmp_path, "compile_causes.py", "eager", python=python, environment=logs)
    without = run_script(tmp_path, "compile_causes.py", "eager", python=python, environment=logs, recorded=False)
    assert (with_us.status, with_us.stdout) == (without.status, without.stdout) == (0, "forward\n" * 14)
    assert "Graph break in user code" in without.stderr
    assert usual(with_us.stderr) == usual(without.stderr)
    assert not with_us.events("probe_error")
    assert not with_us.events("compile_unknown")
    told = with_us.events("compile")
    hooked = any(event["step_source"] for event in told)
    at_limit = [event for event in told if event["guarded"] is None]
    # `self.calls` and the growing report reach the limit of 8 versions, the tenth step on Dynamo is quiet
    compiled = [event for event in told if event["guarded"] and event["is_forward"]]
    assert {event["limit"] for event in told} == {8}
    assert [event["graph"] for event in at_limit] == (["2/8", "3/8"] if hooked else ["3/8"])
    assert all(event["fail_type"] and event["fail_reason"] for event in at_limit)
    assert [count for _, count in sorted(by_step(with_us, compiled).items())] == (
        [4, 3, 3, 3, 2, 2, 2, 2] if hooked else [4, 3, 3, 2, 1, 1, 1, 1]
    )
    assert set(by_step(with_us, at_limit)) == {8}
    assert all(event["step"] == next(iter(by_step(with_us, [event]))) for event in told if event["step_source"])
    assert {(event["function"], event["def_line"]) for event in compiled if event["graph"].startswith("3/")} == {
        ("mean", line_of(CAUSES, "@staticmethod"))
    }
    if hooked:
        reasons = {event["graph"]: event["recompile_reason"] for event in told}
        assert "self.calls == 7" in reasons["2/8"]
        assert "size mismatch at index 0. expected 8, actual 12" in reasons["0/1"]
        assert "scale == 1.0" in reasons["0/2"]
        assert "expected 1, actual 2" in reasons["3/1"]
        called = {event["graph"]: (event["call_line"], event["call_function"]) for event in told}
        assert {called[graph] for graph in ("0/0", "1/0", "2/0", "0/1", "2/8")} == {
            (line_of(CAUSES, "model(x, scale)"), "main")
        }
        assert {called[graph] for graph in ("3/0", "3/8")} == {(line_of(CAUSES, "self.mean(self.rows)"), "Report.add")}
    breaks = {}
    for event in with_us.events("graph_break"):
        place, reason = event["reason"].split("\n", 1)
        breaks.setdefault(place.rpartition(":")[2], reason)
    item, printed = (str(line_of(CAUSES, text)) for text in (".item()", 'print("forward")'))
    assert set(breaks) == {item, printed}
    assert "Tensor.item" in breaks[item]
    assert "print" in breaks[printed]
    assert {event["step"] for event in with_us.events("graph_break")} == {0, 1, 2, 3}


def test_graphs_breaks_and_recompilations_are_the_same(tmp_path: Path, python: str) -> None:
    with_us = run_script(tmp_path, "compile_unchanged.py", python=python)
    without = run_script(tmp_path, "compile_unchanged.py", python=python, recorded=False)
    assert with_us.status == 0, with_us.stderr
    counted = json.loads(without.stdout)
    assert counted["counters"]["stats"]["unique_graphs"] >= 4
    assert counted["counters"]["graph_break"]
    assert json.loads(with_us.stdout) == counted
    assert [event["graph"] for event in with_us.events("compile")] == [entry[0] for entry in counted["entries"]]
    assert not with_us.events("probe_error")


def test_recording_from_code_captures_and_leaves_nothing_behind(tmp_path: Path, python: str) -> None:
    outcome = run_script(
        tmp_path, "compile_profile.py", str(tmp_path / "p"), python=python, recorded=False, path=(SOURCE,)
    )
    assert outcome.status == 0, outcome.stderr
    result = json.loads(outcome.stdout.splitlines()[-1])
    before, during, after, again, last = result["states"]
    assert before == after == last == [0, 0, 0, True, 64]
    # a hook for contexts, or, before torch 2.7, room for more entries
    assert during == again
    assert during in ([1, 10, 1, True, 64], [0, 10, 1, True, 1_024])
    hooked = during[0] == 1
    reasons = []
    for folder in result["folders"]:
        lines = (Path(folder) / "rank-0" / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        reasons.append([event["recompile_reason"] for event in events if event["kind"] == "compile"])
        assert not [event for event in events if event["kind"] == "probe_error"]
    # the first version of all was compiled before recording began; the rest at 8.0, then at 7.0 and 6.0
    if hooked:
        assert [[reason.split(" #")[0].strip() for reason in part] for part in reasons] == [
            ["0/0: scale == 9.0"],
            ["0/1: scale == 8.0", "0/2: scale == 7.0"],
        ]
    else:
        assert reasons[0] == [None]
