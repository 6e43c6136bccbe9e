"""What is seen from outside: stacks, processes with their roles, and readings, of a real tree behind a shell."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from stepscope.record.host.pyspy import find_pyspy
from tests.record.host.launching import host_dir, manifest, record, rows

pytestmark = pytest.mark.process

# A rank with two forked workers and a helper, as the agent would announce them; busy in one line.
TREE = """
import json, multiprocessing, os, sys, time
host = json.loads(os.environ["STEPSCOPE_RECORD"])["host_dir"]
def hot_line(seconds):
    end = time.time() + seconds
    while time.time() < end:
        sum(range(2000))
if __name__ == "__main__":
    with open(host + "/agents.jsonl", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "folder": "rank-0"}) + "\\n")
    with open(os.environ["PIDS"], "w") as file:
        multiprocessing.set_start_method("fork")
        workers = [multiprocessing.Process(target=hot_line, args=(3.5,)) for _ in range(2)]
        for worker in workers:
            worker.start()
        json.dump([os.getpid()] + [worker.pid for worker in workers], file)
    hot_line(3.5)
    for worker in workers:
        worker.join()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("telemetry")
    (folder / "tree.py").write_text(TREE)
    (folder / "job.sh").write_text(
        f"export PIDS={folder}/pids\n{sys.executable} tree.py --api-key hunter2 && echo done\n"
    )
    done = record(folder / "run", "bash", "job.sh", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"done\n", b"")
    return folder


def test_every_process_is_listed_with_its_role(recorded: Path) -> None:
    rank, *workers = json.loads((recorded / "pids").read_text())
    last: dict[int, dict[str, object]] = {}
    ended = set()
    for row in rows(host_dir(recorded / "run") / "processes.jsonl"):
        if "ended_ns" in row:
            ended.add(row["pid"])
        else:
            last[row["pid"]] = row
    shell = manifest(recorded / "run")["pid"]
    assert last[shell]["role"] == "root"
    assert (last[shell]["python"], last[shell]["torch"]) == (False, False)
    assert last[rank]["role"] == "rank"
    assert (last[rank]["python"], last[rank]["torch"], last[rank]["ppid"]) == (True, False, shell)
    assert [last[worker]["role"] for worker in workers] == ["loader_worker", "loader_worker"]
    assert {rank, *workers} <= ended
    assert "hunter2" not in str(last)


def test_readings_cover_the_machine_and_every_process(recorded: Path) -> None:
    rank, *workers = json.loads((recorded / "pids").read_text())
    readings = [tuple(metric) for row in rows(host_dir(recorded / "run") / "system.jsonl") for metric in row["metrics"]]
    names = {(name, pid) for name, _, _, pid, _ in readings}
    assert {("load_1m", None), ("runnable", None)} <= names
    wanted = ("cpu_pct", "rss_bytes", "read_bytes", "threads", "major_faults", "involuntary_switches", "migrations")
    assert {(name, pid) for name in wanted for pid in (rank, *workers)} <= names
    busy = [value for name, _, value, pid, _ in readings if name == "cpu_pct" and pid == rank]
    assert max(busy) > 1  # it did nothing but work, next to two others and whatever else the machine has to do
    assert all(value > 1_000_000 for name, _, value, pid, _ in readings if name == "rss_bytes" and pid == rank)


@pytest.mark.skipif(find_pyspy() is None or shutil.which("bash") is None, reason="needs py-spy and bash")
def test_stacks_reach_python_behind_a_shell_and_carry_no_secret(recorded: Path) -> None:
    rank, *workers = json.loads((recorded / "pids").read_text())
    folder = host_dir(recorded / "run")
    if manifest(recorded / "run")["sampler"]["source"] == "agent":
        pytest.skip("py-spy may not attach here: " + str(manifest(recorded / "run")["sampler"]["reason"]))
    segments = [row for row in rows(folder / "stacks.jsonl") if row["status"] == "ok"]
    assert segments
    text = "".join((folder / row["file"]).read_text() for row in segments)
    for pid in (rank, *workers):
        lines = [line for line in text.splitlines() if f"thread ({pid})" in line and "hot_line (" in line]
        assert lines, f"no stack of {pid}"
    assert "--api-key ***" in text
    assert "hunter2" not in text
    for row in segments:
        assert row["source"] == "py-spy"
        assert row["idle"] is True
        assert row["blocking"] is False
        assert row["samples"] > 0
        assert manifest(recorded / "run")["started_ns"] < row["end_ns"]
        assert row["start_ns"] < row["end_ns"]
        times = json.loads((folder / row["times"]).read_text())
        assert manifest(recorded / "run")["started_ns"] <= times["start_ns"] < row["end_ns"]
        records = len((folder / row["file"]).read_text().splitlines())
        assert set(times["stretches"]["record"]) == set(range(records))
    assert not list(folder.glob("*.part"))
    assert not (folder / "recorder.log").exists()
