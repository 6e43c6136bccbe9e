"""What the command line does about memory before anything large is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from pathlib import Path
from stepscope.cli import options
options.LARGE_BYTES = int(sys.argv[2])
options.spare_memory([Path(sys.argv[1]), Path("/nowhere")])
assert "polars" not in sys.modules
print(os.environ.get("_RJEM_MALLOC_CONF", "as it is"))
"""


@pytest.mark.parametrize(("least", "conf"), [(10, "dirty_decay_ms:0,muzzy_decay_ms:0"), (11, "as it is")])
def test_large_files_make_polars_give_memory_back(tmp_path: Path, least: int, conf: str) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(b"x" * 10)
    fresh = {name: value for name, value in os.environ.items() if name != "_RJEM_MALLOC_CONF"}  # Polars sets its own
    command = [sys.executable, "-c", PROGRAM, str(file), str(least)]
    done = subprocess.run(command, capture_output=True, text=True, env=fresh)
    assert done.stdout.strip() == conf, done.stderr
