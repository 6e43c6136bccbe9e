"""`stepscope analyze --table` and `--diff`: one view in full, on the terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepscope.analyze.views.select import TABLES
from stepscope.report.definitions import definition
from stepscope.report.table import SHOWN
from tests import gpu_traces
from tests.builders import MS, T0
from tests.cli.calls import call, json_of
from tests.read.memory_files import Allocator
from tests.run_folders import make_run_folder, metrics_event

main = partial(call, "analyze")
pytestmark = pytest.mark.usefixtures("elsewhere")

NUMBERED = {"line", "step", "rank", "span", "device"}  # numbers that name things


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(gpu_traces.write(tmp_path / "logs" / "worker0.1700000000000.pt.trace.json.gz"))


def names(document: dict[str, Any]) -> list[str]:
    return [row["name"] for row in document["rows"]]


@pytest.mark.parametrize("table", [name for name in TABLES if name != "stacks"])
def test_every_table_has_rows_or_a_reason_in_all_forms(
    table: str, trace: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = json_of(capfd, "analyze", trace, "--table", table)
    assert document["schema"] == "stepscope.table/1"
    assert document["table"] == table
    assert (document["absent"] is None) == bool(document["rows"])
    figures = {key for row in document["rows"] for key, value in row.items() if type(value) in (int, float)}
    assert {key for key in figures - NUMBERED if definition(table, key) is None} == set()
    assert main(trace, "--table", table, "--csv", "out.csv") == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert [list(row) for row in rows] == [list(row) for row in document["rows"]]
    capfd.readouterr()
    assert main(trace, "--table", table, "--define") == 0
    shown = capfd.readouterr().out
    assert SHOWN[table].title in shown
    if document["absent"]:
        assert document["absent"] in shown


def test_operators_are_sorted_cut_and_filtered(trace: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert names(json_of(capfd, "analyze", trace, "--table", "operators"))[:2] == ["aten::mm", "aten::copy_"]
    by_calls = json_of(capfd, "analyze", trace, "--table", "operators", "--sort", "total_host")
    assert names(by_calls)[0] == "aten::linear"
    assert by_calls["sorted_by"] == "host_total_ns"
    cut = json_of(capfd, "analyze", trace, "--table", "operators", "--top", "1")
    assert (len(cut["rows"]), cut["rows_total"]) == (1, 4)
    assert names(json_of(capfd, "analyze", trace, "--table", "operators", "--filter", "^aten::(mm|SUM)$")) == [
        "aten::mm",
        "aten::sum",
    ]
    grouped = json_of(capfd, "analyze", trace, "--table", "operators", "--group", "shapes", "--filter", "mm")
    assert grouped["rows"][0]["shapes"]


def test_figures_of_a_known_trace(trace: str, capfd: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json_of(capfd, "analyze", trace, "--table", "operators")["rows"]}
    assert rows["aten::mm"]["device_self_ns"] == 600_000
    assert rows["aten::mm"]["calls"] == 2
    assert rows["aten::linear"]["device_self_ns"] == 0
    assert rows["aten::linear"]["device_total_ns"] == 600_000
    assert rows["aten::mm"]["host_self_ns"] == 2 * 35_000  # without its launch
    assert rows["aten::mm"]["tensor_core_self_pct"] == 100
    assert (rows["aten::mm"]["file"], rows["aten::mm"]["function"]) == ("/app/train.py", "train")
    kernels = json_of(capfd, "analyze", trace, "--table", "kernels", "--group", "launch")["rows"]
    assert kernels[0]["total_ns"] == 600_000
    assert (kernels[0]["grid"], kernels[0]["block"], kernels[0]["registers"]) == (50, 256, 32)
    assert kernels[0]["launch_delay_ns"] == 20_000
    gpus = json_of(capfd, "analyze", trace, "--table", "gpus")["rows"]
    assert gpus[0]["name"] == "Test GPU"
    assert gpus[0]["tensor_core_pct"] == 75
    overview = json_of(capfd, "analyze", trace, "--table", "overview")["rows"]
    for partition in ("stepscope", "tensorboard"):
        assert sum(row["share"] for row in overview if row["partition"] == partition) == pytest.approx(1)
    data = next(row for row in overview if row["part"] == "idle_data")
    assert data["mean_ns"] == 200_000


def test_a_difference_is_shown_and_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = str(gpu_traces.write(tmp_path / "before" / "worker0.pt.trace.json", gemm_us=300))
    after = str(gpu_traces.write(tmp_path / "after" / "worker0.pt.trace.json", gemm_us=100))
    assert main(before, "--diff", after) == 0
    shown = capfd.readouterr().out
    assert "Overview: before → after" in shown or "Overview:" in shown
    assert "ampere_sgemm_h1688_64x64" in shown
    rows = json_of(capfd, "analyze", before, "--diff", after, "--table", "kernels")["rows"]
    gemm = next(row for row in rows if "sgemm" in row["key"])
    assert (gemm["base_ns"], gemm["other_ns"], gemm["delta_ns"]) == (300_000, 100_000, -200_000)
    same = json_of(capfd, "analyze", before, "--diff", before, "--table", "operators")["rows"]
    assert {row["delta_ns"] for row in same} == {0}


def test_names_are_harmless_everywhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = "=cmd|' /C calc'!A0\x1b[2J\u202e"
    odd = [gpu_traces.launch(2500, 77), gpu_traces.kernel(name, 2600, 900, 77)]
    trace = str(gpu_traces.write(tmp_path / "odd.json", more=odd))
    assert main(trace, "--table", "kernels") == 0
    shown = capfd.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert main(trace, "--table", "kernels", "--csv", "out.csv") == 0
    first = next(row for row in csv.DictReader((tmp_path / "out.csv").open()) if "cmd" in row["name"])
    assert first["name"].startswith("'=")


def test_a_memory_snapshot_is_shown_alone_and_beside_a_trace(
    trace: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    allocator = Allocator()
    allocator.allocate(4_000, line=1)
    allocator.record()
    allocator.allocate(5_000_000, line=42)
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(pickle.dumps(allocator.snapshot()))
    assert main(str(snapshot)) == 0
    shown = capfd.readouterr().out
    assert "a recording of memory" in shown
    assert "train.py:42" in shown
    for paths in ((str(snapshot),), (trace, str(snapshot))):
        lines = json_of(capfd, "analyze", *paths, "--table", "memory-lines")["rows"]
        assert (lines[0]["line"], lines[0]["at_peak_bytes"]) == (42, 5_000_000)
        states = json_of(capfd, "analyze", *paths, "--table", "memory-states")["rows"]
        assert states[0]["in_use_bytes"] == 5_004_000
    assert len(json_of(capfd, "analyze", trace, str(snapshot), "--table", "kernels")["rows"]) == 2
    assert "no trace" in json_of(capfd, "analyze", str(snapshot), "--table", "kernels")["absent"]


def test_metrics_are_cut_filtered_and_keep_what_is_no_number(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    times = [T0 + at * 10 * MS + MS for at in range(10)]
    values = [2.0, math.nan, -math.inf, *[1e-5] * 7]
    run = str(make_run_folder(tmp_path, events=[metrics_event(("train/loss", "log", times, values))]))
    found = json_of(capfd, "analyze", run, "--table", "metrics", "--filter", "LOSS$", "--top", 4)
    assert [row["value"] for row in found["rows"]] == [2.0, "nan", "-inf", 1e-5]
    assert [row["step"] for row in found["rows"]] == [0, 1, 2, 3]
    assert (found["rows_total"], found["sorted_by"]) == (10, None)
    assert set(found["rows"][0]) >= {"step", "time_ns", "name", "value", "source", "rank"}

    assert main(run, "--table", "metrics", "--filter", "loss", "--sort", "value", "--csv", "out.csv") == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert [row["value"] for row in rows][:3] == ["nan", "2.0", "1e-05"]
    assert rows[-1]["value"] == "-inf"
    capfd.readouterr()
    assert main(run, "--table", "metrics", "--filter", "loss", "--top", 4) == 0
    shown = capfd.readouterr().out
    assert "Metrics, 4 of 10" in shown
    assert "1e-05" in shown
    assert main(run, "--table", "metrics", "--group", "curve", "--filter", "perf") == 0
    assert "perf/step_ms" in capfd.readouterr().out
