"""Real traces of eight ranks, reduced: the same collectives and steps as where the traces are read in full."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from stepscope import ReadOptions, open_run, reduce_run
from stepscope.model.views import CollectiveOverWorkers
from stepscope.tables.reduced import LABELS, load
from tests.analyze.shared_traces import TRACES

PARAM = TRACES / "ranks" / "param_dlrm" / "dlrm_kineto"
pytestmark = pytest.mark.skipif(not PARAM.is_dir(), reason="the shared traces are not here")


def test_collectives_and_steps_are_those_of_the_whole_traces(tmp_path: Path) -> None:
    whole = open_run(PARAM, options=ReadOptions(cache=False, keep=False))
    reduce_run(PARAM, out=tmp_path)
    reduced = load(tmp_path / "reduced")
    assert [one.host for one in reduced.hosts] == ["unknown"]
    found = reduced.scan("collectives").collect()
    length = pl.col("end_ns") - pl.col("start_ns")
    by_kind = found.group_by("kind").agg(calls=pl.len() // 8, mean=length.mean())
    told = {row["kind"]: (row["calls"], pytest.approx(row["mean"])) for row in by_kind.to_dicts()}
    expected = [row for row in whole.table("distributed-collectives").rows if isinstance(row, CollectiveOverWorkers)]
    assert expected
    assert {row.name: (row.calls, row.mean_ns) for row in expected} == told
    steps = reduced.scan("steps").sort("rank").collect()
    known = whole.labelled.frame.sort("rank")
    assert [LABELS[number] for number in steps["label"]] == known["reason"].to_list()
    assert steps["wall_us"].to_list() == (known["wall_ns"] // 1000).to_list()
    # each collective ends on all ranks of the machine at nearly the same moment
    ends = found.group_by("kind", "sequence").agg(spread_ns=pl.col("end_ns").max() - pl.col("end_ns").min())
    assert ends.height == 8
    assert ends["spread_ns"].max() <= 10_000  # type: ignore[operator]
