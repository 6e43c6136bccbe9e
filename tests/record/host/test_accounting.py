"""What `sacct` says of a job: asked for after its end, kept with the run, shown, and never needed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.dashboard.pages import PageContext
from stepscope.dashboard.pages import page as document
from stepscope.record.host import scheduler
from tests.builders import T0
from tests.run_folders import make_run_folder

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
