"""The loop of an experiment: a pilot, then run after run until everything is decided, the budget is used or we are told
to end.

Everything that happens is in the journal before the next thing does, and what comes next follows from the journal
alone. `experiment.json` is written whole after every run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol as Interface

from msgspec import Struct, field

from stepscope.errors import UnreadableInputError
from stepscope.experiment import folder, noise, result, runner, schedule, screening
from stepscope.experiment import plan as planning
from stepscope.experiment.journal import Journal, Made, State
from stepscope.experiment.plan import FINDINGS, PILOT, Plan, Request, Slot
from stepscope.experiment.propose import Proposals
from stepscope.experiment.result import Frame
from stepscope.experiment.runner import Order, Runner, StepsSeen, Stopped
from stepscope.experiment.stopping import StoppingRule
from stepscope.model.experiment import Candidate, Experiment, Protocol
from stepscope.record.host.processes import read_stat
from stepscope.schema import Knob

BUDGET = "the budget of {:g} min is used up"
INTERRUPTED = "it was interrupted by {}"
# A candidate may compile for minutes where the baseline does not; what takes longer than this is taken to hang.
HANG_FACTOR, HANG_LEAST_S = 5.0, 300.0
PILOT_LABEL = "pilot"


class Listener(Interface):
    """Who shows progress. `left` are the runs to come at least, `left_s` what they take, None while not known."""

    def note(self, text: str) -> None: ...

    def starting(self, slot: Slot, number: int, left: int | None, left_s: float | None) -> None: ...

    def finished(self, made: Made, experiment: Experiment | None) -> None: ...


class Parts(Struct, frozen=True, kw_only=True):
    """What an experiment is put together from.

    `propose` gives the candidates that the user named and those of a run's findings: of the pilot in the given folder
    where the request says FINDINGS, else of the run it names. `write` puts an experiment on the disk, `stop` tells the
    signal that asks us to end.
    """

    frame: Frame
    key: str
    run: Runner
    write: Callable[[Experiment], None]
    propose: Callable[[Path | None, tuple[Candidate, ...]], Proposals]
    listener: Listener
    stop: Callable[[], int | None] = field(default=lambda: None)
    clock: Callable[[], float] = time.monotonic


class Conclusion(Struct, frozen=True):
    """How it ended. `signal` is what ended it early, None where it came to its end or to that of its budget."""

    experiment: Experiment
    signal: int | None = None


class Engine:
    """One session of an experiment in its folder, which the caller has claimed."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._folder = Path(parts.frame.folder)
        self._journal = Journal(self._folder / "experiment.jsonl")
        self._began = parts.clock()

    def conduct(self) -> Conclusion:
        """Run until the end. Raises `StepscopeError` where the command cannot be measured at all."""
        self._journal.open()
        try:
            if self._state.key is None:
                self._journal.begin(self._parts.key, self._parts.frame.repeat)
            self._clean()
            return self._conduct()
        finally:
            self._journal.close()

    @property
    def _state(self) -> State:
        return self._journal.state

    @property
    def _request(self) -> Request:
        return self._parts.frame.request

    def _conduct(self) -> Conclusion:
        plan = self._state.plan
        if plan is None:
            try:
                plan = self._plan()
            except Stopped as stopped:
                return self._interrupted_early(stopped.number)
        rule = StoppingRule(plan.protocol, 1 if plan.design else len(plan.candidates))
        ended: str | None = None
        number = self._parts.stop()
        try:
            while number is None and ended is None:
                slot = self._next(plan, rule)
                if slot is None:
                    break
                ended = schedule.trouble(schedule.with_flags_of_pairs(self._state.made)) or self._out_of_time(
                    plan, slot
                )
                if ended is None:
                    self._make(plan, slot, rule)
                number = self._parts.stop()
        except Stopped as stopped:
            number = stopped.number
        if number is not None:
            ended = INTERRUPTED.format(runner.signal_name(number))
        if ended is None:
            self._journal.completed()
        return Conclusion(self._write(plan, finished=ended is None, stopped=ended), number)

    def _next(self, plan: Plan, rule: StoppingRule) -> Slot | None:
        """The next run; a screening that has all its runs is judged on the way."""
        made = schedule.with_flags_of_pairs(self._state.made)
        slot = schedule.next_slot(plan, self._state.screened, made, rule.enough)
        if slot is None and plan.design and self._state.screened is None:
            self._journal.screened(screening.judged(plan, self._state.made))
            return self._next(plan, rule)
        return slot

    def _make(self, plan: Plan, slot: Slot, rule: StoppingRule) -> None:
        made = schedule.with_flags_of_pairs(self._state.made)
        left = schedule.runs_left(plan, self._state.screened, made, rule.wanted)
        self._parts.listener.starting(slot, self._state.runs + 1, left, left * self._usual_s(plan))
        protocol = plan.protocol
        done = self._run(
            slot,
            warmup=protocol.warmup_steps,
            steps=protocol.measured_steps,
            seconds=max(HANG_LEAST_S, HANG_FACTOR * max(plan.run_s, *(run.wall_s for run in made))),
        )
        experiment = self._write(plan, finished=False)
        self._parts.listener.finished(done, experiment)

    def _run(self, slot: Slot, **more: object) -> Made:
        """One run with its lines in the journal. A run that we are told to end is as if it had never been."""
        name = folder.run_name(self._state.runs + 1, slot.label)
        place = self._folder / folder.RUNS / name
        order = Order(
            slot=slot,
            command=self._request.command,
            folder=place,
            rate_hz=planning.RATE_HZ,
            seed=self._request.seed + slot.block,  # the runs of a pair have one seed, and chance shows between pairs
            **more,  # type: ignore[arg-type]
        )
        self._journal.started(slot, name)
        try:
            made = self._parts.run(order, lambda pid, ticks: self._journal.leads(name, pid, ticks))
        except Stopped:
            runner.discard(place)
            self._journal.dropped(name)
            raise
        self._journal.finished(made)
        return made

    def _plan(self) -> Plan:
        """The pilot, and what follows from it."""
        request = self._request
        quiet = noise.plan(seed=request.seed) if request.quiet_machine else None
        base = _together(quiet.knobs if quiet is not None else (), request.base_knobs)
        pilot = result.pilot_of(self._state) or self._pilot(base)
        assert pilot.measure is not None
        warmup, steps = planning.sizes(request, pilot.measure.mean_ms / 1e3, pilot.length)
        proposals = self._proposals(self._folder / folder.RUNS / pilot.folder)
        plan = Plan(
            protocol=_protocol(request, warmup, steps, base),
            candidates=proposals.candidates,
            skipped=proposals.skipped,
            run_s=pilot.wall_s,
            by_hand=proposals.by_hand,
            notes=proposals.notes,
            noise=noise.of_outcome(None, quiet) if quiet is not None else None,
        )
        if request.screen:
            plan = screening.designed(plan)
        self._journal.planned(plan)
        return plan

    def _pilot(self, base: Sequence[Knob]) -> Made:
        request = self._request
        slot = Slot(PILOT, 0, None, 0, tuple(base), PILOT_LABEL)
        self._parts.listener.starting(slot, self._state.runs + 1, None, None)
        limit = planning.pilot_limit(request)
        warmup = planning.MOST_WARMUP if request.warmup is None else request.warmup

        def ends(seen: StepsSeen) -> bool:
            return seen.step_s is not None and seen.count >= sum(planning.sizes(request, seen.step_s, None))

        made = self._run(
            slot,
            warmup=warmup,
            steps=limit - warmup,
            seconds=request.budget_s,
            full=request.source == FINDINGS,
            ends=ends,
        )
        if made.failure is not None:
            log = runner.log_of(self._folder / folder.RUNS / made.folder)
            raise UnreadableInputError(f"the command cannot be measured: {made.failure}; its log is {log}")
        self._parts.listener.finished(made, None)
        return made

    def _proposals(self, pilot: Path) -> Proposals:
        """The candidates: those that the user named, and those of findings."""
        request = self._request
        if request.itself:
            return Proposals((Candidate(schedule.AGAIN, ()),))
        if request.source is None:
            return Proposals(request.candidates)
        return self._parts.propose(pilot if request.source == FINDINGS else None, request.candidates)

    def _out_of_time(self, plan: Plan, slot: Slot) -> str | None:
        """Why `slot` is not started: it would not end within the budget."""
        budget = self._request.budget_s
        if budget is None:
            return None
        own = [run.wall_s for run in self._state.made if run.slot.label == slot.label]
        expected = max(own[-3:], default=self._usual_s(plan))
        if self._parts.clock() - self._began + expected <= budget:
            return None
        return BUDGET.format(budget / 60)

    def _usual_s(self, plan: Plan) -> float:
        """What a run takes, by the latest ones."""
        walls = [run.wall_s for run in self._state.made if run.slot.phase != PILOT][-8:]
        return fmean(walls) if walls else plan.run_s

    def _write(self, plan: Plan, *, finished: bool, stopped: str | None = None) -> Experiment:
        found = result.experiment(self._parts.frame, plan, self._state, finished=finished, stopped=stopped)
        self._parts.write(found)
        return found

    def _interrupted_early(self, number: int) -> Conclusion:
        """Before there is a plan there is nothing to write but that."""
        request = self._request
        plan = Plan(_protocol(request, 0, 0, request.base_knobs), request.candidates, (), 0.0)
        stopped = INTERRUPTED.format(runner.signal_name(number))
        return Conclusion(
            result.experiment(self._parts.frame, plan, self._state, finished=False, stopped=stopped), number
        )

    def _clean(self) -> None:
        """Remove runs that an earlier session began and never finished, once their processes are gone."""
        if self._state.bad_lines:
            self._parts.listener.note(f"{self._state.bad_lines} lines of the journal could not be read")
        for name, pid, ticks in self._state.open:
            stat = read_stat(pid) if pid is not None else None
            if pid is not None and stat is not None and ticks is not None and stat.start_ticks == ticks:
                runner.end(pid)
            runner.discard(self._folder / folder.RUNS / name)
            self._journal.dropped(name)


def _together(first: Sequence[Knob], second: Sequence[Knob]) -> tuple[Knob, ...]:
    """Knobs of both; the second ones win."""
    own = {knob.knob for knob in second}
    return (*(knob for knob in first if knob.knob not in own), *second)


def _protocol(request: Request, warmup: int, steps: int, base: Sequence[Knob]) -> Protocol:
    return Protocol(
        command=request.command,
        warmup_steps=warmup,
        measured_steps=steps,
        least_pairs=request.least_pairs,
        most_pairs=request.most_pairs,
        width=request.width,
        threshold=request.threshold,
        loss_band=request.loss_band,
        seed=request.seed,
        quiet_machine=request.quiet_machine,
        budget_s=request.budget_s,
        rate_hz=planning.RATE_HZ,
        base_knobs=tuple(base),
    )
