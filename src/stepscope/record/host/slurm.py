"""A batch script with recording switched on: `stepscope run --` in front of every program that trains.

Only insertions: taking them out again gives the script as it was. Whatever is not understood is left alone and named.
"""

from __future__ import annotations

import bisect
import itertools
import re
import shlex
from dataclasses import dataclass

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.record.host.slurm_launch import LeftAlone, Place, Recorded, find_launches
from stepscope.record.host.slurm_shell import UnclosedText, commands

_SHEBANG = re.compile(r"#!\s*(\S+)(?:[ \t]+(\S+))?")
_UNDERSTOOD = ("bash", "sh", "dash", "zsh", "ksh")
MOST_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Remark:
    """Something to say about a line; lines count from 1."""

    line: int
    text: str


@dataclass(frozen=True)
class SwitchedOn:
    """`text` is the new script. `lines` were changed, `recorded` had been before, `left` may train and stay as is."""

    text: str
    lines: tuple[int, ...]
    recorded: tuple[int, ...]
    left: tuple[Remark, ...]
    remarks: tuple[Remark, ...]


def switch_on(script: str, *, program: str = "stepscope") -> SwitchedOn:
    """The script with `program run --` inserted where a training is started.

    Raises `UnreadableInputError` for what is no text, `UsageError` for a script of another shell and for one whose
    quotes never close.
    """
    _check_shell(script)
    if shlex.quote(program) != program:
        raise UsageError(f"--stepscope {program} needs quoting in a shell; give a path without blanks or special signs")
    try:
        found = find_launches(commands(script))
    except UnclosedText as error:
        raise UsageError(
            f"line {_line(script, error.offset)}: {error.what} is never closed; check the script with bash -n"
        ) from None
    except RecursionError:
        raise UsageError("quotes and brackets in it are nested too deeply; put the recorder in by hand") from None
    places = {one.offset: one for one in sorted(found, key=lambda one: one.offset) if isinstance(one, Place)}
    cuts = [0, *places, len(script)]
    ends = [match.start() for match in re.finditer("\n", script)]

    def line(offset: int) -> int:
        return bisect.bisect_left(ends, offset) + 1

    return SwitchedOn(
        text=f"{program} run -- ".join(script[start:end] for start, end in itertools.pairwise(cuts)),
        lines=tuple(dict.fromkeys(line(offset) for offset in places)),
        recorded=tuple(dict.fromkeys(line(one.offset) for one in found if isinstance(one, Recorded))),
        left=tuple(Remark(line(one.offset), one.reason) for one in found if isinstance(one, LeftAlone)),
        remarks=tuple(Remark(line(offset), one.note) for offset, one in places.items() if one.note),
    )


def _check_shell(script: str) -> None:
    if len(script) > MOST_CHARACTERS or "\0" in script:
        raise UnreadableInputError("this is no batch script; give the script that is handed to sbatch")
    found = _SHEBANG.match(script)
    if found is None:
        return
    shell = (found[2] if found[1].endswith("/env") and found[2] else found[1]).rpartition("/")[2]
    if shell not in _UNDERSTOOD:
        raise UsageError(
            f"this is a script for {shell}; put `stepscope run --` in front of its training command by hand"
        )


def _line(script: str, offset: int) -> int:
    return script.count("\n", 0, offset) + 1
