"""MLflow's database: every value once, also after an export that was cut short, and of a run that has grown."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.sinks import mlflow
from tests.cli.calls import call
from tests.run_folders import make_run_folder
from tests.sinks import expected

pytest.importorskip("mlflow")
LARGEST = 1.7976931348623157e308


def asked(query: str, database: str = "m.db") -> list[Any]:
    with sqlite3.connect(database) as connection:
        return connection.execute(query).fetchall()


def values(database: str = "m.db") -> Counter[str]:
    rows = asked("SELECT CASE WHEN is_nan THEN 'nan' ELSE value END FROM metrics", database)
    return Counter(repr(float(value) + 0.0) for (value,) in rows)


def truth(run: Path) -> Counter[str]:
    """As its store can hold them."""
    return Counter(repr(min(max(row["value"], -LARGEST), LARGEST) + 0.0) for row in expected.table(run))


def test_every_value_once(odd_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    export = ("export", odd_run, "--to", "mlflow", "--out", "m.db", "--project", "my experiment")
    assert call(*export) == 0
    said = capfd.readouterr().err
    assert "MLflow takes no such names" in said
    assert "infinite values" in said
    assert values() == truth(odd_run)
    told = {row["time_ns"] // 10**6 for row in expected.table(odd_run)}
    moved = [time for (time,) in asked("SELECT timestamp FROM metrics") if time not in told]
    assert len(moved) <= 5  # the same value of a name twice in a millisecond: the later one stands in the next
    (run,) = asked("SELECT run_uuid, status, start_time FROM runs")
    assert run[1] == "FINISHED"
    tags = dict(asked("SELECT key, value FROM tags"))
    assert {"stepscope.run", "stepscope.complete", "mlflow.note.content"} <= tags.keys()
    assert dict(asked("SELECT key, value FROM params"))["knobs.loader.num_workers"] == "2"
    assert "Load in worker processes" in tags["mlflow.note.content"]
    kept = {path.name for path in Path("mlartifacts").rglob("*") if path.is_file()}
    assert kept == {"findings.json", "report.html", "names.json"}
    before = asked("SELECT count(*), sum(timestamp) FROM metrics")
    assert call(*export) == 0
    assert "No new value" in capfd.readouterr().err
    assert asked("SELECT count(*), sum(timestamp) FROM metrics") == before
    assert len(asked("SELECT * FROM runs")) == 1


def test_goes_on_where_it_was_cut_short(odd_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr(mlflow, "BATCH", 200)
    log_batch, done = MlflowClient.log_batch, []

    def fails(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(done) == 2:
            raise RuntimeError("the machine went away\nin two lines")
        done.append(1)
        log_batch(self, *args, **kwargs)

    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "log_batch", fails)
        assert call("export", odd_run, "--to", "mlflow", "--out", "m.db") == 4
    assert asked("SELECT count(*) FROM metrics") == [(400,)]
    assert call("export", odd_run, "--to", "mlflow", "--out", "m.db") == 0
    assert values() == truth(odd_run)
    assert len(asked("SELECT * FROM runs")) == 1


def test_a_run_that_has_grown_is_completed(growing: Callable[..., Path]) -> None:
    run = growing(4)
    assert call("export", run, "--to", "mlflow", "--out", "m.db") == 0
    assert asked("SELECT status FROM runs") == [("RUNNING",)]
    growing(3, last=True)
    assert call("export", run, "--to", "mlflow", "--out", "m.db") == 0
    assert values() == truth(run)
    assert asked("SELECT status FROM runs") == [("FINISHED",)]


def test_the_users_own_store_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/theirs.db")
    assert call("export", make_run_folder(tmp_path), "--to", "mlflow") == 0
    assert asked("SELECT count(*) FROM metrics", "theirs.db")[0][0] > 0
    capfd.readouterr()
    Path("bad.db").write_bytes(b"no database at all" * 100)
    assert call("export", tmp_path / "run", "--to", "mlflow", "--out", "bad.db") == 4
    assert capfd.readouterr().err.count("\n") == 1
