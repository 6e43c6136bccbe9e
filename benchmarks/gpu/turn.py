"""One process at a time on the device, and its clock: what the scripts of the check share."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))

from common import WARMUP, Watch

TURN = "GPU_TURN"  # names the file whose lock is the turn; without it nobody waits
_held: list[IO[str]] = []


def take_turn() -> None:
    """Wait until no other process of the check works on the device; the turn ends with the process, if not before."""
    name = os.environ.get(TURN)
    if name:
        _held.append(Path(name).open("w"))  # noqa: SIM115 - open until the turn ends
        fcntl.flock(_held[-1], fcntl.LOCK_EX)


def end_turn() -> None:
    """Let the next one have the device."""
    while _held:
        _held.pop().close()


class DeviceClock:
    """What a steady step takes by the device's clock: the host runs ahead of it, by many steps that launch little."""

    def __init__(self, steps: int, device: str) -> None:
        self._first, self._last = max(5, round(steps * WARMUP)), steps - 1
        self._on_gpu, self._steps, self._ends = device != "cpu", 0, []  # type: ignore[var-annotated]

    def after_step(self) -> None:
        """A step has been launched."""
        if self._on_gpu and self._steps in (self._first, self._last):
            import torch

            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ends.append(event)
        self._steps += 1

    def report(self, watch: Watch) -> None:
        """As the watch on the host's clock says it."""
        if len(self._ends) < 2:
            watch.report()
            return
        self._ends[1].synchronize()
        mean_ms = self._ends[0].elapsed_time(self._ends[1]) / (self._last - self._first)
        print(f"{self._steps} steps, {mean_ms:.2f} ms each")
