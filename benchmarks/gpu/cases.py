"""Trainings with one planted cost each, and their twins: `cases.py NAME [--fixed] [--steps N] [--device cpu]`.

A planted statement ends with `# planted: NAME`. `--fixed` leaves out that cost alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))

import torch
from common import WARMUP, Watch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from turn import take_turn

Step = Callable[[Tensor, Tensor], Tensor]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Random rows; `work_s` is what making one takes."""

    def __init__(self, count: int, width: int, work_s: float = 0.0) -> None:
        self.count, self.width, self.work_s = count, width, work_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        end = time.perf_counter() + self.work_s
        while time.perf_counter() < end:  # planted: starving_loader
            pass
        return torch.randn(self.width), torch.zeros(1)


class Case:
    """A perceptron of `depth` layers of `width`, fed from the device; a case changes what it is about."""

    width, depth, batch = 2048, 6, 1024
    per_step = 1  # forward passes

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        self.device, self.fixed = device, fixed
        if small:
            self.width, self.depth, self.batch = 32, 2, 8
        layers = [layer for _ in range(self.depth) for layer in (nn.Linear(self.width, self.width), nn.ReLU())]
        self.model: nn.Module = nn.Sequential(*layers, nn.Linear(self.width, 1)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(self.batch, self.width, device=device)
        self.targets = torch.zeros(self.batch, 1, device=device)

    def batches(self, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        return ((self.inputs, self.targets) for _ in range(steps))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.model(inputs), targets)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(inputs, targets).backward()
        self.optimizer.step()


class Clean(Case):
    """Nothing planted: mixed precision, data on the device."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return F.mse_loss(self.model(inputs), targets.to(torch.bfloat16))


class CleanSmall(Clean):
    width, batch, depth = 4096, 512, 3


class ItemPerStep(Case):
    """Values read singly, in the middle of the step."""

    width, batch = 512, 256

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        out = self.model(inputs)
        if not self.fixed:
            sum(value.item() for value in out[:32, 0])  # planted: item
        return F.mse_loss(out, targets)


class PageableCopies(Case):
    width, depth, batch = 8192, 1, 4096

    def batches(self, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        rows = torch.randn(self.batch, self.width)
        rows = rows.pin_memory() if self.fixed and self.device != "cpu" else rows
        for _ in range(steps):
            yield rows.to(self.device, non_blocking=True), self.targets  # planted: pageable


class SmallLaunches(Case):
    """A product for each row instead of one for all."""

    width, batch, depth = 256, 256, 1

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.fixed:
            return F.mse_loss(self.model(inputs), targets)
        out = torch.stack([self.model(row) for row in inputs])  # planted: small_launches
        return F.mse_loss(out, targets)


class NoTf32(Case):
    width, batch, depth = 4096, 2048, 3

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        super().__init__(device, fixed=fixed, small=small)
        if fixed:  # off by default
            torch.backends.cuda.matmul.allow_tf32 = True

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.model(inputs), targets)  # planted: no_tf32


class NoMixedPrecision(Case):
    width, batch, depth = 4096, 2048, 3

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.fixed):
            return F.mse_loss(self.model(inputs).float(), targets)  # planted: fp32


class AllocatorRetries(Case):
    """Blocks of a new size in every step, in a device nearly full: the allocator empties its cache, and retries.

    Of the 6 GiB that the process may take a block is 1 GiB and more; the twin's blocks are all of one size.
    """

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        super().__init__(device, fixed=fixed, small=small)
        self.count = 0
        if device != "cpu" and not fixed:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, 6 * 2**30 / total))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.count += 1
        rows = 2**28 if self.device != "cpu" else 2**10
        rows += 0 if self.fixed else 2**20 * (self.count % 29)
        scratch = torch.empty(rows, device=self.device)  # planted: retries
        return F.mse_loss(self.model(inputs), targets) + 0 * scratch[0].nan_to_num()


class StarvingLoader(Case):
    width, batch, depth = 1024, 64, 2

    def batches(self, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        rows = Rows(steps * self.batch, self.width, 0.0 if self.fixed else 2e-4)
        for inputs, targets in DataLoader(rows, batch_size=self.batch):
            yield inputs.to(self.device), targets.to(self.device)


class PythonBetween(Case):
    """Arithmetic of Python before every layer."""

    width, batch = 512, 256

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.model:  # type: ignore[attr-defined]
            if not self.fixed:
                self.penalty()
            inputs = layer(inputs)
        return F.mse_loss(inputs, targets)

    def penalty(self) -> float:
        return sum(number * 0.5 for number in range(20_000))  # planted: python_between


class UnfusedPointwise(Case):
    width, batch, depth = 4096, 4096, 1

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model[0](inputs)  # type: ignore[index]
        activate = self.activation_fused if self.fixed else self.activation
        return F.mse_loss(self.model[-1](activate(hidden)), targets)  # type: ignore[index]

    def activation(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))  # planted: unfused
        return x

    def activation_fused(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = F.gelu(x, approximate="tanh")
        return x


class Recompilation(Case):
    """A Python number that every step changes is a constant of the compiled function."""

    width, batch, depth = 512, 128, 2

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        super().__init__(device, fixed=fixed, small=small)
        self.count = 0
        torch._dynamo.config.cache_size_limit = 64
        self.compiled = torch.compile(self.scaled, dynamic=False, backend="eager" if small else "inductor")

    def scaled(self, x: Tensor, exponent: int) -> Tensor:
        return x * 1.0001 ** len("x" * exponent)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.count += not self.fixed
        scaled = self.compiled(inputs, self.count % 48)  # planted: recompilation
        return F.mse_loss(self.model(scaled), targets)


class IdleStream(Case):
    """Work of a second stream that the first one waits for before it begins its own, which does not need it yet."""

    width, batch, depth = 1024, 512, 4

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        super().__init__(device, fixed=fixed, small=small)
        self.stream = torch.cuda.Stream() if device != "cpu" else None
        self.host = torch.zeros(1024 if small else 2**24)
        self.host = self.host.pin_memory() if device != "cpu" else self.host

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.stream is None:
            return F.mse_loss(self.model(inputs), targets)
        with torch.cuda.stream(self.stream):
            extra = self.host.to(self.device, non_blocking=True)
        if not self.fixed:
            torch.cuda.current_stream().wait_stream(self.stream)  # planted: idle_stream
        out = F.mse_loss(self.model(inputs), targets)
        torch.cuda.current_stream().wait_stream(self.stream)
        return out + 0 * extra[0]


class EmptyCache(Case):
    width, batch, depth = 1024, 512, 4

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        super().step(inputs, targets)
        if not self.fixed and self.device != "cpu":
            torch.cuda.empty_cache()  # planted: empty_cache


class CpuTensors(Case):
    """Tensors that are made on the host in the step and moved."""

    width, batch, depth = 4096, 2048, 1

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.fixed:
            noise = torch.randn(self.batch, self.width, device=self.device)
        else:
            noise = torch.randn(self.batch, self.width).to(self.device)  # planted: cpu_tensors
        return F.mse_loss(self.model(inputs + 0.01 * noise), targets)


# The case, and the categories of findings that are right for it; None: a clean script, of which nothing may be said.
CASES: dict[str, tuple[type[Case], tuple[str, ...] | None]] = {
    "item": (ItemPerStep, ("sync",)),
    "pageable": (PageableCopies, ("transfer",)),
    "small_launches": (SmallLaunches, ("launch", "host")),
    "no_tf32": (NoTf32, ("compute",)),
    "fp32": (NoMixedPrecision, ("compute",)),
    "retries": (AllocatorRetries, ("memory",)),
    "starving_loader": (StarvingLoader, ("input",)),
    "python_between": (PythonBetween, ("host", "launch")),
    "unfused": (UnfusedPointwise, ("compute",)),
    "recompilation": (Recompilation, ("compile",)),
    "idle_stream": (IdleStream, ("transfer", "sync", "compute", "launch")),
    "empty_cache": (EmptyCache, ("memory", "sync")),
    "cpu_tensors": (CpuTensors, ("transfer", "host", "sync")),
    "clean": (Clean, None),
    "clean_small": (CleanSmall, None),
}


def main() -> None:
    """Train one case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a try on a CPU")
    options = parser.parse_args()
    take_turn()
    torch.manual_seed(0)
    watch = Watch()
    case = CASES[options.name][0](options.device, fixed=options.fixed, small=options.small)
    first, ends = max(5, round(options.steps * WARMUP)), {}
    for number, (inputs, targets) in enumerate(case.batches(options.steps)):
        with watch.step(case.model):
            case.step(inputs, targets)
        if options.device != "cpu" and number in (first, options.steps - 1):
            ends[number] = torch.cuda.Event(enable_timing=True)
            ends[number].record()
    if len(ends) < 2:
        watch.report()
        return
    # The host runs ahead, dozens of steps where they launch little: what a step takes is by the device's clock
    torch.cuda.synchronize()
    mean_ms = ends[first].elapsed_time(ends[options.steps - 1]) / (options.steps - 1 - first)
    print(f"{options.steps} steps, {mean_ms:.2f} ms each")


if __name__ == "__main__":
    main()
