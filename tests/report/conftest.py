"""A folder with the script that made-up findings point into."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.fabricate import write_script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_script(tmp_path)
    return tmp_path
