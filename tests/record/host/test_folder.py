"""Names and ownership of run folders."""

from __future__ import annotations

import datetime
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.record.host.folder import RunFolder, claim_folder
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
