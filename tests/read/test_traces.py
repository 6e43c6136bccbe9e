"""Which files are traces, and of which rank: never two by accident."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.read import read_paths
from stepscope.read.raw import RawRun
from tests.read.collected import event

EVENTS = [event()]


def trace(path: Path, rank: int | None = None, world_size: int | None = None, *, tail: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    info: dict[str, Any] = {"distributedInfo": {"rank": rank, "world_size": world_size}} if rank is not None else {}
    content = {"traceEvents": EVENTS * 3000, **info} if tail else {**info, "traceEvents": EVENTS}
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def ranks(run: RawRun) -> dict[str, list[str]]:
    return {rank.name: [ref.name for ref in rank.traces] for rank in run.ranks}


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
@pytest.mark.parametrize("tail", [False, True])
def test_rank_of_the_metadata_wins_over_the_name(tmp_path: Path, ending: str, tail: bool):
    paths = [trace(tmp_path / f"rank{n}{ending}", 5 - n, 6, tail=tail) for n in range(6)]
    run = read_paths(paths)
    assert ranks(run) == {f"rank-{n}": [f"rank{5 - n}.json"] for n in range(6)}
    assert not run.losses.counts


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["rank-10.json", "rank-9.json"], {9: "rank-9.json", 10: "rank-10.json"}),
        (["trace_rank_1.json", "trace_rank_0.json"], {0: "trace_rank_0.json", 1: "trace_rank_1.json"}),
        (["worker1.pt.trace.json", "worker0.pt.trace.json"], {0: "worker0.pt.trace.json", 1: "worker1.pt.trace.json"}),
        (["rank_1/t.json", "rank_0/t.json"], {0: "t.json", 1: "t.json"}),
        (["b.json", "a.json"], {0: "a.json", 1: "b.json"}),
        (["frank3.json"], {0: "frank3.json"}),
    ],
)
def test_rank_of_the_name(tmp_path: Path, names: list[str], expected: dict[int, str]):
    for name in names:
        trace(tmp_path / name)
    run = read_paths([tmp_path])
    assert {rank.rank: rank.traces[0].name for rank in run.ranks} == expected
    assert run.losses.counts["guessed_ranks"] == (2 if "b.json" in names else 0)


def test_spans_of_one_worker_are_one_rank(tmp_path: Path):
    spans = ("12.1623143089861", "12.1623143566756", "13.1623143089861")
    names = [f"host_{span}.pt.trace.json{'.gz' * (at == 1)}" for at, span in enumerate(spans)]
    for name in names:
        trace(tmp_path / "run" / name)
    run = read_paths([tmp_path])
    assert ranks(run) == {"rank-0": [names[0], names[1].removesuffix(".gz")], "rank-1": [names[2]]}


def test_ranks_are_given_once(tmp_path: Path):
    for name in ("a", "b"):
        trace(tmp_path / "guessed" / f"{name}.json")
    trace(tmp_path / "guessed" / "z.json", 0, 3)
    expected = {"rank-0": ["z.json"], "rank-1": ["a.json"], "rank-2": ["b.json"]}
    assert ranks(read_paths([tmp_path / "guessed"])) == expected
    shutil.rmtree(tmp_path / "guessed")
    trace(tmp_path / "a" / "rank0.json", 0, 2)
    trace(tmp_path / "b" / "rank0.json", 0, 2)
    run = read_paths([tmp_path])
    assert [rank.traces[0].path.parent.name for rank in run.ranks] == ["a", "b"]
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.losses.counts == {"duplicate_ranks": 1}


def test_missing_ranks_are_counted(tmp_path: Path):
    for rank in (0, 3):
        trace(tmp_path / f"{rank}.json", rank, 8)
    assert read_paths([tmp_path]).losses.counts == {"missing_ranks": 6}
    for rank in (0, 3):
        trace(tmp_path / "named" / f"rank{rank}.json")
    assert read_paths([tmp_path / "named"]).losses.counts == {"missing_ranks": 2}


def test_foreign_files_in_a_folder(tmp_path: Path):
    trace(tmp_path / "t.json")
    (tmp_path / "config.json").write_text('{"lr": 1e-3, "layers": [1, 2]}')
    (tmp_path / "list.json").write_text("[1, 2, 3]")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".hidden.json").write_text(json.dumps(EVENTS))
    run = read_paths([tmp_path])
    assert ranks(run) == {"rank-0": ["t.json"]}
    assert run.losses.counts == {"foreign_files": 3}
    assert set(run.losses.files["foreign_files"]) == {"config.json", "list.json", "empty.json"}


def test_a_file_that_was_named_is_never_left_out(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert ranks(read_paths([path])) == {"rank-0": ["config.json"]}


@pytest.mark.parametrize("kind", ["absent", "empty folder", "folder without traces", "nothing"])
def test_no_trace(tmp_path: Path, kind: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.json").write_text("{}")
    paths = {"absent": ["none"], "empty folder": ["empty"], "folder without traces": ["other"], "nothing": []}[kind]
    with pytest.raises(UnreadableInputError):
        read_paths([tmp_path / path for path in paths])


def test_folders_that_lead_to_themselves(tmp_path: Path):
    trace(tmp_path / "a" / "t.json")
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a" / "again.json").symlink_to(tmp_path / "a" / "t.json")
    trace(tmp_path / "a" / "t.json.gz")  # the plain one is taken beside a packed one
    path = tmp_path / "a" / "t.json"
    run = read_paths([tmp_path, path, path])
    assert [(ref.path.resolve(), ref.owner) for rank in run.ranks for ref in rank.traces] == [(path, "user")]
    assert (run.hosts, run.ranks[0].steps, run.ranks[0].journal, run.ranks[0].info) == ((), (), (), None)
