"""What a trial's run reached: a figure of its metric's curve, as `stepscope analyze --table metrics` has it.

The same reading serves a run that goes on, whose figure after a number of steps decides whether it is pruned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze import curves, sites
from stepscope.analyze.context import Context
from stepscope.analyze.curves import Curve
from stepscope.analyze.facts import Facts
from stepscope.errors import StepscopeError
from stepscope.experiment.runner import StepsSeen
from stepscope.model.sweep import JOULES, MINIMUM, SECONDS, Objective
from stepscope.read import read_run
from stepscope.sweep.space import BEST, TAIL
from stepscope.tables import build

TAIL_SHARE = 0.1  # of a curve's values: the last tenth, as the tail of a loss is read
_LOOK_S = 1.0  # between two looks at a run in progress, at least: its recorder writes twice a second
_LOOK_SHARE = 20  # times what a look took: at most a twentieth of a core is spent looking
_NEAREST = 5  # names said where a metric is not there


class Reached(Struct, frozen=True):
    """The figures of a run. `values` are of the objectives, in their order; `missing` says why there are none. What it
    `lacks` is no matter of a value: another trial will hardly have it."""

    values: tuple[float, ...] = ()
    missing: str | None = None
    lacks: bool = False
    steps: int | None = None
    seconds: float | None = None
    mean_ms: float | None = None


def _opened(folder: Path) -> Context:
    """A run folder; of a run that goes on, as far as it is."""
    return Context(build(read_run(folder)))


def _curve(context: Context, name: str) -> Curve | None:
    """That of the first process that has it."""
    processes = curves.processes(context.tables)
    of_each = (curves.curves(context.tables, context.labelled, process, narrow=False) for process in processes)
    return next((found[name] for found in of_each if name in found), None)


def reached(folder: Path, objectives: tuple[Objective, ...]) -> Reached:
    """The figures of a run that has ended."""
    try:
        context = _opened(folder)
    except StepscopeError as error:
        return Reached(missing=f"cannot be read: {error}")
    steps = context.tables.steps.filter(context.tables.steps["kind"] == "train")
    known = Reached()
    if steps.height:
        own = steps.filter(steps["process"] == steps["process"][0])
        ends_ns = (own["start_ns"] + own["wall_ns"]).max()
        steady = context.labelled.steady()["wall_ns"].mean()
        known = Reached(
            steps=own.height,
            seconds=(ends_ns - own["start_ns"].min()) / 1e9,
            mean_ms=steady / 1e6 if isinstance(steady, float) else None,
        )
    # of values that the run never had, what it reached says nothing
    told = sites.trial(context.tables)
    knobs = told.knobs if told is not None else ()
    applied = {knob.knob for knob in knobs if knob.applied}
    for knob in knobs:
        if knob.knob not in applied:
            missing = f"{knob.knob}={knob.value} was not applied: {knob.reason or 'no reason is known'}"
            return replace(known, missing=missing, lacks=True)
    values: list[float] = []
    for objective in objectives:
        value, missing = _value(context, objective, known)
        if value is None or missing:
            return replace(known, missing=missing, lacks=value is None)
        values.append(value)
    return replace(known, values=tuple(values))


def _value(context: Context, objective: Objective, known: Reached) -> tuple[float | None, str]:
    """The figure of an objective, None where the run has none, and what is wrong with it."""
    if objective.name == SECONDS:
        return known.seconds, "no training step was seen in it" if known.seconds is None else ""
    if objective.name == JOULES:
        energy = Facts(context).energy
        if energy is None or energy.joules is None:
            absent = "there is no telemetry" if energy is None else energy.absent or "nothing counted it"
            return None, f"its energy is not known: {absent}"
        return energy.joules, ""
    curve = _curve(context, objective.name)
    if curve is None or not len(curve.values):
        there = sorted(context.tables.metrics["name"].unique().to_list())
        named = ", ".join(there[:_NEAREST]) + (" and more" if there[_NEAREST:] else "")
        return None, f"it has no metric {objective.name}; there are {named or 'none'}"
    value = figure(curve.values, objective)
    return value, "" if math.isfinite(value) else f"{objective.name} is {value:g}, not a finite number"


def figure(values: np.typing.NDArray[np.float64], objective: Objective) -> float:
    """The last value of a curve, its best, or the mean of its tail; not a number where one of those it stands on is
    none."""
    if objective.of == BEST:
        return float(np.min(values) if objective.direction == MINIMUM else np.max(values))
    if objective.of == TAIL:
        return float(np.mean(values[-max(1, math.ceil(len(values) * TAIL_SHARE)) :]))
    return float(values[-1])


class Watch:
    """Follows the first objective of a run in progress, and reports it at the same steps of every trial: after `every`
    training steps, twice that, and so on. `report` says whether the run is to be ended, `pruned` why it was."""

    def __init__(self, folder: Path, objective: Objective, every: int, report: Callable[[float, int], bool]) -> None:
        self._folder, self._objective, self._every, self._report = folder, objective, every, report
        self._next, self._due, self._seen = every, 0.0, 0
        self.pruned: str | None = None

    def __call__(self, seen: StepsSeen) -> bool:
        """Whether the run is to be ended."""
        began = time.monotonic()
        if began < self._due:
            return False
        steps, self._seen = self._seen, seen.count  # of the look before: their values have been written since
        self._report_up_to(steps)
        self._due = began + max(_LOOK_S, _LOOK_SHARE * (time.monotonic() - began))
        return self.pruned is not None

    def finish(self, steps: int) -> None:
        """Report what is left of a run that came to its end: other trials are measured by it."""
        self._report_up_to(steps, ended=True)

    def _report_up_to(self, steps: int, *, ended: bool = False) -> None:
        if steps < self._next:
            return
        try:
            curve = _curve(_opened(self._folder), self._objective.name)
        except StepscopeError:
            return
        while self._next <= steps and self.pruned is None:
            at, self._next = self._next, self._next + self._every
            values = np.empty(0) if curve is None else curve.values[curve.steps < at]
            value = figure(values, self._objective) if len(values) else math.nan
            # one that is not there yet decides nothing, nor does one that is no number: its end says what it was
            if math.isfinite(value) and self._report(value, at) and not ended:
                self.pruned = f"after {at} steps {self._objective.name} was {value:.4g}, worse than half of the others"
