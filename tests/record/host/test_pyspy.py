"""The sampler's supervisor: masking of raw files, refusals, the hand-over to the agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stepscope.record.host.pyspy import Sampler, find_pyspy, is_refusal, look_into, process_prefix
from tests.read.stack_text import parse


def test_secrets_leave_command_lines_and_line_breaks_do_not_split_records() -> None:
    chain = [(10, ("bash", "run.sh")), (11, ("python", "train.py", "--token", "abc def", "--note", "a\nb"))]
    prefix = process_prefix(chain)
    assert prefix == 'process 10:"bash run.sh";process 11:"python train.py --token *** --note a b";'


def denied(tmp_path: Path) -> str:
    """A py-spy that runs as nobody, as an unprivileged user on a shared machine would."""
    program = find_pyspy()
    assert program is not None
    script = tmp_path / "py-spy-denied"
    script.write_text(f'#!/bin/sh\nexec setpriv --reuid 65534 --regid 65534 --clear-groups {program} "$@"\n')
    script.chmod(0o755)
    return str(script)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or find_pyspy() is None, reason="needs root, to give its rights away, and py-spy"
)


WAITS = "import time\ndef waits():\n    time.sleep(60)\nprint(flush=True); waits()"
# Two functions in turns of half a second, their times printed at the end; beside them a thread that soon ends.
TURNS = """
import json, threading, time
def alpha(end):
    while time.monotonic() < end:
        sum(range(300))
def beta(end):
    while time.monotonic() < end:
        sum(range(300))
def brief():
    time.sleep(1.0)
print(flush=True)
threading.Thread(target=brief).start()
turns = []
for number in range(6):
    start = time.monotonic_ns()
    (beta if number % 2 else alpha)(time.monotonic() + 0.5)
    turns.append(("beta" if number % 2 else "alpha", start, time.monotonic_ns()))
