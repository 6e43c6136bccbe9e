"""What could not be recorded is said, wherever the recording is read later, and the training never notices."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import NO_WINDOW
from tests.integration.harness import (
    PYTHON,
    SCRIPTS,
    Recorded,
    analyze,
    end_session,
    environment,
    record,
    run_line,
    step_rows,
    wait_for_steps,
)

pytestmark = pytest.mark.process
STEPS = 60


def lose(tmp_path: Path, how: str, folder: Path) -> Recorded:
    script = [PYTHON, str(SCRIPTS / "losing.py"), how, str(folder)]
    done = record(folder / "run", script, options=[*NO_WINDOW, "--no-report"], cwd=tmp_path)
    assert (done.status, done.stdout.split()[0].decode()) == (0, how), done.text
    return done


def report(run: Path) -> dict[str, Any]:
    document = run.parent / "report.json"
    done = analyze(run, "--json", str(document), "--force")
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(document.read_text())
    return loaded


def notes(run: Path) -> str:
    return " ".join(note["text"] for note in report(run)["quality"]["notes"])


def test_descriptors_that_the_script_closes_lose_nothing_and_its_own_files_stay_its_own(tmp_path: Path) -> None:
    done = lose(tmp_path, "descriptors", tmp_path)
    assert len(step_rows(done.folder / "rank-0")) == STEPS
    assert done.stdout.split()[1] == b"40"  # empty files: nothing of ours is in them
    assert "could not be written" not in notes(done.folder)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    done = lose(tmp_path, "limit", tmp_path)
    missing = STEPS - len(step_rows(done.folder / "rank-0"))
    assert missing > 0
    said = notes(done.folder)
    assert f"at least {missing} steps" in said
    assert "File too large" in said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    done = lose(tmp_path, "disk", small_disk)
    assert "the disk took no more" in done.text
    copy = tmp_path / "copy"
    shutil.copytree(done.folder, copy)
    said = notes(copy)
    assert f"at least {STEPS - len(step_rows(copy / 'rank-0'))} steps" in said
    assert "No space left" in said
    assert "never ended" not in said
    assert report(copy)["run"]["exit_status"] == 0
    assert analyze(done.folder).returncode == 0  # where nothing can be kept


@contextlib.contextmanager
def training(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A loop of 100 steps under the recorder, its first ten steps done."""
    script = [PYTHON, str(SCRIPTS / "steps.py"), "100", "0.02"]
    process = subprocess.Popen(
        run_line(run, script, [*NO_WINDOW, "--no-report"]),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        wait_for_steps(run, 10, process)
        yield process
    finally:
        end_session(process)


def test_a_killed_recorder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(run) as process:
        children = psutil.Process(process.pid).children()
        (beside,) = [child for child in children if "stepscope.record.host.telemetry" in child.cmdline()]
        beside.kill()
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"killed by signal 9" in stderr
    assert "killed by signal 9" in notes(run)


def test_everything_stopped_for_a_while(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(run) as process:
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in everyone:
            each.suspend()
        time.sleep(1.5)
        for each in reversed(everyone):
            each.resume()
        stdout, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"result " in stdout
    rows = step_rows(run / "rank-0")
    assert len(rows) == 100
    assert sum(row["wall_ns"] > 10**9 for row in rows) == 1
    steps = report(run)["steps"]
    assert steps["median_ms"] < 500 < max(wall for _, wall in steps["series"])


def test_a_folder_taken_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(run) as process:
        shutil.rmtree(run, ignore_errors=True)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"result " in stdout
    assert b"cannot write" in stderr
    assert b"Traceback" not in stderr
