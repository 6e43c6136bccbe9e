"""Which folder belongs to an experiment, and that two never work in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.errors import EnvironmentRefusal, UsageError
from stepscope.experiment import folder, journal
from stepscope.experiment.journal import Journal


def unfinished(place: Path, key: str, *, complete: bool = False) -> None:
    with folder.claimed(place):
        book = Journal(place / journal.NAME)
        book.open()
        book.begin(key, "stepscope experiment")
        if complete:
            book.completed()
        book.close()


def test_the_unfinished_experiment_of_the_same_request_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = folder.find("0123456789abcdef", "train")
    assert not first.resumed
    assert first.folder.parent == tmp_path / "stepscope-runs"
    unfinished(first.folder, "0123456789abcdef")
    again = folder.find("0123456789abcdef", "train")
    assert (again.folder, again.resumed) == (first.folder, True)
    other = folder.find("fedcba9876543210", "train")
    assert other.folder != first.folder
    assert not other.resumed
    fresh = folder.find("0123456789abcdef", "train", fresh=True)
    assert fresh.folder not in (first.folder, other.folder)
    assert not fresh.resumed


def test_a_finished_one_is_made_again_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = folder.find("0123456789abcdef", "train")
    unfinished(first.folder, "0123456789abcdef", complete=True)
    again = folder.find("0123456789abcdef", "train")
    assert again.folder != first.folder
    assert not again.resumed


@pytest.mark.parametrize(
    ("key", "complete", "fresh", "words"),
    [("b", False, False, "another experiment"), ("a", True, False, "finished"), ("a", False, True, "--fresh")],
)
def test_a_named_folder_is_never_written_over(
    tmp_path: Path, key: str, complete: bool, fresh: bool, words: str
) -> None:
    unfinished(tmp_path / "e", "a", complete=complete)
    with pytest.raises(UsageError, match=words):
        folder.find(key, "train", tmp_path / "e", fresh=fresh)


def test_a_named_folder_is_continued(tmp_path: Path) -> None:
    unfinished(tmp_path / "e", "a")
    assert folder.find("a", "train", tmp_path / "e").resumed
    assert not folder.find("a", "train", tmp_path / "new").resumed
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        folder.find("a", "train", tmp_path / "file")


def test_two_experiments_in_one_folder_are_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    refused = pytest.raises(UsageError, match=str(os.getpid()))
    with folder.claimed(tmp_path / "e"), refused, folder.claimed(tmp_path / "e"):
        pytest.fail("two experiments work in one folder")
    with folder.claimed(tmp_path / "e"):
        pass


def test_the_lock_of_a_killed_experiment_does_not_stay(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from stepscope.experiment import folder\n"
        "with folder.claimed(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "e")], timeout=60)
    assert done.returncode == -9
    with folder.claimed(tmp_path / "e"):
        pass


def test_a_folder_that_cannot_be_made_is_a_refusal() -> None:
    with pytest.raises(EnvironmentRefusal, match="--out"), folder.claimed(Path("/proc/self/nothing")):
        pass


@pytest.mark.parametrize("label", ["env:A=../../etc/passwd", "arg:--x=" + "y" * 500, "a + b\n\x1b[2J", ""])
def test_names_of_runs_are_plain_names(label: str) -> None:
    name = folder.run_name(7, label)
    assert name.startswith("007-")
    assert len(name) < 64
    assert Path(name).name == name
    assert name.isascii()
    assert name.isprintable()
