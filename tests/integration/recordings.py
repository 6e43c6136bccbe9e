"""Recordings that tests of several folders look at. Each is made once per process, by whoever asks first.

`base` is the folder of the session's temporary files, `tmp_path_factory.getbasetemp()`.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from tests.integration.harness import EXAMPLES, PYTHON, Recorded, record


@cache
def pictures(base: Path) -> Path:
    """A small version of the example's data set: ten batches of 64."""
    folder = _folder(base, "pictures") / "train"
    make_data = EXAMPLES / "cifar_png" / "make_data.py"
    subprocess.run([PYTHON, str(make_data), "--data", str(folder), "--images", "640"], check=True)
    return folder


def train_line(data: Path, *arguments: str) -> list[str]:
    """The demo's command on the small data set."""
    train = EXAMPLES / "cifar_png" / "train.py"
    return [PYTHON, str(train), "--data", str(data), "--epochs", "14", *arguments]


@cache
def demo(base: Path) -> Recorded:
    """The demo: pictures decoded in the training process."""
    return record(_folder(base, "demo") / "run", train_line(pictures(base)))


def _folder(base: Path, name: str) -> Path:
    folder = base / f"recorded-{name}"
    folder.mkdir()
    return folder
