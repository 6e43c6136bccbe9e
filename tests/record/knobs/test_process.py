"""Knobs of the process: threads, CPUs and the garbage collector, each looked at from inside a real training process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from .recorded import recorded
from .test_loader import COMMON

pytestmark = [pytest.mark.process, pytest.mark.torch]

CPUS = sorted(os.sched_getaffinity(0))

WITHOUT_WORKERS = (
    COMMON
    + """
import gc, threading
torch.set_num_threads(7)
torch.set_num_interop_threads(5)
loader = DataLoader(Rows(), batch_size=1)
seen = [train(loader) for epoch in range(3)]
masks = []
thread = threading.Thread(target=lambda: masks.append(sorted(os.sched_getaffinity(0))))
thread.start()
thread.join()
print(json.dumps({
    "threads": torch.get_num_threads(),
    "interop": torch.get_num_interop_threads(),
    "cpus": sorted(os.sched_getaffinity(0)),
    "masks": masks,
    "frozen": gc.get_freeze_count(),
    "enabled": gc.isenabled(),
}))
sys.exit(9)
"""
)


def test_threads_affinity_and_a_frozen_collector(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        WITHOUT_WORKERS,
        "torch.num_threads=3",
        "torch.num_interop_threads=2",
        f"cpu.affinity={CPUS[0]}",
        "gc=freeze",
        "cpu.worker_affinity=16000",
    )
    assert (run.status, run.stderr) == (9, "")
    printed = run.printed()
    assert (printed["threads"], printed["interop"]) == (3, 2)
    assert (printed["cpus"], printed["masks"]) == ([CPUS[0]], [[CPUS[0]]])
    assert printed["frozen"] > 1000
    assert printed["enabled"]
    lines = WITHOUT_WORKERS.splitlines()
    threads, interop = run.knob("torch.num_threads"), run.knob("torch.num_interop_threads")
    assert (threads["applied"], threads["observed"]) == (True, "3, against the script's own set_num_threads")
    assert (interop["applied"], interop["observed"][0]) == (True, "2")
    assert lines[threads["line"] - 1] == "torch.set_num_threads(7)"
    affinity, collector = run.knob("cpu.affinity"), run.knob("gc")
    assert (affinity["applied"], affinity["observed"]) == (True, str(CPUS[0]))
    assert collector["applied"]
    assert int(collector["observed"].split()[-3]) > 1000
    columns, *steps = map(json.loads, (run.run / "rank-0" / "steps.jsonl").read_text().splitlines())
    started = columns["columns"].index("start_ns")
    assert 5 <= sum(step[started] < collector["time_ns"] for step in steps) <= 12
    refused = run.knob("cpu.worker_affinity")
    assert refused["applied"] is False
    assert "may use CPUs" in refused["reason"]


WITH_WORKERS = (
    COMMON
    + """
import gc
loader = DataLoader(Rows(), batch_size=1, num_workers=2, pin_memory=False)
seen = [train(loader) for epoch in range(3)]
if sys.argv[1:] == ["again"]:
    gc.enable()
print(json.dumps({"seen": seen[0], "enabled": gc.isenabled(), "threshold": gc.get_threshold()[0]}))
"""
)


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_workers_have_cpus_of_their_own_and_one_thread(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        WITH_WORKERS,
        f"cpu.worker_affinity={CPUS[1]}",
        f"cpu.affinity={CPUS[0]}",
        "torch.num_threads=2",
        "gc=off",
        "loader.persistent_workers=true",
        arguments=("again",),
        environ={"PYTHONWARNINGS": "ignore"},  # torch counts the CPUs of the main process when it looks at workers
    )
    assert (run.status, run.stderr) == (0, "")
    seen = run.printed()["seen"]
    assert (seen["workers"], seen["threads"]) == ([0, 1], [1])
    assert (seen["first_cpu"], seen["cpus"]) == ([CPUS[1]], [1])
    workers = run.knob("cpu.worker_affinity")
    assert (workers["applied"], workers["observed"]) == (True, str(CPUS[1]))
    assert run.knob("cpu.affinity")["observed"] == str(CPUS[0])
    assert run.knob("torch.num_threads")["observed"] == "2"
    applied, undone = run.knobs("gc")
    assert (applied["applied"], applied["observed"].split(",")[0]) == (True, "off")
    assert (undone["applied"], undone["observed"].split(",")[0]) == (False, "on")


def test_workers_keep_the_cpus_of_the_process(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        WITH_WORKERS,
        f"cpu.affinity={CPUS[0]}",
        "gc=50000",
        "torch.num_interop_threads=1",
        "loader.pin_memory=false",
    )
    assert (run.status, run.printed()["threshold"]) == (0, 50000)
    assert run.printed()["seen"]["cpus"] == [len(CPUS)]
    assert run.knob("gc")["observed"].split(",")[1] == " threshold 50000"
    assert run.knob("cpu.affinity")["applied"]
    assert run.knob("torch.num_interop_threads")["observed"] == "1"
    assert run.knob("loader.pin_memory")["observed"] == "false"


NOTHING = """
import time, torch
from plain_sgd import PlainSGD
model = torch.nn.Linear(2, 1)
optimizer = PlainSGD(model.parameters(), lr=0.1)
for step in range(3000):
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
"""


def test_a_knob_without_an_occasion_says_so_before_the_last_step_allowed_ends_the_run(tmp_path: Path) -> None:
    knobs = ("loader.num_workers=2", "gc=off", f"cpu.worker_affinity={CPUS[0]}")
    run = recorded(tmp_path, NOTHING, *knobs, options=("--max-steps", "3"))
    assert (run.status, run.stdout) == (130, "")
    (limit,) = [event for event in run.events("exit") if event["reason"] == "max_steps"]
    assert all(row["time_ns"] <= limit["time_ns"] for row in run.events("knob"))
    assert len(run.events("knob")) == 3
    assert run.knob("loader.num_workers")["reason"] == "the script made no DataLoader"
    assert "steady" in run.knob("gc")["reason"]
    assert not any(row["applied"] for row in run.events("knob"))
