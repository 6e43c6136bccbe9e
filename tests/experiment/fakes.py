"""A runner that makes no processes: step times are made up from the run's label and block, and time is a number."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.cli.experiment import Progress
from stepscope.experiment.engine import Conclusion, Engine
from stepscope.experiment.folder import Made
from stepscope.experiment.plan import Request, Slot, candidates_of
from stepscope.experiment.propose import Proposals
from stepscope.experiment.runner import Order, Stopped
from stepscope.model.comparison import AppliedKnob, Candidate, Experiment, Flag, Measure
from tests.comparison import measures

RUN_S = 10.0
COMMAND = ("python", "train.py")


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


def request(*tries: str, **more: object) -> Request:
    values: dict[str, object] = {"command": COMMAND, "cwd": "/somewhere", "candidates": candidates_of(tries), **more}
    return Request(**values)  # type: ignore[arg-type]


def measure(label: str, mean_ms: float, *flags: Flag, **more: Any) -> Measure:
    return measures.measure(mean_ms, **{"label": label, "path": label, "flags": flags, **more})


def flag(name: str, *, withholds: bool = True) -> Flag:
    return measures.flag(name, withholds=withholds, text=f"{name} happened.")


@dataclass
class FakeRunner:
    """`ms` by label, 100 where it has none; `noise` is the deviation between runs. `flags` and `failures` are asked for
    every run. Runs from number `kill_at` on never end: the process is killed in them."""

    ms: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.002
    flags: Callable[[Slot], tuple[Flag, ...]] = lambda _: ()
    failures: Callable[[Slot], str | None] = lambda _: None
    losses: Mapping[str, float] = field(default_factory=dict)
    length: int | None = None
    kill_at: int | None = None
    stop_at: int | None = None
    run_s: float = RUN_S
    now: float = 0.0
    slots: list[Slot] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)

    def __call__(self, order: Order, started: Callable[[int, int | None], None]) -> Made:
        slot = order.slot
        self.slots.append(slot)
        self.orders.append(order)
        order.folder.mkdir(parents=True)
        started(2**22 + len(self.slots), None)
        if self.kill_at is not None and len(self.slots) >= self.kill_at:
            raise Killed
        if self.stop_at is not None and len(self.slots) >= self.stop_at:
            raise Stopped(2)
        self.now += self.run_s
        failure = self.failures(slot)
        return Made(
            slot=slot,
            folder=order.folder.name,
            wall_s=self.run_s,
            measure=None if failure is not None else self._measure(order),
            failure=failure,
            length=self.length,
        )

    def _measure(self, order: Order) -> Measure:
        slot = order.slot
        draw = random.Random(f"{slot.label} {slot.block} {slot.attempt}").gauss(0.0, self.noise)
        loss = self.losses.get(slot.label, 1.0)
        return measure(
            slot.label,
            self.ms.get(slot.label, 100.0) * (1.0 + draw),
            *self.flags(slot),
            path=str(order.folder),
            losses=tuple((step, loss) for step in range(40)),
            knobs=tuple(AppliedKnob(knob.knob, knob.value, applied=True) for knob in slot.knobs),
        )

    @property
    def labels(self) -> list[str]:
        return [slot.label for slot in self.slots]


def conduct(
    folder: Path,
    asked: Request,
    runner: FakeRunner,
    *,
    propose: Callable[[Path | None, tuple[Candidate, ...]], Proposals] | None = None,
    written: list[Experiment] | None = None,
) -> Conclusion:
    """One session in `folder`."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    return Engine(
        request=asked,
        folder=folder,
        repeat="stepscope experiment",
        run=runner,
        write=(written if written is not None else []).append,
        propose=propose or (lambda pilot, named: Proposals(named)),  # noqa: ARG005
        listener=Progress(quiet=True),
        clock=lambda: runner.now,
    ).conduct()
