"""The history of a script: what was changed from run to run, the step time, and what is left; on every surface."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepscope import comparing
from stepscope.api import open_run
from stepscope.dashboard import history
from tests.builders import T0
from tests.cli.calls import call, json_of
from tests.comparison.run_sets import MINUTE, make_run
from tests.dashboard.opened import Runs, page, parts

main = partial(call, "runs")


def source(**hashes: str) -> list[dict[str, Any]]:
    named = {f"/p/{name}.py": text * 64 for name, text in hashes.items()}
    loader = {"id": 1, "dataset": 2, "epoch": 0, "length": 60, "num_workers": 0, "batch_size": 8}
    return [
        {"kind": "loader", "time_ns": T0, "duration_ns": 1_000, "step": 0, **loader},
        {"kind": "sources", "time_ns": T0, "duration_ns": None, "step": None, "hashes": named},
    ]


@pytest.fixture
def fixes(tmp_path: Path) -> Path:
    """A script whose loader was given workers, then a new file, then an argument; made in another order."""
    script = {"cwd": "/p", "user_roots": ["/p"], "script": {"kind": "script", "path": "/p/train.py"}}
    made: list[tuple[str, float, list[dict[str, Any]], list[str], list[list[str]]]] = [
        ("a", 9, source(train="0"), ["--lr", "0.1"], []),
        ("b", 0.1, source(train="0"), ["--lr", "0.1"], [["env:OMP_NUM_THREADS", "2"]]),
        ("c", 0.1, source(train="1", model="2"), ["--lr", "0.1"], []),
        ("d", 0.1, source(train="1", model="2"), ["--lr", "0.3", "--fused"], []),
    ]
    for number in (2, 0, 3, 1):
        name, wait_ms, sources, words, knobs = made[number]
        applied = [
            {"kind": "knob", "time_ns": T0, "knob": knob, "value": value, "applied": True, "observed": value}
            for knob, value in knobs
        ]
        manifest = {**script, "command": ["python", "train.py", *words], "options": {"knobs": knobs}}
        start = T0 + number * MINUTE
        make_run(tmp_path / name, data_wait_ms=wait_ms, start_ns=start, events=[*sources, *applied], manifest=manifest)
    return tmp_path


def test_each_run_tells_what_was_changed_and_what_it_gained(fixes: Path) -> None:
    versions, notes = comparing.history(fixes / name for name in "dbca")
    assert [version.label for version in versions] == ["a", "b", "c", "d"]
    assert notes == ()
    said = [list(history.said(version)) for version in versions]
    assert said[0] == []
    assert said[1] == ["env:OMP_NUM_THREADS: none → 2"]
    assert said[2] == ["model.py new", "train.py edited", "env:OMP_NUM_THREADS: 2 → none"]
    assert said[3] == ["--lr 0.1 → 0.3 --fused"]
    first, second = versions[0].mean_ms, versions[1].mean_ms
    assert first is not None
    assert second is not None
    assert versions[1].ratio == versions[1].of_first == pytest.approx(second / first)
    assert first == pytest.approx(18, rel=0.05)
    assert (versions[2].ratio, versions[0].ratio) == (pytest.approx(1), None)


def test_a_finding_that_a_fix_has_removed_is_gone(fixes: Path) -> None:
    first, second, *_ = comparing.history(fixes / name for name in "ab")[0]
    assert [left.rule for left in first.findings] == ["input.loader_bound"]
    assert second.gone == (first.findings[0].title,)
    assert second.findings == ()


def test_the_command_line_and_the_page_say_the_same(fixes: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = json_of(capfd, "runs", fixes, "--history")
    assert [row["label"] for row in told["runs"]] == ["a", "b", "c", "d"]
    assert main(fixes, "--history") == 0
    shown = capfd.readouterr().out
    runs = {name: open_run(fixes / name) for name in "abcd"}
    catalog = Runs({f"s-{name}": run for name, run in runs.items()})
    asked = page(runs["d"], "compare", catalog=catalog, key="s-d")
    assert not parts(asked, "table")
    found = page(runs["d"], "compare", catalog=catalog, key="s-d", history="shown")
    (table,) = (block for block in parts(found, "table") if block["id"] == "history")
    assert [row["label"] for row in table["rows"]] == ["a", "b", "c", "d"]
    assert [row["mean_ms"] for row in table["rows"]] == [row["mean_ms"] for row in told["runs"]]
    (changed,) = (block for block in parts(found, "facts") if block["title"] == "What was changed")
    assert len(changed["rows"]) == 3
    for row in changed["rows"]:
        assert row["value"] in shown
    assert "--lr 0.1" in changed["rows"][2]["value"]


def test_runs_of_several_scripts_have_no_history(fixes: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(fixes / "other", manifest={"script": {"kind": "script", "path": "/p/other.py"}})
    assert main(fixes, "--history") == 2
    assert "2 scripts" in capfd.readouterr().err
    assert main(fixes, "--history", "--search", "/p/train.py") in (0, 3)
    assert main(fixes, "--history", "--prune", "--keep", "1") == 2


def test_one_run_is_a_history_of_one_and_a_damaged_one_is_said(fixes: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in "bc":
        for file in (fixes / name).rglob("*"):
            if file.is_file():
                file.write_bytes(b"\0\xff{" * 50)
    told = json_of(capfd, "runs", fixes, "--history", "--search", "0.1 a")
    assert [row["label"] for row in told["runs"]] == ["a"]
    versions, notes = comparing.history(fixes / name for name in "abd")
    assert [version.label for version in versions] in (["a", "d"], ["a", "b", "d"])
    assert all("b is left out" in note for note in notes)
