"""What came of an experiment so far: the runs that were made, laid against each other and judged together, and what to
write into the script for each candidate. Pure.

Knobs of one place make one sentence: `train.py:77: DataLoader(..., num_workers=2, persistent_workers=True)`, or
`TrainingArguments(...)` where a framework takes the setting. The words are those of the findings. Nothing here edits a
file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from stepscope.comparison.outcomes import corrected, outcome
from stepscope.diagnose.in_script import edit_of
from stepscope.experiment import noise, schedule, screening
from stepscope.experiment.folder import Made, State
from stepscope.experiment.plan import PAIRS, Plan, Request, limits_of
from stepscope.model import Settings
from stepscope.model.comparison import UNDECIDED, VOID, AppliedKnob, Candidate, Experiment, Outcome, Tried, Verdict
from stepscope.record.agent.knobs import ARGUMENT_PREFIX, ENVIRONMENT_PREFIX
from stepscope.record.host.knobs import with_arguments, with_prefix
from stepscope.schema import Knob

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
