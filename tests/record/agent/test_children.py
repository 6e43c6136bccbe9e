"""Processes that a script starts are written with their number, command and line; the loader's workers are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from .processes import run_script

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.process]

SCRIPT = """
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
    script.write_text(SCRIPT)
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
