"""Compile spans of traces: the union of nested and doubled spans, and nothing where the journal knows better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.read import read_paths
from stepscope.tables import build
from tests.records import replace


def slice_(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    where = {"pid": 0, "tid": 7} if cat.startswith("gpu") else {"pid": 1, "tid": tid}
    return {"ph": "X", **where, "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def step(number: int, ts: float, dur: float = 1000) -> dict[str, Any]:
    return slice_(f"ProfilerStep#{number}", ts, dur, "user_annotation")


def compiles(folder: Path, events: list[dict[str, Any]]) -> pl.DataFrame:
    path = folder / "worker0.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return build(read_paths([path])).compiles


def frame(ts: float, dur: float) -> list[dict[str, Any]]:
    """A frame compiled as torch 2.13 records it: each phase twice, one inside the other."""
    names = ["dynamo", "entire_frame_compile", "_compile.compile_inner (dynamo_timed)", "backend_compile"]
    names += ["OutputGraph.call_user_compiler (dynamo_timed)", "inductor_compile"]
    return [slice_(name, ts + i, dur - 2 * i) for i, name in enumerate(names)]


def test_the_union_not_the_sum(tmp_path: Path):
    table = compiles(tmp_path, [step(0, 0, 1000), *frame(100, 500), step(1, 1000, 1000), *frame(1200, 300)])
    assert table.select("step", "duration_ns", "kind", "direction").rows() == [
        (0, 498_000, "compile", "forward"),
        (1, 298_000, "compile", "forward"),
    ]
    assert set(table["step_source"]) == {"trace"}
    assert set(table["backend"]) == {"torch.compile"}


def test_overlap_on_another_thread_counts_once(tmp_path: Path):
    events = [
        step(0, 0, 1000),
        slice_("entire_frame_compile", 100, 300),
        slice_("backward._backward_impl (dynamo_timed)", 300, 300, "user_annotation", tid=2),
    ]
    table = compiles(tmp_path, events)
    assert table.select("time_ns", "duration_ns", "direction").rows() == [
        (100_000, 300_000, "forward"),
        (400_000, 200_000, "backward"),
    ]


def test_journals_that_tell_of_compiling_are_not_doubled(tmp_path: Path):
    path = tmp_path / "worker0.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [step(0, 0, 1000), *frame(100, 500)]}))
    raw = read_paths([path])
    told = {"kind": "compile", "time_ns": 0, "duration_ns": 7, "step": 0, "graph": "0/0"}
    other = {"kind": "graph_break", "time_ns": 0, "duration_ns": None, "step": 0, "reason": "x"}

    def rows(event: dict[str, Any]) -> list[tuple[Any, ...]]:
        ranks = tuple(replace(rank, journal=(event,)) for rank in raw.ranks)
        return build(replace(raw, ranks=ranks)).compiles.select("kind", "step_source").rows()

    assert rows(told) == [("compile", "poll")]
    assert rows({**told, "backend": "torch_xla"}) == [("compile", "poll"), ("compile", "trace")]
    assert rows(other) == [("graph_break", "poll"), ("compile", "trace")]
