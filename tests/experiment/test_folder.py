"""Which folder belongs to an experiment, that two never work in one, and its journal: what a torn, foreign or
unwritable file does, and what is done about runs left open."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import EnvironmentRefusal, UsageError
from stepscope.experiment import folder
from stepscope.experiment.folder import JOURNAL, Journal, Made, fold
from stepscope.experiment.plan import PAIRS, Slot
from stepscope.record.host.processes import read_stat
from stepscope.schema import Knob
from tests.experiment.fakes import FakeRunner, conduct, flag, measure, request
from tests.records import some


def unfinished(place: Path, key: str, *, complete: bool = False) -> None:
    with folder.claimed(place):
        book = Journal(place / JOURNAL)
        book.open()
        book.add("experiment", key=key, line="stepscope experiment")
        if complete:
            book.add("complete")
        book.close()


def test_the_unfinished_experiment_of_the_same_request_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = "0123456789abcdef"
    first, resumed = folder.find(key, "train")
    assert (first.parent, resumed) == (tmp_path / "stepscope-runs", False)
    unfinished(first, key)
    assert folder.find(key, "train") == (first, True)
    for other in (folder.find("fedcba9876543210", "train"), folder.find(key, "train", fresh=True)):
        assert other[0] != first
        assert not other[1]
    unfinished(first, key, complete=True)  # a finished one is made again beside it
    assert folder.find(key, "train")[0] != first


@pytest.mark.parametrize(
    ("key", "complete", "fresh", "words"),
    [
        ("a", False, False, None),
        ("b", False, False, "another experiment"),
        ("a", True, False, "finished"),
        ("a", False, True, "--fresh"),
    ],
)
def test_a_named_folder_is_continued_or_never_written_over(
    tmp_path: Path, key: str, complete: bool, fresh: bool, words: str | None
) -> None:
    unfinished(tmp_path / "e", "a", complete=complete)
    assert not folder.find(key, "train", tmp_path / "new")[1]
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        folder.find(key, "train", tmp_path / "file")
    refused = nullcontext() if words is None else pytest.raises(UsageError, match=words)
    with refused:
        assert folder.find(key, "train", tmp_path / "e", fresh=fresh)[1]


def test_two_experiments_in_one_folder_are_refused_until_the_first_has_ended_or_was_killed(tmp_path: Path) -> None:
    refused = pytest.raises(UsageError, match=str(os.getpid()))
    with folder.claimed(tmp_path / "e"), refused, folder.claimed(tmp_path / "e"):
        pytest.fail("two experiments work in one folder")
    program = (
        "import os, sys; from pathlib import Path; from stepscope.experiment import folder\n"
        "with folder.claimed(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "e")], timeout=60)
    assert done.returncode == -9
    with folder.claimed(tmp_path / "e"):
        pass


@pytest.mark.parametrize("label", ["env:A=../../etc/passwd", "arg:--x=" + "y" * 500, "a + b\n\x1b[2J", ""])
def test_names_of_runs_are_plain_names(label: str) -> None:
    name = folder.run_name(7, label)
    assert name.startswith("007-")
    assert len(name) < 64
    assert Path(name).name == name
    assert name.isascii()
    assert name.isprintable()


SLOT = Slot(PAIRS, 2, 1, 0, (Knob("env:A", 'x "y"\n☃'),), "env:A=x")


def written(path: Path) -> Journal:
    book = Journal(path)
    book.open()
    book.add("experiment", key="0123", line="stepscope experiment")
    book.add("started", slot=SLOT, folder="001-env")
    book.add("finished", made=Made(SLOT, "001-env", 12.5, measure("env:A=x", 41.5, flag("throttled")), None, 40))
    return book


def test_a_torn_last_line_is_cut_off_and_written_over(tmp_path: Path) -> None:
    written(tmp_path / "j").close()
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-7])
    book = Journal(tmp_path / "j")
    book.open()
    assert book.state.made == ()
    assert book.state.open == (("001-env", None, None),)
    book.add("dropped", folder="001-env")
    book.close()
    state = fold((tmp_path / "j").read_bytes())
    assert (state.open, state.bad_lines) == ((), 0)


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b'{"kind": "finished", "made": {"slot": 3}}')), max_size=5))
def test_lines_that_cannot_be_understood_are_counted_and_left_out(lines: list[bytes]) -> None:
    junk = b"".join(line.replace(b"\n", b"").replace(b"\r", b"") + b"\n" for line in lines)
    good = b'{"kind": "experiment", "key": "k"}\n'
    state = fold(junk + good + junk)
    assert state.key == "k"
    assert state.made == ()
    assert state.bad_lines <= 2 * len(lines)


def test_a_journal_that_cannot_be_written_is_a_refusal() -> None:
    with pytest.raises(EnvironmentRefusal, match="--out"):
        Journal(Path("/proc/self/nothing/journal")).open()


def test_a_full_disk_is_a_refusal_and_what_was_written_stays(tmp_path: Path) -> None:
    book = written(tmp_path / "j")
    size = (tmp_path / "j").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(EnvironmentRefusal, match="cannot be written"):
            book.add("started", slot=SLOT, folder="002-env")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    book.close()
    again = Journal(tmp_path / "j")
    again.open()
    again.add("started", slot=SLOT, folder="002-env")
    again.close()
    state = fold((tmp_path / "j").read_bytes())
    assert (len(state.made), state.runs, state.bad_lines) == (1, 2, 0)


@pytest.mark.parametrize("same", [True, False])
def test_a_run_that_outlived_its_experiment_is_ended_first_and_no_other_process(tmp_path: Path, same: bool) -> None:
    """What a session leaves behind that was killed in its first run; a process of that number may be another one."""
    (tmp_path / "runs" / "001-pilot").mkdir(parents=True)
    sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        stat = some(read_stat(sleeper.pid))
        book = Journal(tmp_path / JOURNAL)
        book.open()
        book.add("started", slot=SLOT, folder="001-pilot")
        book.add("process", folder="001-pilot", pid=sleeper.pid, start_ticks=stat.start_ticks - (not same))
        book.close()
        conduct(tmp_path, request("gc=freeze"), FakeRunner())
        time.sleep(0.2)
        assert (sleeper.poll() is None) == (not same)
        assert not (tmp_path / "runs" / "001-pilot").exists()
    finally:
        sleeper.kill()
        sleeper.wait()
