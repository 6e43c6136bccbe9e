"""Small traces for tests of the export, and strict ways to read what came out."""

from __future__ import annotations

import gzip
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from stepscope import cli
from stepscope.model import STEP_COLUMNS

SHARED = Path(__file__).parents[2] / ".." / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the folder of recorded traces is not here")
BASE_NS = 1_790_857_026_000_000_000
HOST = 4242  # the process of the training
GPU = 0
STEP_US = 100
LAG_US = 70  # a kernel runs that much after its launch


def slice_(name: str, ts: Any, dur: Any, cat: str = "cpu_op", **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": HOST, "ts": ts, "dur": dur, **more}


def step_events(number: int, at_us: float) -> list[dict[str, Any]]:
    """A step of 100 us from `at_us`: an operator that launches a kernel, which runs 70 us later for 20 us."""
    correlation = 10 + number
    on_gpu = {"correlation": correlation, "device": 0, "stream": 7}
    launch, kernel = at_us + 60.125, at_us + 60.125 + LAG_US
    flow = {"id": correlation, "cat": "ac2g", "name": "ac2g"}
    return [
        slice_(f"ProfilerStep#{number}", at_us, STEP_US - 0.5, "user_annotation"),
        slice_("aten::mm", at_us + 50.25, 20.001, args={"External id": number, "Sequence number": number}),
        slice_("cudaLaunchKernel", launch, 5.5, "cuda_runtime", args={"correlation": correlation}),
        {"ph": "s", **flow, "pid": HOST, "tid": HOST, "ts": launch},
        slice_("gemm", kernel, 20, "kernel", pid=GPU, tid=7, args=on_gpu),
        {"ph": "f", "bp": "e", **flow, "pid": GPU, "tid": 7, "ts": kernel},
        {
            "ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": HOST, "tid": HOST,
            "ts": at_us + 51, "args": {"Bytes": 64 * number, "Device Type": 1, "Device Id": 0},
        },
    ]  # fmt: skip


def names() -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "ts": 1, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": HOST, "tid": 0, "ts": 1, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "thread_name", "pid": HOST, "tid": HOST, "ts": 1, "args": {"name": "thread main"}},
        {"ph": "M", "name": "process_name", "pid": GPU, "tid": 0, "ts": 1, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": GPU, "tid": 0, "ts": 1, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "process_name", "pid": 3, "tid": 0, "ts": 1, "args": {"name": "unused"}},
        {"ph": "M", "name": "environment", "pid": HOST, "tid": 0, "ts": 1, "args": {"name": "TOKEN=hunter2"}},
    ]


def trace(
    *, rank: int | None = None, steps: range = range(5, 9), base_ns: int = BASE_NS, shift_us: float = 1000.0
) -> Any:
    """Steps one after the other; the metadata carries what must never be copied."""
    events = [event for number in steps for event in step_events(number, shift_us + STEP_US * (number - steps.start))]
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 2, "backend": "nccl"}}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Card", "numSms": 80}],
        **info,
        "metadata": {"env": {"TOKEN": "hunter2"}},
        "trace_id": "hunter2",
        "baseTimeNanoseconds": base_ns,
        "traceEvents": [*names(), *events],
    }


def save(path: Path, content: Any) -> Path:
    """Indented as profilers write it; packed if the name says so."""
    data = content if isinstance(content, bytes) else json.dumps(content, indent=2).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def export(*arguments: Any, status: int = 0) -> str:
    """What the command line says on stderr, in this process; nothing may reach stdout."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
        cli.main(["export", *map(str, arguments)])
    assert (ended.value.code or 0) == status, stderr.getvalue()
    assert stdout.getvalue() == ""
    return stderr.getvalue()


def load(path: Path) -> Any:
    """A trace as strict JSON with its decimals as text."""
    return json.loads(unpacked(path).decode("utf-8", "strict"), parse_float=str, parse_constant=_refuse)


def load_loosely(path: Path) -> Any:
    """A source, which may hold control characters."""
    return json.loads(unpacked(path), parse_float=str, strict=False)


def unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def _refuse(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


def ns(microseconds: Any) -> int:
    return int(Decimal(str(microseconds)) * 1000)


def timed(content: Any) -> list[tuple[Any, ...]]:
    """(phase, name, start on the epoch clock, duration) of every slice, arrow, instant and counter, in ns."""
    base = int(content.get("baseTimeNanoseconds", 0))
    return [
        (e["ph"], e["name"], ns(e["ts"]) + base, ns(e.get("dur", 0)))
        for e in content["traceEvents"]
        if e.get("ph") in ("X", "s", "t", "f", "i", "I", "C")
    ]


def of(content: Any, phase: str) -> list[dict[str, Any]]:
    return [event for event in content["traceEvents"] if event["ph"] == phase]


def check_format(path: Path) -> None:
    """The Chrome trace event format as strictly as a viewer could want it."""
    content = load(path)
    events = content["traceEvents"]
    phases = [event["ph"] for event in events]
    assert set(phases) <= {"M", "X", "i", "I", "C", "s", "t", "f"}
    assert "M" not in phases[phases.count("M") :], "metadata events come first"
    described = [(e["pid"], e["tid"]) for e in events if e["ph"] == "M"]
    assert described == sorted(described)
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"].isprintable() or "\u00a0" in event["name"] or not _controls(event["name"])
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert 0 <= event["pid"] < 2**31
        assert 0 <= event["tid"] < 2**31
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            continue
        assert isinstance(event.get("cat", ""), str)
        times = [event["ts"], event["dur"]] if event["ph"] == "X" else [event["ts"]]
        for time in times:
            whole, _, decimals = time.partition(".")
            assert whole.isdigit(), time
            assert len(decimals) == 3, time
        if event["ph"] in ("s", "t", "f"):
            assert type(event["id"]) is int
            assert 0 <= event["id"] < 2**64


def _controls(text: str) -> bool:
    return any(ord(char) < 32 or 127 <= ord(char) < 160 for char in text)


def run_folder(folder: Path, *, late_ns: int = 0) -> Path:
    """Steps 20 to 23 of 100 us each, which the journal alone numbers, on a clock `late_ns` behind the trace's."""
    rank = folder / "rank-0"
    rank.mkdir(parents=True)
    content = trace()
    annotations = [event for event in content["traceEvents"] if event["name"].startswith("ProfilerStep")]
    for event in annotations:  # an optimizer's step ends where the step does
        event.update(name="Optimizer.step#SGD.step", ts=event["ts"] + STEP_US - 10, dur=10)
    save(rank / "trace-0.pt.trace.json.gz", content)
    rows = []
    for index in range(4):
        row = dict.fromkeys(STEP_COLUMNS)
        start_ns = BASE_NS + 1_000_000 + index * STEP_US * 1000 - late_ns
        row.update(
            step=20 + index, kind="train", start_ns=start_ns, wall_ns=STEP_US * 1000, in_window=True, signal="optimizer"
        )
        rows.append(list(row.values()))
    lines = [json.dumps({"columns": list(STEP_COLUMNS)}), *map(json.dumps, rows)]
    (rank / "steps.jsonl").write_text("\n".join(lines) + "\n")
    return folder
