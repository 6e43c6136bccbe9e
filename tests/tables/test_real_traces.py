"""Links of traces that real programs left, of every vendor and age we have."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from stepscope import tables
from stepscope.read import read_paths
from stepscope.tables import Tables
from stepscope.tables.links import METHODS

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


def built(name: str) -> Tables:
    return tables.build(read_paths([TRACES / name]))


def kernel_ns(run: Tables) -> dict[tuple[str, str | None], int]:
    """Kernel time by (state, method)."""
    kernels = run.events.filter(pl.col("category").is_in(KERNELS)).select("id", "duration_ns")
    sums = run.links.join(kernels, left_on="event", right_on="id").group_by("state", "method")
    return {(state, method): ns for state, method, ns in sums.agg(pl.col("duration_ns").sum()).iter_rows()}


@pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize("name", LINKED)
def test_kernel_time_reaches_an_operator(name: str):
    by = kernel_ns(built(name))
    linked = sum(by.get(("linked", method), 0) for method in METHODS)
    before = sum(ns for (state, _), ns in by.items() if state == "before_recording")
    total = sum(by.values())
    assert linked >= 0.99 * (total - before) > 0
    if "Qwen" in name:
        assert 0.25 < before / total < 0.35
    else:
        assert before == 0
