"""The loss of every step: what `backward` was called on, as `loss` events.

A copy of the scalar is kept at each backward pass, on its device and without its graph, and all of them are read out
once, at the end: nothing here waits for the device in between. Where a GradScaler has scaled the loss, it is the value
before that is kept. What is no plain tensor of one element, or is recorded into a graph, is left out.
"""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_right
from threading import get_ident
from typing import Any

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.compiling import is_dynamo_compiling_check
from stepscope.record.agent.patches import Probe, root_of, scaler_home
from stepscope.record.agent.segments import StepRow

NAME = "losses"
LIMIT = 5_000  # backward passes; more are not kept
STEPS_LIMIT = 100_000  # evaluation steps count as well
CHUNK = 500  # values per event
PATIENCE_S = 5.0  # for a device that has not finished; one that never does must not keep the process from ending


def attach(agent: Agent) -> None:
    """Keep the losses of `agent`'s training."""
    losses = Losses(agent)
    losses.install()
    agent.probes.add(losses)
    agent.add_step_listener(losses, NAME, losses.wants_each)
    agent.add_end_hook(losses.write, NAME)


class Losses(Probe):
    """Wraps `torch.autograd.backward`, and `GradScaler.scale` to know the loss from its scaled self."""

    name = NAME

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._is_compiling = is_dynamo_compiling_check()
        self._depth = 0  # backward passes inside one another, as reentrant checkpoints make them
        self._kept: list[tuple[int, Any]] = []  # (time, tensor of one element)
        self._steps: list[int] = []  # that were cut, and where they ended: a step is known only once it is over
        self._ends: list[int] = []
        self._written = False
        self._scaled: tuple[Any, Any] | None = None  # (what GradScaler.scale returned last, what it was given)

    def install(self) -> None:
        """Put the wrappers in, or wake them up; not once all is written."""
        if not self._written:
            super().install()

    def uninstall(self) -> None:
        super().uninstall()
        self._depth = 0
        self._scaled = None

    def _wrap_all(self) -> None:
        import torch

        self._plain: Any = torch.Tensor
        self._around(torch.autograd, "backward", self._before_backward, self._after_backward)
        self._around(
            scaler_home(torch).GradScaler, "scale", lambda _scaler, outputs=None, *_, **__: outputs, self._after_scale
        )

    def __call__(self, row: StepRow | None, _now_ns: int) -> None:
        if row is not None and self.wants_each():
            self._steps.append(row.step)
            self._ends.append(row.start_ns + row.wall_ns)

    def wants_each(self) -> bool:
        return len(self._kept) < LIMIT and len(self._ends) < STEPS_LIMIT

    def write(self) -> None:
        """Read all values out and write them; those that come later are lost. Waits for the device a while at most."""
        kept, self._kept, self._written = self._kept, [], True
        self.uninstall()
        if not kept or not self._device_done():
            return
        known = [*self._steps, self._steps[-1] + 1 if self._steps else 0]  # after the last known step, the next
        steps = [known[bisect_right(self._ends, time_ns)] for time_ns, _ in kept]
        values = read_out([tensor for _, tensor in kept])
        for start in range(0, len(steps), CHUNK):
            part = slice(start, start + CHUNK)
            self._agent.journal.write("loss", step=None, steps=steps[part], values=[plain(x) for x in values[part]])

    def _before_backward(self, tensors: Any = None, *_args: Any, **_kwargs: Any) -> bool | None:
        thread = self._agent.training_thread
        if (thread is not None and get_ident() != thread) or self._is_compiling():
            return None
        self._depth += 1
        scaled, self._scaled = self._scaled, None
        if self._depth == 1 and len(self._kept) < LIMIT:
            tensors = root_of(tensors)
            if scaled is not None and scaled[0] is tensors:
                tensors = scaled[1]
            torch: Any = sys.modules["torch"]
            is_scalar = tensors.__class__ is self._plain and tensors.numel() == 1
            if is_scalar and not (tensors.is_cuda and torch.cuda.is_current_stream_capturing()):
                # A copy: the memory may be reused, as that of a CUDA graph's output is, or be a view of much more.
                self._kept.append((self._agent.clock.now(), tensors.detach().clone()))
        return True

    def _after_backward(self, _counted: bool, _result: Any, _error: BaseException | None) -> None:
        self._depth = max(0, self._depth - 1)

    def _after_scale(self, outputs: Any, result: Any, error: BaseException | None) -> None:
        if error is None and get_ident() == (self._agent.training_thread or get_ident()):
            self._scaled = (result, outputs)

    def _device_done(self) -> bool:
        """Whether the device in use has done what it was given, waited for only so long."""
        if not self._agent.device.in_use:
            return True
        stream: Any = sys.modules["torch"].cuda.current_stream()
        deadline = time.monotonic() + PATIENCE_S
        while not stream.query() and time.monotonic() <= deadline:
            time.sleep(0.001)
        return bool(stream.query())


def read_out(tensors: list[Any]) -> list[float]:
    """The values of tensors of one element each, one transfer per device and type."""
    torch: Any = sys.modules["torch"]
    groups: dict[tuple[str, str], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((str(tensor.device), str(tensor.dtype)), []).append(index)
    values: dict[int, float] = {}
    with torch.no_grad():
        for indices in groups.values():
            values.update(zip(indices, torch.stack([tensors[index].reshape(()) for index in indices]).tolist()))
    return [float(values[index]) for index in range(len(tensors))]


def plain(value: float) -> float | str:
    """`value` as JSON has it: what is not finite is a word."""
    return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
