"""Trainings with one planted cost each, and their twins: `cases.py NAME|twins [--fixed] [--steps N] [--device cpu]`.

A planted statement ends with `# planted: NAME`. `--fixed` leaves out that cost alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from turn import DeviceClock, end_turn, take_turn, warm_up

Step = Callable[[Tensor, Tensor], Tensor]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Random rows; `work_s` is what making one takes."""

    def __init__(self, count: int, shape: tuple[int, ...], work_s: float = 0.0) -> None:
        self.count, self.shape, self.work_s = count, shape, work_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        end = time.perf_counter() + self.work_s
        while time.perf_counter() < end:  # planted: starving_loader
            pass
        return torch.randn(self.shape), torch.zeros(*self.shape[:-1], 1)


class Case:
    """A perceptron of `depth` layers of `width` in mixed precision, fed from the device; a case changes its own part.

    As large as it is, a GPU of 2020 or later has work for longer than the host takes to launch it: without a planted
    cost nothing else is lost.
    """

    width, depth, batch = 4096, 4, 12288
    autocast = True

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        self.device, self.fixed = device, fixed
        if small:
            self.width, self.depth, self.batch = 32, 2, 8
        with torch.device(device):  # random numbers of the host would take seconds
            layers = [layer for _ in range(self.depth) for layer in (nn.Linear(self.width, self.width), nn.ReLU())]
            self.model: nn.Module = nn.Sequential(*layers, nn.Linear(self.width, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(self.batch, self.width, device=device)
        self.targets = torch.zeros(self.batch, 1, device=device)

    def batches(self, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        return ((self.inputs, self.targets) for _ in range(steps))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.model(inputs).float(), targets)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16) if self.autocast else nullcontext():
            loss = self.loss(inputs, targets)
        loss.backward()
        self.optimizer.step()


class Clean(Case):
    """Nothing planted."""


class CleanLoader(Case):
    """Nothing planted: batches come from workers, ahead of time and pinned."""

    def batches(self, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        rows = Rows(steps, (256, self.width))
        workers = 4 if self.device != "cpu" else 0
        loader = DataLoader(rows, batch_size=None, num_workers=workers, pin_memory=self.device != "cpu")
        for inputs, targets in loader:
            few, zeros = inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
            times = max(1, self.batch // 256)
            yield few.repeat(times, 1), zeros.repeat(times, 1)


class ItemPerStep(Case):
    """Values read singly, in the middle of the step."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        out = self.model(inputs).float()
        if not self.fixed:
            sum(value.item() for value in out[:256, 0])  # planted: item
        return F.mse_loss(out, targets)


class PageableCopies(Case):
    def batches(self, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        rows = torch.randn(self.batch, self.width)
        rows = rows.pin_memory() if self.fixed and self.device != "cpu" else rows
        for _ in range(steps):
            yield rows.to(self.device, non_blocking=True), self.targets  # planted: pageable


class SmallLaunches(Case):
    """A product for each row instead of one for all."""

    width, batch, depth, autocast = 256, 256, 1, False

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.fixed:
            return F.mse_loss(self.model(inputs), targets)
        out = torch.stack([self.model(row) for row in inputs])  # planted: small_launches
        return F.mse_loss(out, targets)


class NoTf32(Case):
    batch, depth, autocast = 4096, 2, False

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        super().__init__(device, fixed=fixed, small=small)
        if fixed:  # off by default
            torch.backends.cuda.matmul.allow_tf32 = True

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model(inputs)  # planted: no_tf32
        return F.mse_loss(hidden, targets)


class NoMixedPrecision(Case):
    batch, depth = 4096, 3

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        super().__init__(device, fixed=fixed, small=small)
        self.autocast = fixed

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs = inputs * 0.5
        out = self.model(inputs)  # planted: fp32
        return F.mse_loss(out.float(), targets)


class AllocatorRetries(Case):
    """A block larger than any before in every step, on a device nearly full: the allocator drops its cache each time.

    The process may take 6 GiB, a block is 1 GiB and more; the twin's blocks are all of one size.
    """

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        super().__init__(device, fixed=fixed, small=small)
        self.count = 0
        if device != "cpu" and not fixed:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, 6 * 2**30 / total))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.count += not self.fixed
        rows = 2**28 + 2**20 * self.count if self.device != "cpu" else 2**10
        scratch = torch.empty(rows, device=self.device)  # planted: retries
        return super().loss(inputs, targets) + 0 * scratch[0].nan_to_num()


class StarvingLoader(Case):
    width, batch, depth = 1024, 64, 2

    def batches(self, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        rows = Rows(steps * self.batch, (self.width,), 0.0 if self.fixed else 2e-4)
        for inputs, targets in DataLoader(rows, batch_size=self.batch):
            yield inputs.to(self.device), targets.to(self.device)


class PythonBetween(Case):
    """Arithmetic of Python before every layer."""

    batch = 8192

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.model:  # type: ignore[attr-defined]
            if not self.fixed:
                self.penalty()
            inputs = layer(inputs)
        return F.mse_loss(inputs.float(), targets)

    def penalty(self) -> float:
        return sum(number * 0.5 for number in range(20_000))  # planted: python_between


class UnfusedPointwise(Case):
    batch, depth = 16384, 1

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model[0](inputs)  # type: ignore[index]
        activate = self.activation_fused if self.fixed else self.activation
        return F.mse_loss(self.model[-1](activate(hidden)).float(), targets)  # type: ignore[index]

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

    batch = 4096

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        super().__init__(device, fixed=fixed, small=small)
        self.count = 0
        torch._dynamo.config.cache_size_limit = 64
        self.compiled = torch.compile(self.scaled, dynamic=False, backend="eager" if small else "inductor")

    def scaled(self, x: Tensor, exponent: int) -> Tensor:
        return x * 1.0001 ** len("x" * exponent)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.count += not self.fixed
        scaled = self.compiled(inputs, self.count % 32)  # planted: recompilation
        return super().loss(scaled, targets)


class IdleStream(Case):
    """Work of a second stream that the first one waits for before it begins its own, which does not need it yet."""

    batch = 4096

    def __init__(self, device: str, *, fixed: bool, small: bool) -> None:
        super().__init__(device, fixed=fixed, small=small)
        self.stream = torch.cuda.Stream() if device != "cpu" else None
        self.host = torch.zeros(1024 if small else 2**25)
        self.host = self.host.pin_memory() if device != "cpu" else self.host

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.stream is None:
            return super().loss(inputs, targets)
        with torch.cuda.stream(self.stream):
            extra = self.host.to(self.device, non_blocking=True)  # planted: idle_stream
        if not self.fixed:
            torch.cuda.current_stream().wait_stream(self.stream)  # planted: idle_stream
        loss = super().loss(inputs, targets)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss + 0 * extra[0]


class EmptyCache(Case):
    def step(self, inputs: Tensor, targets: Tensor) -> None:
        super().step(inputs, targets)
        if not self.fixed and self.device != "cpu":
            torch.cuda.empty_cache()  # planted: empty_cache


class CpuTensors(Case):
    """Tensors that are made on the host in the step and moved."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        rows = min(512, self.batch)
        if self.fixed:
            noise = torch.randn(rows, self.width, device=self.device)
        else:
            noise = torch.randn(rows, self.width).to(self.device)  # planted: cpu_tensors
        return super().loss(inputs + 0.01 * noise.repeat(self.batch // rows, 1), targets)


# The case, and the categories of findings that are right for it; None: a clean script, of which nothing may be said.
CASES: dict[str, tuple[type[Case], tuple[str, ...] | None]] = {
    "item": (ItemPerStep, ("sync", "host")),
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
    "clean_loader": (CleanLoader, None),
}


def train(name: str, options: argparse.Namespace, *, fixed: bool) -> DeviceClock:
    """Train one case."""
    torch.manual_seed(0)
    clock = DeviceClock(options.steps, options.device)
    case = CASES[name][0](options.device, fixed=fixed, small=options.small)
    for inputs, targets in case.batches(options.steps):
        case.step(inputs, targets)
        clock.after_step()
    return clock


def begin_anew(device: str) -> None:
    """Undo what cases change for the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> None:
    """Train one case; or all, and their twins, one after the other, and say as JSON what their steps took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=(*CASES, "twins"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a try on a CPU")
    options = parser.parse_args()
    warm_up(options.device)
    take_turn()
    if options.name != "twins":
        print(f"{options.steps} steps, {train(options.name, options, fixed=options.fixed).mean_ms():.2f} ms each")
        end_turn()
        return
    said: dict[str, list[float]] = {}
    train("clean", options, fixed=False)  # clocks and libraries are warm from here on
    for name in (name for name, (_case, expected) in CASES.items() if expected is not None):
        for fixed in (False, True):
            said.setdefault(name, []).append(train(name, options, fixed=fixed).mean_ms())
            begin_anew(options.device)
    print(json.dumps(said))
    end_turn()


if __name__ == "__main__":
    main()
