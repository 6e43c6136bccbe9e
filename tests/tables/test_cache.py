"""Tables of traces found again by content: when they are used, when they are made anew, and what never breaks.

A trace that a forked process reads gives the same tables as without it, whatever becomes of that process.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope import tables
from stepscope.api import ReadOptions, open_run
from stepscope.files import INDEX, key_of
from stepscope.read.raw import Losses, RawRank, RawRun, TraceRef
from stepscope.tables import BuildOptions, Tables, cache, trace_entry
from stepscope.tables.cache import fetch, prune
from stepscope.workers import usable_cores
from tests import gpu_traces


def write_trace(path: Path, name: str = "aten::mm", count: int = 20) -> Path:
    events: list[dict[str, Any]] = []
    for i in range(count):
        events.append({"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": i * 10, "dur": 8})
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
        events.append({**call, "ts": i * 10 + 1, "dur": 2, "args": {"correlation": i + 1}})
        kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": i * 10 + 5, "dur": 4}
        events.append({**kernel, "args": {"correlation": i + 1, "stream": 7, "device": 0}})
    data = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def run_of(*paths: Path) -> RawRun:
    ranks = tuple(
        RawRank(f"rank-{i}", i, None, (), (), (TraceRef(path, path.name.removesuffix(".gz"), "user"),))
        for i, path in enumerate(paths)
    )
    return RawRun(folder=paths[0].parent, hosts=(), ranks=ranks, losses=Losses())


def same(one: Tables, other: Tables) -> bool:
    return all(getattr(one, name).equals(getattr(other, name)) for name in tables.SCHEMAS)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The traces that were read and not taken from the cache."""
    seen: list[Path] = []
    real = cache.KinetoTrace

    def spy(path: Path, **more: Any) -> Any:
        seen.append(path)
        return real(path, **more)

    monkeypatch.setattr(cache, "KinetoTrace", spy)
    return seen


def test_second_build_reads_the_tables(tmp_path: Path, opened: list[Path]):
    path, options = write_trace(tmp_path / "a.json.gz"), BuildOptions(cache=tmp_path / "cache")
    first = tables.build(run_of(path), options)
    again = tables.build(run_of(path), options)
    assert (opened, same(first, again)) == ([path], True)
    assert first.events.height == 60
    copy = Path(shutil.copy(path, tmp_path / "copy.json.gz"))
    assert tables.build(run_of(copy), options).events["trace"].unique().to_list() == ["copy.json"]
    assert opened == [path]
    write_trace(path, "aten::add")
    assert "aten::add" in tables.build(run_of(path), options).events["name"]
    assert opened == [path, path]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def garbled(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for i in range(4, len(data) // 2):
        data[i] ^= 0x5A
    path.write_bytes(data)


def another_version(path: Path) -> None:
    path.write_text(path.read_text().replace('"version":"', '"version":"0.0.'))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("events-00000.parquet", Path.unlink),
        ("events-00000.parquet", truncated),
        ("events-00000.parquet", garbled),
        ("tree.parquet", Path.unlink),
        ("tree.parquet", garbled),
        ("marks.parquet", Path.unlink),
        ("links.parquet", Path.unlink),
        ("links.parquet", garbled),
        ("memory.parquet", truncated),
        (INDEX, Path.unlink),
        (INDEX, truncated),
        (INDEX, another_version),
        (INDEX, lambda path: path.write_text('{"files": 1}')),
    ],
)
def test_damaged_entry_is_made_again(tmp_path: Path, opened: list[Path], name: str, damage: Callable[[Path], object]):
    path, options = write_trace(tmp_path / "a.json"), BuildOptions(cache=tmp_path / "cache")
    first = tables.build(run_of(path), options)
    damage(fetch(path, tmp_path / "cache") / name)
    assert same(first, tables.build(run_of(path), options))
    assert len(opened) == 2
    assert same(first, tables.build(run_of(path), options))
    assert len(opened) == 2


def test_interrupted_entry_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, root = write_trace(tmp_path / "a.json"), tmp_path / "cache"

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_move", die)
        with pytest.raises(KeyboardInterrupt):
            fetch(path, root)
    assert list(root.iterdir()) == []
    assert fetch(path, root) == root / key_of(path)


