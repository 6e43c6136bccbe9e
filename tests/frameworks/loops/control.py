"""What a training loop counts and times of itself, by hand: the truth that a recording of it is compared with.

Nothing here knows of a recorder or touches torch's own functions. A script counts a trained step where it makes one
(`step`), an evaluation step likewise (`evaluated`), and puts each part of its work in `phase`. Of nested phases each
has the time that the inner ones leave it, so that what runs in a closure counts once. `tell` writes it all as JSON to
the file named by LOOP_TRUTH.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

TRUTH = "LOOP_TRUTH"
PHASES = ("data", "forward", "backward", "optimizer", "other")
FEATURES, WIDTH, CLASSES = 512, 1024, 10

torch.set_num_threads(1)  # the recorded run shall compute what the plain one does, and leave a core to the recorder


class Control:
    """One process's counts. Without a loader nobody can count samples, nor evaluation steps: those are None then."""

    def __init__(self, *, loader: bool = True, evaluation_seen: bool = True) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)  # of the step under way
        self._phases_of: list[dict[str, float]] = []  # of each trained step
        self._samples: list[int] | None = [] if loader else None
        self._evaluated: list[int] | None = [] if evaluation_seen else None
        self._steps: list[float] = []
        self._logged: dict[str, list[float]] = {}
        self._updates = 0
        self._pending = 0
        self._phases: list[str] = []
        self._since = 0.0
        self._began: float | None = None
        self._evaluating = False
        self._parts: list[tuple[torch.Tensor, int]] = []
        self._losses: list[list[tuple[torch.Tensor, int]]] = []  # of each trained step
        self._told: list[int] = []  # when the last of them was known (ns since the epoch)
        self._told_last = 0
        self._rates: list[float] = []
        self._norms: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time in the block is of phase `name`, but for that of phases within, and but for evaluation."""
        if self._evaluating:
            yield
            return
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        self._book(now)
        self._phases.append(name)
        try:
            yield
        finally:
            self._book(time.perf_counter())
            self._phases.pop()

    def _book(self, now: float) -> None:
        if self._phases:
            self._seconds[self._phases[-1]] += now - self._since
        self._since = now

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Nothing in the block is of a trained step."""
        self._evaluating, before = True, self._evaluating
        try:
            yield
        finally:
            self._evaluating = before
            self._began = None

    def batch(self, samples: int) -> None:
        """A batch, or micro-batch, of the next trained step."""
        self._pending += samples

    def loss(self, loss: torch.Tensor, parts: int = 1, at_ns: int | None = None) -> None:
        """A loss of the next trained step, as the script knows it: one of so many whose mean is the step's."""
        self._parts.append((loss.detach().clone(), parts))
        self._told_last = at_ns or time.time_ns()

    def clipped(self, norm: torch.Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """The norm of the gradients before they were clipped, as the script was told; and what they have now.

        Taken as torch takes it: one sum in double precision is off from it by 1e-5.
        """
        norms = [torch.linalg.vector_norm(parameter.grad) for parameter in parameters if parameter.grad is not None]
        self._norms.append((norm.detach().clone(), torch.linalg.vector_norm(torch.stack(norms))))

    def step(self) -> None:
        """A trained step has ended: all batches since the last belong to it."""
        now = time.perf_counter()
        self._book(now)
        self._phases_of.append(self._seconds)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._losses.append(self._parts)
        self._told.append(self._told_last)
        self._parts = []
        if self._began is not None:
            self._steps.append(now - self._began)
        self._began = now
        if self._samples is not None:
            self._samples.append(self._pending)
        self._updates += 1
        self._pending = 0

    def evaluated(self, samples: int) -> None:
        """An evaluation step of so many samples."""
        if self._evaluated is not None:
            self._evaluated.append(samples)

    def logs(self, values: Mapping[str, Any]) -> None:
        """What is logged, or what the framework says that it has logged."""
        for name, value in values.items():
            self._logged.setdefault(name, []).append(float(value))

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """`function` in a phase."""

        def around(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        return around

    def optimizer(self, optimizer: torch.optim.Optimizer, *, cuts: bool = True) -> torch.optim.Optimizer:
        """`optimizer` with its `step` in phase "optimizer"; with `cuts` each call ends a trained step.

        What a closure does beside its forward and backward pass (gradients zeroed, hooks of a framework) is "other".
        """
        own = optimizer.step

        def step(_: torch.optim.Optimizer, closure: Callable[..., Any] | None = None) -> Any:
            if cuts:
                self._rates.append(optimizer.param_groups[0]["lr"])
            with self.phase("optimizer"):
                result = own() if closure is None else own(self.timed(closure, "other"))
            if cuts:
                self.step()
            return result

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers ask for a method
        return optimizer

    def tell(self, *, loss: float, framework_step: int | None = None) -> None:
        """Write the truth, and print the loss."""
        print(f"final loss {loss:.9g}")
        where = os.environ.get(TRUTH)
        if where is None or os.environ.get("RANK", "0") != "0":
            return
        truth = {
            "steps": self._updates,
            "samples": self._samples,
            "evaluated": self._evaluated,
            "framework_step": framework_step,
            "seconds": self._phases_of,
            "median_step_s": statistics.median(self._steps),
            "loss": loss,
            "losses": [sum(part.item() / parts for part, parts in told) if told else None for told in self._losses],
            "rates": self._rates,
            "norms": [(before.item(), after.item()) for before, after in self._norms],
            "told_ns": self._told,
            "logged": self._logged,
        }
        Path(where).write_text(json.dumps(truth))


class Vectors(Dataset):
    """Vectors, or what `item` is, the same for the same index; with a control, making a batch counts as phase "data".

    It hands out whole batches to the loader, as data sets of Hugging Face do, so that what it times is nearly all of
    the loader's `__next__`. `item_s` is slept for each item.
    """

    def __init__(self, items: int, control: Control | None = None, *, item_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(items)
        self.inputs = torch.randn(items, FEATURES, generator=generator)
        self.labels = torch.randint(0, CLASSES, (items,), generator=generator)
        self.control, self.item_s = control, item_s

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        with nullcontext() if self.control is None else self.control.phase("data"):
            if self.item_s:
                time.sleep(self.item_s * len(indices))
            return [self.item(index) for index in indices]

    def item(self, index: int) -> Any:
        return self.inputs[index], self.labels[index]


def network(inputs: int = FEATURES, outputs: int = CLASSES, width: int = WIDTH) -> nn.Sequential:
    """About 2.6 million parameters: with 64 samples a step takes tens of milliseconds on one thread."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, outputs),
    )
