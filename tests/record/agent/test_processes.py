"""The agent inside real processes: what is recorded, and that nothing changes for the script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .processes import PACKAGE, run_script

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.process]


def test_a_whole_training_script(tmp_path: Path) -> None:
    outcome = run_script(tmp_path, "loops.py", "whole", environment={"RANK": "3", "WORLD_SIZE": "4"})
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout.splitlines()[0] == "child 7"
    assert outcome.stdout.split()[-1] == str(PACKAGE)  # the script's `import stepscope` is the agent's copy
    assert outcome.ranks == ["rank-3", "rank-3.2"]  # the forked child trained
    steps = outcome.steps("rank-3")
    loops = [step for step in steps if step["fetches"]]
    assert [step["kind"] for step in loops] == [*["train"] * 3, *["eval"] * 2, "train"] * 2
    assert [step["samples"] for step in loops] == [8, 8, 8, 16, 16, 8] * 2
    assert [step["epoch"] for step in loops if step["kind"] == "train"] == [0] * 4 + [1] * 4
    assert [step["first_batch"] for step in loops] == [1, 0, 0, 1, 0, 0] * 2
    for step in loops:
        assert step["wall_ns"] == sum(
            step[p + "_ns"] for p in ("data_wait", "forward", "backward", "optimizer", "other")
        )
    unfed = [step for step in steps if not step["fetches"] and step["kind"] == "train"]
    assert len(unfed) >= 3
    assert all(step["data_wait_ns"] > 3_000_000 for step in unfed[2:4])
    assert len(outcome.events("scaler_skip", "rank-3")) == 1
    sites = {site["what"]: site for site in outcome.events("site", "rank-3")}
    assert {"DataLoader", "SGD", "GradScaler", "set_num_threads"} <= set(sites)
    assert sites["set_per_process_memory_fraction"]["arguments"] == {"fraction": "0.5"}
    memory = outcome.events("memory", "rank-3")[0]
    assert (memory["step"], memory["private_bytes"] > 10 << 20, "device" in memory) == (0, True, False)
    assert sites["SGD"]["arguments"]["momentum"] == "0.9"
    assert Path(sites["SGD"]["file"]).name == "loops.py"
    assert Path(outcome.events("save", "rank-3")[0]["path"]).name == "model.pt"
    assert outcome.events("save", "rank-3")[0]["bytes"] > 100
    assert outcome.events("region", "rank-3")[0]["name"] == "forward"
    assert len(outcome.kept("loss", "rank-3")) == 8
    assert [event["reason"] for event in outcome.events("exit", "rank-3")] == ["atexit"]
    assert [event["generation"] for event in outcome.events("gc", "rank-3")].count(2) >= 1
    assert not outcome.events("probe_error", "rank-3")
    roles = [agent["role"] for agent in outcome.agents() if "role" in agent]
    assert sorted(roles) == ["fork", "torch"] + ["worker"] * 4
    rank = json.loads((outcome.run / "rank-3" / "rank.json").read_text())
    assert (rank["rank"], rank["world_size"], Path(rank["main_file"]).name) == (3, 4, "loops.py")


def test_forked_children_that_train_are_recorded(tmp_path: Path) -> None:
    outcome = run_script(tmp_path, "forked.py")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout.splitlines() == ["status 3", "status 5", "status 0"]
    assert outcome.ranks == ["rank-0", "rank-0.2", "rank-0.3"]  # neither the parent nor the child that did nothing
    assert [len(outcome.steps(rank)) for rank in outcome.ranks] == [3, 5, 7]
    assert all(outcome.events("exit", rank) for rank in outcome.ranks)
    assert not any(outcome.events("probe_error", rank) for rank in outcome.ranks)


def test_os_exit_loses_no_step(tmp_path: Path) -> None:
    outcome = run_script(tmp_path, "loops.py", "os_exit")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (5, "leaving\n", "")
    steps = outcome.steps()
    assert len([step for step in steps if step["kind"] == "train"]) == 5
    assert len([step for step in steps if step["kind"] == "eval"]) == 2


def test_a_fault_in_every_hook_changes_nothing(tmp_path: Path) -> None:
    recorded = run_script(tmp_path, "loops.py", "raise")
    faulty = run_script(tmp_path / "faulty", "loops.py", "raise", faults="*")
    assert recorded.status == faulty.status == 1
    assert "ValueError: out of the loop" in recorded.stderr
    assert (recorded.stdout, recorded.stderr) == (faulty.stdout, faulty.stderr)
    assert len([step for step in recorded.steps() if step["kind"] == "train"]) == 6
    assert recorded.events("exit")
    assert set(faulty.agents()[-1]["probe_errors"]) >= {"loader", "autograd", "optimizer", "scaler"}


def test_a_faulty_probe_is_reported_once_and_max_steps_tells_the_launcher_once(tmp_path: Path) -> None:
    outcome = run_script(tmp_path, "loops.py", "plain", faults="autograd", max_steps=3)
    assert outcome.status == 0
    assert [error["probe"] for error in outcome.events("probe_error")] == ["autograd"]
    assert len([step for step in outcome.steps() if step["kind"] == "train"]) == 8
    marker = (outcome.run / "host-h" / "max-steps").read_text().splitlines()
    assert [json.loads(line)["steps"] for line in marker] == [3]
    assert [event["reason"] for event in outcome.events("exit")] == ["max_steps", "atexit"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 one more line appears in a traceback")
def test_warnings_and_tracebacks_name_the_same_lines_as_without_us(tmp_path: Path) -> None:
    with_us = run_script(tmp_path, "warnings_and_errors.py")
    without = run_script(tmp_path, "warnings_and_errors.py", recorded=False)
    assert "bad item" in without.stderr
    assert "reported to be 2" in without.stderr
    assert (with_us.status, with_us.stdout, with_us.stderr) == (without.status, without.stdout, without.stderr)


STARTS = """
import multiprocessing, os, subprocess, sys

