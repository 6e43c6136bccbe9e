"""A real training process with more threads than it needs: what the scheduler counted of them reaches the analysis."""

from __future__ import annotations

import json
import shutil

import pytest

from stepscope.analyze import analyze
from stepscope.model import Analysis
from stepscope.read import read_run
from stepscope.tables import build
from tests.integration.harness import PYTHON, SCRIPTS, Recorded, json_lines
from tests.integration.harness import record as recorded_by

pytestmark = [pytest.mark.process, pytest.mark.torch]

THREADS = 8
SCRIPT = f"""
import os, sys, time
import torch
from plain_sgd import PlainSGD
torch.set_num_threads({THREADS})
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
optimizer = PlainSGD(model.parameters(), lr=1e-3)
inputs = torch.randn(256, 256)
with open(sys.argv[1], "rb") as data:
    end = time.monotonic() + 4
    while time.monotonic() < end:
        data.seek(0)
        data.read()
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
COUNTERS = ("main_cpu_ns", "main_timeslices", "run_delay_ns", "pool_cpu_ns", "pool_delay_ns", "pool_timeslices")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("threads")
    (folder / "train.py").write_text(SCRIPT)
    shutil.copy(SCRIPTS / "plain_sgd.py", folder)
    (folder / "data.bin").write_bytes(bytes(1 << 20))
    line = [PYTHON, "train.py", str(folder / "data.bin")]
    done = recorded_by(folder / "run", line, options=["--no-window"], cwd=folder)
    assert done.status == 0, done.text
    return done


@pytest.fixture(scope="module")
def analysis(run: Recorded) -> Analysis:
    return analyze(build(read_run(run.folder)))


def test_every_counter_of_the_main_thread_and_its_pool_is_there_and_grows(run: Recorded) -> None:
    rank = json.loads((run.folder / "rank-0" / "rank.json").read_text())
    assert rank["threads"] == THREADS
    (system,) = run.folder.glob("host-*/system.jsonl")
    values: dict[str, list[float]] = {}
    for row in json_lines(system):
        for name, _, value, pid, _ in row["metrics"]:
            if name in ("busy_cores", "stolen_cores") or pid == rank["pid"]:
                values.setdefault(name, []).append(value)
    for name in COUNTERS:
        assert values[name] == sorted(values[name]), name
        assert values[name][-1] > values[name][0], name
    assert {"processor", "voluntary_switches", "requested_bytes", "busy_cores", "stolen_cores"} <= set(values)
