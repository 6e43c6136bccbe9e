"""Lines of the user's code: their sampled time, and the device time that they cause.

Where a script was edited, the lines of a function may all have moved. A function of which both sides know lines, but
none in common, is therefore compared as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stepscope.comparison import thresholds
from stepscope.comparison.changes.rows import (
    DEVICE_PER_STEP,
    OF_SAMPLES,
    PER_STEP,
    Amount,
    Amounts,
    Pair,
    Thing,
    merged,
    rows,
)
from stepscope.model import DeviceLines
from stepscope.model.comparison import Change

_Function = tuple[str, str | None]


def of_device(view: DeviceLines | None, name: Callable[[str], str]) -> Amounts:
    """Device time a step by the line that caused it; of a trace without a device there is none."""
    if view is None or view.basis != "device":
        return {}
    return merged(
        (Thing(line.place.function or "", name(line.place.file), line.place.line), Amount(line.ms_per_step))
        for line in view.lines
        if line.ms_per_step is not None
    )


def changes(sampled: Sequence[Pair], device: Sequence[Pair], floor: float, *, shares: bool) -> list[Change]:
    """Lines whose time differs, of the training process and of the device."""
    of_process = (
        rows("line", OF_SAMPLES, _matched(sampled), thresholds.SHARE_FLOOR)
        if shares
        else rows("line", PER_STEP, _matched(sampled), floor)
    )
    return [
        *of_process,
        *rows("line", DEVICE_PER_STEP, _matched(device), floor),
    ]


def _matched(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs, with the lines of functions that moved as a whole added up."""
    ours = _lines(side for side, _ in pairs)
    theirs = _lines(side for _, side in pairs)
    moved = {key for key, lines in ours.items() if key in theirs and not lines & theirs[key]}
    if not moved:
        return list(pairs)
    return [(_without_lines(one, moved), _without_lines(other, moved)) for one, other in pairs]


def _lines(sides: Iterable[Amounts]) -> dict[_Function, set[int | None]]:
    found: dict[_Function, set[int | None]] = {}
    for side in sides:
        for thing in side:
            found.setdefault((thing.name, thing.file), set()).add(thing.line)
    return found


def _without_lines(side: Amounts, moved: set[_Function]) -> Amounts:
    return merged(
        (Thing(thing.name, thing.file) if (thing.name, thing.file) in moved else thing, amount)
        for thing, amount in side.items()
    )
