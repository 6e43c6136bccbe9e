"""Runs and traces for the dashboard's tests, made of plain values; `conftest` names them and makes each once."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from stepscope.model import STEP_COLUMNS
from tests import gpu_traces
from tests.builders import MS, PID, Row, full_steps, step_rows
from tests.run_folders import make_run_folder, metrics_event

START = gpu_traces.BASE_NS + gpu_traces.STEP_US * 1000  # when the first step of `gpu_traces` begins
PROJECT = "/home/user/project"
STALL = 40  # the step of `small` that is ten times as long
EVIL = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "{{constructor}} {red|rich} text",
    "\x1b]0;owned\x07\x1b[31mred",
    "\u202egnp.exe \u2028 javascript:alert(1)",
    "../../etc/passwd",
    '=HYPERLINK("http://example.invalid")',
)


def small(parent: Path) -> Path:
    """Two ranks of 120 steps that wait for their loader, the second slower; stacks, telemetry, a window of a GPU."""
    return _recording(parent, "small", trace=_gpu_trace_bytes(parent))


def fuzzed(parent: Path) -> Path:
    """A recording in which everything that has a name has a hostile one."""
    more = [
        gpu_traces.host(name, 1900 + 5 * i, 4, **{"External id": 900 + i, "Input Dims": [[name]]})
        for i, name in enumerate(EVIL)
    ]
    more += [gpu_traces.host(name, 1940 + 5 * i, 3, "user_annotation") for i, name in enumerate(EVIL)]
    more += [gpu_traces.kernel(name, 1850 + 5 * i, 4, 950 + i) for i, name in enumerate(EVIL)]
    return _recording(
        parent,
        "fuzzed",
        trace=_gpu_trace_bytes(parent, more=more),
        manifest={"name": EVIL[0], "command": ["python", *EVIL], "tags": list(EVIL), "cwd": EVIL[1]},
        events=[{"kind": "region", "name": name, "time_ns": START, "duration_ns": MS, "step": 4} for name in EVIL]
        + [
            metrics_event(*((name, name, [START, START + MS], [1.0, math.nan]) for name in (*EVIL, f"watch/{EVIL[0]}")))
        ],
        functions=EVIL,
    )


def empty(parent: Path) -> Path:
    """A run that ended before its first step."""
    return make_run_folder(parent, name="empty", steps=[], agents=[], events=[])


def link(made: Path, name: Path) -> None:
    """Show what lies elsewhere in the folder of runs, under a name of ours."""
    if not name.is_symlink():
        name.symlink_to(made, target_is_directory=made.is_dir())


def gpu_trace(path: Path) -> Path:
    """Six steps of a device, as torch.profiler writes them."""
    return gpu_traces.write(path, steps=6)


def cpu_trace(path: Path) -> Path:
    """Six steps of a training on the CPU alone, with Python frames and memory."""
    events = [event for number in range(1, 7) for event in _cpu_step(number)]
    document = {"schemaVersion": 1, "baseTimeNanoseconds": gpu_traces.BASE_NS, "traceEvents": events}
    path.write_text(json.dumps(document))
    return path


def _cpu_step(number: int) -> list[dict[str, Any]]:
    at, first = number * gpu_traces.STEP_US, number * 10
    host = gpu_traces.host
    return [
        host(f"ProfilerStep#{number}", at, 990, "user_annotation"),
        host(f"{PROJECT}/train.py(7): train", at, 980, "python_function", **{"Python id": number}),
        host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 1, 300, "user_annotation"),
        host("aten::linear", at + 310, 200, **{"External id": first, "Input Dims": [[64, 32], [32, 8]]}),
        host("aten::addmm", at + 320, 150, **{"External id": first + 1, "Input Dims": [[64, 32], [32, 8]]}),
        host("autograd::engine::evaluate_function: AddmmBackward0", at + 520, 200, **{"External id": first + 2}),
        host("aten::mm", at + 530, 150, **{"External id": first + 3, "Input Dims": [[64, 32], [32, 8]]}),
        host("Optimizer.step#SGD.step", at + 740, 100, "user_annotation"),
    ]


def _gpu_trace_bytes(parent: Path, **options: Any) -> bytes:
    scratch = parent.parent / "scratch.pt.trace.json.gz"
    data = gpu_traces.write(scratch, steps=4, **options).read_bytes()
    scratch.unlink()
    return data


def _recording(
    parent: Path,
    name: str,
    *,
    trace: bytes,
    manifest: Row | None = None,
    events: Sequence[Row] = (),
    functions: Sequence[str] = ("__getitem__", "decode"),
) -> Path:
    facts = {"started_ns": START - 1000 * MS, "ended_ns": START + 4000 * MS, "name": name, **(manifest or {})}
    file = "trace-0.pt.trace.json.gz"
    window = {"kind": "window", "trace": file, "first_step": 0, "steps": 4, "status": "kept", "step": 4}
    window |= {"time_ns": START, "start_ns": START}
    window |= {f"{part}_duration_ns": MS for part in ("start", "stop", "export")}
    loader = {"kind": "loader", "time_ns": START, "step": 0, "num_workers": 0, "batch_size": 8, "id": 1, "epoch": 0}
    lead = {
        "traces": {file: trace},
        "stacks_raw": _stacks(functions),
        "stacks_index": [{"start_ns": START, "end_ns": START + 4000 * MS}],
        "system": _telemetry(),
    }
    for rank in (0, 1):
        make_run_folder(
            parent,
            name=name,
            rank=rank,
            pid=PID + rank,
            steps=_steps(rank),
            events=[loader] if rank else [window, loader, *events],
            manifest={**facts, "user_roots": [PROJECT]},
            rank_json={"world_size": 2, "device": "cuda", "started_ns": START - 900 * MS},
            **({} if rank else lead),
        )
    return parent / name


def _steps(rank: int) -> list[dict[str, Any]]:
    window = step_rows(4, start_ns=START, data_wait_ms=0.2, forward_ms=0.8, backward_ms=0, optimizer_ms=0, other_ms=0)
    rows = [{**row, "in_window": True} for row in window] if rank == 0 else []
    at = START + 10 * MS
    for number in range(len(rows), 120):
        factor = 10 if number == STALL else 1
        rows += step_rows(1, start_ns=at, first_step=number, data_wait_ms=15 * factor, backward_ms=4 + 2 * rank)
        at += rows[-1]["wall_ns"]
    return rows


def _stacks(functions: Sequence[str]) -> str:
    lines = []
    for number, function in enumerate(functions):
        frames = f"<module> ({PROJECT}/train.py:70);main ({PROJECT}/train.py:64)"
        frames += ";_BaseDataLoaderIter.__next__ (/v/torch/utils/data/dataloader.py:700)"
        frames += f";{function.replace(';', ',')} ({PROJECT}/data.py:{20 + number})"
        lines.append(f'process {PID}:"python train.py";thread ({PID}): MainThread;{frames} {60 - number}\n')
    return "".join(line for line in lines if line.count("\n") == 1)


def _telemetry() -> list[dict[str, Any]]:
    def metrics(second: int) -> list[list[Any]]:
        of_process = [
            ["cpu_pct", "pct", 95.0 + second, PID, None],
            ["rss_bytes", "bytes", 2e9 + second * 1e7, PID, None],
        ]
        gpu = [["gpu_util_pct", "pct", 40.0 + second, None, "gpu:0"], ["gpu_memory_bytes", "bytes", 8e9, None, "gpu:0"]]
        return [*of_process, ["busy_cores", "cores", 1.5, None, None], *gpu]

    return [{"time_ns": START + second * 1000 * MS, "metrics": metrics(second)} for second in range(5)]


class Growing:
    """A run that goes on: its launcher is a process that lives, and steps come when `add` is called."""

    def __init__(self, parent: Path, name: str = "growing", *, steps: int = 30) -> None:
        # stands for the launcher: started before the run, it does nothing, and can be killed
        self._launcher: psutil.Popen | None = psutil.Popen(["sleep", "3600"])
        host, start = socket.gethostname(), time.time_ns()
        self._next = 0
        self._at = start + 100 * MS
        facts = {"started_ns": start, "ended_ns": None, "launcher_pid": self._launcher.pid}
        facts["exit"] = {"status": None, "signal": None, "shell_status": None}
        self.folder = make_run_folder(parent, name=name, steps=[], manifest=facts, host=host)
        self.add(steps)

    def add(self, count: int, *, wall_ms: float = 10) -> None:
        """`count` steps more, in one write, as the agent does."""
        made = step_rows(count, other_ms=wall_ms - 9, start_ns=self._at, first_step=self._next)
        rows = full_steps({**row, "first_batch": row["step"] == 0} for row in made)
        lines = [[int(v) if isinstance(v, bool) else v for v in (row[name] for name in STEP_COLUMNS)] for row in rows]
        with (self.folder / "rank-0" / "steps.jsonl").open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._next += count
        self._at = rows[-1]["start_ns"] + rows[-1]["wall_ns"]

    def end(self, status: int = 0) -> None:
        """The command ended with `status`, and so did the launcher."""
        path = next(self.folder.glob("host-*/manifest.json"))
        ended = {"status": status, "signal": None, "shell_status": status}
        values = {**json.loads(path.read_text()), "ended_ns": time.time_ns(), "exit": ended}
        replacement = path.with_suffix(".new")
        replacement.write_text(json.dumps(values))
        replacement.replace(path)
        self.close()

    def close(self) -> None:
        """The launcher is gone; without `end`, nothing says how the command ended."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
            self._launcher = None
