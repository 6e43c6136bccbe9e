"""What a process knows of its job from its environment, and that all members of a job come to the same answer."""

from __future__ import annotations

import datetime

import pytest

from stepscope.record.host.scheduler import Scheduler, detect_scheduler, job_in_manifest

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


def test_the_place_in_the_network_is_kept_where_slurm_tells_it() -> None:
    place = {"SLURM_TOPOLOGY_ADDR": "top.leaf3.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    facts = found(STEP, {**place, "SLURM_NODEID": "2", "SLURM_CLUSTER_NAME": "alpha"}).for_manifest()
    assert (facts["topology_addr"], facts["topology_addr_pattern"]) == tuple(place.values())
    assert (facts["nodeid"], facts["cluster_name"]) == ("2", "alpha")
    assert "topology_addr" not in found(STEP).for_manifest()


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
