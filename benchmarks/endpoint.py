"""What it costs to be asked: `run --metrics-port`, a page a second beside a small training that goes on.

    python benchmarks/endpoint.py [--requests 500]

Limits: an answer in 20 ms, and 0.1 % of a core for a request a second. The processor time is that of the process beside
the run, less what it takes for as long without requests. The result goes into RESULTS.md; keep the machine idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
from results import RESULTS, machine, put_between_markers

TOKEN = "of-the-benchmark"
QUIET_S = 10.0
LIMIT_MS, LIMIT_CPU_MS = 20.0, 1.0  # of an answer; of a core, a request a second
TRAINING = """
import sys, time, torch
data = torch.utils.data.TensorDataset(torch.randn(400_000, 32), torch.randint(0, 8, (400_000,)))
model = torch.nn.Linear(32, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for inputs, labels in torch.utils.data.DataLoader(data, batch_size=4):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    time.sleep(0.005)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAINING)
        line = [sys.executable, "-m", "stepscope", "run", "--no-report", "--metrics-port", "0", "--out", "run", "--"]
        environment = {name: text for name, text in os.environ.items() if name != "STEPSCOPE_METRICS_TOKEN"}
        run = subprocess.Popen(
            [*line, sys.executable, "train.py"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
        )
        assert run.stderr is not None
        address = run.stderr.readline().rpartition(" ")[2].strip()
        try:
            found = measure(run.pid, address, asked.requests)
        finally:
            for child in psutil.Process(run.pid).children(recursive=True):
                child.terminate()
            run.wait(30)
    about = ", ".join(f"{key} {value}" for key, value in machine("torch", "stepscope").items())
    text = f"""A page a second beside the run, asked {asked.requests} times in turn ({about}):
{found["cpu_ms"]:.2f} ms of a core for a request (limit {LIMIT_CPU_MS:g}, 0.1 % of a core at one a second), an answer
of {found["bytes"]:,} bytes in {found["median_ms"]:.1f} ms, the slowest of a hundred in {found["p99_ms"]:.1f} ms
(limit {LIMIT_MS:g}). Without requests the process takes {found["quiet_pct"]:.2f} % of a core, with stack samples."""
    put_between_markers(RESULTS, "endpoint", text)
    print(json.dumps(found, indent=1))


def measure(pid: int, address: str, requests: int) -> dict[str, float]:
    """Processor time and latency of requests to the process beside the run."""
    deadline = time.monotonic() + 60
    beside = None
    while beside is None and time.monotonic() < deadline:
        time.sleep(0.5)
        children = psutil.Process(pid).children()
        beside = next((one for one in children if "stepscope.record.host.telemetry" in one.cmdline()), None)
        if beside is not None and b"stepscope_step_ms" not in ask(address):
            beside = None
    assert beside is not None, "no step was told in a minute"
    quiet_s = busy_s(beside, lambda: time.sleep(QUIET_S)) / QUIET_S
    times: list[float] = []
    size = 0

    def all_of_them() -> None:
        nonlocal size
        for _ in range(requests):
            began = time.perf_counter()
            size = len(ask(address))
            times.append(time.perf_counter() - began)
            time.sleep(0.02)

    began = time.monotonic()
    spent_s = busy_s(beside, all_of_them)
    spent_s -= quiet_s * (time.monotonic() - began)
    return {
        "cpu_ms": spent_s / requests * 1e3,
        "median_ms": statistics.median(times) * 1e3,
        "p99_ms": statistics.quantiles(times, n=100)[98] * 1e3,
        "bytes": size,
        "quiet_pct": quiet_s * 100,
    }


def ask(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=20) as answer:
        found: bytes = answer.read()
    return found


def busy_s(process: psutil.Process, do: Callable[[], None]) -> float:
    """Processor time of a process and of the samplers that it has waited for, while `do` is done."""

    def spent() -> float:
        times = process.cpu_times()
        return times.user + times.system

    before = spent()
    do()
    return spent() - before


if __name__ == "__main__":
    main()