print(json.dumps(turns), flush=True)
time.sleep(60)
"""


class Watched:
    """A Python child to look at, and a sampler of it."""

    def __init__(self, program: str, folder: Path, segment_seconds: float = 1.0, text: str = WAITS) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
        assert self.child.stdout is not None
        self.child.stdout.readline()
        self.rows: list[Mapping[str, Any]] = []
        self.reasons: list[str] = []
        self.sampler = Sampler(
            program, self.child.pid, folder, rate_hz=50.0, segment_seconds=segment_seconds, now_ns=time.monotonic_ns,
            write=self.rows.append, give_up=self.reasons.append, targets=self.targets,
            chain=lambda pid: [(pid, ('python', '--key', 'hunter2'))],
        )  # fmt: skip

    def targets(self) -> list[int]:
        return [self.child.pid] if self.child.poll() is None else []

    def poll_until(self, ended: Any) -> None:
        deadline = time.monotonic() + 60
        while not ended() and time.monotonic() < deadline:
            self.sampler.poll()
            time.sleep(0.02)
        assert ended()

    def close(self) -> None:
        self.sampler.stop(5.0)
        self.child.kill()
        self.child.communicate()


@needs_root
@pytest.mark.process
def test_a_refusal_is_recognised_and_sampling_ends(tmp_path: Path) -> None:
    watched = Watched(denied(tmp_path), tmp_path)
    try:
        assert is_refusal(look_into(denied(tmp_path), watched.child.pid) or "")
        watched.poll_until(lambda: watched.reasons)
        assert watched.sampler.active is False
        assert watched.rows[-1]["status"] == "failed"
        assert "ermission" in watched.reasons[0]
    finally:
        watched.close()


@pytest.mark.process
@pytest.mark.skipif(find_pyspy() is None, reason="needs py-spy")
def test_segments_follow_each_other_and_survive_the_death_of_the_process(tmp_path: Path) -> None:
    program = find_pyspy()
    assert program is not None
    watched = Watched(program, tmp_path, segment_seconds=1.0)
    try:
        if look_into(program, watched.child.pid) is not None:
            pytest.skip("py-spy may not attach here")
        watched.poll_until(lambda: len(watched.rows) >= 1)
        end = time.monotonic() + 0.6
        watched.poll_until(lambda: time.monotonic() > end)
        watched.child.kill()
        watched.child.wait()
        watched.poll_until(lambda: len(watched.rows) >= 2)
    finally:
        watched.close()
    assert [row["file"] for row in watched.rows[:2]] == ["stacks-0.raw", "stacks-1.raw"]
    assert watched.rows[0]["end_ns"] <= watched.rows[1]["start_ns"]
    for row in watched.rows[:2]:
        assert row["status"] == "ok"
        text = (tmp_path / row["file"]).read_text()
        assert "waits (<string>:3)" in text
        parsed = parse(text.splitlines())
        assert {stack.pids for stack in parsed.stacks} == {(watched.child.pid,)}
        assert parsed.skipped_records == 0
        assert "hunter2" not in text


def stretches(folder: Path, row: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """(record, start, end) of a segment, in ns."""
    records = (folder / row["file"]).read_text().splitlines()
    times = json.loads((folder / row["times"]).read_text())
    columns = times["stretches"]
    return [
        (records[record], times["start_ns"] + start * 1000, times["start_ns"] + end * 1000)
        for record, start, end in zip(columns["record"], columns["start_us"], columns["end_us"], strict=True)
    ]


@pytest.mark.process
@pytest.mark.skipif(find_pyspy() is None, reason="needs py-spy")
def test_times_tell_when_a_function_ran_and_a_thread_that_ended_is_not_drawn_on(tmp_path: Path) -> None:
    program = find_pyspy()
    assert program is not None
    watched = Watched(program, tmp_path, segment_seconds=20.0, text=TURNS)
    try:
        if look_into(program, watched.child.pid) is not None:
            pytest.skip("py-spy may not attach here")
        began = time.monotonic()
        watched.poll_until(lambda: time.monotonic() > began + 3.6)
        assert watched.child.stdout is not None
        turns = json.loads(watched.child.stdout.readline())
        watched.sampler.cut()
        watched.poll_until(lambda: watched.rows)
    finally:
        watched.close()
    (row, *_) = watched.rows
    found = stretches(tmp_path, row)
    told = right = 0
    for record, start, end in found:
        name = next((name for name in ("alpha", "beta") if f";{name} (" in record), None)
        if name is not None:
            told += end - start
            right += sum(max(0, min(end, b) - max(start, a)) for turn, a, b in turns if turn == name)
    assert told > 1_000_000_000
    assert right / told > 0.75  # 50 samples a second: a change is known to 20 ms or so, turns last 500
    brief = [(start, end) for record, start, end in found if ";brief (" in record]
    assert brief
    assert brief[-1][1] < turns[4][1]  # it ended after a second; looks at threads are a second apart
    counts = [int(line.rpartition(" ")[2]) for line in (tmp_path / row["file"]).read_text().splitlines()]
    assert sum(counts) == row["samples"]
    assert min(counts) >= 1


@pytest.mark.process
@pytest.mark.parametrize("content", ["", "[", '[{"args":{"filename":"","line":0},"name":"x","ph":"E","tid":1,"ts":1}]'])
def test_a_damaged_file_counts_as_a_failed_sampler(tmp_path: Path, content: str) -> None:
    program = tmp_path / "py-spy"
    (tmp_path / "content").write_text(content)
    program.write_text(
        f'#!/bin/sh\nfor last; do :; done\ncp {tmp_path}/content "$last"\necho "Samples: 5 Errors: 0"\nexec sleep 0.1\n'
    )
    program.chmod(0o755)
    watched = Watched(str(program), tmp_path, segment_seconds=0.3)
    try:
        watched.poll_until(lambda: watched.rows)
    finally:
        watched.close()
    assert watched.rows[0]["status"] == "failed"
    assert watched.rows[0]["samples"] is None
    assert "damaged" in watched.rows[0]["message"]
    assert not list(tmp_path.glob("stacks-*"))


@pytest.mark.process
def test_an_interpreter_py_spy_does_not_know_is_handed_over_after_some_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.record.host.pyspy._RETRY_SECONDS", 0.01)
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Error: Failed to find python version from target process' >&2\nexit 1\n")
    program.chmod(0o755)
    watched = Watched(str(program), tmp_path)
    try:
        watched.poll_until(lambda: watched.reasons)
    finally:
        watched.close()
    assert watched.reasons == ["Error: Failed to find python version from target process"]
    assert len(list(tmp_path.glob("stacks-*"))) == 0
