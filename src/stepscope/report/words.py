"""Numbers, terms, paths and commands as a reader sees them, the same on every surface.

Three significant digits are what a noisy training machine justifies; None is a dash, never zero.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from stepscope.model.counted import things as things  # for who writes words.things
from stepscope.report.escape import plain

MISSING = "–"

SMALLEST = 0.001  # of any unit: less is the end of a float, no measurement
WHOLE = 0.995  # a share from which "of it" says nothing

_WORDS = msgspec.json.decode(Path(__file__).with_name("words.json").read_bytes(), type=dict[str, dict[str, str]])
SIGNALS = _WORDS["signals"]  # what cut the steps
PARTS = _WORDS["parts"]  # of a profiled step
WAIT_PARTS = _WORDS["wait_parts"]  # kinds of parts of a wait; where a line is known, it follows
STAGES = _WORDS["stages"]
STEP_REASONS = _WORDS["step_reasons"]  # why a step counts, or does not
STEP_EVENTS = _WORDS["step_events"]  # what happened in a step
ROLES = _WORDS["roles"]  # of processes
FRAME_KINDS = _WORDS["frame_kinds"]
COMPILER_EVENTS = _WORDS["compiler_events"]  # one of what compilers did


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits, thousands separated: 0.412, 41.2, 1,234."""
    if value is None:
        return MISSING
    size = abs(float(f"{value:.{digits}g}"))  # rounded first: 9.996 has two digits before the point
    if size == 0:
        return "0"
    if size < SMALLEST:  # no clock, counter or rate of ours tells so little
        return f"< {SMALLEST}"
    decimals = digits - 1
    while size >= 10 and decimals > 0:
        size /= 10
        decimals -= 1
    while size < 1:
        size *= 10
        decimals += 1
    return f"{value:,.{decimals}f}"


def _duration(value: float, unit: str) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f} {unit}"
    return f"{value:.1f} {unit}" if size >= 0.95 or size == 0 else f"{number(value, 2)} {unit}"


def milliseconds(value: float | None) -> str:
    """A duration given in ms, with its unit: 0.41 ms, 7.4 ms, 412 ms; seconds from ten seconds on."""
    if value is None:
        return MISSING
    return _duration(value / 1000, "s") if abs(value) >= 10_000 else _duration(value, "ms")


def nanoseconds(value: float | None) -> str:
    return MISSING if value is None else milliseconds(value / 1e6)


def seconds(value: float | None) -> str:
    return MISSING if value is None else _duration(value, "s")


def percent(share: float | None) -> str:
    """A fraction as percent: 67 %, 5 %, 4.2 %, < 0.1 %."""
    if share is None:
        return MISSING
    value = share * 100
    if value == 0:
        return "0 %"
    if abs(value) < 0.1:
        return "< 0.1 %"
    return f"{value:.1f}".removesuffix(".0") + " %" if abs(value) < 9.95 else f"{value:.0f} %"


def moment(time_ns: float | None, form: str) -> str | None:
    """A time in UTC, in the form of `strftime`; None for one that no clock shows."""
    from datetime import datetime, timezone

    try:
        return None if time_ns is None else datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime(form)
    except (OverflowError, ValueError, OSError):
        return None


def money(value: float | None) -> str:
    """An amount of the user's currency, with two digits however small it is: 1,234, 0.0123, 0.00041."""
    if value is None or value == 0 or abs(value) >= SMALLEST:
        return number(value)
    return format(Decimal(f"{value:.2g}"), "f")


def joules(value: float | None) -> str:
    """An energy with its unit: 0.41 mJ, 33.1 J, 12.3 kJ, 4.56 MJ."""
    if value is None:
        return MISSING
    units = ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"))
    factor, unit = next((pair for pair in units if abs(value) >= pair[0] * WHOLE), (1e-3, "mJ"))
    return f"{number(value / factor)} {unit if value else 'J'}"


def size(value: float | None) -> str:
    if value is None:
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{number(value)} {unit}"
        value /= 1024
    return f"{number(value)} TiB"


