"""Real dumps: ranks on gloo of which one leaves a call out, or stands in its loader, read as JSON and as pickles."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stepscope import open_run
from stepscope.model.ranks import HangVerdict
from tests.integration.conftest import free_port
from tests.integration.harness import PYTHON, SCRIPTS, TIMEOUT_S, environment, line_of

pytestmark = [pytest.mark.process, pytest.mark.torch]

SCRIPT = SCRIPTS / "gloo_hang.py"
WORLD = 3


def run_jobs(folder: Path, *hows: str) -> Path:
    """Run the ranks of jobs to their end; each has left two dumps."""
    for how in hows:
        for form in ("pickles", "json"):
            (folder / how / form).mkdir(parents=True)
    jobs = [f"{how}:{free_port()}" for how in hows]
    subprocess.run(
        [PYTHON, str(SCRIPT), str(WORLD), str(folder), *jobs],
        env=environment({"TORCH_FR_BUFFER_SIZE": "200", "GLOO_SOCKET_IFNAME": "lo"}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=True,
    )
    if not all((folder / how / "pickles" / f"fr_rank_{rank}").exists() for how in hows for rank in range(WORLD)):
        pytest.fail("a rank left no dump")
    return folder


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_jobs(tmp_path_factory.mktemp("jobs"), "left_out", "loader")


def verdict(path: Path) -> HangVerdict:
    found = open_run(path).hang
    assert found is not None
    return found


def test_a_rank_that_leaves_a_call_out(jobs: Path) -> None:
    found = verdict(jobs / "left_out" / "pickles")
    (cause, *_) = found.causes
    assert (cause.kind, cause.ranks) == ("mismatch", (1,))
    assert cause.place is not None
    assert (Path(cause.place.file).name, cause.place.line) == (SCRIPT.name, line_of(SCRIPT, "# NORM"))
    assert (
        f"it left out all_reduce of group 0 (default_pg) at {SCRIPT.name}:{line_of(SCRIPT, '# NORM')}" in found.sentence
    )
    without_lines = verdict(jobs / "left_out" / "json")
    assert (without_lines.causes[0].ranks, without_lines.causes[0].place) == ((1,), None)
    assert any("hold no stacks" in note for note in without_lines.notes)


def test_a_rank_that_stands_in_its_loader(jobs: Path) -> None:
    for form, line in (("pickles", line_of(SCRIPT, "# GRADIENTS")), ("json", None)):
        found = verdict(jobs / "loader" / form)
        (cause,) = found.causes
        assert (cause.kind, cause.ranks) == ("missing", (1,))
        assert (cause.place.line if cause.place is not None else None) == line
        (row,) = found.calls
        assert (row.sequence, row.waiting_ranks, row.absent_ranks) == (10, "0, 2", "1")


@pytest.mark.thorough
def test_a_job_that_does_not_hang(tmp_path: Path) -> None:
    folder = run_jobs(tmp_path, "none") / "none"
    assert verdict(folder / "pickles").verdict == verdict(folder / "json").verdict == "none"
