"""The loop of a sweep: trial after trial until all are made, the budget is used or we are told to end.

What is known of a trial is in Optuna's journal before the next thing happens, and what comes next follows from it
alone. `sweep.json` is written whole before the first trial and after every one.

What a trial's run reached: a figure of its metric's curve, as `stepscope analyze --table metrics` has it.

The same reading serves a run that goes on, whose figure after a number of steps decides whether it is pruned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Protocol as Interface

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze import curves, sites
from stepscope.analyze.context import Context
from stepscope.analyze.curves import Curve
from stepscope.analyze.facts import Facts
from stepscope.errors import StepscopeError
from stepscope.experiment import folder as folders
from stepscope.experiment import runner
from stepscope.experiment.engine import INTERRUPTED, out_of_time
from stepscope.experiment.folder import Held
from stepscope.experiment.plan import Slot
from stepscope.experiment.runner import Order, StepsSeen, Stopped
from stepscope.files import decoded_small
from stepscope.model.sweep import (
    FAILED,
    FINISHED,
    JOULES,
    MINIMUM,
    PRUNED,
    RUNNING,
    SECONDS,
    SWEEP_SCHEMA,
    Objective,
    Sweep,
    Trial,
)
from stepscope.read import read_run
from stepscope.sweep import space
from stepscope.sweep.importance import importance
from stepscope.sweep.space import BEST, TAIL, Request
from stepscope.sweep.study import Study
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


NAME = "sweep.json"
SWEEP = "sweep"  # what a folder of ours is called
TRIAL = "trial"
MOST_FAILED = 3  # first trials that failed or have no such metric: then it is the command, not its parameters
_MAX_BYTES = 64 * 2**20

# Makes a run: (its status, None where we ended it, what went wrong with it). Tests have one that makes none.
Run = Callable[[Order, Callable[[int, "int | None"], None]], "tuple[int | None, str | None]"]


class Listener(Interface):
    """Who shows progress."""

    def note(self, text: str) -> None: ...
    def starting_trial(self, number: int, asked: int, label: str, left_s: float | None) -> None: ...
    def finished_trial(self, trial: Trial, best: Trial | None) -> None: ...


class Conclusion(Struct, frozen=True):
    """How it ended. `signal` is what ended it early; `trouble` says that the command itself cannot be run."""

    sweep: Sweep
    signal: int | None = None
    trouble: str | None = None


class _Head(Struct):
    key: str | None = None
    schema: str | None = None
    trials: list[dict[str, object]] = []


def held(folder: Path, asked: int) -> Held | None:
    """The sweep in a folder, complete once it has as many trials as are asked for; None where there is none."""
    head = decoded_small(folder / NAME, _MAX_BYTES, _Head)
    if head is None or head.schema != SWEEP_SCHEMA:
        return None
    return Held(head.key, sum(trial.get("state") in (FINISHED, PRUNED, FAILED) for trial in head.trials) >= asked)


@dataclass(kw_only=True)
class Engine:
    """One session of a sweep in its folder, which the caller has claimed. `repeat` is the line that makes it again."""

    request: Request
    folder: Path
    repeat: str
    run: Run
    write: Callable[[Sweep], None]
    listener: Listener
    stop: Callable[[], int | None] = lambda: None
    read: Callable[[Path, tuple[Objective, ...]], Reached] = reached
    clock: Callable[[], float] = time.monotonic
    _study: Study = field(init=False)
    _began: float = field(init=False)

    def conduct(self) -> Conclusion:
        """Run until the end. Raises `StepscopeError` where the folder holds something else."""
        self._began = self.clock()
        if not (self.folder / NAME).exists():
            self.write(self._sweep(()))  # says whose folder this is, before anything is in it
        self._study = Study(self.folder, space.key(self.request), self.request)
        ended, trouble, failures = None, None, 0
        number = self.stop()
        try:
            while number is None and ended is None and self._left():
                ended = out_of_time(self.request.budget_s, self.clock() - self._began + (self._usual_s() or 0.0))
                if ended is None:
                    trial, broke = self._trial()
                    failures = failures + 1 if broke else -MOST_FAILED  # never after one that ran
                    trials = self._study.trials()
                    self.write(self._sweep(trials))
                    number = best(trials, self.request.objectives)
                    self.listener.finished_trial(trial, next((one for one in trials if one.number == number), None))
                    if failures == MOST_FAILED:
                        log = runner.log_of(self.folder / folders.RUNS / (trial.folder or ""))
                        ended = trouble = f"the first {failures} trials failed: {trial.reason}; a log is {log}"
                number = self.stop()
        except Stopped as stopped:
            number = stopped.number
        if number is not None:
            ended = INTERRUPTED.format(runner.signal_name(number))
        found = self._sweep(self._study.trials(), stopped=ended, ranked=True)
        self.write(found)
        return Conclusion(found, number, trouble)

    def _left(self) -> int:
        return space.count(self.request) - sum(trial.state != RUNNING for trial in self._study.trials())

    def _usual_s(self) -> float | None:
        """What a trial takes, by the latest ones."""
        walls = [trial.wall_s for trial in self._study.trials() if trial.state != RUNNING and trial.wall_s is not None]
        return fmean(walls[-8:]) if walls else None

    def _trial(self) -> tuple[Trial, bool]:
        """One trial, made and told; whether the command is to blame.

        One that we are told to end is taken up again later.
        """
        request, underway = self.request, self._study.next()
        runner.end_left(underway.facts.get("pid"), underway.facts.get("start_ticks"))
        label, usual_s = space.label(underway.params), self._usual_s()
        knobs = (*request.base_knobs, *space.at(request.params, underway.params))
        name = folders.run_name(underway.number + 1, label)
        place = self.folder / folders.RUNS / name
        underway.note(folder=name)
        left_s = None if usual_s is None else usual_s * self._left()
        self.listener.starting_trial(underway.number + 1, space.count(self.request), label, left_s)
        watch = None
        if request.prune_after is not None:
            watch = Watch(place, request.objectives[0], request.prune_after, underway.report)
        order = Order(
            slot=Slot(TRIAL, underway.number, None, 0, knobs, label),
            command=request.command,
            folder=place,
            warmup=0,
            steps=None,
            seed=request.seed,
            ends=watch,
        )
        runner.discard(place)
        began = self.clock()
        try:
            _, failure = self.run(order, lambda pid, ticks: underway.note(pid=pid, start_ticks=ticks))
            number = self.stop()
            if failure is not None and number is not None:
                raise Stopped(number)  # the signal may have been what made it fail
        except Stopped:
            runner.discard(place)
            raise
        found = self.read(place, request.objectives)
        underway.note(wall_s=self.clock() - began, steps=found.steps, seconds=found.seconds, mean_ms=found.mean_ms)
        if failure is not None:
            self._study.tell(underway, FAILED, reason=failure)
        elif watch is not None and watch.pruned is not None:
            self._study.tell(underway, PRUNED, reason=watch.pruned)
        elif found.missing is not None:
            self._study.tell(underway, FAILED, reason=found.missing)
        else:
            if watch is not None:
                watch.finish(found.steps or 0)
            self._study.tell(underway, FINISHED, found.values)
        told = next(trial for trial in self._study.trials() if trial.number == underway.number)
        return told, failure is not None or found.lacks

    def _sweep(self, trials: tuple[Trial, ...], *, stopped: str | None = None, ranked: bool = False) -> Sweep:
        request = self.request
        objectives = request.objectives
        done = sum(trial.state != RUNNING for trial in trials)
        return Sweep(
            key=space.key(request),
            command=request.command,
            cwd=request.cwd,
            params=request.params,
            objectives=objectives,
            sampler=request.sampler,
            seed=request.seed,
            asked=space.count(self.request),
            trials=trials,
            best=best(trials, objectives),
            front=front(trials, objectives) if len(objectives) > 1 else (),
            importances=tuple(
                importance(request.params, trials, objectives, at, request.seed) for at in range(len(objectives))
            )
            if ranked
            else (),
            finished=done >= space.count(self.request),
            stopped=stopped,
            repeat=self.repeat,
            folder=str(self.folder),
        )


def best(trials: tuple[Trial, ...], objectives: tuple[Objective, ...]) -> int | None:
    """The number of the finished trial that is best by the first metric; of equal ones the better by the second."""
    return min(((own, number) for number, own in _costs(trials, objectives)), default=(None, None))[1]


def front(trials: tuple[Trial, ...], objectives: tuple[Objective, ...]) -> tuple[int, ...]:
    """The numbers of trials that no other beats in one metric without being worse in another."""
    done = _costs(trials, objectives)
    return tuple(
        number
        for number, own in done
        if not any(
            all(there <= here for there, here in zip(other, own, strict=True)) and other != own for _, other in done
        )
    )


def _costs(trials: tuple[Trial, ...], objectives: tuple[Objective, ...]) -> list[tuple[int, tuple[float, ...]]]:
    """Number and values of finished trials; less is better of all of them."""
    signs = [1.0 if objective.direction == MINIMUM else -1.0 for objective in objectives]
    return [
        (
            trial.number,
            tuple(sign * value for sign, value in zip(signs, trial.values, strict=True) if value is not None),
        )
        for trial in trials
        if trial.state == FINISHED
    ]
