"""One run as a process: its words when it fails, and that nothing of it is left when it has ended, however it did."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stepscope.experiment import runner
from stepscope.experiment.folder import Made
from stepscope.experiment.plan import PAIRS, Slot
from stepscope.experiment.runner import Order, Processes, StepsSeen, Stopped, last_line, log_of
from stepscope.schema import Knob
from tests.records import some

pytestmark = pytest.mark.process

SLEEPY = Path(__file__).parent / "scripts" / "sleepy.py"
GONE_S = 30


def order(folder: Path, *command: str, knobs: tuple[Knob, ...] = (), **more: object) -> Order:
    values: dict[str, object] = {
        "slot": Slot(PAIRS, 0, None, 0, knobs, "baseline"),
        "command": command,
        "folder": folder / "run",
        "warmup": 2,
        "steps": 10,
        "seed": 0,
        **more,
    }
    return Order(**values)  # type: ignore[arg-type]


def run(asked: Order, stop: Callable[[], int | None] = lambda: None) -> tuple[Made, int]:
    """The run, and the process that led it."""
    pids: list[int] = []
    return Processes(stop)(asked, lambda pid, _: pids.append(pid)), pids[0]


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_run_that_fails_says_its_status_and_its_last_words(tmp_path: Path) -> None:
    made, _ = run(order(tmp_path, "sh", "-c", "echo first; echo; echo the last words >&2; exit 3"))
    assert made.failure == "it ended with status 3: the last words"
    assert made.measure is None
    assert log_of(tmp_path / "run").read_text() == "first\n\nthe last words\n"


def test_modules_in_the_working_directory_are_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stepscope.py", "typer.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    made, _ = run(order(tmp_path, "sh", "-c", "exit 5"))
    assert made.failure == "it ended with status 5"


def test_a_run_that_hangs_is_ended(tmp_path: Path) -> None:
    made, pid = run(order(tmp_path, "sleep", "1000", seconds=2.0))
    assert "far longer" in (made.failure or "")
    assert is_gone(pid)


def test_a_run_is_ended_when_we_are_told_to_end(tmp_path: Path) -> None:
    began = time.monotonic()
    pids: list[int] = []
    with pytest.raises(Stopped) as caught:
        Processes(lambda: 15 if time.monotonic() - began > 2 else None)(
            order(tmp_path, "sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 1000"), lambda pid, _: pids.append(pid)
        )
    assert caught.value.number == 15
    assert is_gone(pids[0])
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_what_a_run_leaves_behind_does_not_disturb_the_next(tmp_path: Path) -> None:
    run(order(tmp_path, "sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid"))
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_run_without_a_limit_is_ended_where_its_steps_say_so(tmp_path: Path) -> None:
    steps = "import stub_torch; list(stub_torch.steps(4000, 0.02))"
    asked = order(tmp_path, sys.executable, "-c", steps, steps=None, ends=lambda seen: seen.count >= 5)
    status, why = Processes(lambda: None).run(asked, lambda *_: None)
    assert (status, why) == (None, None)
    seen = StepsSeen(asked.folder)
    seen.look()
    assert 5 <= seen.count < 1000


@pytest.mark.torch
def test_a_training_that_does_not_listen_is_ended_after_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_CUT_S", 1.0)
    script = tmp_path / "deaf.py"
    script.write_text(f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{SLEEPY.read_text()}")
    made, pid = run(order(tmp_path, sys.executable, str(script), knobs=(Knob("env:SLEEPY", "a b"),)))
    assert made.failure is None
    assert made.measure is not None
    assert made.measure.steps >= 8
    assert [(knob.knob, knob.applied) for knob in made.measure.knobs] == [("env:SLEEPY", True)]
    assert len(made.measure.losses) >= 10
    assert made.length is None
    assert is_gone(pid)


def test_the_last_line_of_a_log_is_found_whatever_is_in_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) is None
    log.write_bytes(b"\xff\xfe" + b"x" * 100_000 + b"\n" + b"y" * 10_000 + b"\n  \n\n")
    found = some(last_line(log))
    assert set(found) == {"y"}
    assert len(found) < 1000


def test_steps_are_counted_as_they_are_written(tmp_path: Path) -> None:
    rank = tmp_path / "rank-0"
    seen = StepsSeen(tmp_path)
    assert not seen.look()
    assert (seen.count, seen.step_s) == (0, None)
    rank.mkdir()
    with (rank / "steps.jsonl").open("w") as file:
        file.write('{"schema": "stepscope.steps/1", "columns": []}\n')
        for step in range(3):
            file.write(f'[{step}, "train", 0, 0, 2000000, null]\n')
        file.write('[3, "ev')
        file.flush()
        assert seen.look()
        assert (seen.count, seen.step_s) == (3, pytest.approx(0.002))
        file.write('al", 0, 0, 5, null]\nnot json\n')
        file.flush()
        assert seen.look()
        assert seen.count == 3  # an evaluation step is not one to train with
        assert not seen.look()


def test_a_run_ends_with_us(tmp_path: Path) -> None:
    """The kernel ends the run when the process that started it is gone without a word."""
    program = (
        "import os, sys; from pathlib import Path; from tests.experiment.test_runner import order\n"
        "from stepscope.experiment.runner import Processes\n"
        "def started(pid, ticks): print(pid, flush=True)\n"
        "calls = []\n"
        "def stop():\n"
        "    calls.append(1)\n"
        "    if len(calls) > 12: os.kill(os.getpid(), 9)\n"
        "Processes(stop)(order(Path(sys.argv[1]), 'sleep', '1000'), started)\n"
    )
    import subprocess

    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        timeout=120,
    )
    assert done.returncode == -9
    assert is_gone(int(done.stdout))
