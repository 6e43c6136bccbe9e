"""Runs in which nothing is wrong, or nothing can be said: one clear line, no traceback, no invented figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import NO_WINDOW
from tests.integration.harness import PYTHON, SCRIPTS, record

pytestmark = pytest.mark.process


@pytest.mark.torch
def test_a_healthy_run_says_so(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", [PYTHON, str(SCRIPTS / "healthy.py")])
    assert recorded.status == 0, recorded.text
    assert [finding["rule"] for finding in recorded.findings if finding["severity"] != "info"] == []
    text, rest = " ".join(recorded.text.lower().split()), recorded.report["unexplained"]
    if rest["large"]:  # other tests have the cores meanwhile: that is said instead, and nothing else
        assert "nobody explained" in text
        assert all("others on the machine" in part["what"] for part in rest["parts"]), rest
    elif recorded.findings or rest["unseen"]:  # a small loss to other tests, or too few readings beside them
        assert "nothing worth fixing" not in text
    else:
        assert "nothing worth fixing above" in text, (recorded.text, rest)


@pytest.mark.parametrize("script", ["no_torch.py", pytest.param("never_steps.py", marks=pytest.mark.torch)])
def test_without_steps_there_is_a_clear_line(tmp_path: Path, script: str) -> None:
    recorded = record(tmp_path / "run", [PYTHON, str(SCRIPTS / script)], options=NO_WINDOW)
    assert recorded.status == 0, recorded.text
    assert "Traceback" not in recorded.text
    assert "step" in recorded.text
    assert 1 <= len(recorded.text.strip().splitlines()) <= 30, recorded.text
