"""Growing memory in real processes: a script that keeps its losses with their graph, and the same with numbers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.model import Risk
from tests.integration.harness import PYTHON, TIMEOUT_S, environment, finish, started

pytestmark = [pytest.mark.torch, pytest.mark.process]

SCRIPT = """\
import sys, time
import torch
from plain_sgd import PlainSGD

torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
optimizer = PlainSGD(model.parameters(), lr=0.01)
leaks = sys.argv[1] == "leak"
losses = []


def train(batch):
    scaled = batch * 2.0
    loss = model(scaled).square().mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=leaks)
    optimizer.step()
    losses.append(loss if leaks else loss.item())


def run(steps, pause):
    for _ in range(steps):
        train(torch.ones(512, 256))
        time.sleep(pause)


"""
RECORDED = SCRIPT + "run(320, 0.04)\n"
TRACED = SCRIPT + (
    "from torch.profiler import profile, ProfilerActivity, schedule\n"
    "with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True,\n"
    "             schedule=schedule(wait=1, warmup=1, active=6),\n"
    "             on_trace_ready=lambda prof: prof.export_chrome_trace(sys.argv[2])) as prof:\n"
    "    for _ in range(8):\n"
    "        run(1, 0)\n"
    "        prof.step()\n"
)
TRAIN_LINE = SCRIPT.splitlines().index("def train(batch):") + 1
MODES = ("leak", "clean")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """report.json of both, recorded side by side: they mostly sleep, for the readings need ten seconds."""
    folder = tmp_path_factory.mktemp("growth")
    (folder / "train.py").write_text(RECORDED)
    lines = {mode: [PYTHON, "train.py", mode] for mode in MODES}
    with (
        started(folder / "leak", lines["leak"], options=["--no-window"]) as leak,
        started(folder / "clean", lines["clean"], options=["--no-window"]) as clean,
    ):
        done = {"leak": finish(leak, folder / "leak"), "clean": finish(clean, folder / "clean")}
    assert {mode: one.status for mode, one in done.items()} == dict.fromkeys(MODES, 0), done
    return {mode: one.report for mode, one in done.items()}


def traced(folder: Path, mode: str) -> tuple[Risk, ...]:
    (folder / "train.py").write_text(TRACED)
    trace = folder / f"{mode}.pt.trace.json"
    line = [PYTHON, "train.py", mode, str(trace)]
    subprocess.run(line, cwd=folder, env=environment(), check=True, timeout=TIMEOUT_S, capture_output=True)
    assert json.loads(trace.read_text())["traceEvents"]
    return stepscope.open_run(trace).diagnosis.risks


@pytest.mark.thorough
def test_losses_with_their_graph_grow(reports: dict[str, dict[str, Any]]) -> None:
    (risk,) = reports["leak"]["risks"]
    assert risk["rule"] == "memory.growth"
    per_step = next(row["value"] for row in risk["evidence"] if row["metric"] == "growth per step")
    # the batch times 2 and the model's output live on: half a MiB each (autograd keeps both); on a busy machine the
    # allocator takes memory from the system in other portions
    assert per_step == pytest.approx(1 << 20, rel=0.5)


@pytest.mark.thorough
def test_numbers_in_their_place_do_not(reports: dict[str, dict[str, Any]]) -> None:
    assert reports["clean"]["risks"] == []
    assert reports["clean"]["views"]["memory_losses"]["logged"]


def test_a_trace_with_allocations_names_the_function(tmp_path: Path) -> None:
    (risk,) = traced(tmp_path, "leak")
    place = risk.where[0]  # where only the trace is at hand, a function is named by the line it begins at
    assert (Path(place.file).name, place.function, place.line) == ("train.py", "train", TRAIN_LINE)
    assert "aten::" in next(row.metric for row in risk.evidence if row.metric.startswith("still there"))


@pytest.mark.thorough
def test_a_trace_without_a_leak_names_nothing(tmp_path: Path) -> None:
    assert traced(tmp_path, "clean") == ()
