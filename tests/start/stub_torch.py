"""Steps that a script marks itself, in a process whose PyTorch is a stub: for tests of the processes around a training,
which need steps but no model, and would wait for two seconds of a core until PyTorch is imported."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "stub"))
import torch  # noqa: F401 - the stub, which wakes the agent

import stepscope

del sys.path[0]


def steps(count: int, pause_s: float) -> Iterator[int]:
    """The numbers of so many steps, each of which lasts until the next one is asked for, and `pause_s` more."""
    stepscope.step()  # what came before is no step
    for number in range(count):
        yield number
        time.sleep(pause_s)
        stepscope.step()
