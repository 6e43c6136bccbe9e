"""A real recording that loses time in many ways, made once in a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import PYTHON, record

SCRIPT = Path(__file__).parent / "scripts" / "losses.py"
STEPS = "160"  # two seconds of training


@pytest.fixture(scope="session")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder."""
    folder = tmp_path_factory.mktemp("losses")
    command = [PYTHON, str(SCRIPT), STEPS, str(folder / "log.txt")]
    recorded = record(folder / "run", command, options=["--rate", "100"])
    assert recorded.status == 0, recorded.text
    return recorded.folder
