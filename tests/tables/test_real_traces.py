"""Links of traces that real programs left, of every vendor and age we have."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from stepscope import tables
from stepscope.cached import INDEX
from stepscope.read import read_paths
from stepscope.tables import BuildOptions, Tables
from stepscope.tables.cache import fetch
from stepscope.tables.links import METHODS

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")

LINKED = (
    "kineto_tb_plugin/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz",
    "kineto_tb_plugin/resnet50_num_workers_4/worker0.1623212756351.pt.trace.json.gz",
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/h100/facebook_timesformer-base-finetuned-k400__1016002.json.gz",
    "tracelens/h100/gaunernst_bert-small-uncased__1016001.json.gz",
    "tracelens/b200/eager_trace.json.gz",
    "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
)
GRAPHS = (
    "tracelens/inference/vllm_decode_full/graph_execution.json.gz",
    "tracelens/inference/sglang_decode/sglang_Qwen3-8B_decode.json.gz",
)
KERNELS = ("kernel", "Kernel")


def built(name: str) -> Tables:
    return tables.build(read_paths([TRACES / name]))


def kernel_ns(run: Tables) -> dict[tuple[str, str | None], int]:
    """Kernel time by (state, method)."""
    kernels = run.events.filter(pl.col("category").is_in(KERNELS)).select("id", "duration_ns")
    sums = run.links.join(kernels, left_on="event", right_on="id").group_by("state", "method")
    return {(state, method): ns for state, method, ns in sums.agg(pl.col("duration_ns").sum()).iter_rows()}


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


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_say_that_they_cannot_be_linked(name: str):
    run = built(name)
    by = kernel_ns(run)
    assert sum(ns for (state, _), ns in by.items() if state == "graph") > 0.9 * sum(by.values())
    text = "\n".join(note.text for note in run.quality.notes)
    assert "cannot be linked to single operators" in text


def everything() -> Iterator[Path]:
    for folder in ("kineto_tb_plugin", "hta", "tracelens"):
        yield from sorted((TRACES / folder).rglob("*.json*"))


def test_every_trace_becomes_consistent_tables():
    paths = list(everything())
    assert len(paths) > 20
    for path in paths:
        run = tables.build(read_paths([path]))
        assert run.traces.height == 1, path
        assert run.traces["events"][0] > 0, path
        height = run.events.height
        for name in ("id", "parent", "frame", "forward"):
            numbers = run.events[name].drop_nulls()
            assert len(numbers) == 0 or 0 <= numbers.min() <= numbers.max() < height, (path, name)  # type: ignore[operator]
        assert (run.events["self_ns"] >= 0).all(), path
        roots = run.events.filter(pl.col("parent").is_null() & ~pl.col("category").str.starts_with("gpu_user"))
        assert roots.height > 0, path


def test_the_environment_in_the_metadata_reaches_no_table(tmp_path: Path):
    path = TRACES / "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"
    secrets = (b"HF_TOKEN", b"LD_LIBRARY_PATH", b"pip_packages", b"started_by", b"ab5ece529443")
    with gzip.open(path) as file:
        raw = file.read()
    assert all(secret in raw for secret in secrets)
    run = tables.build(read_paths([path]), BuildOptions(cache=tmp_path))
    written = [(fetch(path, tmp_path) / INDEX).read_bytes()]  # waits for the entry, which is written beside the build
    for table in tables.SCHEMAS:
        frame: pl.DataFrame = getattr(run, table)
        written.append(frame.select(pl.col(pl.String)).write_csv().encode())
    written.append(repr((run.run, run.quality, run.ranks, run.traces.rows())).encode())
    assert len(written) > len(tables.SCHEMAS) + 1
    assert [secret for secret in secrets for text in written if secret in text] == []
