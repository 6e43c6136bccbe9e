"""Recordings that several tests look at, each made once in a test run by whoever asks first, whatever process that is.

They are read, never written into.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.harness import EXAMPLES, PYTHON, Recorded, record

STATUS = "status"  # the last file that is written


def shared(temporary: pytest.TempPathFactory, name: str, make: Callable[[Path], Recorded]) -> Recorded:
    """What `make` recorded into the folder that it is given, once for all workers."""
    folder = _for_all_workers(temporary) / f"recorded-{name}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / STATUS).exists():
            made = make(folder)
            assert made.folder == folder / "run"
            (folder / "stdout").write_bytes(made.stdout)
            (folder / "stderr").write_bytes(made.stderr)
            (folder / STATUS).write_text(str(made.status))
    status = int((folder / STATUS).read_text())
    return Recorded(folder / "run", status, (folder / "stdout").read_bytes(), (folder / "stderr").read_bytes())


def _for_all_workers(temporary: pytest.TempPathFactory) -> Path:
    """The folder of a test run's temporary files, which those of each worker lie in."""
    own = temporary.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def train_line(data: Path, *arguments: str) -> list[str]:
    """The demo's command on the small data set."""
    train = EXAMPLES / "cifar_png" / "train.py"
    return [PYTHON, str(train), "--data", str(data), "--epochs", "14", *arguments]


def demo(temporary: pytest.TempPathFactory) -> Recorded:
    """The demo: pictures decoded in the training process."""

    def make(folder: Path) -> Recorded:
        make_data, data = EXAMPLES / "cifar_png" / "make_data.py", folder / "train"
        subprocess.run([PYTHON, str(make_data), "--data", str(data), "--images", "640"], check=True)
        return record(folder / "run", train_line(data))

    return shared(temporary, "demo", make)
