"""A trace that a forked process reads for this one: the same tables as without it, whatever becomes of that process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.api import ReadOptions, open_run
from stepscope.workers import usable_cores
from tests import gpu_traces

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="one core: nothing is read ahead")

CODE = """
import json, os, signal, sys
from pathlib import Path
from stepscope import workers
from stepscope.cli.options import Reading
what, path = sys.argv[1], Path(sys.argv[2])
cache = Path(sys.argv[3]) if sys.argv[3:] else None
Reading(tables=cache, no_cache=cache is None).start([path])
(child,) = workers._started.values()
if what == "killed":
    os.kill(child._child, signal.SIGKILL)
elif what == "untaken":
    sys.exit()
from stepscope.api import ReadOptions, open_run
run = open_run(path, options=ReadOptions(tables=cache, cache=False))
try:
    print(json.dumps([*map(str, run.tables.events.hash_rows(0)), run.tables.traces.height]))
except Exception as error:
    print(json.dumps(str(error)))
left = not workers._started
try:
    os.waitpid(child._child, os.WNOHANG)
except ChildProcessError:
    print(json.dumps(left))
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_traces.write(tmp_path_factory.mktemp("ahead") / "trace.json", steps=300)


def read_by(what: str, *paths: Path) -> list[object]:
    ended = subprocess.run(
        [sys.executable, "-c", CODE, what, *map(str, paths)], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stderr == ""
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("what", ["whole", "killed"])
def test_the_tables_are_those_of_reading_it_here(what: str, trace: Path) -> None:
    tables = open_run(trace, options=ReadOptions(cache=False)).tables

    rows, no_child_is_left = read_by(what, trace)

    assert rows == [*map(str, tables.events.hash_rows(0)), tables.traces.height]
    assert no_child_is_left


def test_what_cannot_be_read_is_said_as_without_it(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    path.write_text("[" + " " * 300_000 + "]")
    with pytest.raises(Exception, match="no trace event in it") as raised:
        open_run(path, options=ReadOptions(cache=False)).load()

    assert read_by("whole", path) == [str(raised.value), True]


def test_tables_that_are_there_are_taken(trace: Path, tmp_path: Path) -> None:
    first, second = (read_by("whole", trace, tmp_path) for _ in range(2))

    assert first == second
    assert second[-1] is True


def test_nobody_waits_for_one_whose_trace_is_not_asked_for(trace: Path) -> None:
    assert read_by("untaken", trace) == []


def test_the_report_is_the_same(trace: Path) -> None:
    command = [sys.executable, "-m", "stepscope", "analyze", "--no-cache", "--json", "-", str(trace)]
    alone = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command]

    assert subprocess.check_output(command) == subprocess.check_output(alone)
