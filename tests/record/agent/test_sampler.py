"""The in-process sampler, in real processes: what it writes, when it holds still, and that children get their own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.read.raw import Losses
from stepscope.read.run_folder import read_times
from stepscope.record.agent.config import Config
from stepscope.record.agent.sampler import FallbackSampler, Stretches
from tests.read.stack_text import parse

pytestmark = pytest.mark.process

PROGRAM = """
import json, multiprocessing, sys, time
from stepscope.record.agent.config import Config
from stepscope.record.agent.sampler import FallbackSampler
folder, seconds, quiet = sys.argv[1], 1.0, sys.argv[2] == "quiet"
def busy_line(seconds):
    end = time.time() + seconds
    while time.time() < end:
        sum(range(500))
def worker_line():
    busy_line(seconds)
if __name__ == "__main__":
    sampler = FallbackSampler(Config(run=folder, host_dir=folder, sampler_hz=1000), time.time_ns, lambda: quiet)
    sampler.start()
    began = time.time_ns()
    busy_line(seconds)
    ended = time.time_ns()
    child = multiprocessing.get_context("fork").Process(target=worker_line)
    child.start()
    child.join()
    print(json.dumps({"status": child.exitcode, "worker": child.pid, "busy": [began, ended]}))
"""


def sample(folder: Path, mode: str, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Run the program; returns what it printed, the lines of stacks.jsonl, and its pid."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    environment = {"PYTHONPATH": str(Path(stepscope.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    run = subprocess.Popen(
        [sys.executable, str(script), str(folder), mode, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    stdout, stderr = run.communicate(timeout=60)
    assert (run.returncode, stderr) == (0, b"")
    log = folder / "stacks.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return json.loads(stdout), rows, run.pid


def test_the_hot_line_of_process_and_forked_worker_is_written(tmp_path: Path) -> None:
    printed, rows, pid = sample(tmp_path, "busy", "--token", "hunter2")
    assert printed["status"] == 0
    assert {row["pid"] for row in rows} == {pid, printed["worker"]}
    for row in rows:
        assert (row["source"], row["status"], row["rate_hz"], row["idle"]) == ("agent", "ok", 50.0, True)
        assert row["start_ns"] < row["end_ns"]
        assert 0 < row["samples"] <= 50 * 1.6 * (row["end_ns"] - row["start_ns"]) / 1e9 + 2
        text = (tmp_path / row["file"]).read_text()
        line = "busy_line (" + str(tmp_path / "program.py")
        own = [entry for entry in text.splitlines() if f"process {row['pid']}:" in entry and line in entry]
        assert own, text
        assert "hunter2" not in text
        assert "stepscope-sampler" not in text
    (worker,) = [row for row in rows if row["pid"] == printed["worker"]]
    assert "worker_line (" in (tmp_path / worker["file"]).read_text()
    assert not list(tmp_path.glob("*.part"))


def test_its_files_are_read_like_py_spys_and_tell_when_it_was(tmp_path: Path) -> None:
    printed, rows, pid = sample(tmp_path, "busy")
    (row, *_) = [row for row in rows if row["pid"] == pid]
    records = (tmp_path / row["file"]).read_text().splitlines()
    raw = parse(records)
    assert (raw.skipped_records, raw.skipped_samples) == (0, 0)
    assert {stack.pids for stack in raw.stacks} == {(pid,)}
    assert {"<module>", "busy_line"} <= {frame.function for stack in raw.stacks for frame in stack.frames}
    losses = Losses()
    times = read_times(tmp_path / row["times"], losses, "x")
    found = list(zip(times.record, times.start_ns, times.end_ns, strict=True))
    assert not losses.counts
    assert {record for record, _, _ in found} == set(range(len(records)))
    assert all(row["start_ns"] <= start <= end <= row["end_ns"] + 1000 for _, start, end in found)
    began, ended = printed["busy"]
    hot = {number for number, text in enumerate(records) if "busy_line (" in text and f"process {pid}:" in text}
    busy = [(start, end) for record, start, end in found if record in hot]
    right = sum(max(0, min(end, ended) - max(start, began)) for start, end in busy)
    assert right > 0.8 * (ended - began)
    assert right > 0.8 * sum(end - start for start, end in busy)


def test_stretches_are_cut_half_way_and_not_drawn_over_a_pause() -> None:
    stretches = Stretches(1_000_000)
    stretches.add({1: 0, 2: 1}, 1_200_000)
    stretches.add({1: 0, 2: 2}, 1_400_000)
    stretches.add({1: 0}, 1_600_000)
    stretches.interrupt(1_650_000)
    stretches.interrupt(9_000_000)
    stretches.resume(9_100_000)
    stretches.add({1: 0}, 9_300_000)
    text = stretches.text(1_000_000, 9_400_000)
    assert text is not None
    columns = json.loads(text)["stretches"]
    found = sorted(zip(columns["record"], columns["start_us"], columns["end_us"], strict=True))
    assert found == [(0, 100, 650), (0, 8200, 8400), (1, 100, 300), (2, 300, 500)]


def test_times_beyond_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.record.agent.sampler.MOST_STRETCHES", 2)
    stretches = Stretches(0)
    for moment in range(5):
        stretches.add({1: moment}, moment * 1000)
    assert stretches.text(0, 9000) is None
    assert Stretches(0).text(0, 1) is None


def test_it_holds_still_while_a_profiler_records(tmp_path: Path) -> None:
    printed, rows, pid = sample(tmp_path, "quiet")
    assert [row for row in rows if row["pid"] == pid] == []
    assert printed["status"] == 0


def test_taken_out_as_a_probe_it_has_no_thread(tmp_path: Path) -> None:
    sampler = FallbackSampler(Config(run=str(tmp_path), host_dir=str(tmp_path)), time.time_ns, lambda: False)
    before, known = set(sys._current_frames()), threading.enumerate()
    for _ in range(2):
        sampler.install()
        while set(sys._current_frames()) == before:
            time.sleep(0.001)
        time.sleep(0.1)  # some samples
        assert threading.enumerate() == known  # a script may join all of these, or wait until it is alone
        sampler.uninstall()
        assert set(sys._current_frames()) == before
    sampler.stop()
