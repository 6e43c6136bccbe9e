"""The lattice example: sampled stacks name the QR decomposition and its line; the fix draws the same fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.harness import EXAMPLES, PYTHON, Recorded, command, line_of, plain, record

pytestmark = [pytest.mark.process, pytest.mark.torch]

FLOW = EXAMPLES / "lattice_qr" / "flow.py"
TRAIN = "examples/lattice_qr/train.py"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The example, started as its README says."""
    return record(tmp_path_factory.mktemp("qr") / "run", [PYTHON, TRAIN, "--steps", "12"], cwd=EXAMPLES.parent)


def hotspots(run: Path, *options: str) -> list[dict[str, object]]:
    done = command("hotspots", str(run), "--library", "flow", "--json", "-", *options)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, object]] = json.loads(done.stdout)["rows"]
    return rows


def test_the_first_row_is_the_decomposition(recorded: Recorded) -> None:
    assert recorded.status == 0, recorded.text
    first = hotspots(recorded.folder)[0]
    assert first["library_function_name"] == "haar_qr"
    assert Path(str(first["library_function_path"])).resolve() == FLOW
    assert first["library_function_line"] == line_of(FLOW, "torch.linalg.qr(")


@pytest.mark.thorough
def test_both_ways_train_on_the_same_fields(recorded: Recorded) -> None:
    fast = plain([PYTHON, TRAIN, "--steps", "5", "--gram-schmidt"], cwd=EXAMPLES.parent)
    assert fast.returncode == 0, fast.stderr.decode()
    assert fast.stdout.startswith(b"step 5: loss ")
    assert recorded.stdout.startswith(fast.stdout)


def test_the_top_line_stands_on_the_first_page_and_the_operator_behind_it_is_replayed(recorded: Recorded) -> None:
    line = f"flow.py:{line_of(FLOW, 'torch.linalg.qr(')}"
    assert line in recorded.text
    done = command("replay", str(recorded.folder), "--op", "linalg_qr", "--devices", "cpu,cuda:99", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    assert "Replayed alone: aten::linalg_qr" in done.stdout
    assert "not on this machine" in done.stdout
    shown = command("analyze", str(recorded.folder), "--json", "-", "--force")
    assert shown.returncode == 0, shown.stderr
    views = json.loads(shown.stdout)["views"]
    assert views["stacks"]["hot_lines"][0]["line"] == line_of(FLOW, "torch.linalg.qr(")
    (replay,) = views["replayed_operators"]
    (call,) = replay["calls"]
    cpu, absent = call["times"]
    assert call["shapes"] == "[[64,4,4,4,4,4,3,3],[]]"
    assert cpu["variant"]["threads"] == 1  # those of the training
    assert cpu["per_step_ns"] == pytest.approx(call["calls_per_step"] * cpu["per_call_ns"])
    assert absent["reason"] == "not on this machine"
    assert [step["variant"]["device"] for step in replay["steps"]] == ["cpu"]
