"""The loop of an experiment: a pilot, then run after run until everything is decided, the budget is used or we are told
to end.

Everything that happens is in the journal before the next thing does, and what comes next follows from the journal
alone. `experiment.json` is written whole after every run.

What came of an experiment so far: the runs that were made, laid against each other and judged together, and what to
write into the script for each candidate. Pure.

Knobs of one place make one sentence: `train.py:77: DataLoader(..., num_workers=2, persistent_workers=True)`, or
`TrainingArguments(...)` where a framework takes the setting. The words are those of the findings. Nothing here edits a
file.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Protocol as Interface

from msgspec import Struct
from msgspec.structs import asdict, replace

from stepscope.comparison.outcomes import corrected, outcome
from stepscope.diagnose.in_script import edit_of
from stepscope.errors import UnreadableInputError
from stepscope.experiment import folder, noise, runner, schedule, screening
from stepscope.experiment import plan as planning
from stepscope.experiment.folder import JOURNAL, SCHEMA, Journal, Made, State
from stepscope.experiment.plan import FINDINGS, PAIRS, PILOT, Plan, Request, Slot, limits_of
from stepscope.experiment.propose import Proposals
from stepscope.experiment.runner import Order, Runner, StepsSeen, Stopped
from stepscope.model import Settings
from stepscope.model.comparison import (
    UNDECIDED,
    VOID,
    AppliedKnob,
    Candidate,
    Experiment,
    Outcome,
    Protocol,
    Tried,
    Verdict,
)
from stepscope.model.counted import things
from stepscope.record.agent.knobs import ARGUMENT_PREFIX, ENVIRONMENT_PREFIX
from stepscope.record.host.launch import with_arguments, with_prefix
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
    """How it ended. `signal` is what ended it early; `trouble` says that the baseline cannot be measured."""

    experiment: Experiment
    signal: int | None = None
    trouble: str | None = None


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
        ended = trouble = None
        earlier = len(self._state.made)  # of a session before: what ended that may be mended
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
                trouble = schedule.trouble(made[earlier:])
                ended = trouble or self._out_of_time(plan, slot)
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
        return Conclusion(found, number, trouble)

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
            raise UnreadableInputError(
                f"the command cannot be measured: {made.failure}; its stdin is empty, and its log is {log}"
            )
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
        return experiment(
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


MAX_PLACES = 3  # named of one knob


def experiment(
    request: Request,
    plan: Plan,
    state: State,
    *,
    folder: str,
    repeat: str,
    finished: bool,
    stopped: str | None = None,
) -> Experiment:
    """`experiment.json` of what has been made so far. `repeat` is the line that makes the experiment again, `stopped`
    says why it ended early, in words."""
    paired = [run for run in schedule.with_flags_of_pairs(state.made) if run.slot.phase == PAIRS]
    candidates = schedule.candidates(plan, state.screened)
    outcomes = _outcomes(plan, candidates, paired)
    tried = tuple(
        _tried(request, candidate, found, [run for run in paired if run.slot.candidate == number])
        for number, (candidate, found) in enumerate(zip(candidates, outcomes, strict=True))
    )
    screened = state.screened
    if screened is None and plan.design and stopped is not None:  # what the runs made so far tell
        screened = replace(screening.judged(plan, state.made), candidate=None)
    of_itself = noise.of_equal_runs(outcomes[0] if outcomes else None, plan.noise) if request.itself else plan.noise
    return Experiment(
        protocol=plan.protocol,
        baseline=tuple(run.measure for run in paired if run.slot.candidate is None and run.measure is not None),
        tried=tried,
        skipped=(*plan.skipped, *(screened.skipped if screened is not None else ())),
        effects=screened.effects if screened is not None else (),
        noise=of_itself,
        repeat=repeat,
        finished=finished,
        stopped=stopped,
        runs=len(state.made),
        wall_s=sum(made.wall_s for made in state.made),  # in all sessions
        by_hand=plan.by_hand,
        notes=plan.notes,
        source=request.source,
        folder=folder,
        cwd=request.cwd,
    )


def _outcomes(plan: Plan, candidates: Sequence[Candidate], paired: Sequence[Made]) -> list[Outcome]:
    """Of all candidates, judged together; of one that was given up, or not run yet, with the verdict that says so."""
    protocol, limits = plan.protocol, limits_of(plan.protocol)
    found = []
    for number, candidate in enumerate(candidates):
        one = outcome(candidate.knobs, schedule.pairs_of(number, paired), limits, candidates=len(candidates))
        found.append(replace(one, left_out=(*one.left_out, *schedule.replaced(number, paired))))
    alpha = schedule.alpha_after(least=protocol.least_pairs, most=protocol.most_pairs)
    found = corrected(found, limits, alpha)
    for number, one in enumerate(found):
        reason = schedule.given_up(number, paired)
        if reason is not None and (one.verdict.word != VOID or not one.pairs):
            found[number] = replace(one, verdict=Verdict(VOID, f"void: {reason}"))
        elif not schedule.pairs_of(number, paired):
            word = Verdict(UNDECIDED, "undecided: not run yet", pairs_needed=protocol.least_pairs)
            found[number] = replace(one, verdict=word)
    return found


def _tried(request: Request, candidate: Candidate, found: Outcome, made: Sequence[Made]) -> Tried:
    runs = [run.measure for run in made if run.measure is not None]
    applied = tuple(dict.fromkeys(knob for run in runs for knob in run.knobs))  # once however many runs say it
    own = {knob.knob for knob in candidate.knobs}
    settings = next((run.settings for run in runs if run.settings is not None), None)
    return Tried(
        candidate=candidate,
        outcome=found,
        applied=tuple(each for each in applied if each.knob in own),
        change=edits(candidate.knobs, applied, command=request.command, cwd=request.cwd, settings=settings),
    )


def edits(
    knobs: Sequence[Knob],
    applied: Sequence[AppliedKnob] = (),
    *,
    command: Sequence[str] = (),
    cwd: str | None = None,
    settings: Settings | None = None,
) -> tuple[str, ...]:
    """One sentence for each change, those of one call in one place together, the command line last.

    Args:
        knobs: of the candidate.
        applied: what became of them in its runs; names the user's lines.
        command: of the training, for what is changed on its command line.
        cwd: files below it are shown relative to it.
        settings: of the framework that runs the loop, where one does.
    """
    calls: dict[tuple[str, str], list[str]] = {}
    alone: list[str] = []
    for knob in knobs:
        if knob.knob.startswith((ENVIRONMENT_PREFIX, ARGUMENT_PREFIX)):
            continue
        edit, own = edit_of(knob.knob, settings)
        lines = [
            (each.file, each.line)
            for each in applied
            if each.knob == knob.knob and each.applied and each.file is not None
        ]
        if own and settings is not None:
            # The line that made the loader or called torch is the framework's, or merely runs it.
            lines = [(settings.place.file, settings.place.line)] if settings.place is not None else []
        where = ", ".join(list(dict.fromkeys(_shown(file, line, cwd) for file, line in lines))[:MAX_PLACES])
        if edit is not None and edit.call is not None:
            calls.setdefault((where, edit.call), []).append(edit.argument(knob.value))
            continue
        if edit is None:
            text = f"{settings.framework} has no setting for {knob.knob}" if own and settings is not None else ""
        else:
            text = edit.text(knob.value)
        text = text or f"set {knob.knob} to {knob.value}"
        alone.append(_at(where, text.replace("DEVICE", "device_type")))
    merged = [_at(where, f"{call}(..., {', '.join(arguments)})") for (where, call), arguments in calls.items()]
    line = command_line(knobs, command, cwd)
    return (*merged, *alone, *((f"start it with: {line}",) if line is not None else ()))


def command_line(knobs: Sequence[Knob], command: Sequence[str], cwd: str | None = None) -> str | None:
    """The training's command with what `env:` and `arg:` knobs change in it, as a shell takes it; None if nothing."""
    variables = [f"{knob.knob}={shlex.quote(knob.value)}" for knob in with_prefix(knobs, ENVIRONMENT_PREFIX)]
    if not variables and not with_prefix(knobs, ARGUMENT_PREFIX):
        return None
    words = with_arguments(tuple(command) or ("COMMAND",), knobs, os.environ, Path(cwd or os.curdir))
    return " ".join([*variables, shlex.join(words)])


def _shown(file: str, line: int | None, cwd: str | None) -> str:
    if cwd is not None and file.startswith(cwd.rstrip(os.sep) + os.sep):
        file = os.path.relpath(file, cwd)
    return file if line is None else f"{file}:{line}"


def _at(where: str, text: str) -> str:
    return f"{where}: {text}" if where else text
