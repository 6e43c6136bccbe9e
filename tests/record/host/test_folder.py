"""Names and ownership of run folders; which of several launchers reduces and reports; traces compressed afterwards."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UsageError
from stepscope.record.host.folder import (
    LARGEST_READ_JOB,
    Part,
    RunFolder,
    claim_folder,
    compress_traces,
    own_rank_folders,
    part_in_report,
    reduces,
    say_done,
)
from stepscope.record.host.scheduler import Scheduler, detect_scheduler

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)


def claim(out: Path | None = None, environ: dict[str, str] | None = None, host: str = "alpha") -> RunFolder:
    return claim_folder(out, "train", scheduler(environ or {}), now=NOW, host=host)


def scheduler(environ: dict[str, str]) -> Scheduler | None:
    return detect_scheduler(environ, now=NOW, parent_started=datetime.datetime(2026, 1, 2, 3, 0, 0))


def write_manifest(folder: RunFolder, environ: dict[str, str]) -> None:
    found = scheduler(environ)
    value = {"scheduler": None if found is None else found.for_manifest()}
    (folder.host / "manifest.json").write_text(json.dumps(value))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_hosts_of_a_slurm_step_share_a_folder_and_the_next_step_does_not(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}
    first = claim(environ=step)
    other_host = claim(environ=step, host="beta")
    other_task = claim(environ={**step, "SLURM_LOCALID": "1"})
    again = claim(environ=step)
    requeued = claim(environ={**step, "SLURM_RESTART_COUNT": "1"})
    assert first.run == other_host.run == other_task.run == tmp_path / "stepscope-runs/slurm-17.0-train"
    assert [first.host.name, other_host.host.name, other_task.host.name] == ["host-alpha", "host-beta", "host-alpha.2"]
    assert again.run.name == "slurm-17.0-train-2"
    assert requeued.run.name == "slurm-17.0-restart1-train"


def test_out_with_strange_content_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    for path in (tmp_path / "full", tmp_path / "full/notes.txt"):
        with pytest.raises(UsageError, match="--out"):
            claim(path)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_out_is_shared_by_the_hosts_of_one_step_only(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}
    write_manifest(claim(tmp_path / "o", step), step)
    assert claim(tmp_path / "o", step, host="beta").host.name == "host-beta"
    with pytest.raises(UsageError, match="already holds"):
        claim(tmp_path / "o", step)
    with pytest.raises(UsageError, match="not empty"):
        claim(tmp_path / "o", {**step, "SLURM_STEP_ID": "1"}, host="gamma")


def test_tasks_that_start_in_the_same_moment_share_one_folder(tmp_path: Path) -> None:
    tasks = [{"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_LOCALID": str(local)} for local in range(4)]
    for out in (None, tmp_path / "o"):
        folders = together([(out, task, host) for task in tasks for host in ("alpha", "beta")])
        assert {folder.run for folder in folders if isinstance(folder, RunFolder)} == {
            out or tmp_path / "stepscope-runs/slurm-17.0-train"
        }
        assert len({folder.host for folder in folders if isinstance(folder, RunFolder)}) == 8


def test_array_tasks_with_one_out_never_mix(tmp_path: Path) -> None:
    """Each on a host of its own, so that nothing but the job tells them apart."""
    array = {"SLURM_STEP_ID": "0", "SLURM_ARRAY_JOB_ID": "17"}
    tasks = [{**array, "SLURM_JOB_ID": str(17 + task), "SLURM_ARRAY_TASK_ID": str(task)} for task in range(6)]
    for attempt in range(5):
        out = tmp_path / f"o{attempt}"
        claims = together([(out, task, f"host{index}") for index, task in enumerate(tasks)])
        won = [claimed for claimed in claims if isinstance(claimed, RunFolder)]
        assert len(won) == 1
        assert [path for path in out.iterdir() if path.is_dir()] == [won[0].host]
        lost = [str(claimed) for claimed in claims if not isinstance(claimed, RunFolder)]
        assert all("$SLURM_ARRAY_TASK_ID" in message for message in lost)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "0"}])
def test_a_requeued_job_records_beside_its_first_attempt(tmp_path: Path, step: dict[str, str]) -> None:
    """Refusing the folder would end a training that was started again in the night."""
    first = {"SLURM_JOB_ID": "17", **step}
    write_manifest(claim(tmp_path / "o", first), first)
    again = {**first, "SLURM_RESTART_COUNT": "2"}
    folder = claim(tmp_path / "o", again)
    assert folder.run == tmp_path / "o-restart2"
    if step:
        assert claim(tmp_path / "o", again, host="beta").run == folder.run
    with pytest.raises(UsageError, match="SLURM_JOB_ID"):
        claim(tmp_path / "o", {**again, "SLURM_JOB_ID": "18"})


def test_discarding_in_a_shared_folder_leaves_the_other_members(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}
    first, second = claim(environ=step), claim(environ=step, host="beta")
    second.discard()
    assert sorted(path.name for path in first.run.iterdir()) == ["host-alpha", "job.json"]
    first.discard()
    assert list(tmp_path.iterdir()) == []


def test_file_systems_without_links_still_keep_jobs_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}
    claim(tmp_path / "o", step)
    assert claim(tmp_path / "o", step, host="beta").host.name == "host-beta"
    with pytest.raises(UsageError):
        claim(tmp_path / "o", {**step, "SLURM_JOB_ID": "18"}, host="gamma")


def together(claims: list[tuple[Path | None, dict[str, str], str]]) -> list[RunFolder | UsageError]:
    """All claims at once, each on a thread of its own."""
    barrier = threading.Barrier(len(claims))

    def one(arguments: tuple[Path | None, dict[str, str], str]) -> RunFolder | UsageError:
        barrier.wait(30)
        try:
            return claim(*arguments)
        except UsageError as error:
            return error

    with ThreadPoolExecutor(len(claims)) as pool:
        return list(pool.map(one, claims))


def host(run: Path, index: int, members: int, *, ended: bool = True, **scheduler: Any) -> Path:
    folder = run / f"host-{index}"
    folder.mkdir(parents=True, exist_ok=True)
    value = {"identity": ["slurm", "17", "0", "0"], "members": members, "index": index, **scheduler}
    manifest = {"scheduler": value, "ended_ns": 1 if ended else None}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_launcher_alone_reports(tmp_path: Path) -> None:
    for number, manifest in enumerate(("", "[]", '{"scheduler": null}', '{"scheduler": {"identity": null}}')):
        folder = tmp_path / f"{number}" / "host-a"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(manifest)
        assert part_in_report(folder.parent, folder) is Part.REPORT
    assert part_in_report(tmp_path / "gone", tmp_path / "gone/host-a") is Part.REPORT
    assert part_in_report(tmp_path / "one", host(tmp_path / "one", 0, 1)) is Part.REPORT


def test_the_last_reports_and_the_first_task_says_a_word(tmp_path: Path) -> None:
    folders = [host(tmp_path, index, 3, ended=False) for index in range(3)]
    parts = []
    for index in (0, 2, 1):
        host(tmp_path, index, 3)
        parts.append(part_in_report(tmp_path, folders[index]))
    assert parts == [Part.WORD, Part.SILENT, Part.REPORT]


def test_one_report_when_all_end_in_the_same_moment(tmp_path: Path) -> None:
    folders = [host(tmp_path, index, 4) for index in range(4)]
    barrier = threading.Barrier(4)

    def end(folder: Path) -> Part:
        barrier.wait(30)
        return part_in_report(tmp_path, folder)

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(end, folders))
    assert parts.count(Part.REPORT) == 1


def test_of_a_large_job_each_machine_is_reduced_once_and_the_last_reports(tmp_path: Path) -> None:
    count = LARGEST_READ_JOB + 1
    folders = [host(tmp_path, index, count, ended=False) for index in range(count)]
    order = [*range(1, count), 0]
    parts = []
    for index in order:
        host(tmp_path, index, count)
        assert reduces(tmp_path, folders[index])
        assert not reduces(tmp_path, folders[index]), "once"
        say_done(folders[index])
        parts.append(part_in_report(tmp_path, folders[index]))
    assert parts == [Part.SILENT] * (count - 1) + [Part.REPORT]


def test_who_has_not_done_its_part_keeps_a_large_job_from_being_reported(tmp_path: Path) -> None:
    count = LARGEST_READ_JOB + 1
    folders = [host(tmp_path, index, count) for index in range(count)]
    for folder in folders[:-1]:
        say_done(folder)
        assert part_in_report(tmp_path, folder) is not Part.REPORT
    say_done(folders[-1])
    assert part_in_report(tmp_path, folders[-1]) is Part.REPORT
    assert part_in_report(tmp_path, folders[0]) is Part.WORD


def test_a_machine_with_several_launchers_is_reduced_by_the_last_that_lives(tmp_path: Path) -> None:
    count = 3 * LARGEST_READ_JOB
    names = ("a", "a.2", "a.3")
    folders = [host(tmp_path, 0, count, ended=False).rename(tmp_path / f"host-{name}") for name in names]
    host(tmp_path, 1, count)

    def ends(folder: Path, **more: Any) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))

    ends(folders[0], ended_ns=1)
    assert not reduces(tmp_path, folders[0])
    gone = subprocess.Popen(["true"])
    gone.wait()
    ends(folders[1], launcher_pid=gone.pid, host=socket.gethostname())
    ends(folders[2], launcher_pid=os.getpid(), host=socket.gethostname())
    assert not reduces(tmp_path, folders[0]), "one of the machine goes on"
    ends(folders[2], ended_ns=1)
    assert reduces(tmp_path, folders[2]), "one was killed, the others have ended"
    assert not reduces(tmp_path, folders[0])


def test_a_small_job_is_not_reduced(tmp_path: Path) -> None:
    assert not reduces(tmp_path, host(tmp_path, 0, LARGEST_READ_JOB))
    assert not reduces(tmp_path / "gone", tmp_path / "gone" / "host-a")


def test_a_host_without_a_readable_manifest_is_waited_for_by_nobody(tmp_path: Path) -> None:
    for broken in ("{", "[]"):
        mine = host(tmp_path / "broken", 1, 2)
        (host(tmp_path / "broken", 0, 2) / "manifest.json").write_text(broken)
        assert part_in_report(tmp_path / "broken", mine) is Part.SILENT


def test_own_traces_are_compressed_and_others_left_alone(tmp_path: Path) -> None:
    host = tmp_path / "host-a"
    host.mkdir()
    for name in ("rank-0", "rank-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace-0.pt.trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "rank-0/steps.jsonl").write_text("x")
    claims = [{"pid": 1, "folder": "rank-0"}, {"pid": 2, "folder": "../elsewhere"}, {"pid": 3}]
    (host / "agents.jsonl").write_text("".join(json.dumps(claim) + "\n" for claim in claims) + '{"torn')
    folders = own_rank_folders(tmp_path, host)
    assert folders == [tmp_path / "rank-0"]
    compress_traces(folders)
    assert sorted(path.name for path in (tmp_path / "rank-0").iterdir()) == ["steps.jsonl", "trace-0.pt.trace.json.gz"]
    assert gzip.decompress((tmp_path / "rank-0/trace-0.pt.trace.json.gz").read_bytes()) == b'{"traceEvents": []}'
    assert (tmp_path / "rank-1/trace-0.pt.trace.json").exists()
