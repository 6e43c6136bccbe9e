"""CSV and Parquet hold the very table of metrics, in full precision, with findings and the report beside."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from tests.cli.calls import call
from tests.run_folders import make_run_folder
from tests.sinks import expected


def test_csv_is_the_table(odd_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("export", odd_run, "--to", "csv", "--out", "out") == 0
    with open("out/metrics.csv", newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    told = expected.table(odd_run)
    assert len(found) == len(told)
    for row, truth in zip(found, sorted(told, key=lambda row: row["time_ns"]), strict=True):
        assert row["step"] == ("" if truth["step"] is None else str(truth["step"]))
        assert int(row["time_ns"]) == truth["time_ns"]
        assert expected.key(0, float(row["value"])) == expected.key(0, truth["value"])
        assert row["source"] == truth["source"]
        assert row["process"] == (truth["process"] or "")
        assert not row["name"].startswith("=")  # no formula, as in every table
    assert {row["name"] for row in found} >= {"perf/step_ms", "perf/forward_ms", "sys/load_1m", "'=1+1", "loss\\x0a2"}
    about = json.loads(Path("out/run.json").read_text())
    assert about["knobs"] == {"loader.num_workers": "2"}
    assert about["seed"] == 3
    assert pl.read_csv("out/steps.csv").height == 50
    assert pl.read_csv("out/findings.csv")["rule"][0] == "input.loader_bound"
    assert "<html" in Path("out/report.html").read_text()
    assert call("export", odd_run, "--to", "csv", "--out", "out") == 2
    assert "--force" in capfd.readouterr().err
    assert call("export", odd_run, "--to", "csv", "--out", "out", "--force") == 0


def test_parquet_is_the_table(odd_run: Path) -> None:
    assert call("export", odd_run, "--to", "parquet") == 0
    folder = Path("stepscope-exports/parquet/odd run")
    found = pl.read_parquet(folder / "metrics.parquet")
    told = pl.DataFrame(expected.table(odd_run)).sort("time_ns", maintain_order=True)
    shared = ["step", "time_ns", "name", "value", "source", "rank", "process"]
    assert_frame_equal(found.select(shared), told.select(shared), check_exact=True, check_dtypes=False)
    assert pl.read_parquet(folder / "findings.parquet").columns[:3] == ["kind", "id", "rule"]


def test_a_run_without_metrics_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run_folder(tmp_path)
    assert call("export", run, "--to", "csv", "--out", "out") == 0
    said = capfd.readouterr().err
    assert "no metric was recorded" in said
    assert "no telemetry was recorded" in said
    assert set(pl.read_csv("out/metrics.csv")["source"]) == {"steps"}
    empty = make_run_folder(tmp_path, steps=[], name="empty")
    assert call("export", empty, "--to", "csv", "--out", "none") == 0
    assert "neither steps nor metrics" in capfd.readouterr().err
    assert pl.read_csv("none/metrics.csv").height == 0
