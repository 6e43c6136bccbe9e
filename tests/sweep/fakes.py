"""Runs that are no processes: what a trial reaches is a function of its values, and a kill stops everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.cli.experiment import Progress
from stepscope.experiment.runner import Order, Stopped
from stepscope.model.sweep import Objective, Sweep
from stepscope.sweep.engine import Conclusion, Engine, Reached
from stepscope.sweep.space import Request, objective, parameter

COMMAND = ("python", "train.py")


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


def request(*params: str, metrics: tuple[str, ...] = ("loss:min",), **more: Any) -> Request:
    return Request(
        command=COMMAND,
        cwd="/somewhere",
        params=tuple(parameter(text) for text in params),
        objectives=tuple(objective(text, "last") for text in metrics),
        **more,
    )


@dataclass
class FakeRuns:
    """`reach` is asked for the values of each trial, of its knobs as numbers; None is a run without the metric. Runs
    from number `kill_at` or `stop_at` on (from 1) never end."""

    reach: Callable[[dict[str, str]], tuple[float, ...] | None]
    failure: str | None = None
    kill_at: int | None = None
    stop_at: int | None = None
    run_s: float = 10.0
    now: float = 0.0
    made: list[dict[str, str]] = field(default_factory=list)
    _reached: dict[str, tuple[float, ...] | None] = field(default_factory=dict)

    def __call__(self, order: Order, started: Callable[[int, int | None], None]) -> tuple[int | None, str | None]:
        assert not order.folder.exists()  # what was left of it is gone
        order.folder.mkdir(parents=True)
        started(2**22 + len(self.made), None)
        knobs = {knob.knob: knob.value for knob in order.slot.knobs}
        self.made.append(knobs)
        if self.kill_at is not None and len(self.made) >= self.kill_at:
            raise Killed
        if self.stop_at is not None and len(self.made) >= self.stop_at:
            raise Stopped(2)
        self.now += self.run_s
        self._reached[order.folder.name] = self.reach(knobs)
        return (1 if self.failure else 0), self.failure

    def read(self, folder: Path, objectives: tuple[Objective, ...]) -> Reached:
        values = self._reached[folder.name]
        missing = f"it has no metric {objectives[0].name}; there are none"
        return Reached(missing=missing) if values is None else Reached(values, steps=10)


def conduct(folder: Path, asked: Request, runs: FakeRuns, written: list[Sweep] | None = None) -> Conclusion:
    """One session in `folder`."""
    from stepscope.report import outputs, sweep_report

    folder.mkdir(parents=True, exist_ok=True)

    def write(found: Sweep) -> None:
        outputs.write_file(folder / sweep_report.NAME, sweep_report.dumps(found))
        (written if written is not None else []).append(found)

    return Engine(
        request=asked,
        folder=folder,
        repeat="stepscope sweep",
        run=runs,
        write=write,
        listener=Progress(quiet=True),
        read=runs.read,
        clock=lambda: runs.now,
    ).conduct()
