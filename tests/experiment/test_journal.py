"""The journal of an experiment: what a torn, foreign or unwritable file does, and what is done about runs left open."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import EnvironmentRefusal
from stepscope.experiment import journal
from stepscope.experiment.journal import Journal, Made
from stepscope.experiment.plan import PAIRS, Slot
from stepscope.record.host.processes import read_stat
from stepscope.schema import Knob
from tests.experiment.fakes import FakeRunner, conduct, flag, measure, request

SLOT = Slot(PAIRS, 2, 1, 0, (Knob("env:A", 'x "y"\n☃'),), "env:A=x")


def written(path: Path) -> Journal:
    book = Journal(path)
    book.open()
    book.begin("0123", "stepscope experiment")
    book.started(SLOT, "001-env")
    book.finished(Made(SLOT, "001-env", 12.5, measure("env:A=x", 41.5, flag("throttled")), None, 40))
    return book


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    book = written(tmp_path / "j")
    book.close()
    again = Journal(tmp_path / "j")
    again.open()
    assert again.state == book.state
    assert again.state.made[0].slot == SLOT
    assert (again.state.key, again.state.runs, again.state.open, again.state.wall_s) == ("0123", 1, (), 12.5)
    again.close()


def test_a_torn_last_line_is_cut_off_and_written_over(tmp_path: Path) -> None:
    written(tmp_path / "j").close()
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-7])
    book = Journal(tmp_path / "j")
    book.open()
    assert book.state.made == ()
    assert book.state.open == (("001-env", None, None),)
    book.dropped("001-env")
    book.close()
    state = journal.fold((tmp_path / "j").read_bytes())
    assert (state.open, state.bad_lines) == ((), 0)


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b'{"kind": "finished", "made": {"slot": 3}}')), max_size=5))
def test_lines_that_cannot_be_understood_are_counted_and_left_out(lines: list[bytes]) -> None:
    junk = b"".join(line.replace(b"\n", b"").replace(b"\r", b"") + b"\n" for line in lines)
    good = b'{"kind": "experiment", "key": "k"}\n'
    state = journal.fold(junk + good + junk)
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
            book.started(SLOT, "002-env")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    book.close()
    again = Journal(tmp_path / "j")
    again.open()
    again.started(SLOT, "002-env")
    again.close()
    state = journal.fold((tmp_path / "j").read_bytes())
    assert (len(state.made), state.runs, state.bad_lines) == (1, 2, 0)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def left_open(folder: Path, pid: int, ticks: int) -> None:
    """What a session leaves behind that was killed in its first run."""
    (folder / "runs" / "001-pilot").mkdir(parents=True)
    book = Journal(folder / journal.NAME)
    book.open()
    book.started(SLOT, "001-pilot")
    book.leads("001-pilot", pid, ticks)
    book.close()


def test_a_run_that_outlived_its_experiment_is_ended_first(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    stat = read_stat(sleeper.pid)
    assert stat is not None
    left_open(tmp_path, sleeper.pid, stat.start_ticks)
    conduct(tmp_path, request("gc=freeze"), FakeRunner())
    assert sleeper.wait(timeout=30) < 0
    assert not (tmp_path / "runs" / "001-pilot").exists()


def test_another_process_of_the_same_number_is_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    stat = read_stat(sleeper.pid)
    assert stat is not None
    left_open(tmp_path, sleeper.pid, stat.start_ticks - 1)
    conduct(tmp_path, request("gc=freeze"), FakeRunner())
    time.sleep(0.2)
    assert sleeper.poll() is None
