"""One process at a time on the device, and its clock: what the scripts of the check share."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO, Any

TURN = "GPU_TURN"  # names the file whose lock is the turn; without it nobody waits
WARMUP = 0.1  # of the steps, at least five: first batches, allocations, first compilations
MANY_CORES = 8  # from which on cores can be kept free
_held: list[IO[str]] = []


def leave_core_free() -> None:
    """This process and what it starts keep off the first two cores, which may be one core's two threads."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= MANY_CORES:
        os.sched_setaffinity(0, cores[2:])


def have_core_alone() -> None:
    """This thread, and autograd's, run on the core that the others keep off: times of microseconds agree then."""
    if (os.cpu_count() or 1) < MANY_CORES:
        return
    os.sched_setaffinity(0, {0})
    for thread in Path("/proc/self/task").iterdir():
        if "autograd" in (thread / "comm").read_text():
            os.sched_setaffinity(int(thread.name), {0})


def warm_up(device: str) -> None:
    """A context, libraries and their kernels take seconds, and nothing of the device's time: before the turn."""
    import torch
    import torch._dynamo  # optimizers import it at their first step

    if device == "cpu":
        return
    square = torch.randn(64, 64, device=device, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):
        (square.to(dtype) @ square.to(dtype)).sum().backward()
    torch.cuda.synchronize()


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
        self._on_gpu = device != "cpu"
        self._steps = 0
        self._ends: list[Any] = []

    def after_step(self) -> None:
        """A step has been launched."""
        import torch  # not at the top: the check itself needs none

        if self._steps in (self._first, self._last):
            end: Any = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter()
            if self._on_gpu:
                end.record()
            self._ends.append(end)
        self._steps += 1

    def mean_ms(self) -> float:
        """Of the steady steps; waits for the device."""
        begin, end = self._ends
        if self._on_gpu:
            end.synchronize()
        took_ms = begin.elapsed_time(end) if self._on_gpu else (end - begin) * 1e3
        return float(took_ms) / (self._last - self._first)
