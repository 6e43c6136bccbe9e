"""Knobs on the launch side: variables of the command's environment, and flags of the script it starts.

Arguments stay a list from here to the process: no shell sees them, so spaces and quotes in a value arrive as given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stepscope.record.agent.knobs import ARGUMENT_PREFIX, ENVIRONMENT_PREFIX, launched
from stepscope.record.agent.knobs.launched import POSITIONAL_FROM_HERE, is_short_with_number, looks_like_flag
from stepscope.record.host.command import first_argument
from stepscope.record.host.options import RecordOptions
from stepscope.schema import Knob

ALLOCATOR, HOST_ALLOCATOR = "allocator.conf", "host.allocator"


def changed_by_knobs(
    options: RecordOptions, environ: Mapping[str, str], cwd: Path
) -> tuple[RecordOptions, dict[str, str]]:
    """`options` with the command its knobs ask for, and the environment to start it in, seed included."""
    environment = dict(environ)
    if options.seed is not None:
        environment.setdefault("PYTHONHASHSEED", str(options.seed))  # read when Python starts, too early for the agent
    values = {knob.knob: knob.value for knob in options.knobs}
    if HOST_ALLOCATOR in values:
        environment |= launched.host_allocator_variables(values[HOST_ALLOCATOR], environment.get("LD_PRELOAD"))
    environment.update((knob.knob, knob.value) for knob in with_prefix(options.knobs, ENVIRONMENT_PREFIX))
    if ALLOCATOR in values:
        environment |= launched.allocator_variables(values[ALLOCATOR])
    return replace(options, command=with_arguments(options.command, options.knobs, environment, cwd)), environment


def with_arguments(
    command: tuple[str, ...], knobs: Sequence[Knob], environ: Mapping[str, str], cwd: Path
) -> tuple[str, ...]:
    """`command` with the flags of its script that `knobs` set."""
    arguments = with_prefix(knobs, ARGUMENT_PREFIX)
    start = first_argument(command, environ, cwd) if arguments else len(command)
    words = command[start:]
    for knob in arguments:
        words = with_argument(words, knob.knob, knob.value)
    return (*command[:start], *words)


def with_argument(words: Sequence[str], flag: str, value: str) -> tuple[str, ...]:
    """The arguments of a script with `flag` set to `value`: replaced wherever it is given, else appended.

    An empty `value` is a flag that takes none. A `flag` without dashes is the left side of a `name=value` argument.
    Words after a lone `--` are left alone.
    """
    end = words.index(POSITIONAL_FROM_HERE) if POSITIONAL_FROM_HERE in words else len(words)
    before, after = list(words[:end]), words[end:]
    changed: list[str] = []
    found = False
    while before:
        word = before.pop(0)
        joined, apart = word.startswith(flag + "="), word == flag and flag.startswith("-")
        if not joined and not apart and not is_short_with_number(word, flag):
            changed.append(word)
            continue
        found = True
        if apart and value and before and not looks_like_flag(before[0]):
            before.pop(0)  # the old value
        changed += _written(flag, value, joined=joined)
    if not found:
        changed += _written(flag, value, joined=False)
    return (*changed, *after)


def _written(flag: str, value: str, *, joined: bool) -> list[str]:
    if not flag.startswith("-"):
        return [f"{flag}={value}"]
    if not value:
        return [flag]
    # A value that looks like a flag is taken for one when it stands alone.
    return [f"{flag}={value}"] if joined or looks_like_flag(value) else [flag, value]


def with_prefix(knobs: Sequence[Knob], prefix: str) -> list[Knob]:
    """Those of one kind, their names without the prefix."""
    return [Knob(knob.knob[len(prefix) :], knob.value) for knob in knobs if knob.knob.startswith(prefix)]
