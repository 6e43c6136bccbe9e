"""The records of W&B's offline file: every value, our step as axis, original times; a resumed run gets no more."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.builders import T0
from tests.cli.calls import call
from tests.sinks import expected
from tests.wandb_file import records


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows that were logged."""
    rows = (record.history.item for record in records(folder) if record.WhichOneof("record_type") == "history")
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json, parse_int=float) for item in row}
        for row in rows
    ]


def points(rows: list[dict[str, Any]]) -> Counter[tuple[int, str]]:
    own = {"stepscope/step"}
    return Counter(
        expected.key(expected.micro(row["_timestamp"]), value)
        for row in rows
        for name, value in row.items()
        if name.startswith("stepscope/") and name not in own and "findings_table" not in name
    )


def only(pattern: str) -> Path:
    (folder,) = Path("out/wandb").glob(pattern)
    return folder


def test_every_value_over_our_step(
    odd_run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WANDB_RUN_ID": "theirs01", "WANDB_RESUME": "must", "WANDB_MODE": "online"}.items():
        monkeypatch.setenv(name, value)
    assert call("export", odd_run, "--to", "wandb", "--out", "out", "--project", "p") == 0
    assert "Next wandb sync" in capfd.readouterr().err
    folder = only("*")  # nothing is left beside it
    assert folder.name.startswith("offline-run-")
    rows = history(folder)
    assert points(rows) == expected.values(odd_run)
    assert all(row["stepscope/step"] >= -1 for row in rows if "_timestamp" in row and "stepscope/train/loss" in row)
    losses = [(row["stepscope/step"], row["stepscope/train/loss"]) for row in rows if "stepscope/train/loss" in row]
    told = [row for row in expected.table(odd_run) if row["name"] == "train/loss" and row["process"] == "rank-0"]
    assert [step for step, _ in losses][:5] == [row["step"] for row in told if row["source"] == "log"][:5]
    assert any("stepscope/rank-1/train/loss" in row for row in rows)
    assert any("stepscope/step (logged)" in row for row in rows)  # what the script calls so is not the axis
    by_kind = {kind: [] for kind in ("run", "metric", "summary", "files", "exit")}
    for record in records(folder):
        by_kind.setdefault(record.WhichOneof("record_type"), []).append(record)
    (globbed,) = [one.metric for one in by_kind["metric"] if one.metric.glob_name]
    assert (globbed.glob_name, globbed.step_metric) == ("stepscope/*", "stepscope/step")
    made = by_kind["run"][0].run
    config = {item.key: json.loads(item.value_json) for item in made.config.update if item.key != "_wandb"}
    assert made.project == "p"
    assert made.run_id.startswith("stepscope-")
    assert config["knobs"] == {"loader.num_workers": "2"}
    assert datetime.fromisoformat(config["started"]).timestamp() == pytest.approx(T0 / 1e9, abs=1)
    assert "Load in worker processes" in made.notes
    table = json.loads(next(folder.rglob("*.table.json")).read_text())
    assert table["data"][0][table["columns"].index("rule")] == "input.loader_bound"
    assert {path.path for one in by_kind["files"] for path in one.files.files} >= {"report.html"}
    assert (folder / "files" / "report.html").stat().st_size > 10_000
    summaries = {item.key for one in by_kind["summary"] for item in one.summary.update}
    assert {"stepscope/findings", "stepscope/step_ms"} <= summaries
    assert by_kind["exit"][0].exit.exit_code == 0


def test_a_second_export_writes_nothing_unless_forced(odd_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    export = ("export", odd_run, "--to", "wandb", "--out", "out")
    assert call(*export) == 0
    first = only("*").stat().st_ino
    assert call(*export) == 0
    assert "holds it already" in capfd.readouterr().err
    assert only("*").stat().st_ino == first
    assert call(*export, "--force") == 0
    assert only("*").stat().st_ino != first
    made = only("*")
    about = made.rename(made.with_name(made.name.replace("run-2", "run-1"))) / "stepscope.json"  # of another second
    about.unlink()
    os.mkfifo(about)
    assert call(*export) == 0  # nobody is waited for to write into it


def test_a_resumed_run_keeps_all_that_is_its_own(odd_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        assert call("export", odd_run, "--to", "wandb", "--out", "out", "--resume", "theirs01") == 0
    folder = only("*-theirs01")
    assert points(history(folder)) == expected.values(odd_run)
    for record in records(folder):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            assert record.run.resume
            assert (record.run.display_name, record.run.notes, list(record.run.tags)) == ("", "", [])
            assert {item.key for item in record.run.config.update} <= {"_wandb"}
        elif kind == "config":
            assert {item.key or item.nested_key[0] for item in record.config.update} <= {"_wandb", "stepscope"}
        elif kind == "files":
            assert all("stepscope/" in path.path for path in record.files.files)
        elif kind == "summary":
            told = {item.key or item.nested_key[0] for item in record.summary.update}
            assert all(name.startswith(("stepscope/", "_")) for name in told)


def test_a_run_that_goes_on_is_not_written_into(
    growing: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    export = ("export", growing(4), "--to", "wandb", "--out", "out", "--resume", "theirs01")
    assert call(*export) == 2
    assert "goes on" in capfd.readouterr().err
    assert not Path("out").exists()
    growing(1, last=True)
    assert call(*export) == 0
