"""What a process knows of its job: from its environment, alike for all members, by lists of nodes, and by `sacct`."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.dashboard.pages import PageContext
from stepscope.dashboard.pages import page as document
from stepscope.record.host import scheduler
from stepscope.record.host.scheduler import MOST_NODES, Scheduler, detect_scheduler, job_in_manifest, nodes_of
from tests.builders import T0
from tests.run_folders import make_run_folder

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
PARENT = datetime.datetime(2026, 1, 2, 3, 0, 0)
BATCH = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "train", "SLURM_JOB_PARTITION": "gpu", "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1",
}  # fmt: skip
STEP = {**BATCH, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4"}
WORKER = {
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "RANK": "0", "LOCAL_RANK": "0",
    "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip


def detect(*parts: dict[str, str], later: int = 0) -> Scheduler | None:
    environ = {name: value for part in parts for name, value in part.items()}
    return detect_scheduler(environ, now=NOW + datetime.timedelta(seconds=later), parent_started=PARENT)


def found(*parts: dict[str, str], later: int = 0) -> Scheduler:
    scheduler = detect(*parts, later=later)
    assert scheduler is not None
    return scheduler


def test_tasks_of_a_step_share_identity_and_label_whenever_they_start() -> None:
    first = found(STEP)
    second = found(STEP, {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n2"}, later=40)
    assert (first.label, first.identity) == (second.label, second.identity)
    assert first.label == "slurm-17.3"
    assert (first.index, second.index, first.members) == (0, 3, 4)
    assert (first.local_index, second.local_index) == (0, 1)
    assert (first.host, second.host) == ("n1", "n2")
    assert first.for_manifest()["job_partition"] == "gpu"


@pytest.mark.parametrize("step", [None, "", "batch", "4294967291", "4294967290"])
def test_the_batch_script_and_an_interactive_shell_are_no_step(step: str | None) -> None:
    scheduler = found(BATCH, {} if step is None else {"SLURM_STEP_ID": step})
    assert scheduler.identity is None
    assert scheduler.label == "slurm-17-20260102-030405"
    assert (scheduler.members, scheduler.host) == (None, None)  # its SLURM_NTASKS speaks of steps to come


def test_components_of_a_heterogeneous_job_are_one_job() -> None:
    leader = found(STEP, {"SLURM_HET_JOB_ID": "17"})
    component = found(STEP, {"SLURM_HET_JOB_ID": "17", "SLURM_JOB_ID": "18", "SLURM_PROCID": "2"})
    assert leader.identity == component.identity
    assert leader.label == component.label


def test_a_requeued_job_is_another_attempt_of_the_same_job() -> None:
    first, second = found(STEP), found(STEP, {"SLURM_RESTART_COUNT": "1"})
    assert first.identity != second.identity
    assert second.label == "slurm-17.3-restart1"
    (job, attempt), again = (job_in_manifest(scheduler.for_manifest()) for scheduler in (first, second))
    assert (attempt, again) == (0, (job, 1))


@pytest.mark.parametrize("name", ["SLURM_RESTART_COUNT", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"])
@pytest.mark.parametrize("value", ["", "x", "-1", "0x1", "1" * 40, "٣"])
def test_odd_values_count_as_missing(name: str, value: str) -> None:
    scheduler = found(STEP, {name: value})
    assert scheduler.label == "slurm-17.3"
    assert scheduler.facts["restart_count"] == 0


def test_workers_of_torchrun_in_a_step_are_named_after_the_job() -> None:
    """One torchrun per node: SLURM numbers the launchers, torchrun the workers."""
    places = [("0", "0", "n1"), ("0", "1", "n1"), ("1", "0", "n2"), ("1", "1", "n2")]
    workers = [
        found(STEP, WORKER, {"SLURM_PROCID": task, "LOCAL_RANK": local, "SLURMD_NODENAME": node})
        for task, local, node in places
    ]
    assert len({worker.identity for worker in workers}) == 1
    assert {worker.label for worker in workers} == {"slurm-17.3"}
    assert [(worker.host, worker.local_index) for worker in workers] == [("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1)]


def test_ranks_of_open_mpi_agree_inside_and_outside_of_slurms_own_step() -> None:
    mpi = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun-n1-99@1"}
    here = found(BATCH, mpi, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    there = found(STEP, mpi, {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    assert here.identity == there.identity
    assert here.label == there.label
    assert (there.local_index, there.index, there.members) == (1, 3, 4)
    assert found(mpi, {"OMPI_COMM_WORLD_RANK": "0"}).label == "mpi-prterun-n1-99@1"


def test_ranks_of_mpich_go_by_its_own_numbers() -> None:
    hydra = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
    scheduler = found(STEP, hydra)
    assert (scheduler.local_index, scheduler.index, scheduler.members) == (1, 5, 8)
    assert scheduler.identity != found(STEP).identity
    assert found(hydra).label == "mpi-20260102-030000"
    # PMI alone is what srun itself hands to its tasks
    assert found(STEP, {"PMI_RANK": "0", "PMI_SIZE": "4"}).identity == found(STEP).identity


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login1", ("login1",)),
        ("node[01-03,7]", ("node01", "node02", "node03", "node7")),
        ("a[1-2],b,c[009-011]-ib", ("a1", "a2", "b", "c009-ib", "c010-ib", "c011-ib")),
        ("r[1-2]n[1,3]", ("r1n1", "r1n3", "r2n1", "r2n3")),
        ("traverse-k01g[2-3]", ("traverse-k01g2", "traverse-k01g3")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
    ],
)
def test_lists_are_nodes_of(text: str, names: tuple[str, ...]) -> None:
    assert nodes_of(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n[",
        "n[3-1]",
        "n[a-b]",
        "n[1-2",
        "n]1[",
        "n[]",
        "n[1,]",
        "a,,b",
        "n[1-2]]",
        "n[[1-2]]",
        "a b",
        "n;rm",
        "(null)",
    ],
)
def test_what_is_no_list_has_no_names(text: str) -> None:
    assert nodes_of(text) == ()


@pytest.mark.parametrize("text", ["n[1-999999999]", "n[1-999]m[1-999]k[1-999]", "n[0-19999],m"])
def test_lists_are_bounded(text: str) -> None:
    assert nodes_of(text) == ()
    assert len(nodes_of(f"n[1-{MOST_NODES}]")) == MOST_NODES


TEXTS = Path(__file__).parents[2] / "data" / "slurm"
SCHEDULER: dict[str, Any] = {
    "kind": "slurm", "identity": ["slurm", "17", "0", "1"], "members": 4, "index": 0, "job_id": "17", "step_id": "0",
    "restart_count": 1, "cluster_name": "alpha", "job_partition": "gpu", "job_nodelist": "node[01-03,08]",
    "nodes": ["node01", "node02", "node03", "node08"], "topology_addr": "top.leaf3.node01",
    "topology_addr_pattern": "switch.switch.node",
}  # fmt: skip


def recorded(folder: Path, text: str | None = None, **more: Any) -> api.Run:
    manifest = {"scheduler": {**SCHEDULER, **more}, "started_ns": T0, "ended_ns": T0 + 10**12}
    run = make_run_folder(folder, manifest=manifest, host="node01")
    if text is not None:
        shutil.copyfile(TEXTS / text, run / "sacct.txt")
    return api.open_run(run, options=api.ReadOptions(cache=False, keep=False))


def shown(run: api.Run) -> str:
    found = document(PageContext(run, run), "environment")
    return str([block for block in found["blocks"] if block.get("title") in ("The job", "Accounting of the job")])


def warned(run: api.Run) -> list[str]:
    return [note["text"] for note in run.report().quality["notes"] if note["source"] == "sacct.txt"]


def test_a_requeued_job_that_ran_out_of_memory(tmp_path: Path) -> None:
    run = recorded(tmp_path, "requeued.txt")
    job = run.report().run["job"]
    assert (job["id"], job["step"], job["requeues"], job["node_failures"]) == ("17", "0", 1, 1)
    assert job["nodes"] == ["node01", "node02", "node03", "node08"]
    assert job["topology"] == {"node01": "top.leaf3.node01"}
    last = job["steps"][-1]
    assert (last["id"], last["state"], last["exit_status"], last["exit_signal"]) == ("17.0", "OUT_OF_MEMORY", 0, 125)
    assert (last["max_rss_bytes"], last["max_rss_node"]) == (int(63.25 * 2**30), "node08")
    assert (last["elapsed_s"], job["steps"][0]["max_rss_bytes"]) == (1980, None)
    assert warned(run) == [
        "the job was started again once; what was recorded is of one attempt",
        "the job ended as OUT_OF_MEMORY: it ran out of memory",
    ]
    text = shown(run)
    assert "top.leaf3.node01" in text
    assert "switch.switch.node" in text
    assert "NODE_FAIL" in text


def test_a_text_with_other_fields_and_local_times_is_read(tmp_path: Path) -> None:
    run = recorded(tmp_path, "completed.txt")
    job = run.report().run["job"]
    assert (job["requeues"], job["node_failures"], job["absent"]) == (0, 0, "")
    assert [step["state"] for step in job["steps"]] == ["COMPLETED", "COMPLETED", "CANCELLED by 1000"]
    assert job["steps"][2]["max_rss_bytes"] == 14083556 * 1024
    assert warned(run) == []


def test_without_accounting_it_is_missing_and_said(tmp_path: Path) -> None:
    job = recorded(tmp_path).report().run["job"]
    assert (job["requeues"], job["node_failures"], job["steps"]) == (None, None, [])
    assert "sacct was not there" in job["absent"]
    assert "sacct was not there" in shown(recorded(tmp_path / "again"))
    alone = api.open_run(make_run_folder(tmp_path / "alone"), options=api.ReadOptions(cache=False, keep=False))
    assert alone.report().run["job"] is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cluster_name": "beta"}, "of another cluster (alpha)"),
        ({"job_id": "18"}, "does not have job 18"),
    ],
)
def test_the_accounting_of_another_job_is_not_taken(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    job = recorded(tmp_path, "requeued.txt", **change).report().run["job"]
    assert reason in job["absent"]
    assert job["node_failures"] is None


def test_a_job_of_that_number_at_another_time_is_not_taken(tmp_path: Path) -> None:
    run = recorded(tmp_path, "requeued.txt")
    path = run.folder / "sacct.txt"
    path.write_text(path.read_text().replace("|1749", "|1649").replace("|1750", "|1650"))
    assert "at another time" in api.open_run(run.folder).report().run["job"]["absent"]


@pytest.mark.parametrize(
    "text", ["", "nonsense", "JobIDRaw|State\n17|A|B\n", "JobIDRaw|State|ExitCode|MaxRSS\n17|||9Z\n"]
)
def test_damaged_texts_leave_a_report(tmp_path: Path, text: str) -> None:
    run = recorded(tmp_path)
    (run.folder / "sacct.txt").write_text(text)
    again = api.open_run(run.folder, options=api.ReadOptions(cache=False, keep=False))
    assert again.report().run["job"]["kind"] == "slurm"
    assert shown(again)


def fake(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_sacct_is_asked_until_the_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path).folder
    log, answer = tmp_path / "asked", tmp_path / "answer"
    head = (TEXTS / "requeued.txt").read_text().splitlines()[0]
    answer.write_text(f"{head}\n17|alpha|RUNNING|0:0|0:0|||4|node[01-03,08]|1749999900|Unknown|20\n")
    fake(tmp_path / "bin", "sacct", f'echo "$@ $SLURM_TIME_FORMAT" >> {log}; cat {answer}', monkeypatch)
    scheduler.keep_accounting(run)
    assert "RUNNING" in (run / "sacct.txt").read_text()
    shutil.copyfile(TEXTS / "requeued.txt", answer)
    scheduler.keep_accounting(run)
    scheduler.keep_accounting(run)
    asked = log.read_text().splitlines()
    assert len(asked) == 2, "a job that has ended is not asked for again"
    assert asked[0].startswith("-j 17 -P -D --format=JobIDRaw,")
    assert asked[0].endswith(" %s")
    assert "OUT_OF_MEMORY" in (run / "sacct.txt").read_text()
    assert sorted(path.name for path in run.iterdir()) == ["host-node01", "rank-0", "sacct.txt"]


@pytest.mark.parametrize("script", ["exit 1", "echo 'JobIDRaw|State'", "sleep 60", "head -c 10000000 /dev/zero"])
def test_a_sacct_that_fails_leaves_no_file(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path).folder
    monkeypatch.setattr(scheduler, "SACCT_SECONDS", 0.3)
    fake(tmp_path / "bin", "sacct", script, monkeypatch)
    scheduler.keep_accounting(run)
    assert not (run / "sacct.txt").exists()


@pytest.mark.parametrize("job", ["17;rm -rf /", "--help", "", "１７", None, 17])
def test_a_hostile_number_is_never_handed_to_a_program(
    tmp_path: Path, job: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(tmp_path, job_id=job).folder
    fake(tmp_path / "bin", "sacct", f"touch {tmp_path}/asked", monkeypatch)
    scheduler.keep_accounting(run)
    assert not (tmp_path / "asked").exists()
