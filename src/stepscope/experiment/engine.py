"""The loop of an experiment: a pilot, then run after run until everything is decided, the budget is used or we are told
to end.

Everything that happens is in the journal before the next thing does, and what comes next follows from the journal
alone. `experiment.json` is written whole after every run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Protocol as Interface

from msgspec import Struct
from msgspec.structs import asdict

from stepscope.errors import UnreadableInputError
from stepscope.experiment import folder, noise, result, runner, schedule, screening
from stepscope.experiment import plan as planning
from stepscope.experiment.folder import JOURNAL, SCHEMA, Journal, Made, State
from stepscope.experiment.plan import FINDINGS, PILOT, Plan, Request, Slot
from stepscope.experiment.propose import Proposals
from stepscope.experiment.runner import Order, Runner, StepsSeen, Stopped
from stepscope.model.comparison import Candidate, Experiment, Protocol
from stepscope.model.counted import things
from stepscope.schema import Knob

INTERRUPTED = "it was interrupted by {}"
# A candidate may compile for minutes where the baseline does not; what takes longer than this is taken to hang.
HANG_FACTOR, HANG_LEAST_S = 5.0, 300.0


class Listener(Interface):
    """Who shows progress. `left` are the runs to come at least, `left_s` what they take, None while not known."""

    def note(self, text: str) -> None: ...

    def starting(self, slot: Slot, number: int, left: int | None, left_s: float | None) -> None: ...

    def finished(self, made: Made, experiment: Experiment | None) -> None: ...


class Conclusion(Struct, frozen=True):
    """How it ended. `signal` is what ended it early, None where it came to its end or to that of its budget."""

    experiment: Experiment
    signal: int | None = None


@dataclass(kw_only=True)
class Engine:
    """One session of an experiment in its folder, which the caller has claimed.

    `repeat` is the line that makes the experiment again. `propose` gives the candidates that the user named and those
    of a run's findings: of the pilot in the given folder where the request says FINDINGS, else of the run it names.
    `write` puts an experiment on the disk, `stop` tells the signal that asks us to end.
    """

    request: Request
    folder: Path
    repeat: str
    run: Runner
    write: Callable[[Experiment], None]
    propose: Callable[[Path | None, tuple[Candidate, ...]], Proposals]
    listener: Listener
    stop: Callable[[], int | None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    _journal: Journal = field(init=False)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._journal = Journal(self.folder / JOURNAL)
        self._began = self.clock()

    def conduct(self) -> Conclusion:
        """Run until the end. Raises `StepscopeError` where the command cannot be measured at all."""
        self._journal.open()
        try:
            if self._state.key is None:
                self._journal.add("experiment", schema=SCHEMA, key=planning.key(self.request), line=self.repeat)
            self._clean()
            return self._conduct()
        finally:
            self._journal.close()

    @property
    def _state(self) -> State:
        return self._journal.state

    def _conduct(self) -> Conclusion:
        plan = self._state.plan
        if plan is None:
            try:
                plan = self._plan()
            except Stopped as stopped:
                # before there is a plan there is nothing to write but that
                plan = Plan(_protocol(self.request, 0, 0, self.request.base_knobs), self.request.candidates, (), 0.0)
                why = INTERRUPTED.format(runner.signal_name(stopped.number))
                return Conclusion(self._result(plan, finished=False, stopped=why), stopped.number)
        ended: str | None = None
        number = self.stop()
        try:
            while number is None and ended is None:
                made = schedule.with_flags_of_pairs(self._state.made)
                slot = schedule.next_slot(plan, self._state.screened, made)
                if slot is None and plan.design and self._state.screened is None:
                    self._journal.add("screened", screened=screening.judged(plan, self._state.made))
                    slot = schedule.next_slot(plan, self._state.screened, made)
                if slot is None:
                    break
                ended = schedule.trouble(made) or self._out_of_time(plan, slot)
                if ended is None:
                    left = schedule.runs_left(plan, self._state.screened, made)
                    self.listener.starting(slot, self._state.runs + 1, left, left * self._usual_s(plan))
                    seconds = max(HANG_LEAST_S, HANG_FACTOR * max(plan.run_s, *(run.wall_s for run in made)))
                    warmup, steps = plan.protocol.warmup_steps, plan.protocol.measured_steps
                    done = self._run(slot, warmup=warmup, steps=steps, seconds=seconds)
                    experiment = self._result(plan, finished=False)
                    self.write(experiment)
                    self.listener.finished(done, experiment)
                number = self.stop()
        except Stopped as stopped:
            number = stopped.number
        if number is not None:
            ended = INTERRUPTED.format(runner.signal_name(number))
        if ended is None:
            self._journal.add("complete")
        found = self._result(plan, finished=ended is None, stopped=ended)
        self.write(found)
        return Conclusion(found, number)

    def _run(self, slot: Slot, **more: object) -> Made:
        """One run with its lines in the journal. A run that we are told to end is as if it had never been."""
        name = folder.run_name(self._state.runs + 1, slot.label)
        place = self.folder / folder.RUNS / name
        order = Order(
            slot=slot,
            command=self.request.command,
            folder=place,
            seed=self.request.seed + slot.block,  # the runs of a pair have one seed, and chance shows between pairs
            **more,  # type: ignore[arg-type]
        )
        self._journal.add("started", slot=slot, folder=name)
        try:
            made = self.run(
                order, lambda pid, ticks: self._journal.add("process", folder=name, pid=pid, start_ticks=ticks)
            )
        except Stopped:
            runner.discard(place)
            self._journal.add("dropped", folder=name)
            raise
        self._journal.add("finished", made=made)
        return made

    def _plan(self) -> Plan:
        request = self.request
        quiet, unchanged = noise.plan(seed=request.seed) if request.quiet_machine else ((), None)
        base = planning.together(quiet, request.base_knobs)
        pilots = [run for run in self._state.made if run.slot.phase == PILOT and run.measure is not None]
        pilot = pilots[-1] if pilots else self._pilot(base)
        assert pilot.measure is not None
        warmup, steps = planning.sizes(request, pilot.measure.mean_ms / 1e3, pilot.length)
        proposals = Proposals(request.candidates)
        if request.itself:
            proposals = Proposals((Candidate(schedule.AGAIN, ()),))
        elif request.source is not None:
            path = self.folder / folder.RUNS / pilot.folder if request.source == FINDINGS else None
            proposals = self.propose(path, request.candidates)
        protocol = _protocol(request, warmup, steps, base)
        plan = Plan(protocol=protocol, run_s=pilot.wall_s, noise=unchanged, **asdict(proposals))
        if request.screen:
            plan = screening.designed(plan)
        self._journal.add("plan", plan=plan)
        return plan

    def _pilot(self, base: Sequence[Knob]) -> Made:
        request = self.request
        slot = Slot(PILOT, 0, None, 0, tuple(base), PILOT)
        self.listener.starting(slot, self._state.runs + 1, None, None)
        warmup = planning.MOST_WARMUP if request.warmup is None else request.warmup
        steps = planning.MOST_STEPS if request.steps is None else request.steps

        def ends(seen: StepsSeen) -> bool:
            """Where steps are slow, before the limit."""
            return seen.step_s is not None and seen.count >= sum(planning.sizes(request, seen.step_s, None))

        full = request.source == FINDINGS
        made = self._run(slot, warmup=warmup, steps=steps, seconds=request.budget_s, full=full, ends=ends)
        if made.failure is not None:
            log = runner.log_of(self.folder / folder.RUNS / made.folder)
            raise UnreadableInputError(f"the command cannot be measured: {made.failure}; its log is {log}")
        self.listener.finished(made, None)
        return made

    def _out_of_time(self, plan: Plan, slot: Slot) -> str | None:
        own = [run.wall_s for run in self._state.made if run.slot.label == slot.label]
        takes_s = max(own[-3:], default=self._usual_s(plan))
        return out_of_time(self.request.budget_s, self.clock() - self._began + takes_s)

    def _usual_s(self, plan: Plan) -> float:
        """What a run takes, by the latest ones."""
        walls = [run.wall_s for run in self._state.made if run.slot.phase != PILOT][-8:]
        return fmean(walls) if walls else plan.run_s

    def _result(self, plan: Plan, *, finished: bool, stopped: str | None = None) -> Experiment:
        place, repeat = str(self.folder), self.repeat
        return result.experiment(
            self.request, plan, self._state, folder=place, repeat=repeat, finished=finished, stopped=stopped
        )

    def _clean(self) -> None:
        """Remove runs that an earlier session began and never finished, once their processes are gone."""
        if self._state.bad_lines:
            self.listener.note(f"{things(self._state.bad_lines, 'line')} of the journal could not be read")
        for name, pid, ticks in self._state.open:
            runner.end_left(pid, ticks)
            runner.discard(self.folder / folder.RUNS / name)
            self._journal.add("dropped", folder=name)


def out_of_time(budget_s: float | None, ends_s: float) -> str | None:
    """Why a run is not started: it would not end within the budget."""
    if budget_s is None or ends_s <= budget_s:
        return None
    return f"the budget of {budget_s / 60:g} min is used up"


def _protocol(request: Request, warmup: int, steps: int, base: Sequence[Knob]) -> Protocol:
    asked = {name: value for name, value in asdict(request).items() if name in Protocol.__struct_fields__}
    chosen = {"warmup_steps": warmup, "measured_steps": steps, "rate_hz": planning.RATE_HZ, "base_knobs": tuple(base)}
    return Protocol(**(asked | chosen))
