"""`stepscope slurm` as a user types it: which file is written, what is shown where, and what is never touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.calls import call

SCRIPT = "#!/bin/bash\n#SBATCH --ntasks=2\nsrun python train.py\nnsys profile python other.py\n"
SWITCHED = SCRIPT.replace("srun python", "srun stepscope run -- python")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("train.sbatch")
    path.write_text(SCRIPT)
    path.chmod(0o750)
    return path


def test_a_copy_is_written_and_the_difference_shown(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("slurm", "train.sbatch") == 0
    assert call("slurm", "train.sbatch") == 2
    assert call("slurm", "train.sbatch", "--force") == 0
    copy = Path("train.stepscope.sbatch")
    assert copy.read_text() == SWITCHED
    assert copy.stat().st_mode & 0o777 == 0o750
    assert script.read_text() == SCRIPT
    shown = capsys.readouterr()
    assert "-srun python train.py\n+srun stepscope run -- python train.py\n" in shown.out
    assert "--force" in shown.err
    assert shown.out.startswith("--- train.sbatch\n+++ train.stepscope.sbatch\n")
    assert "left alone: line 4: it runs under nsys" in shown.err
    assert "sbatch train.stepscope.sbatch" in shown.err


def test_a_script_that_records_already_says_so(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SWITCHED)
    assert call("slurm", script) == 0
    assert "records already (line 3)" in capsys.readouterr().err
    assert list(Path.cwd().iterdir()) == [Path.cwd() / script]


def test_bytes_that_are_no_text_and_control_characters_survive_and_are_not_printed(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_bytes(b"# caf\xe9 \x1b[2J\r\nsrun python train.py\r\n")
    assert call("slurm", script) == 0
    written = Path("train.stepscope.sbatch").read_bytes()
    assert written == b"# caf\xe9 \x1b[2J\r\nsrun stepscope run -- python train.py\r\n"
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out
    assert "\\x1b[2J" in shown.out
