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


def job(folder: Path, how: str) -> None:
    """Run the ranks of a job to their end; each has left two dumps."""
    for form in ("pickles", "json"):
        (folder / form).mkdir()
    words = [str(WORLD), str(free_port()), str(folder), how]
    ranks = [
        subprocess.Popen(
            [PYTHON, str(SCRIPT), str(rank), *words],
            env=environment({"TORCH_FR_BUFFER_SIZE": "200", "GLOO_SOCKET_IFNAME": "lo"}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(WORLD)
    ]
    for rank in ranks:
        rank.wait(TIMEOUT_S)
    if not all((folder / "pickles" / f"fr_rank_{rank}").exists() for rank in range(WORLD)):
        pytest.fail("a rank left no dump")


def verdict(path: Path) -> HangVerdict:
    found = open_run(path).hang
    assert found is not None
    return found


def test_a_rank_that_leaves_a_call_out(tmp_path: Path) -> None:
    job(tmp_path, "left_out")
    found = verdict(tmp_path / "pickles")
    (cause, *_) = found.causes
    assert (cause.kind, cause.ranks) == ("mismatch", (1,))
    assert cause.place is not None
    assert (Path(cause.place.file).name, cause.place.line) == (SCRIPT.name, line_of(SCRIPT, "# NORM"))
    assert (
        f"it left out all_reduce of group 0 (default_pg) at {SCRIPT.name}:{line_of(SCRIPT, '# NORM')}" in found.sentence
    )
    without_lines = verdict(tmp_path / "json")
    assert (without_lines.causes[0].ranks, without_lines.causes[0].place) == ((1,), None)
    assert any("hold no stacks" in note for note in without_lines.notes)


def test_a_rank_that_stands_in_its_loader(tmp_path: Path) -> None:
    job(tmp_path, "loader")
    for form, line in (("pickles", line_of(SCRIPT, "# GRADIENTS")), ("json", None)):
        found = verdict(tmp_path / form)
        (cause,) = found.causes
        assert (cause.kind, cause.ranks) == ("missing", (1,))
        assert (cause.place.line if cause.place is not None else None) == line
        (row,) = found.calls
        assert (row.sequence, row.waiting_ranks, row.absent_ranks) == (10, "0, 2", "1")


@pytest.mark.thorough
def test_a_job_that_does_not_hang(tmp_path: Path) -> None:
    job(tmp_path, "none")
    assert verdict(tmp_path / "pickles").verdict == "none"
    assert verdict(tmp_path / "json").verdict == "none"
