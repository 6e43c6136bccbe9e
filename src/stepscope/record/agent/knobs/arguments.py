"""`arg:--flag=value`: the launcher changes the command; here the training process is asked whether it got the flag."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Sequence

from stepscope.record.agent.knobs import masked
from stepscope.record.agent.knobs.base import KnobBase, Report

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class Argument(KnobBase):
    """Reports the arguments as `sys.argv` has them when torch is imported."""

    def install(self, _agent: Agent, value: str, report: Report) -> None:
        flag = self.name.partition(":")[2]
        words = sys.argv[1:]
        seen = argument_of(words, flag)
        if value == "" and seen is not None:
            report(True, "given")
        elif seen == value:
            report(True, masked(self.name, seen))
        elif seen is None:
            report(False, reason="the training process did not get it; the command does not hand it on")
        else:
            report(False, masked(self.name, seen), "the training process got another value")


POSITIONAL_FROM_HERE = "--"


def argument_of(words: Sequence[str], flag: str) -> str | None:
    """The value of the last `flag` among arguments, "" for one that stands alone; None where there is none."""
    found: str | None = None
    for index, word in enumerate(words):
        if word == POSITIONAL_FROM_HERE:
            break
        if word.startswith(flag + "="):
            found = word[len(flag) + 1 :]
        elif is_short_with_number(word, flag):
            found = word[len(flag) :]
        elif word == flag and flag.startswith("-"):
            following = words[index + 1] if index + 1 < len(words) else POSITIONAL_FROM_HERE
            found = "" if looks_like_flag(following) else following
    return found


def is_short_with_number(word: str, flag: str) -> bool:
    """Whether `word` is a one-letter flag with a number right behind it, such as -j4."""
    return len(flag) == 2 and word.startswith(flag) and word[2:].isdecimal()


def looks_like_flag(word: str) -> bool:
    """Whether an argument is a flag of its own and no value: a dash that does not begin a number."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False