def count(value: int | float | None) -> str:
    """A number of things, thousands separated: 1,234, and where it is an average 4.5 or 0.10."""
    if value is None:
        return MISSING
    if float(value).is_integer() or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 0.95 else number(value, 2)


def term(name: Any) -> str:
    """An identifier as words: data_wait → data wait."""
    return plain(str(name).replace("_", " "))


def part(name: Any) -> str:
    """A part of a profiled step, or a phase, in words."""
    return PARTS.get(name, term(name))


def signal(name: Any) -> str:
    """What cut the steps, in words; several are joined by "+" or "," in the facts."""
    parts = [part.strip() for part in str(name).replace("+", ",").split(",")]
    return " or ".join(SIGNALS.get(part, plain(part)) for part in parts if part)


def evidence(row: dict[str, Any]) -> tuple[str, str]:
    """What was measured and its figure; a unit that the words before it name already is not said again."""
    metric, unit = plain(row["metric"]), str(row["unit"])
    return metric, quantity(row["value"], "" if unit in metric.split() else unit)


_PLURAL = re.compile(r"(?<=[sxh])es$|(?<=[a-z]{2})s$")


def quantity(value: Any, unit: str) -> str:
    """An evidence value with its unit: fractions as percent, times and counts rounded, text as it is."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return plain(f"{value} {unit}".strip() if unit not in ("", "text", "name", "1") else value)
    if unit in ("share", "fraction", "ratio of step", "of step"):
        return percent(value)
    if unit in ("%", "pct", "percent"):
        return f"{number(value)} %"
    if unit in ("bytes", "B"):
        return size(value)
    if unit in ("ms", "milliseconds"):
        return milliseconds(value)
    if value == 1:
        unit = _PLURAL.sub("", unit)
    return plain(f"{count(value)} {unit}".strip() if unit not in ("", "1", "count") else count(value))


def shortened(names: Iterable[str], room: int) -> dict[str, str]:
    """By name, each in at most `room` characters, cut in the middle; as `web/src/lib/labels.ts` does.

    Names that differ stay different: those of which both ends are alike are shown from where they begin to differ, and
    what even then is alike gets a number.
    """
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(_middle(name, room), []).append(name)
    labels: dict[str, str] = {}
    used: set[str] = set()
    for group in alike.values():
        same = sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, zip(*group, strict=False)))
        for name in group:
            label = _middle(name, room) if len(group) == 1 else _differing(name, same, room)
            number = 2
            while label in used:
                label = f"{_middle(name, room - len(str(number)) - 2)} #{number}"
                number += 1
            used.add(label)
            labels[name] = label
    return labels


def _middle(name: str, room: int) -> str:
    head = int((room - 1) * 0.45)  # the end says more of a path or a module than its beginning
    return name if len(name) <= room else f"{name[:head]}…{name[len(name) - (room - 1 - head) :]}"


def _differing(name: str, same: int, room: int) -> str:
    start = max(0, same - 2)
    head = min(room // 4, start)
    return f"{name[:head]}…{_middle(name[start:], room - head - 1)}"


MAX_COMMAND = 4_000  # characters: whole, so that it can be copied
_LIBRARY = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+)/")


class Shortener:
    """Shows files relative to the folder the run was started in or to its user roots, libraries from their name on."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        roots = [run.get("cwd"), *(run.get("user_roots") or ())]
        self._roots = [str(root).rstrip(os.sep) + os.sep for root in roots if root and root != os.sep]

    def __call__(self, file: str, line: int | None = None) -> str:
        """`file:line`, harmless to print."""
        inside = next((root for root in self._roots if file.startswith(root)), "")
        shown = _LIBRARY.sub("", file[len(inside) :])
        return plain(shown) + (f":{line}" if line is not None else "")


def command_line(run: Mapping[str, Any]) -> str:
    """The recorded command as it was typed, for a shell."""
    return plain(shlex.join(str(word) for word in run.get("command") or ()), MAX_COMMAND)


def near(path: str, folder: str) -> str:
    """A path as one who stands in `folder` writes it: relative below it, absolute elsewhere."""
    inside = folder.rstrip(os.sep) + os.sep
    return path[len(inside) :] if path.startswith(inside) and path != inside else path
