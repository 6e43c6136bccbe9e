"""A garbage collection while the script imports: what is recorded of it must import nothing itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from .processes import run_script

SCRIPT = """
import gc, sys, torch
before = set(sys.modules)
gc.collect()
print(sorted(set(sys.modules) - before))
"""


@pytest.mark.torch
@pytest.mark.process
def test_a_collection_loads_nothing(tmp_path: Path) -> None:
    # Python's import of a module breaks (KeyError) when a collection inside it imports another one.
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert run_script(tmp_path, script).stdout.strip() == "[]"
