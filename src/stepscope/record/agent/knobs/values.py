"""What knobs take: small predicates over the text of a value. None of them loads anything."""

from __future__ import annotations

import re
from typing import Callable

from stepscope.errors import UsageError

_CPU_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DASHED = re.compile(r"-{1,2}[A-Za-z0-9][^\s=]*")
_ASSIGNED = re.compile(r"[+~]{0,2}[A-Za-z_][\w.\-/@]*")
_SETTING = r"[a-z][a-z0-9_]*:(?:[A-Za-z0-9_.\-]+|\[[A-Za-z0-9_.:,\-]*\])"
_ALLOCATOR_CONF = re.compile(f"{_SETTING}(?:,{_SETTING})*")
_HIGHEST_CPU = 16_383  # beyond any machine; bounds what a range may unfold to
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
TRUTHS = {"true": True, "false": False}
# What stepscope itself sends to the training process through its environment.
_OWN_PREFIX = "STEPSCOPE_"


def whole(least: int, most: int) -> Callable[[str], bool]:
    """A predicate: a whole number from `least` to `most`, in plain decimal digits."""

    def accepts(text: str) -> bool:
        return text.isascii() and text.isdecimal() and len(text) <= 9 and least <= int(text) <= most

    return accepts


def one_of(*words: str) -> Callable[[str], bool]:
    """A predicate: one of `words`."""
    return frozenset(words).__contains__


def truth(text: str) -> bool:
    """true or false."""
    return text in TRUTHS


def anything(_text: str) -> bool:
    """Any text, nothing included."""
    return True


def collector(text: str) -> bool:
    """freeze, off, or a threshold."""
    return text in ("freeze", "off") or whole(1, 999_999_999)(text)


def allocator_conf(text: str) -> bool:
    """Settings of torch's allocator, such as expandable_segments:True,max_split_size_mb:512."""
    return len(text) <= 1000 and _ALLOCATOR_CONF.fullmatch(text) is not None


def is_cpu_list(text: str) -> bool:
    """CPU numbers and ranges, separated by commas."""
    try:
        cpu_list(text)
    except UsageError:
        return False
    return True


def cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a list such as `0-3,8`. Raises UsageError."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = _CPU_RANGE.fullmatch(part.strip()) if part.isascii() else None
        first, last = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (1, 0)
        if first > last or last > _HIGHEST_CPU:
            raise UsageError(f"{text!r} is no list of CPUs; write such as 0-3,8")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def cpu_text(cpus: frozenset[int] | set[int]) -> str:
    """`cpus` as a list with ranges, the way the kernel writes it."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def is_variable(name: str) -> bool:
    """The name of an environment variable that is not one of stepscope's own."""
    return _VARIABLE.fullmatch(name) is not None and not name.startswith(_OWN_PREFIX)


def is_flag(name: str) -> bool:
    """A flag with its dashes, or the left side of a NAME=VALUE argument as configuration frameworks take them."""
    return _DASHED.fullmatch(name) is not None or _ASSIGNED.fullmatch(name) is not None