def test_two_processes_make_the_same_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, root = write_trace(tmp_path / "a.json"), tmp_path / "cache"
    real = cache.ingest

    def slower(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(cache, "ingest", real)
        fetch(path, root)  # the other one is done first
        return real(*args, **options)

    monkeypatch.setattr(cache, "ingest", slower)
    entry = fetch(path, root)
    assert cache.index_of(entry) is not None
    assert [child.name for child in root.iterdir()] == [entry.name]


@pytest.mark.parametrize("where", ["a file", "under a file"])
def test_cache_that_cannot_be_written_to_is_no_error(tmp_path: Path, where: str):
    path = write_trace(tmp_path / "a.json")
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    place = blocker if where == "a file" else blocker / "cache"
    assert tables.build(run_of(path), BuildOptions(cache=place)).events.height == 60
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.json", "blocker"]


def test_several_traces_in_processes_and_progress(tmp_path: Path):
    paths = [write_trace(tmp_path / f"rank{i}.json", f"aten::op{i}") for i in range(3)]
    broken = tmp_path / "broken.json"
    broken.write_text("[]")
    alone = tables.build(run_of(*paths, broken), BuildOptions(cache=None, workers=1))
    seen: list[tuple[str, int, int]] = []
    options = BuildOptions(cache=tmp_path / "cache", workers=2, progress=lambda *now: seen.append(now))
    assert same(alone, tables.build(run_of(*paths, broken), options))
    assert alone.events["id"].to_list() == list(range(180))
    assert alone.links["event"].to_list() == [i for i in range(180) if i % 3 == 2]
    assert alone.links["operator"].to_list() == [i for i in range(180) if i % 3 == 0]
    assert alone.quality.counts["unreadable_traces"] == 1
    assert [note.source for note in alone.quality.notes if "could not be read" in note.text] == ["rank-3/broken.json"]
    assert {name for name, *_ in seen} == {path.name for path in (*paths, broken)}
    assert all(done == size for _, done, size in seen)


def test_entries_used_longest_ago_go_first(tmp_path: Path):
    root = tmp_path / "cache"
    entries = [fetch(write_trace(tmp_path / f"{i}.json", f"op{i}"), root) for i in range(3)]
    for age, entry in enumerate(entries):
        os.utime(entry / INDEX, (1_000_000 - age, 1_000_000 - age))
    fetch(tmp_path / "2.json", root)  # used again
    size = sum(file.stat().st_size for file in entries[0].iterdir())
    mine = root / "my-run"
    mine.mkdir()
    (mine / INDEX).write_bytes(bytes(10 * size))  # the folder may be one that the user keeps other things in
    prune(root, kept_bytes=int(2.5 * size))
    assert sorted(root.iterdir()) == sorted([entries[0], entries[2], mine])
    prune(root, kept_bytes=0)
    assert list(root.iterdir()) == [mine]


def test_what_came_in_parts_is_joined_and_what_stands_for_all_rows_stays_one_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trace_entry, "ROWS_PER_FILE", 7)
    events = tables.build(run_of(write_trace(tmp_path / "a.json")), BuildOptions(cache=tmp_path / "cache")).events
    assert events.height > 7
    assert set(events.n_chunks("all")) == {1}
    assert events.select("trace", "call_stack").estimated_size() < events.height


two_cores = pytest.mark.skipif(usable_cores() < 2, reason="one core: nothing is read ahead")

CODE = """
import json, os, signal, sys
from pathlib import Path
from stepscope import __main__ as program, workers
workers.begin(program._reader)
from stepscope.cli.options import Reading
what, path = sys.argv[1], Path(sys.argv[2])
cache = Path(sys.argv[3]) if sys.argv[3:] else None
((child, _),) = workers._begun
if what == "untold":
    print(child._child)
    sys.exit()
Reading(tables=cache, no_cache=cache is None, steps="1:2" if what == "unwanted" else None).start([path])
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


@two_cores
@pytest.mark.parametrize("what", ["whole", "killed", "unwanted"])
def test_the_tables_are_those_of_reading_it_here(what: str, trace: Path) -> None:
    tables = open_run(trace, options=ReadOptions(cache=False)).tables

    rows, no_child_is_left = read_by(what, trace)

    assert rows == [*map(str, tables.events.hash_rows(0)), tables.traces.height]
    assert no_child_is_left


@two_cores
def test_what_cannot_be_read_is_said_as_without_it(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    path.write_text("[" + " " * 300_000 + "]")
    with pytest.raises(Exception, match="no trace event in it") as raised:
        open_run(path, options=ReadOptions(cache=False)).load()

    assert read_by("whole", path) == [str(raised.value), True]


@two_cores
def test_tables_that_are_there_are_taken(trace: Path, tmp_path: Path) -> None:
    first, second = (read_by("whole", trace, tmp_path) for _ in range(2))

    assert first == second
    assert second[-1] is True


@two_cores
def test_nobody_waits_for_one_whose_trace_is_not_asked_for(trace: Path) -> None:
    assert read_by("untaken", trace) == []


@two_cores
def test_one_that_is_told_nothing_ends(trace: Path) -> None:
    (pid,) = read_by("untold", trace)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(str(pid))).wait(timeout=30)
