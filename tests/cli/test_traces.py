"""`stepscope analyze --table` and `--diff`: one view in full, on the terminal, as CSV and as JSON."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import math
import os
import pickle
import pty
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.analyze.views.select import TABLES
from stepscope.cli import COMMANDS
from stepscope.report.definitions import definition
from stepscope.report.table import SHOWN
from tests import gpu_traces
from tests.analyze.shared_traces import PRESENT, TRACES, files, needs_traces
from tests.builders import MS, T0
from tests.cli.calls import call, json_of
from tests.dashboard.plain_pages import documents_text
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


SECRET = "example-not-a-secret"
WITH_ENVIRONMENT = (
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    pytest.param("tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", marks=pytest.mark.thorough),
)
ENOUGH = 12  # characters of a value that is worth looking for


def tiny(path: Path, **changes: Any) -> str:
    """A trace of two operators below two functions of the user's."""
    frame = {"ph": "X", "cat": "python_function", "pid": 1, "tid": 1}
    operator = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "dur": 40}
    events = [
        {**frame, "name": "/build/app/train.py(3): train", "ts": 0, "dur": 100, "args": {"Python id": 1}},
        {**operator, "name": "aten::mm", "ts": 10},
        {**frame, "name": "vendor/fast.py(9): go", "ts": 200, "dur": 60, "args": {"Python id": 2}},
        {**operator, "name": "aten::add", "ts": 210},
        *(
            {**operator, "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": n * 200, "dur": 190}
            for n in (0, 1)
        ),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 1_700_000_000_000_000_000, **changes}))
    return str(path)


def places(report: dict[str, Any]) -> list[tuple[str, int]]:
    return sorted((row["place"]["file"], row["place"]["line"]) for row in report["views"]["device_lines"]["lines"])


def first_of_each_collection() -> list[Any]:
    """All traces, but for the first of a collection only in `make test-all`: golden documents hold their reports."""
    names = files() if PRESENT else []
    first = {name.partition("/")[0]: name for name in reversed(names)}
    return [pytest.param(name, marks=[] if name in first.values() else pytest.mark.thorough) for name in names]


@needs_traces
@pytest.mark.parametrize("name", first_of_each_collection())
def test_every_real_trace_gives_a_report_with_its_quality_first(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("analyze", str(TRACES / name), "--no-cache", "--json", "report.json", "--html", "report.html") == 0

    shown = capsys.readouterr()
    assert shown.out.startswith("Read 1 trace, ")
    assert shown.err == "Wrote report.json\nWrote report.html\n"
    report = json.loads(Path("report.json").read_text())
    reading = report["quality"]["reading"]
    assert (reading["traces"], reading["lost"]) == (1, 0)
    assert reading["events"] > 0
    assert report["quality"]["traces"][0]["device_events"] == reading["device_events"]
    assert "Read 1 trace, " in Path("report.html").read_text()


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"{}", b"[1, 2]", b'{"traceEvents": []}', b"\x1f\x8b broken", b"\0" * 99]
)
@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.txt"])
def test_files_without_events_are_one_line(content: bytes, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).write_bytes(content)
    assert call("analyze", name) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith((f"stepscope: {Path(name).absolute()}", f"stepscope: {name}"))


def strings(value: Any) -> set[str]:
    """All texts inside a JSON value."""
    if isinstance(value, dict):
        return {text for item in value.values() for text in strings(item)}
    if isinstance(value, list):
        return {text for item in value for text in strings(item)}
    return {value} if isinstance(value, str) else set()


