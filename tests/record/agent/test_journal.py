"""The agent's files: claimed late, written line by line, given up in silence."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.model import STEP_COLUMNS
from stepscope.record.agent.config import Clock, parse
from stepscope.record.agent.journal import BATCH_NS, Journal, LineFile, rank_identity
from tests.record.agent.fake_agent import row


def journal(folder: Path) -> Journal:
    (folder / "host-h").mkdir(exist_ok=True)
    return Journal(str(folder), str(folder / "host-h"), Clock(5), lambda: {"pid": 1}, lambda: None)


def test_nothing_is_made_before_the_first_row_and_early_events_are_kept(tmp_path: Path) -> None:
    written = journal(tmp_path)
    written.write("site", what="DataLoader")
    assert list(tmp_path.glob("rank-*")) == []
    written.write_steps([row(0, 0, BATCH_NS)])
    lines = (tmp_path / "rank-0" / "steps.jsonl").read_text().splitlines()
    assert tuple(json.loads(lines[0])["columns"]) == STEP_COLUMNS
    assert json.loads(lines[1])[:2] == [0, "train"]
    event = json.loads((tmp_path / "rank-0" / "events.jsonl").read_text())
    assert (event["kind"], event["what"], event["step"]) == ("site", "DataLoader", None)
    assert json.loads((tmp_path / "rank-0" / "rank.json").read_text())["clock"] == {"epoch_offset_ns": 5}
    assert json.loads((tmp_path / "host-h" / "agents.jsonl").read_text())["folder"] == "rank-0"


def test_short_steps_share_a_write_and_an_event_brings_them_along(tmp_path: Path) -> None:
    written = journal(tmp_path)
    written.claim()

    def rows_on_disk() -> list[int]:
        lines = (tmp_path / "rank-0" / "steps.jsonl").read_text().splitlines()[1:]
        return [json.loads(line)[0] for line in lines]

    for step in range(3):
        written.write_steps([row(step, step * BATCH_NS // 2, BATCH_NS // 2)])
    assert rows_on_disk() == [0, 1]
    written.write_event({"kind": "mark"})
    assert rows_on_disk() == [0, 1, 2]
    written.write_steps([row(3, 0, 1)])
    written.abandon()
    written.flush()
    assert rows_on_disk() == [0, 1, 2]


def test_a_forked_child_never_writes_what_its_parent_holds(tmp_path: Path) -> None:
    written = journal(tmp_path)
    written.claim()
    written.write_steps([row(0, 0, 1)])
    child = os.fork()
    if child == 0:  # before any hook of ours ran in it, as when the garbage collector strikes first
        written.write_event({"kind": "gc"})
        written.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    written.flush()
    assert [journal(tmp_path).claim() for _ in range(2)] == [True, True]  # taken: the next numbers
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-0.2", "rank-0.3"]
    assert len((tmp_path / "rank-0" / "steps.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "rank-0" / "events.jsonl").exists() is False


def test_a_run_folder_that_cannot_be_written_is_given_up_in_silence(tmp_path: Path) -> None:
    gone = Journal(str(tmp_path / "gone"), str(tmp_path / "gone"), Clock(0), dict, lambda: None)
    assert not gone.claim()
    gone.write_steps([row(0, 0, BATCH_NS)])
    gone.write_event({"kind": "x"})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_or_a_budget_ends_the_file_not_the_training(tmp_path: Path) -> None:
    for path, limit in (("/dev/full", 1000), (str(tmp_path / "x"), 10)):
        if os.path.exists(path) or limit == 10:
            file = LineFile(path, limit)
            assert file.write("12345678") == (limit == 10)
            assert not file.write("9")
            assert file.full == (limit == 10)
    assert (tmp_path / "x").read_text() == "12345678\n"


STARTERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
)
SLURM_TASK = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environment", "rank", "world_size"),
    [
        ({}, None, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_ID": "0", **SLURM_TASK}, 1, 2),
        ({"SLURM_STEP_ID": "0", **SLURM_TASK}, 5, 8),
        ({"SLURM_STEP_ID": "0", **SLURM_TASK, "SLURM_STEP_NUM_TASKS": "1"}, None, None),
        (SLURM_TASK, None, None),  # the batch script is no task of a step
        ({"SLURM_STEP_ID": str(0xFFFFFFFB), **SLURM_TASK}, None, None),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None, None),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, 3, 4),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, 3, 4),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None, None),
        ({"RANK": "nonsense"}, None, None),
    ],
)
def test_the_rank_comes_from_what_started_the_process(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], rank: int | None, world_size: int | None
) -> None:
    for name in STARTERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (rank_identity()["rank"], rank_identity()["world_size"]) == (rank, world_size)


@pytest.mark.parametrize(("size", "rank"), [("2", 1), ("8", 0)], ids=["the whole job", "a part of it"])
def test_the_group_of_the_whole_job_knows_the_rank_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, rank: int
) -> None:
    """Accelerate's launcher of forks sets RANK to 0 in each."""
    group = {"is_available": lambda: True, "is_initialized": lambda: True}
    group |= {"get_rank": lambda: 1, "get_world_size": lambda: 2}
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(**group))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    made = journal(tmp_path)
    assert made.claim()
    assert json.loads((Path(made.folder or "") / "rank.json").read_text())["rank"] == rank


def test_the_offset_of_another_hosts_clock_is_not_taken(tmp_path: Path) -> None:
    here = {"run": str(tmp_path), "epoch_offset_ns": 5}
    assert parse(json.dumps({**here, "host": os.uname().nodename})).epoch_offset_ns == 5
    assert parse(json.dumps(here)).epoch_offset_ns == 5
    assert parse(json.dumps({**here, "host": "elsewhere"})).epoch_offset_ns > 10**15


def test_configurations_of_the_wrong_shape_fall_back_field_by_field() -> None:
    assert parse("{") is None
    assert parse('{"run": ""}') is None
    config = parse('{"run": "/r", "max_steps": "7", "window": {"active": "x", "mode": "off", "new": 1}, "newer": 2}')
    assert config is not None
    assert (config.max_steps, config.window.active, config.window.mode) == (None, 3, "off")
    assert config.host_dir.startswith("/r/host-")


def test_the_number_of_a_stream_that_is_closed_is_not_taken(tmp_path: Path) -> None:
    """What the script or a library prints there would be ours."""
    child = os.fork()
    if child == 0:
        os.close(0)
        written = LineFile(str(tmp_path / "x.jsonl"), 100).write("x")
        os._exit(int(os.path.exists("/proc/self/fd/0") or not written))
    assert os.waitpid(child, 0)[1] == 0
