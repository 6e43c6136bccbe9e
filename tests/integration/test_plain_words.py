"""Runs in which nothing is wrong, or nothing can be said: one clear line, no traceback, no invented figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import NO_WINDOW
from tests.integration.harness import PYTHON, SCRIPTS, Recorded, analyze, record

pytestmark = pytest.mark.process


@pytest.mark.torch
def test_a_healthy_run_says_so(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", [PYTHON, str(SCRIPTS / "healthy.py")])
    assert recorded.status == 0, recorded.text
    assert [finding["rule"] for finding in recorded.findings if finding["severity"] != "info"] == []
    text, rest = " ".join(recorded.text.lower().split()), recorded.report["unexplained"]
    if rest["large"]:  # other tests have the cores meanwhile: that is said instead, and nothing else
        assert "nobody explained" in text
        assert all("others on the machine" in part["what"] for part in rest["parts"]), rest
    else:
        assert "nothing worth fixing above" in text


@pytest.mark.parametrize("script", ["no_torch.py", pytest.param("never_steps.py", marks=pytest.mark.torch)])
def test_without_steps_there_is_a_clear_line(tmp_path: Path, script: str) -> None:
    recorded = record(tmp_path / "run", [PYTHON, str(SCRIPTS / script)], options=NO_WINDOW)
    assert recorded.status == 0, recorded.text
    assert "Traceback" not in recorded.text
    assert "step" in recorded.text
    assert 1 <= len(recorded.text.strip().splitlines()) <= 30, recorded.text


def test_torch_is_not_imported_for_a_script_without_it(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", [PYTHON, str(SCRIPTS / "no_torch.py")], options=NO_WINDOW)
    assert recorded.stdout == b"sum 4999950000 False\n"


@pytest.mark.torch
def test_report_of_a_normal_loop_counts_its_steps(plain_loop: Recorded) -> None:
    steps = plain_loop.report["steps"]
    assert steps["count"] + sum(steps["excluded"].values()) in {39, 40}
    assert steps["samples_per_second"] is not None
    assert (plain_loop.folder / "report.html").exists()
    assert str(plain_loop.folder) in plain_loop.text.replace("\n", "")


@pytest.mark.torch
def test_a_torn_journal_is_read_and_said(plain_loop: Recorded, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(plain_loop.folder, copy)
    with open(copy / "rank-0" / "steps.jsonl", "a") as journal:
        journal.write('[40, "train", 2, 17')
    shown = analyze(copy, "--json", "-")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert report["steps"]["count"] == plain_loop.report["steps"]["count"]
    assert any("steps.jsonl" in note["text"] + note["source"] for note in report["quality"]["notes"])


def test_an_unreadable_path_is_one_line_and_exit_3(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        shown = analyze(path)
        assert shown.returncode == 3, shown.stderr
        assert len(shown.stderr.strip().splitlines()) == 1


def test_an_existing_folder_is_not_recorded_over(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("keep")
    recorded = record(tmp_path / "run", [PYTHON, "-c", "print('ran')"], options=NO_WINDOW)
    assert recorded.status == 2, recorded.text
    assert recorded.stdout == b""
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]
