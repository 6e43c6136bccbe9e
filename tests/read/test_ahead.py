"""A trace that a process of its own reads is the trace that is read here, whatever becomes of that process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from stepscope import reader_process
from stepscope.errors import UnreadableInputError
from stepscope.read import ahead
from tests.read.collected import Collected, event, kernel, written

SHAPES = {"Input Dims": [[4, 8]], "Input type": ["float"], "Sequence number": 3}
MEMORY = {"Addr": 1, "Bytes": 64, "Device Type": 0, "Device Id": -1, "Total Allocated": 64, "Total Reserved": 0}
EVENTS = [
    event("aten::mm", args=SHAPES),
    event(None),  # lost
    event("gelände", ts=3.25),
    kernel(correlation=7, grid=[2, 3, 1], block=[32, 1, 1], **{"est. achieved occupancy %": 40}),
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 7, "pid": 1, "tid": 1, "ts": 1},
    {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 7, "pid": 0, "tid": 7, "ts": 5, "bp": "e"},
    {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 2, "args": MEMORY},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "main"}},
]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a file that is not worth a process, and on one core."""
    monkeypatch.setattr(reader_process, "WORTH_BYTES", 0)
    monkeypatch.setattr(reader_process, "WORTH_UNPACKED_BYTES", 0)
    monkeypatch.setattr(reader_process, "cores", lambda: 2)


def readers() -> list[psutil.Process]:
    """The processes that read for this one."""
    return [child for child in psutil.Process().children() if reader_process.MODULE in child.cmdline()]


def trace(folder: Path, count: int = len(EVENTS)) -> Path:
    events = (EVENTS * (count // len(EVENTS) + 1))[:count]
    return written(folder, {"baseTimeNanoseconds": 1_790_857_026_000_000_000, "traceEvents": events}, "trace.json.gz")


@pytest.mark.parametrize("count", [len(EVENTS), 150_000])
def test_what_comes_is_what_is_read_here(tmp_path: Path, count: int) -> None:
    path = trace(tmp_path, count)
    told: list[tuple[int, int]] = []
    with reader_process.reading(path) as begun:
        assert begun
        time.sleep(0.1)
        there = Collected(path, source=ahead.opened(path, lambda *done: told.append(done)))
    here = Collected(path)
    assert (there.slices, there.flows, there.memory) == (here.slices, here.flows, here.memory)
    assert (there.summary, there.chunks) == (here.summary, here.chunks)
    assert told == sorted(told)
    assert not readers()


def test_what_is_wrong_with_a_file_is_said_alike(tmp_path: Path) -> None:
    path = written(tmp_path, {"traceEvents": []}, "trace.json.gz")
    with pytest.raises(UnreadableInputError) as here:
        Collected(path)
    with reader_process.reading(path), pytest.raises(UnreadableInputError) as there:
        Collected(path, source=ahead.opened(path))
    assert str(there.value) == str(here.value)


def test_a_process_that_says_nothing_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trace(tmp_path)
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))  # no interpreter starts like that
    with reader_process.reading(path):
        assert Collected(path, source=ahead.opened(path)).slices == Collected(path).slices


def test_a_process_that_is_killed_is_one_line(tmp_path: Path) -> None:
    path = trace(tmp_path, 600_000)
    with reader_process.reading(path):
        source = ahead.opened(path)
        assert source is not None
        chunks = source.chunks()
        next(chunks)
        (child,) = readers()
        child.kill()
        with pytest.raises(UnreadableInputError, match="was ended"):
            list(chunks)


def test_a_trace_that_nobody_opens_is_let_go(tmp_path: Path) -> None:
    with reader_process.reading(trace(tmp_path, 150_000)):
        assert readers()
    assert not readers()


def test_another_thread_reads_for_itself(tmp_path: Path) -> None:
    path = trace(tmp_path)
    with reader_process.reading(path), ThreadPoolExecutor(1) as pool:
        assert pool.submit(ahead.opened, path).result() is None
        assert Collected(path, source=ahead.opened(path)).chunks
