"""Device work of known size, as a training loop: `work.py OUT.json [--device cpu]`; the truth of each case by events.

Every case is an operator with input sizes that no other case has, so that a table of operators by shapes tells them
apart. Its time is that of CUDA events around many calls before any profiler is open, its work is arithmetic.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from turn import take_turn

CALLS = 30
LARGE = 4096  # rows of a product on a GPU: 137 GFLOP, a millisecond and more in fp32
SPIN_CYCLES = 2_000_000


def products(device: str) -> dict[str, tuple[Callable[[], Any], dict[str, Any]]]:
    """Products of known FLOPs, by name: (call, what is known of it)."""
    made: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {}
    base = LARGE if device != "cpu" else 128
    dtypes = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for number, (name, dtype) in enumerate(dtypes.items()):
        rows = base + 64 * number
        a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))

        def call(a: torch.Tensor = a, b: torch.Tensor = b, tf32: bool = name == "tf32") -> torch.Tensor:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            return torch.mm(a, b)

        known = {"operator": "aten::mm", "shapes": f"[[{rows},{rows}],[{rows},{rows}]]", "flop": 2 * rows**3}
        made[f"matmul {name}"] = call, {**known, "tensor_cores": name != "fp32"}
    if device != "cpu" and hasattr(torch, "_scaled_mm") and torch.cuda.get_device_capability() >= (8, 9):
        a, b = (torch.randn(base, base, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        known = {"operator": "aten::_scaled_mm", "flop": 2 * base**3, "tensor_cores": True}
        made["matmul fp8"] = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16), known
    return made


def copies(device: str) -> dict[str, tuple[Callable[[], Any], dict[str, Any]]]:
    """Copies of known bytes to the device, and an empty kernel."""
    made: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {}
    size = 2**26 if device != "cpu" else 2**16
    for number, name in enumerate(("pageable", "pinned")):
        count = size + 1024 * number
        source, target = torch.empty(count), torch.empty(count, device=device)
        source = source.pin_memory() if name == "pinned" and device != "cpu" else source
        known = {"operator": "aten::copy_", "prefix": f"[[{count}],[{count}]", "bytes": 4 * count}
        made[f"copy {name}"] = (
            lambda target=target, source=source: target.copy_(source, non_blocking=True),
            known,
        )
    tiny = torch.zeros(7, device=device)
    made["empty kernel"] = lambda: tiny.neg(), {"operator": "aten::neg", "prefix": "[[7]", "most_us": 10}
    if device != "cpu":
        made["spin"] = lambda: torch.cuda._sleep(SPIN_CYCLES), {"kernel": "spin", "cycles": SPIN_CYCLES}
    return made


def timed_us(call: Callable[[], Any], device: str) -> float:
    """Mean µs of a call, of a GPU by events."""
    for _ in range(3):
        call()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - start) / CALLS * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)  # what is launched behind it runs without gaps
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / CALLS * 1e3


def utilization() -> float | None:
    """Percent that NVML says the device was busy in the last sample period."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByIndex(0)).gpu)
    except Exception:  # noqa: BLE001 - not installed, or no driver
        return None


def main() -> None:
    """Time the cases, then run them as steps for the recorder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--once", action="store_true", help="run each case once, for a profiler of kernels, and no more")
    options = parser.parse_args()
    take_turn()
    cases = {**products(options.device), **copies(options.device)}
    if options.once:
        for call, _known in cases.values():
            call()
        torch.cuda.synchronize()
        return
    truth = {name: {**known, "us": timed_us(call, options.device)} for name, (call, known) in cases.items()}
    weight = torch.nn.Parameter(torch.zeros(3, device=options.device))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(options.steps):
        optimizer.zero_grad()
        for call, _known in cases.values():
            call()
        weight.sum().backward()
        optimizer.step()
    busy = utilization()
    about = {"torch": torch.__version__, "python": sys.version.split()[0], "nvml_busy_pct": busy}
    if options.device != "cpu":
        about["gpu"] = torch.cuda.get_device_name()
        torch.cuda.synchronize()
    options.out.write_text(json.dumps({"about": about, "cases": truth}))


if __name__ == "__main__":
    main()
