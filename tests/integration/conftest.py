"""Recordings that several tests look at: a real training process costs seconds, reading what it left does not."""

from __future__ import annotations

import socket

import pytest

from tests import recordings
from tests.integration.harness import EXAMPLES, PYTHON, SCRIPTS, Recorded, plain, record

NO_WINDOW = ("--no-window",)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The demo: pictures decoded in the training process."""
    return recordings.demo(tmp_path_factory)


SHORT_WINDOW = ("--window", "skip_first=3,wait=0,warmup=1,active=1,repeat=1")  # a busy machine is never steady


@pytest.fixture(scope="session")
def naive_gpt(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The example whose loss loops over the tokens, started as its README says, but for the window."""
    line = [PYTHON, "examples/naive_gpt/train.py", "--steps", "20"]
    return record(tmp_path_factory.mktemp("gpt") / "run", line, options=SHORT_WINDOW, cwd=EXAMPLES.parent)


@pytest.fixture(scope="session")
def loop_result(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What 40 steps of the tiny loop print without us."""
    return plain([PYTHON, str(SCRIPTS / "loop.py")], cwd=tmp_path_factory.mktemp("plain")).stdout


def free_port() -> int:
    """A port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
