"""torch.compile does the same and says the same with a recorder beside it, with the user's logs asked for or not."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.harness import PYTHON, SCRIPTS, Recorded, environment, record, run_to_end

pytestmark = [pytest.mark.process, pytest.mark.torch]

STEP = [PYTHON, str(SCRIPTS / "compiled_step.py")]
LOGS = {"TORCH_LOGS": "graph_breaks,recompiles"}
# What no two runs have in common: the time and the process id at the beginning of a line of torch's log.
PREFIX = re.compile(rb"(?m)^([A-Z])\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ ")


def without_times(output: bytes) -> list[bytes]:
    return PREFIX.sub(rb"\1 ", output).splitlines()


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[bytes]:
    """Without us."""
    return run_to_end(STEP, tmp_path_factory.mktemp("plain"), environment(LOGS))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The same under the recorder, which tells nothing on stderr itself."""
    return record(tmp_path_factory.mktemp("logged") / "run", STEP, options=["--quiet"], env=LOGS)


def test_the_users_log_is_the_same(logged: subprocess.CompletedProcess[bytes], recorded: Recorded) -> None:
    assert recorded.status == 0, recorded.text
    assert without_times(recorded.stderr) == without_times(logged.stderr)


def test_graphs_breaks_and_versions_are_the_same(
    logged: subprocess.CompletedProcess[bytes], recorded: Recorded
) -> None:
    assert recorded.stdout == logged.stdout
    # a full graph, a loss in two parts, an optimizer: each compiled anew when the batch or the learning rate changed
    assert b"graphs {'forward': 2, 'loss': 3, 'optimizer': 3}" in recorded.stdout


@pytest.mark.thorough
def test_a_user_who_asked_for_no_logs_gets_none(logged: subprocess.CompletedProcess[bytes], tmp_path: Path) -> None:
    quiet = record(tmp_path / "run", STEP, options=["--quiet"])
    assert quiet.status == 0, quiet.text
    assert quiet.stdout == logged.stdout
    asked_for = re.compile(rb"\] \[__(graph_breaks|recompiles)\] ?")
    warnings = [line for line in without_times(logged.stderr) if not asked_for.search(line)]
    assert without_times(quiet.stderr) == warnings
