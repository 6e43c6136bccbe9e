"""`stepscope analyze` on traces that others recorded: every real one gives a report, every other file one line."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.cli import COMMANDS
from tests.analyze.shared_traces import PRESENT, TRACES, files, needs_traces
from tests.cli.calls import call, json_of
from tests.dashboard.embedded import documents_text

pytestmark = pytest.mark.usefixtures("elsewhere")

SECRET = "example-not-a-secret"
WITH_ENVIRONMENT = (
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    pytest.param("tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", marks=pytest.mark.thorough),
)
RESNET = "kineto_tb_plugin/resnet50_num_workers_0"
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
    events = json.dumps([trace["traceEvents"], trace["deviceProperties"]])
    private = {text for text in strings(trace["metadata"]) if len(text) >= ENOUGH and text not in events}
    assert SECRET in private
    assert len(private) > 20

    if "export" in COMMANDS:
        assert call("export", str(TRACES / name), "--out", "cut.json") == 0
    arguments = (str(TRACES / name), "--tables", "tables", "--json", "r.json", "--html", "r.html")
    assert call("analyze", *arguments) == 0
    assert call("analyze", *arguments[:3]) == 0  # from the tables
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
