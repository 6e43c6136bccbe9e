"""Runs made of traces alone: steps from annotations, cuts to steps, facts of ranks, notes.

Of steps of a large trace the tables are those of the whole trace, and what lies far from the steps is never held.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope import tables
from stepscope.api import ReadOptions, open_run
from stepscope.engine.spans import spans
from stepscope.errors import UnreadableInputError
from stepscope.read import read_paths
from stepscope.tables import BuildOptions, Tables, ingest
from stepscope.tables.links import METHODS
from tests.tables.test_cache import run_of, same

US = 1000


def slice_of(name: str, start: int, duration: int, category: str = "cpu_op", **args: Any) -> dict[str, Any]:
    device = category in ("kernel", "gpu_user_annotation")
    place = {"pid": 0, "tid": 7} if device else {"pid": 1, "tid": 1}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args, **place}


def three_steps(numbers: tuple[int, ...] = (4, 5, 6)) -> list[dict[str, Any]]:
    """Steps of 100 us; each launches a kernel that runs in the next one."""
    events = [slice_of("train.py(1): main", 0, 1000, "python_function")]
    for i, number in enumerate(numbers):
        start = 100 + i * 100
        events += [
            slice_of(f"ProfilerStep#{number}", start, 101, "user_annotation"),
            slice_of(f"ProfilerStep#{number}", start + 60, 200, "gpu_user_annotation"),
            slice_of("aten::mm", start + 10, 50, **{"External id": number}),
            slice_of("cudaLaunchKernel", start + 20, 5, "cuda_runtime", correlation=number),
            slice_of("gemm", start + 120, 30, "kernel", correlation=number),
        ]
    return events


def build(tmp_path: Path, events: list[dict[str, Any]], steps: tuple[int, int] | None = None, **root: Any) -> Tables:
    path = tmp_path / "rank3.pt.trace.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": 10**18, **root, "traceEvents": events}))
    return tables.build(run_of(path), BuildOptions(steps=steps))


@pytest.mark.parametrize(("start", "duration", "process"), [(200, 101, 1), (220, 50, 1), (250, 100, 2)])
def test_a_mark_told_twice_inside_another_or_of_another_process_is_no_step(
    tmp_path: Path, start: int, duration: int, process: int
):
    again = slice_of("ProfilerStep#9", start, duration, "user_annotation") | {"pid": process}
    plain, more = build(tmp_path, three_steps()), build(tmp_path, [*three_steps(), again])
    assert len(plain.steps) == 3
    assert more.steps.equals(plain.steps)
    assert spans(more)[0].steps.equals(spans(plain)[0].steps)


def notes(built: Tables) -> str:
    return "\n".join(note.text for note in built.quality.notes)


SOUND = three_steps(tuple(range(60)))


def moved(by: int = 0, times: float = 1, pid: int = 0, categories: str = "", numbers: int = 0) -> list[dict[str, Any]]:
    """The entries of `SOUND` with other times, of another process, or with other numbers of launches."""
    return [
        {**entry, "ts": (entry["ts"] + by * (entry["cat"] in categories)) * times, "dur": entry["dur"] * times}
        | {"pid": entry["pid"] + pid, "args": {key: value + numbers for key, value in entry["args"].items()}}
        for entry in SOUND
    ]


@pytest.mark.parametrize(
    ("entries", "said", "read"),
    [
        (SOUND, "linked to an operator", True),
        ([*SOUND, *SOUND], "stand in it twice", True),
        ([entry for entry in SOUND for _ in range(3)], "stand in it twice", True),
        ([*SOUND, *moved(pid=5, numbers=1000)], "it holds 2 processes", True),
        ([*SOUND, *moved(pid=5)], "nothing tells whose work", False),
        (moved(times=1e-3), "count microseconds", False),
        (moved(times=1000 * 10**12), "count microseconds", False),
        (moved(by=-400, categories="kernel"), "begin before the calls that launched them", True),
        (
            [*moved(by=50_000, categories="kernel"), slice_of("cudaDeviceSynchronize", 7000, 10, "cuda_runtime")],
            "the clocks of device and host disagree",
            True,
        ),
        ([{**entry, "cat": "fee"} for entry in SOUND], "another tool wrote it", False),
        ([*SOUND, *({**entry, "cat": "fee", "tid": 5} for entry in SOUND)], "(fee), and count in no figure", True),
    ],
)
def test_what_a_trace_cannot_be_taken_for_is_said(tmp_path: Path, entries: list[dict[str, Any]], said: str, read: bool):
    wanted = build(tmp_path, SOUND)
    if not read:
        with pytest.raises(UnreadableInputError, match=re.escape(said)):
            build(tmp_path, entries)
        return
    found = build(tmp_path, entries)
    assert said in notes(found)
    if "twice" in said or "processes" in said:
        for name in ("name", "track", "self_ns"):
            assert sorted(found.events[name]) == sorted(wanted.events[name])
        assert found.steps.equals(wanted.steps)
        assert found.links["method"].to_list() == wanted.links["method"].to_list()


def test_notes_say_how_far_slices_are_linked(tmp_path: Path):
    events = [
        *three_steps(),
        slice_of("earlier", 5, 10, "kernel", correlation=999),
        slice_of("cudaGraphLaunch", 500, 9, "cuda_runtime", correlation=1000),
        slice_of("replayed", 510, 50, "kernel", correlation=1000),
    ]
    built = build(tmp_path, events)
    text, counts = notes(built), built.quality.counts
    assert "by correlation" in text
    assert "launched before the recording began" in text
    assert "CUDA graphs and cannot be linked to single operators" in text
    assert {
        name: counts[f"{name}_ns"] for name in ("device", "linked_by_correlation", "before_recording", "graph")
    } == {"device": 150 * US, "linked_by_correlation": 90 * US, "before_recording": 10 * US, "graph": 50 * US}


def test_device_alone(tmp_path: Path):
    built = build(tmp_path, [slice_of("gemm", 0, 5, "kernel", correlation=1)])
    assert "no launch of a kernel or copy was recorded" in notes(built)
    assert built.links["state"].to_list() == ["before_recording"]
    lines = open_run(tmp_path / "rank3.pt.trace.json", options=ReadOptions(cache=False)).analysis.device_lines
    assert lines
    assert list(lines.unattributed) == ["neither launch nor operator found"]


STEPS = 40


def events() -> list[dict[str, Any]]:
    """Steps of 100 us in a function; each launches a kernel that runs in the next but one, and frees memory."""
    made = [slice_of("train.py(1): main", 0, 100 * (STEPS + 4), "python_function")]
    for step in range(STEPS):
        start = 100 + step * 100
        made += [
            slice_of("gemm", start + 220, 30, "kernel", correlation=step),  # kernels may stand before their launches
            slice_of("aten::mm", start + 10, 50, **{"External id": step}),
            slice_of("cudaLaunchKernel", start + 20, 5, "cuda_runtime", correlation=step),
            slice_of(f"ProfilerStep#{step}", start, 100, "user_annotation"),
        ]
        memory = {"Bytes": -64, "Addr": step, "Device Type": 0, "Device Id": -1, "Total Allocated": 128}
        made.append({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": start + 5, "args": memory})
    return made


def written(path: Path, entries: list[dict[str, Any]]) -> Path:
    data = json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": entries}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def built(path: Path, cache: Path | None = None) -> Tables:
    return tables.build(run_of(path), BuildOptions(steps=(20, 22), cache=cache))


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "LARGE_BYTES", 1)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_large_trace_gives_the_same_tables(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / name, events())
    whole = built(path)
    monkeypatch.setattr(ingest, "LARGE_BYTES", 1)
    monkeypatch.setattr(ingest, "_BEHIND_BYTES", 0)
    near = built(path, tmp_path / "cache")
    assert same(whole, near)
    assert same(whole, built(path, tmp_path / "cache"))  # found in the cache, where it is not taken for the whole
    assert (whole.events.height, whole.links.height, whole.memory.height) == (13, 3, 3)
    taken, of_all = near.quality.counts["trace_events"], whole.quality.counts["trace_events"]
    assert taken < of_all / 2 + STEPS  # the annotations of all steps stay, for their numbers
    assert tables.build(run_of(path), BuildOptions(cache=tmp_path / "cache")).events.height == of_all


@pytest.mark.usefixtures("small_is_large")
def test_where_steps_are_small_the_device_may_lag_far_behind(tmp_path: Path):
    late = events()
    for one in late:
        one["ts"] += 1_000 if one.get("cat") == "kernel" else 0  # twelve steps behind what launches it
    links = built(written(tmp_path / "a.json", late)).links
    assert links.height == 3
    assert links["launch"].null_count() == 0


@pytest.mark.usefixtures("small_is_large")
def test_steps_that_are_not_there_leave_empty_tables(tmp_path: Path):
    path = written(tmp_path / "a.json", [one for one in events() if "ProfilerStep#2" not in one["name"]])
    assert built(path).events.height == 0


def test_steps_that_damage_hides_from_the_first_pass_are_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = written(tmp_path / "a.json", events())
    whole = built(path)
    monkeypatch.setattr(ingest, "LARGE_BYTES", 1)
    real = ingest.trace_steps
    calls = []

    def some(marks: Any) -> Any:
        calls.append(marks)
        return [row for row in real(marks) if len(calls) > 1 or row["step"] != 22]

    monkeypatch.setattr(ingest, "trace_steps", some)
    monkeypatch.setattr(ingest, "_BEHIND_STEPS", 0)
    monkeypatch.setattr(ingest, "_BEHIND_BYTES", 0)
    assert same(whole, built(path))
    assert len(calls) == 2


TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"

LINKED = (
    "kineto_tb_plugin/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz",
    "kineto_tb_plugin/resnet50_num_workers_4/worker0.1623212756351.pt.trace.json.gz",
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/h100/facebook_timesformer-base-finetuned-k400__1016002.json.gz",
    "tracelens/h100/gaunernst_bert-small-uncased__1016001.json.gz",
    "tracelens/b200/eager_trace.json.gz",
    "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
)
KERNELS = ("kernel", "Kernel")


def tables_of(name: str) -> Tables:
    return tables.build(read_paths([TRACES / name]))


def kernel_ns(run: Tables) -> dict[tuple[str, str | None], int]:
    """Kernel time by (state, method)."""
    kernels = run.events.filter(pl.col("category").is_in(KERNELS)).select("id", "duration_ns")
    sums = run.links.join(kernels, left_on="event", right_on="id").group_by("state", "method")
    return {(state, method): ns for state, method, ns in sums.agg(pl.col("duration_ns").sum()).iter_rows()}


@pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize("name", LINKED)
def test_kernel_time_reaches_an_operator(name: str):
    by = kernel_ns(tables_of(name))
    linked = sum(by.get(("linked", method), 0) for method in METHODS)
    before = sum(ns for (state, _), ns in by.items() if state == "before_recording")
    total = sum(by.values())
    assert linked >= 0.99 * (total - before) > 0
    if "Qwen" in name:
        assert 0.25 < before / total < 0.35
    else:
        assert before == 0
