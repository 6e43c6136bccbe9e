"""`stepscope doctor` on the terminal and as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.calls import call, json_of

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("elsewhere")]


def test_the_table_fits_a_terminal_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of an interpreter that has no torch, whatever this one has, and is quick about it."""
    monkeypatch.setenv("COLUMNS", "80")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    assert call("doctor", "--python", python, "--json", "facts.json") == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    assert max(len(line) for line in shown.out.splitlines()) <= 80
    text = " ".join(shown.out.split())
    assert [words for words in ("PyTorch missing", "costs:", "get it:", "taskset -c") if words not in text] == []
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert {"name", "state", "finding", "cost", "remedy"} == set(facts["checks"][0])
    assert call("doctor", "--json", "facts.json") == 2


def test_everything_of_this_machine_gets_a_verdict(capfd: pytest.CaptureFixture[str]) -> None:
    facts = json_of(capfd, "doctor", "--python", sys.executable)
    assert facts["schema"] == "stepscope.doctor/1"
    assert {check["state"] for check in facts["checks"]} <= {"ok", "limited", "missing", "unknown"}
    assert all(check["cost"] for check in facts["checks"] if check["state"] in ("limited", "missing"))
    assert facts["pinned_command"] is not None