@needs_traces
@pytest.mark.parametrize("name", WITH_ENVIRONMENT)
def test_the_environment_of_the_recording_machine_reaches_nothing(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with gzip.open(TRACES / name) as file:
        trace = json.load(file)
    trace["traceEvents"] = trace["traceEvents"][:3_000]
    Path("trace.json").write_text(json.dumps(trace))
    events = json.dumps([trace["traceEvents"], trace["deviceProperties"]])
    private = {text for text in strings(trace["metadata"]) if len(text) >= ENOUGH and text not in events}
    assert SECRET in private
    assert len(private) > 20

    if "export" in COMMANDS:
        assert call("export", "trace.json", "--out", "cut.json") == 0
    arguments = ("trace.json", "--tables", "tables", "--json", "r.json", "--html", "r.html")
    assert call("analyze", *arguments) == 0
    assert call("analyze", *arguments[:3]) == 0  # from the tables
    Path("trace.json").unlink()
    shown = capfd.readouterr()
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    tables = [path for path in written if path.suffix in (".parquet", ".arrow")]
    assert tables
    texts = {str(path): data.decode("utf-8", "replace") for path, data in written.items() if path not in tables}
    texts |= {str(path): pl.read_parquet(path).write_ndjson() for path in tables if path.suffix == ".parquet"}
    texts |= {"documents in r.html": documents_text(texts[str(tmp_path / "r.html")])}
    texts |= {"stdout": shown.out, "stderr": shown.err}
    for where, text in texts.items():
        assert not [value for value in private if value in text or json.dumps(value)[1:-1] in text], where


def test_options_say_whose_code_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = tiny(tmp_path / "t.json")
    found = json_of(capfd, "analyze", trace)
    assert places(found) == [("/build/app/train.py", 3), ("vendor/fast.py", 9)]
    assert found["views"]["device_lines"]["basis"] == "cpu_op"

    vendored = json_of(capfd, "analyze", trace, "--library", "vendor")
    assert places(vendored) == places(found)
    assert [row["guess"] for row in vendored["views"]["device_lines"]["lines"]].count(True) == 1

    source = tmp_path / "src" / "app"
    source.mkdir(parents=True)
    (source / "train.py").write_text("# one\n# two\ndef train(x):\n    return x.mm(x)\n")
    options = ("--map", f"/build={tmp_path}/src", "--source-root", str(tmp_path / "src"))
    report = json_of(capfd, "analyze", trace, *options)
    assert (str(source / "train.py"), 4) in places(report)
    assert "return x.mm(x)" in [row.get("code") for row in report["views"]["device_lines"]["lines"]]
    silent = json_of(capfd, "analyze", trace, *options, "--no-source")
    assert "return x.mm(x)" not in json.dumps(silent)


def test_source_text_is_quoted_from_the_readers_folders_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace may name any file of this machine; none but those of the one who reads it is opened."""
    private = tmp_path / "build" / "app" / "train.py"
    private.parent.mkdir(parents=True)
    private.write_text("PASSWORD = 'hunter2'\n# two\ndef train(x):\n    return x.mm(x)  # hunter2\n")
    trace = tiny(tmp_path / "t.json")
    data = json.loads(Path(trace).read_text())
    data["traceEvents"][0]["name"] = f"{private}(3): train"
    Path(trace).write_text(json.dumps(data))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "hunter2" not in json.dumps(json_of(capfd, "analyze", trace))
    assert "hunter2" in json.dumps(json_of(capfd, "analyze", trace, "--source-root", str(private.parent)))
    monkeypatch.chdir(private.parent)
    assert "hunter2" in json.dumps(json_of(capfd, "analyze", trace))


def test_tables_are_kept_where_asked_and_nothing_beside_the_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tiny(tmp_path / "in" / "t.json")
    first = json_of(capfd, "analyze", trace, "--tables", "kept")
    assert list((tmp_path / "kept").rglob("*.parquet"))
    assert not (tmp_path / "cache").exists()
    assert json_of(capfd, "analyze", trace, "--tables", "kept") == first
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["t.json"]

    json_of(capfd, "analyze", trace)
    assert list((tmp_path / "cache").rglob("*.parquet"))


@pytest.mark.parametrize("folders", [("rank-0", "rank-1"), ("0", "1")])
def test_a_folder_of_ranks_is_one_run(
    folders: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank, name in enumerate(folders):
        tiny(tmp_path / "logs" / name / "t.json", distributedInfo={"rank": rank, "world_size": 2})
    report = json_of(capfd, "analyze", "logs")
    assert report["run"]["ranks"] == [0, 1]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(folders)


def test_progress_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    trace = tiny(tmp_path / "t.json")
    command = [sys.executable, "-m", "stepscope", "analyze", trace, "--no-cache"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert done.stderr == b""
    primary, secondary = pty.openpty()
    with os.fdopen(primary, "rb") as terminal:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=secondary, timeout=120, check=True)
        os.close(secondary)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while part := terminal.read1():
                shown += part
    assert b"reading" in shown
    assert done.stdout.startswith(b"Read 1 trace")
