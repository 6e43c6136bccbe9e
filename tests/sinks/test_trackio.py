"""Trackio's local project: every value once with its time, findings as alerts; and its import of our event files."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from tests.cli.calls import call
from tests.sinks import expected

pytest.importorskip("trackio")
_START = datetime(1970, 1, 1, tzinfo=timezone.utc)


def asked(query: str) -> list[Any]:
    with sqlite3.connect("t/stepscope.db") as connection:
        return connection.execute(query).fetchall()


def points() -> Counter[tuple[int, str]]:
    """Times to the microsecond below."""
    found: Counter[tuple[int, str]] = Counter()
    for time, metrics in asked("SELECT timestamp, metrics FROM metrics"):
        since = datetime.fromisoformat(time) - _START
        micros = (since.days * 86_400 + since.seconds) * 10**6 + since.microseconds
        found.update((micros, repr(float(value))) for value in json.loads(metrics).values())
    return found


def truth(run: Path) -> Counter[tuple[int, str]]:
    return Counter((row["time_ns"] // 1000, repr(float(row["value"]))) for row in expected.table(run))


def test_every_value_once_and_findings_as_alerts(odd_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    export = ("export", odd_run, "--to", "trackio", "--out", "t")
    assert call(*export) == 0
    assert points() == truth(odd_run)
    steps = asked("SELECT step, metrics FROM metrics ORDER BY timestamp, id")
    losses = [step for step, metrics in steps if '"train/loss"' in str(metrics)]
    told = expected.table(odd_run)
    own = [row for row in told if row["name"] == "train/loss" and row["process"] == "rank-0" and row["source"] == "log"]
    assert losses[:5] == [row["step"] for row in own][:5]
    assert any('"__timestamp"' in str(metrics) for _, metrics in steps)
    alerts = asked("SELECT title, text, level FROM alerts")
    assert "Load in worker processes" in alerts[0][1]
    assert {level for _, _, level in alerts} <= {"info", "warn", "error"}
    before = asked("SELECT count(*), max(id) FROM metrics")
    assert call(*export) == 0
    assert "No new value" in capfd.readouterr().err
    assert asked("SELECT count(*), max(id) FROM metrics") == before
    assert asked("SELECT title, text, level FROM alerts") == alerts
    with sqlite3.connect("t/stepscope.db") as connection:  # cut short: a later part is not there
        connection.execute("DELETE FROM metrics WHERE id > 60")
    assert call(*export) == 0
    assert points() == truth(odd_run)
    assert list(Path("t/media").rglob("*.html"))


def test_its_import_takes_our_event_files(odd_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", Path("t").absolute())
    assert call("export", odd_run, "--to", "tensorboard", "--out", "tb") == 0
    trackio.import_tf_events("tb", project="stepscope", name="ours")
    found = Counter(
        (name, step, repr(float(value)))
        for step, metrics in asked("SELECT step, metrics FROM metrics")
        for name, value in json.loads(metrics).items()
    )
    told = api.open_run("tb").table("metrics").rows
    assert found == Counter(
        (row["name"], -1 if row["step"] is None else row["step"], repr(float(row["value"]))) for row in told
    )
