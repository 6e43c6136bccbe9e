"""Recordings that several tests look at: a real training process costs seconds, reading what it left does not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests import recordings
from tests.integration.harness import EXAMPLES, PYTHON, SCRIPTS, Recorded, plain, record
from tests.recordings import shared, train_line

NO_WINDOW = ("--no-window",)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The demo: pictures decoded in the training process."""
    return recordings.demo(tmp_path_factory)


@pytest.fixture(scope="session")
def pictures(demo: Recorded) -> Path:
    """Its data set."""
    return recordings.pictures_of(demo)


@pytest.fixture(scope="session")
def demo_with_workers(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The same with two loader processes."""
    return record(tmp_path_factory.mktemp("workers") / "run", train_line(pictures, "--workers", "2", "--epochs", "8"))


@pytest.fixture(scope="session")
def naive_gpt(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The example whose loss loops over the tokens, started as its README says."""
    script = "examples/naive_gpt/train.py"
    return record(tmp_path_factory.mktemp("gpt") / "run", [PYTHON, script, "--steps", "30"], cwd=EXAMPLES.parent)


@pytest.fixture(scope="session")
def loop_result(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What 40 steps of the tiny loop print without us."""
    return plain([PYTHON, str(SCRIPTS / "loop.py")], cwd=tmp_path_factory.mktemp("plain")).stdout


@pytest.fixture(scope="session")
def plain_loop(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The tiny loop, recorded; ends with status 0."""
    line = [PYTHON, str(SCRIPTS / "loop.py")]
    return shared(tmp_path_factory, "loop", lambda folder: record(folder / "run", line, options=NO_WINDOW))


def free_port() -> int:
    """A port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
