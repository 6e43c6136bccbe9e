"""Recorded runs of several hosts for tests: every rank with a journal, a profiled window, stacks, telemetry."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.builders import MS, T0, step_rows
from tests.gpu_traces import PROPERTIES, host, kernel, launch
from tests.run_folders import make_run_folder, metrics_event

STEP_MS = 10
STEPS, WINDOW = 30, range(20, 24)
WORLD = 4
MESSAGE = 4096  # elements of float32
GEMM_US, COLLECTIVE_US = 3000, 1000
CLOCK_SET_AT = 7  # second of telemetry in which the clock had been set, by 5 ms


def make_job(
    tmp_path: Path, hosts: Mapping[str, Sequence[int]] | None = None, *, more: Sequence[dict[str, Any]] = (), **own: Any
) -> Path:
    """A run of two ranks on each of the hosts a and b, or of the ranks given for each; `own` as in `make_run_folder`.

    Args:
        more: events of each trace beside the usual ones.
    """
    run = tmp_path / "run"
    for name, ranks in (hosts or {"a": (0, 1), "b": (2, 3)}).items():
        for rank in ranks:
            pid = 100 + rank
            steps = step_rows(STEPS)
            for step in WINDOW:
                steps[step]["in_window"] = True
            given: dict[str, Any] = {
                "steps": steps,
                "events": events(),
                "stacks_raw": stacks(pid) if rank == ranks[0] else None,
                "system": [reading(second, pid) for second in range(12)],
                "traces": {"trace-0.pt.trace.json.gz": trace(rank, more)},
            }
            make_run_folder(tmp_path, host=name, rank=rank, pid=pid, **{**given, **own})
    return run


def events() -> list[dict[str, Any]]:
    """Of step 3 a long and a short collection, of step 5 a checkpoint; losses, of which one is not finite."""
    at = T0 + 3 * STEP_MS * MS
    place = {"file": "/home/user/project/train.py", "line": 8, "function": "main"}
    times = [T0 + number * STEP_MS * MS + MS for number in range(STEPS)]
    losses = [1.0 + number for number in range(STEPS - 1)] + [float("nan")]
    return [
        {"kind": "gc", "time_ns": at, "duration_ns": 12 * MS, "step": 3, "generation": 2, "collected": 7, **place},
        {"kind": "gc", "time_ns": at + 15 * MS, "duration_ns": 2 * MS, "step": 3, "generation": 0, **place},
        {"kind": "save", "time_ns": at + 20 * MS, "duration_ns": 3 * MS, "step": 5, "path": "/out/model.pt", **place},
        metrics_event(("train/loss", "log", times, losses)),
    ]


def stacks(pid: int) -> str:
    """A segment of five seconds in which the main thread stood at line 5 of the script nine times out of ten."""
    frames = "<module> (/home/user/project/train.py:20);main (/home/user/project/train.py:{})"
    head = f'process {pid}:"python train.py";thread (0x1): MainThread'
    return f"{head};{frames.format(5)} 90\n{head};{frames.format(9)} 10\n"


def reading(second: int, pid: int) -> dict[str, Any]:
    """Telemetry: one device that the process alone computes on."""
    return {
        "time_ns": T0 + second * 1000 * MS,
        "metrics": [
            ["busy_cores", "cores", 1.5 + second % 2, None, None],
            ["gpu_sm_clock_mhz", "MHz", 1000 + second, None, f"gpu:{pid - 100}"],
            ["gpu_process", "count", 1.0, pid, f"gpu:{pid - 100}"],
            ["rss_bytes", "bytes", 2**30, pid, None],
            ["cpu_pct", "%", 50, 99999, None],
            ["clock_set_ns", "ns", 0 if second < CLOCK_SET_AT else 5 * MS, None, None],
        ],
    }


def trace(rank: int, more: Sequence[dict[str, Any]] = ()) -> bytes:
    """A gzipped trace of the window: in each step a product and an all-reduce of all ranks behind it."""
    group = {
        "Collective name": "allreduce",
        "In msg nelems": MESSAGE,
        "Out msg nelems": MESSAGE,
        "dtype": "Float",
        "Group size": WORLD,
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(range(WORLD))),
    }
    shown = []
    for step in WINDOW:
        at, first = step * STEP_MS * 1000, step * 10
        shown += [
            host("aten::mm", at + 1500, 100),
            launch(at + 1510, first),
            kernel("ampere_sgemm_128x64", at + 2000, GEMM_US, first),
            host("record_param_comms", at + 2000, 60, **group, Seq=step),
            launch(at + 2010, first + 1),
            kernel("ncclDevKernel_AllReduce_Sum_f32", at + 5500, COLLECTIVE_US, first + 1, stream=8),
            host("aten::add", at + 9000, 900),
        ]
    document = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": T0,
        "deviceProperties": [PROPERTIES],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": WORLD},
        "traceEvents": [*shown, *more],
    }
    return gzip.compress(json.dumps(document).encode(), mtime=0)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
