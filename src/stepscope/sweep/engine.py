"""The loop of a sweep: trial after trial until all are made, the budget is used or we are told to end.

What is known of a trial is in Optuna's journal before the next thing happens, and what comes next follows from it
alone. `sweep.json` is written whole before the first trial and after every one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Protocol as Interface

import msgspec
from msgspec import Struct

from stepscope.experiment import folder as folders
from stepscope.experiment import runner
from stepscope.experiment.engine import INTERRUPTED, out_of_time
from stepscope.experiment.folder import Held
from stepscope.experiment.plan import Slot
from stepscope.experiment.runner import Order, Stopped
from stepscope.files import open_regular
from stepscope.model.sweep import FAILED, FINISHED, MINIMUM, PRUNED, RUNNING, SWEEP_SCHEMA, Objective, Sweep, Trial
from stepscope.sweep import space
from stepscope.sweep.importance import importance
from stepscope.sweep.reached import Reached, Watch, reached
from stepscope.sweep.space import Request
from stepscope.sweep.study import Study

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
    try:
        with open_regular(folder / NAME) as file:
            head = msgspec.json.decode(file.read(_MAX_BYTES), type=_Head)
    except (OSError, ValueError, RecursionError):  # a msgspec error is a ValueError
        return None
    if head.schema != SWEEP_SCHEMA:
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
        """Trials that are still to be made."""
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
