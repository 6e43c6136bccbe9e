"""A run that goes on, ends, fails, is killed or deleted: what the dashboard says of it, and that it only looks."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.dashboard.server import live
from stepscope.dashboard.server.live import Journals
from stepscope.dashboard.server.prepare import TOO_MANY
from tests.builders import MS, T0, step_rows
from tests.dashboard.client import PATIENCE_S, Dashboard
from tests.dashboard.served_runs import Growing
from tests.run_folders import make_run_folder


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    run = Growing(tmp_path / "runs")
    yield run
    run.close()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on is read again as soon as it has changed."""
    monkeypatch.setattr("stepscope.dashboard.server.prepare.AT_LEAST_S", 0.1)
    monkeypatch.setattr("stepscope.dashboard.server.prepare.PAUSE", 0.0)


def age(folder: Path, seconds: float) -> None:
    """Let all that was written be older."""
    for path in folder.rglob("*"):
        if path.is_file():
            at = path.stat().st_mtime - seconds
            os.utime(path, (at, at))


def until(shown: Dashboard, run: str, met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask how the run goes, as the front end does, until something is so."""
    end = time.monotonic() + PATIENCE_S
    while not met(said := shown.json(f"api/runs/{run}/live")):
        assert time.monotonic() < end, said
        time.sleep(0.1)
    return said  # type: ignore[no-any-return]


def test_a_run_whose_launcher_lives_goes_on_however_long_nothing_was_written(growing: Growing) -> None:
    age(growing.folder, 3600)
    assert live.standing(growing.folder).state == "running"


def test_a_run_that_ended_says_how(growing: Growing, tmp_path: Path) -> None:
    for status, state, told in ((0, "finished", "30 steps"), (3, "failed", "exit status 3")):
        growing.end(status)
        how = live.standing(growing.folder, Journals(growing.folder).read())
        assert (how.state, told in how.text) == (state, True)
    killed = {"exit": {"status": None, "signal": 9, "shell_status": 137}}
    assert "SIGKILL" in live.standing(make_run_folder(tmp_path, manifest=killed)).text


def test_a_run_whose_processes_are_gone_has_vanished(growing: Growing) -> None:
    growing.close()
    age(growing.folder, 3600)
    how = live.standing(growing.folder)
    assert how.state == "vanished"
    assert "60 min" in how.text


def test_a_process_that_began_after_the_run_is_not_its_launcher(growing: Growing) -> None:
    path = next(growing.folder.glob("host-*/manifest.json"))
    long_ago = {**json.loads(path.read_text()), "started_ns": T0}
    path.write_text(json.dumps(long_ago))
    age(growing.folder, 3600)
    assert live.standing(growing.folder).state == "vanished"


def test_of_another_machine_only_the_age_counts(tmp_path: Path) -> None:
    away = {"ended_ns": None, "exit": {}, "host": "another-host", "launcher_pid": os.getpid()}
    folder = make_run_folder(tmp_path, manifest=away)
    assert live.standing(folder).state == "running"
    age(folder, 3600)
    assert live.standing(folder).state == "vanished"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "nul", '{"ended_ns": "x", "exit": 3}', '{"host": 1, "pid": "x"}', '{"host": "\udcff"}']
)
def test_a_manifest_that_cannot_be_read_is_no_error(tmp_path: Path, text: str) -> None:
    folder = make_run_folder(tmp_path)
    next(folder.glob("host-*/manifest.json")).write_text(text, errors="surrogateescape")  # one is no UTF-8
    assert live.standing(folder).state in ("running", "vanished")


def read(journals: Journals) -> live.Progress:
    found = journals.read()
    assert found is not None
    return found


def test_journals_are_read_on_from_where_they_ended(growing: Growing) -> None:
    journals = Journals(growing.folder)
    first = read(journals)
    assert (first.steps, first.last_ms) == (30, 10)
    growing.add(5, wall_ms=40)
    again = read(journals)
    assert (again.steps, again.last_ms) == (35, 40)
    # the first step of the epoch is in no mean
    assert again.mean_ms == pytest.approx((29 * 10 + 5 * 40) / 34)

    path = growing.folder / "rank-0" / "steps.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    with path.open("ab") as file:  # a line that is not finished waits
        file.write(lines[-1][:20])
        file.flush()
        assert read(journals).steps == 35
        file.write(lines[-1][20:] + b"not json\n[]\n{}\n[1]\nnull\n")
    assert read(journals).steps == 36
    path.write_bytes(b"".join(lines[:4]))  # another attempt writes it anew
    assert read(journals).steps == 3


def test_windows_are_in_no_mean_and_ranks_are_together(tmp_path: Path) -> None:
    rows = [*step_rows(10), *step_rows(2, forward_ms=100, in_window=True, start_ns=T0 + 100 * MS, first_step=10)]
    folder = make_run_folder(tmp_path, steps=rows)
    make_run_folder(tmp_path, rank=1, pid=101, steps=step_rows(10, forward_ms=5))
    seen = read(Journals(folder))
    assert seen.steps == 12
    assert seen.mean_ms == pytest.approx((9 * 10 + 9 * 12) / 18)


@pytest.mark.usefixtures("often")
def test_a_run_is_followed_to_its_end(growing: Growing, dashboard_of: Callable[..., Dashboard]) -> None:
    shown = dashboard_of(growing.folder)
    run = shown.id("growing")
    assert shown.json("api/runs")["runs"][0]["state"] == "running"
    page = shown.json(f"api/runs/{run}/pages/steps")
    assert page["revision"] == 1
    said = shown.json(f"api/runs/{run}/live")
    assert (said["state"], said["steps"], said["again_s"]) == ("running", 30, 2.0)
    assert "30 steps" in said["text"]

    growing.add(50)
    said = until(shown, run, lambda said: said["revision"] == 2)
    assert (said["state"], said["steps"]) == ("running", 80)
    assert shown.json(f"api/runs/{run}/pages/steps")["revision"] == 2

    growing.add(1)
    growing.end(0)
    said = until(shown, run, lambda said: said["again_s"] is None)
    assert (said["state"], said["revision"], said["steps"]) == ("finished", 3, 81)
    assert shown.json(f"api/runs/{run}")["state"] == "finished"
    assert shown.json(f"api/runs/{run}/live")["revision"] == 3


def test_a_run_that_vanishes_keeps_its_pages(growing: Growing, dashboard_of: Callable[..., Dashboard]) -> None:
    shown = dashboard_of(growing.folder.parent)
    run = shown.id("growing")
    shown.json(f"api/runs/{run}/pages/findings")
    growing.close()
    age(growing.folder, 3600)
    said = until(shown, run, lambda said: said["again_s"] is None)
    assert said["state"] == "vanished"
    assert "killed" in said["text"]

    shutil.rmtree(growing.folder)
    said = shown.json(f"api/runs/{run}/live")
    assert (said["state"], said["text"], said["again_s"]) == ("vanished", live.GONE, None)
    assert shown.json(f"api/runs/{run}/pages/findings")["page"] == "findings"
    assert shown.json(f"api/runs/{run}")["state"] == "vanished"


def test_following_a_run_writes_nothing(growing: Growing, dashboard_of: Callable[..., Dashboard]) -> None:
    def seen() -> dict[str, tuple[int, int]]:
        found = [path for path in growing.folder.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}

    shown = dashboard_of(growing.folder)
    run = shown.id("growing")
    before = seen()
    for page in ("findings", "steps", "timeline", "system"):
        shown.json(f"api/runs/{run}/pages/{page}")
    shown.json(f"api/runs/{run}/live")
    assert seen() == before


def test_pages_that_need_many_runs_are_made(tmp_path: Path) -> None:
    """Also while three are kept: none that such a page waits for is dropped, and a history holds one at a time."""
    for name in "abcdef":
        make_run_folder(tmp_path, name=name)
    with Dashboard.start(tmp_path) as shown:
        first, *others = (shown.id(name) for name in "abcdef")
        given = zip(("with", "with2", "with3"), others, strict=False)
        laid_over = "&".join(f"{name}={run}" for name, run in given)
        assert shown.json(f"api/runs/{first}/pages/metrics?{laid_over}")["blocks"]
        blocks = shown.json(f"api/runs/{first}/pages/compare?history=shown")["blocks"]
        assert len(next(block for block in blocks if block.get("id") == "history")["rows"]) == 6


def test_runs_are_dropped_by_what_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.dashboard.server.prepare.MOST_HELD", 1)
    monkeypatch.setattr("stepscope.dashboard.server.prepare.ASKED_S", 0.0)
    for name in "ab":
        make_run_folder(tmp_path, name=name)
    with Dashboard.start(tmp_path) as shown:
        runs = [shown.id(name) for name in "aba"]
        assert [shown.json(f"api/runs/{run}/pages/steps")["revision"] for run in runs] == [1, 1, 2]
        # also those that a page waits for, which says so
        monkeypatch.setattr("stepscope.dashboard.server.prepare.ASKED_S", 60.0)
        shown.json(f"api/runs/{runs[1]}/pages/steps")
        while (answer := shown.ask(f"api/runs/{runs[0]}/pages/metrics?with={runs[1]}")).status == 202:
            time.sleep(0.05)
        assert (answer.status, answer.json["error"]) == (409, TOO_MANY)
