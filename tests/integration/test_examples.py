"""Examples and scripts with a planted loss, recorded as their READMEs start them: it is told first, with its line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calls import call
from tests.integration.conftest import SHORT_WINDOW
from tests.integration.harness import (
    EXAMPLES,
    PYTHON,
    SCRIPTS,
    Recorded,
    command,
    line_of,
    lines_of_function,
    plain,
    record,
)

pytestmark = [pytest.mark.process, pytest.mark.torch]

DEMO = EXAMPLES / "cifar_png" / "train.py"
SLEEPY = Path(__file__).parents[1] / "experiment" / "scripts" / "sleepy.py"


def first_of_the_script(recorded: Recorded) -> dict[str, Any]:
    """Its first loss; what other processes of a busy machine cost may well come before."""
    return next(found for found in recorded.findings if found["category"] != "system")


def is_dataset_line(place: dict[str, Any]) -> bool:
    return Path(place["file"]).resolve() == DEMO and place["line"] in lines_of_function(DEMO, "__getitem__")


def test_first_finding_is_the_loader(demo: Recorded) -> None:
    assert demo.status == 0, demo.text
    first = first_of_the_script(demo)
    assert first["rule"] == "input.loader_bound"
    assert first["category"] == "input"
    assert is_dataset_line(first["where"][0]), first["where"]
    assert first["evidence"]
    assert first["cost_ms_per_step"] > 0


def test_terminal_report_quotes_the_line(demo: Recorded) -> None:
    place = first_of_the_script(demo)["where"][0]
    code = DEMO.read_text().splitlines()[place["line"] - 1].strip()
    assert code[:40] in demo.text
    assert f"train.py:{place['line']}" in demo.text
    assert demo.stdout.startswith(b"epoch 1:")
    assert b"stepscope" not in demo.stdout


def test_the_report_fits_a_screen(demo: Recorded) -> None:
    assert len(demo.text.splitlines()) <= 50, demo.text


def test_without_permission_to_attach_the_line_is_still_named(tmp_path: Path) -> None:
    recorded = record(
        tmp_path / "run",
        [PYTHON, str(SLEEPY), "--slow"],
        options=["--no-window", "--max-steps", "40"],
        env={"PYTHONPATH": os.pathsep.join([str(SCRIPTS / "undumpable"), os.environ["PYTHONPATH"]])},
        prefix=[PYTHON, str(SCRIPTS / "unprivileged.py")],
    )
    report, first = recorded.report, first_of_the_script(recorded)
    assert first["rule"] == "input.loader_bound"
    place = first["where"][0]
    assert (Path(place["file"]), place["line"]) == (SLEEPY, line_of(SLEEPY, "time.sleep(PAUSE_S)"))
    assert report["views"]["stacks"]["source"] == "agent"
    notes = " ".join(note["text"] for note in report["quality"]["notes"])
    assert "py-spy" in notes


def test_an_option_decides_the_workers(demo: Recorded, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("libcst")
    before = DEMO.read_bytes()
    assert call("fix", demo.folder, "--finding", first_of_the_script(demo)["id"], "--apply") == 1
    assert "the option --workers of the command line decides it" in capfd.readouterr().err
    assert DEMO.read_bytes() == before


GPT = EXAMPLES / "naive_gpt" / "train.py"


def test_first_finding_is_the_loop(naive_gpt: Recorded) -> None:
    assert naive_gpt.status == 0, naive_gpt.text
    first = first_of_the_script(naive_gpt)
    assert first["rule"] == "host.per_item_loop"
    place = first["where"][0]
    assert Path(place["file"]).resolve() == GPT
    assert place["line"] in lines_of_function(GPT, "looped_loss")
    assert abs(place["line"] - line_of(GPT, "loss = loss + F.cross_entropy")) <= 1


def test_calls_per_step_and_dimension(naive_gpt: Recorded) -> None:
    loops = [loop for loop in naive_gpt.report["views"]["loops"] if "cross_entropy" in loop["callee"]]
    assert loops, naive_gpt.report["views"]["loops"]
    assert loops[0]["calls_per_step"] == pytest.approx(1024, rel=0.02)
    # of the logits, or of what a layer makes of them
    assert loops[0]["dimension"].startswith(("1024 = dims 0 * 1 of (4, 256", "1024 = dim 0 of (1024, 64)"))
    assert re.search(r"1,?024", naive_gpt.text)


FLOW = EXAMPLES / "lattice_qr" / "flow.py"
LATTICE = "examples/lattice_qr/train.py"


@pytest.fixture(scope="module")
def lattice(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The example as its README starts it, but for the window."""
    folder = tmp_path_factory.mktemp("qr") / "run"
    return record(folder, [PYTHON, LATTICE, "--steps", "12"], options=SHORT_WINDOW, cwd=EXAMPLES.parent)