def work():
    pass

if __name__ == "__main__":
    import torch
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    for batch in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
        pass
    program = subprocess.Popen(["true", "--api-key", "hidden"])  # line 12
    shell = subprocess.Popen("true; true", shell=True)  # line 13
    unread = subprocess.Popen(iter(["echo", "once"]))  # line 14
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()  # line 16
    fresh = multiprocessing.get_context("spawn").Process(target=work)
    fresh.start()  # line 18
    spawned = os.posix_spawn("/bin/true", ["true"], {})  # line 19
    status = os.system("exit 3")  # line 20
    child = os.fork()  # line 21
    if child == 0:
        os._exit(0)
    try:
        subprocess.Popen(["/no/such/program"])
    except FileNotFoundError:
        print("as without us")
    started = [program, shell, unread]
    for each in started:
        each.wait()
    process.join(), fresh.join(), os.waitpid(spawned, 0), os.waitpid(child, 0)
    print(status >> 8, [each.returncode for each in started], process.exitcode, fresh.exitcode)
    print("pids", program.pid, shell.pid, unread.pid, process.pid, fresh.pid, spawned)
"""


def test_every_way_to_start_a_process(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    plain = run_script(tmp_path / "plain", script, recorded=False)
    outcome = run_script(tmp_path / "recorded", script)
    assert (outcome.status, outcome.stderr) == (plain.status, plain.stderr) == (0, "")
    assert outcome.stdout.split("pids")[0] == plain.stdout.split("pids")[0]
    pids = [int(word) for word in outcome.stdout.split("pids")[1].split()]
    events = outcome.events("child")
    program, process = "subprocess.Popen", "multiprocessing.Process"
    assert [(event["line"], event["how"], event["command"], event["pid"]) for event in events] == [
        (12, program, "true --api-key ***", pids[0]),
        (13, program, "true; true", pids[1]),
        (14, program, "?", pids[2]),
        (16, process, "work", pids[3]),
        (18, process, "work", pids[4]),
        (19, "os.posix_spawn", "true", pids[5]),
        (20, "os.system", "exit 3", None),
        (21, "os.fork", None, None),
    ]
    assert {event["file"] for event in events} == {str(script)}
    assert not outcome.events("probe_error")
    failing = run_script(tmp_path / "failing", script, faults="children")
    assert (failing.status, failing.stderr) == (0, "")
    assert failing.stdout.split("pids")[0] == plain.stdout.split("pids")[0]
    assert not failing.events("child")


COLLECTS = """
import gc, sys, torch
before = set(sys.modules)
gc.collect()
print(sorted(set(sys.modules) - before))
"""


def test_a_collection_loads_nothing(tmp_path: Path) -> None:
    # Python's import of a module breaks (KeyError) when a collection inside it imports another one.
    (tmp_path / "train.py").write_text(COLLECTS)
    assert run_script(tmp_path, tmp_path / "train.py").stdout.strip() == "[]"
