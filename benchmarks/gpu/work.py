"""Device work of known size, as a training loop: `work.py OUT.json [--device cpu]`; the truth of each case by events.

Every case is an operator with input sizes that no other case has, so that a table of operators by shapes tells them
apart. Its time is that of CUDA events around its calls in the very steps that are recorded, its work is arithmetic. In
each step the device has other work first, so that what follows is launched ahead of it, without gaps.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from turn import take_turn

CALLS = 4  # of a case, one behind the other: what lies between an event and a kernel is shared by them
LARGE = 4096  # rows of a product of fp32 on a GPU: 137 GFLOP, milliseconds; those of tensor cores have twice as many
SPIN_CYCLES = 2_000_000
OTHER = "what keeps the device busy"
NVML_EVERY_S = 0.1

Work = dict[str, tuple[Callable[[], Any], dict[str, Any]]]  # by name: (call, what is known of it)


def products(device: str) -> Work:
    """Products of known FLOPs."""
    made: Work = {}
    base = LARGE if device != "cpu" else 64
    dtypes = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for number, (name, dtype) in enumerate(dtypes.items()):
        rows = base * (1 if name == "fp32" else 2) + 64 * number
        a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))

        def call(a: torch.Tensor = a, b: torch.Tensor = b, tf32: bool = name == "tf32") -> torch.Tensor:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            return torch.mm(a, b)

        known = {"operator": "aten::mm", "shapes": f"[[{rows},{rows}],[{rows},{rows}]]", "flop": 2 * rows**3}
        made[f"matmul {name}"] = call, {**known, "tensor_cores": name != "fp32"}
    if device != "cpu" and hasattr(torch, "_scaled_mm") and torch.cuda.get_device_capability() >= (8, 9):
        rows = 2 * base
        a, b = (torch.randn(rows, rows, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        known = {"operator": "aten::_scaled_mm", "flop": 2 * rows**3, "tensor_cores": True}
        made["matmul fp8"] = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16), known
    return made


def copies(device: str) -> Work:
    """Copies of known bytes to the device and on it, an empty kernel, and one of known clock cycles."""
    made: Work = {}
    size = 2**24 if device != "cpu" else 2**12
    for number, name in enumerate(("pageable", "pinned", "on the device")):
        count = size * (8 if name == "on the device" else 1) + 1024 * number
        target = torch.zeros(count, device=device)
        source = torch.ones(count, device=device if name == "on the device" else "cpu")
        source = source.pin_memory() if name == "pinned" and device != "cpu" else source
        moved = 4 * count * (2 if name == "on the device" else 1)  # there, what is read and what is written
        known = {"operator": "aten::copy_", "prefix": f"[[{count}],[{count}]", "bytes": moved}
        if name == "pageable":  # events also hold what the host stages before the device's first piece
            known["tolerance"] = 0.05
        made[f"copy {name}"] = lambda target=target, source=source: target.copy_(source, non_blocking=True), known
    tiny = torch.zeros(7, device=device)
    made["empty kernel"] = lambda: tiny.neg(), {"operator": "aten::neg", "prefix": "[[7]", "most_us": 10}
    if device != "cpu":
        made["spin"] = lambda: torch.cuda._sleep(SPIN_CYCLES), {"kernel": "spin", "cycles": SPIN_CYCLES}
    return made


class Clock:
    """µs by events that are read at the end, on the CPU by the host's clock: of each step, of a call."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pairs: list[tuple[Any, Any]] = []

    def time(self, call: Callable[[], Any], calls: int = 1) -> None:
        begin = self.now()
        for _ in range(calls):
            call()
        self._pairs.append((begin, self.now()))

    def us(self, calls: int = 1) -> list[float]:
        return [self.between_us(begin, end) / calls for begin, end in self._pairs]

    def between_us(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) * 1e3) if self._device != "cpu" else (end - begin) * 1e6

    def now(self) -> Any:
        if self._device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Nvml(threading.Thread):
    """Reads the utilisation that NVML tells of the first device; None where it cannot be asked."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.read: list[float] = []
        self._over = threading.Event()

    def run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not self._over.wait(NVML_EVERY_S):
                self.read.append(float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu))
        except Exception:  # noqa: BLE001 - not installed, or no driver
            return

    def busy_pct(self) -> float | None:
        """The median of the later half: its sample period is a part of a second."""
        self._over.set()
        self.join()
        return median(self.read[len(self.read) // 2 :]) if len(self.read) > 3 else None


def main() -> None:
    """Run the cases as steps for the recorder, and say how long they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--once", action="store_true", help="run each case once, for ncu, and no more")
    options = parser.parse_args()
    take_turn()
    on_gpu = options.device != "cpu"
    cases = {**products(options.device), **copies(options.device)}
    if options.once:
        for call, _known in cases.values():
            call()
        torch.cuda.synchronize()
        return
    clocks = {name: Clock(options.device) for name in (*cases, OTHER)}
    other = torch.zeros(2**26 if on_gpu else 2**10, device=options.device)
    weight = torch.nn.Parameter(torch.zeros(3, device=options.device))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    nvml = Nvml()
    nvml.start()
    ends = [clocks[OTHER].now()]
    for _ in range(options.steps):
        optimizer.zero_grad()
        for name, (call, _known) in cases.items():
            clocks[OTHER].time(other.cos_)  # the device is busy while the events and the calls are launched
            clocks[name].time(call, CALLS)
        weight.sum().backward()
        optimizer.step()
        ends.append(clocks[OTHER].now())
    if on_gpu:
        torch.cuda.synchronize()
    truth = {name: {**known, "us": clocks[name].us(CALLS)} for name, (_call, known) in cases.items()}
    step_us = [clocks[OTHER].between_us(begin, end) for begin, end in pairwise(ends)]
    others_us = clocks[OTHER].us()
    other_us = [sum(others_us[at : at + len(cases)]) for at in range(0, len(others_us), len(cases))]
    about: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "calls": CALLS}
    about |= {"step_us": step_us, "other_us": other_us}
    if on_gpu:
        about |= {"gpu": torch.cuda.get_device_name(), "nvml_busy_pct": nvml.busy_pct()}
    options.out.write_text(json.dumps({"about": about, "cases": truth}))


if __name__ == "__main__":
    main()
