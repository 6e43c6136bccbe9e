"""Runs made of traces alone: steps from annotations, cuts to steps, facts of ranks, notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope import tables
from stepscope.tables import BuildOptions, Tables
from tests.tables.test_cache import run_of

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


@pytest.mark.parametrize(("first", "last", "kept"), [(5, 5, [5]), (5, 9, [5, 6]), (0, 4, [4])])
def test_cut_to_steps_keeps_what_belongs_to_them(tmp_path: Path, first: int, last: int, kept: list[int]):
    built = build(tmp_path, three_steps(), (first, last))
    assert built.steps["step"].to_list() == kept
    assert built.events["id"].to_list() == list(range(built.events.height))
    enclosing = pl.col("category") == "gpu_user_annotation"
    assert set(built.events.filter(~enclosing)["step"].drop_nulls()) == set(kept)
    assert "train.py(1): main" in built.events["name"]
    names = dict(zip(built.events["id"], built.events["name"], strict=True))
    assert [names[i] for i in built.links["event"]] == ["gemm"] * len(kept)
    assert [names[i] for i in built.links["operator"]] == ["aten::mm"] * len(kept)
    assert [names[i] for i in built.links["frame"]] == ["train.py(1): main"] * len(kept)


def notes(built: Tables) -> str:
    return "\n".join(note.text for note in built.quality.notes)


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
    } == {
        "device": 150 * US,
        "linked_by_correlation": 90 * US,
        "before_recording": 10 * US,
        "graph": 50 * US,
    }


def test_device_alone(tmp_path: Path):
    built = build(tmp_path, [slice_of("gemm", 0, 5, "kernel", correlation=1)])
    assert "no launch of a kernel or copy was recorded" in notes(built)
    assert built.links["state"].to_list() == ["before_recording"]
