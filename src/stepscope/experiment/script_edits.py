"""What to write into the script for each knob, as text, at the user's line where one is known.

A knob is applied from outside; what wins has to be written down by someone. Knobs of one place make one sentence:
`train.py:77: DataLoader(..., num_workers=2, persistent_workers=True)`, or `TrainingArguments(...)` where a framework
takes the setting. The words are those of the findings, `diagnose/in_script.py`. Nothing here edits a file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepscope.diagnose.in_script import edit_of
from stepscope.model import Settings
from stepscope.model.comparison import AppliedKnob
from stepscope.record.agent.knobs import ARGUMENT_PREFIX, ENVIRONMENT_PREFIX
from stepscope.record.host.command import first_argument
from stepscope.record.host.knobs import with_argument
from stepscope.schema import Knob

MAX_PLACES = 3  # named of one knob

Place = tuple[str, "int | None"]


def edits(
    knobs: Sequence[Knob],
    applied: Sequence[AppliedKnob] = (),
    *,
    command: Sequence[str] = (),
    cwd: str | None = None,
    places: Mapping[str, Place] | None = None,
    device: str | None = None,
    settings: Settings | None = None,
) -> tuple[str, ...]:
    """One sentence for each change, those of one call in one place together, the command line last.

    Args:
        knobs: of the candidate.
        applied: what became of them in its runs; names the user's lines.
        command: of the training, for what is changed on its command line.
        cwd: files below it are shown relative to it.
        places: (file, line) by knob or its family ("loader."), for knobs whose runs did not tell.
        device: kind of device the run trained on, where it is known.
        settings: of the framework that runs the loop, where one does.
    """
    told: dict[tuple[str, str], list[str]] = {}
    alone: list[str] = []
    for knob in knobs:
        if knob.knob.startswith((ENVIRONMENT_PREFIX, ARGUMENT_PREFIX)):
            continue
        edit, own = edit_of(knob.knob, settings)
        if own and settings is not None:
            # The line that made the loader or called torch is the framework's, or merely runs it.
            told_at = settings.place
            where = _shown(told_at.file, told_at.line, cwd) if told_at is not None else ""
        else:
            where = _where(knob, applied, places or {}, cwd)
        if edit is not None and edit.call is not None and edit.argument is not None:
            told.setdefault((where, edit.call), []).append(edit.argument(knob.value))
            continue
        if edit is None:
            text = f"{settings.framework} has no setting for {knob.knob}" if own and settings is not None else ""
        else:
            text = edit.text(knob.value)
        text = text or f"set {knob.knob} to {knob.value}"
        alone.append(_at(where, text.replace("DEVICE", repr(device) if device is not None else "device_type")))
    merged = [_at(where, f"{call}(..., {', '.join(arguments)})") for (where, call), arguments in told.items()]
    line = command_line(knobs, command, cwd)
    return (*merged, *alone, *((f"start it with: {line}",) if line is not None else ()))


def command_line(knobs: Sequence[Knob], command: Sequence[str], cwd: str | None = None) -> str | None:
    """The training's command with what `env:` and `arg:` knobs change in it, as a shell takes it; None if nothing."""
    variables = [
        f"{knob.knob[len(ENVIRONMENT_PREFIX) :]}={shlex.quote(knob.value)}"
        for knob in knobs
        if knob.knob.startswith(ENVIRONMENT_PREFIX)
    ]
    arguments = [knob for knob in knobs if knob.knob.startswith(ARGUMENT_PREFIX)]
    if not variables and not arguments:
        return None
    words = tuple(command) or ("COMMAND",)
    start = first_argument(words, os.environ, Path(cwd or os.curdir))
    rest = words[start:]
    for knob in arguments:
        rest = with_argument(rest, knob.knob[len(ARGUMENT_PREFIX) :], knob.value)
    return " ".join([*variables, shlex.join((*words[:start], *rest))])


def _where(knob: Knob, applied: Sequence[AppliedKnob], places: Mapping[str, Place], cwd: str | None) -> str:
    """The user's lines that the knob stands for, "" where none is known."""
    lines = [
        (each.file, each.line) for each in applied if each.knob == knob.knob and each.applied and each.file is not None
    ]
    if not lines:
        known = places.get(knob.knob) or next(
            (place for name, place in places.items() if name.endswith(".") and knob.knob.startswith(name)), None
        )
        lines = [known] if known is not None else []
    shown = list(dict.fromkeys(_shown(file, line, cwd) for file, line in lines))
    return ", ".join(shown[:MAX_PLACES])


def _shown(file: str, line: int | None, cwd: str | None) -> str:
    inside = cwd is not None and file.startswith(cwd.rstrip(os.sep) + os.sep)
    name = os.path.relpath(file, cwd) if inside and cwd is not None else file
    return name if line is None else f"{name}:{line}"


def _at(where: str, text: str) -> str:
    return f"{where}: {text}" if where else text
