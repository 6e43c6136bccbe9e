"""Whatever a tool lacks or raises is one line, with the status of its kind; options that mean nothing are refused."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope import sinks
from stepscope.sinks import mlflow, trackio, wandb
from tests.cli.calls import call
from tests.run_folders import make_run_folder

EXTRAS = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_folder(tmp_path)


def one_line(capfd: pytest.CaptureFixture[str]) -> str:
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("stepscope: ")
    return said


@pytest.mark.parametrize("tool", EXTRAS)
def test_an_extra_that_is_not_there(
    tool: str, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package = EXTRAS[tool]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    real, broken = importlib.import_module, False

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == package:
            raise RuntimeError("built for\nanother") if broken else ModuleNotFoundError(name=package)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    assert call("export", run, "--to", tool, "--out", "out") == 4
    assert f"pip install 'stepscope[{tool}]'" in one_line(capfd)
    broken = True
    assert call("export", run, "--to", tool, "--out", "out") == 4
    assert "RuntimeError: built for" in one_line(capfd)
    assert not Path("out").exists()


@pytest.mark.parametrize("tool", ["csv", "parquet", *EXTRAS])
def test_a_place_that_cannot_be_written(tool: str, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("x")
    for place in ("file/below", "/proc/nothing"):
        assert call("export", run, "--to", tool, "--out", place) in (2, 4)
        assert one_line(capfd)


def test_a_library_that_does_not_come_back_is_given_up(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    storage = pytest.importorskip("trackio.sqlite_storage")
    monkeypatch.setattr(trackio, "PATIENCE_S", 0.2)
    monkeypatch.setattr(storage.SQLiteStorage, "bulk_log", lambda **_: time.sleep(100))
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    left = signal.setitimer(signal.ITIMER_REAL, 1_000.0)
    try:
        assert call("export", run, "--to", "trackio", "--out", "out") == 4
        assert "Trackio: no answer in 0.2 s" in one_line(capfd)
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] < 1_000  # an alarm of somebody else still stands
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left[0])


def test_a_server_that_says_nothing_is_given_up(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    for module in (sinks, mlflow):
        monkeypatch.setattr(module, "PATIENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert call("export", run, "--to", "mlflow", "--out", f"http://127.0.0.1:{silent.getsockname()[1]}") == 4
    assert "MLflow: no answer in 1 s" in one_line(capfd)


@pytest.mark.parametrize("ends", [signal.SIGSTOP, signal.SIGKILL])
def test_the_process_that_wandb_writes_by_may_hang_or_be_killed(
    run: Path, ends: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delitem(sys.modules, "mcp", raising=False)  # of other tests: W&B advertises where it sees it
    known = {child.pid for child in psutil.Process().children()}

    def service() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in known and "wandb" in child.name()]

    def moments(_: Any) -> Iterator[tuple[int, int, dict[str, float]]]:
        for number in range(100_000):
            if number == 3:
                service()[0].send_signal(ends)
            yield number, number, {f"name/{at}": 1.0 for at in range(100)}

    with monkeypatch.context() as broken:
        broken.setattr(wandb, "PATIENCE_S", 2.0)
        broken.setattr(wandb, "moments", moments)
        assert call("export", run, "--to", "wandb", "--out", "out") == 4
    assert one_line(capfd).startswith("stepscope: W&B: ")
    assert not service()
    assert list(Path("out/wandb").iterdir()) == []
    assert call("export", run, "--to", "wandb", "--out", "out") == 0  # and again, as if nothing had been


@pytest.mark.process
def test_two_exports_at_once_are_one(run: Path) -> None:
    line = [sys.executable, "-m", "stepscope", "export", str(run), "--to", "trackio", "--out", "out"]
    both = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted("No new value" in each for each in said) == [False, True]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "aim"), "there are csv, parquet"),
        (("--to", "csv", "--follow"), "--to tensorboard"),
        (("--to", "csv", "--resume", "x"), "--to wandb"),
        (("--to", "wandb", "--resume", "../x"), "no id of a run"),
        (("--to", "csv", "--steps", "1:2"), "--steps cuts a trace"),
        (("--to", "csv", "--project", "x"), "--project"),
        ((), "--out"),
        (("--out", "x.json", "--no-source"), "--no-source"),
    ],
)
def test_options_that_mean_nothing(
    options: tuple[str, ...], said: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call("export", run, *options) == 2
    assert said in one_line(capfd)


def test_no_source_leaves_no_line_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "train.py"
    code.write_text("secret_of_mine = 1\n" * 9)
    stacks = f'process 100:"python train.py";MainThread (100): MainThread;step ({code}:3) 400\n'
    made = make_run_folder(tmp_path, stacks_raw=stacks, manifest={"user_roots": [str(tmp_path)]}, name="told")
    assert call("export", made, "--to", "csv", "--out", "with") == 0
    assert call("export", made, "--to", "csv", "--out", "without", "--no-source") == 0
    assert b"secret_of_mine" not in Path("without/report.html").read_bytes()