def hotspots(run: Path, *options: str) -> list[dict[str, object]]:
    done = command("hotspots", str(run), "--library", "flow", "--json", "-", *options)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, object]] = json.loads(done.stdout)["rows"]
    return rows


def test_the_first_row_is_the_decomposition(lattice: Recorded) -> None:
    assert lattice.status == 0, lattice.text
    # on a busy machine the end of the window, where no Python runs, may take longer
    first = next(row for row in hotspots(lattice.folder) if row["library_function_name"] is not None)
    assert first["library_function_name"] == "haar_qr"
    assert Path(str(first["library_function_path"])).resolve() == FLOW
    assert first["library_function_line"] == line_of(FLOW, "torch.linalg.qr(")


@pytest.mark.thorough
def test_both_ways_train_on_the_same_fields(lattice: Recorded) -> None:
    fast = plain([PYTHON, LATTICE, "--steps", "5", "--gram-schmidt"], cwd=EXAMPLES.parent)
    assert fast.returncode == 0, fast.stderr.decode()
    assert fast.stdout.startswith(b"step 5: loss ")
    assert lattice.stdout.startswith(fast.stdout)


def test_the_top_line_stands_on_the_first_page_and_the_operator_behind_it_is_replayed(lattice: Recorded) -> None:
    line = f"flow.py:{line_of(FLOW, 'torch.linalg.qr(')}"
    assert line in lattice.text
    done = command("replay", str(lattice.folder), "--op", "linalg_qr", "--devices", "cpu,cuda:99", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    assert "Replayed alone: aten::linalg_qr" in done.stdout
    assert "not on this machine" in done.stdout
    shown = command("analyze", str(lattice.folder), "--json", "-", "--force")
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


CHILDREN = SCRIPTS / "children.py"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the processes have to share a core")
def test_processes_of_the_script_that_hold_the_core_are_named(tmp_path: Path) -> None:
    done = record(tmp_path / "run", [PYTHON, str(CHILDREN), "2.5"], options=["--no-window"])
    assert done.status == 0
    (found,) = (row for row in done.findings if row["rule"] == "system.children_hold_cores")
    lines = {place["line"] for place in found["where"]}
    assert lines == {line_of(CHILDREN, "for _ in range(2)"), line_of(CHILDREN, "shell = subprocess")}
    named = " ".join(row["metric"] for row in found["evidence"])
    assert "(2 processes)" in named
    assert "while [ $i -lt" in named
    assert "Nothing worth fixing" not in done.text


NEEDLESS = SCRIPTS / "needless_work.py"


@pytest.fixture(scope="module")
def needless(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("needless") / "run", [PYTHON, str(NEEDLESS)], options=["--rate", "50"])


def finding(needless: Recorded, rule: str) -> dict[str, Any]:
    assert needless.status == 0, needless.text
    (found,) = [one for one in needless.findings if one["rule"] == rule]
    assert Path(found["where"][0]["file"]) == NEEDLESS
    return dict(found)


def test_the_validation_is_told_with_its_line(needless: Recorded) -> None:
    found = finding(needless, "host.evaluation_in_step")
    place = found["where"][0]
    assert place["function"] == "train"
    # the line where samples tell it, else the function's first
    assert place["line"] in (line_of(NEEDLESS, "scores = first(held)"), line_of(NEEDLESS, "def train"))
    assert "no_grad" in found["fix"]
    assert {one["metric"]: one["value"] for one in found["evidence"]}["calls per step that no backward pass reads"] == 1


@pytest.mark.thorough
def test_the_copy_is_told_with_its_line(needless: Recorded) -> None:
    found = finding(needless, "host.model_copied_in_step")
    assert found["where"][0]["line"] == line_of(NEEDLESS, "copy.deepcopy(model)")


def test_what_is_computed_again_is_told_with_its_line(needless: Recorded) -> None:
    found = finding(needless, "compute.recompute")
    assert found["where"][0]["line"] in (line_of(NEEDLESS, "checkpoint(first, inputs"), line_of(NEEDLESS, "def train"))
    assert found["confidence"] != "high"  # nothing tells how much memory is free
