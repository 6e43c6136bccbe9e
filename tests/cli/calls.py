"""Calls of the command line in this process, for tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepscope import cli


def call(*words: object) -> int:
    """The exit status of `stepscope WORDS`."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, words)])
    return int(ended.value.code or 0)


def json_of(capfd: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What it writes as JSON, alone on stdout."""
    capfd.readouterr()
    assert call(*words, "--json", "-") == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    document: dict[str, Any] = json.loads(shown.out)
    return document
