"""Whatever a tool lacks or raises is one line, with the status of its kind; options that mean nothing are refused."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

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
