"""All kinds of changes between two sides. A new kind is one file in `compare.changes` and one line in `changes`.

Runs are compared pair by pair; a row holds the means over the pairs in which both sides know its kind. Where no pair
does, the kind is absent, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from stepscope.analyze.views.diff import STEP
from stepscope.comparison import thresholds
from stepscope.comparison.changes import environment, findings, functions, lines, phases, traced, utilisation, windows
from stepscope.comparison.changes.findings import Judged
from stepscope.comparison.changes.rows import Amounts
from stepscope.comparison.profile import Profile, absent_of
from stepscope.model.comparison import Change, Measure
from stepscope.model.views.diff import Diff

MAX_ROWS = 200  # of a kind; the rest are smaller than all of these
NS_PER_MS = 1e6
Value = TypeVar("Value")
Pairs = Sequence[tuple[Profile, Profile]]
Kind = tuple[str, list[Change], str | None]  # its name, its rows, and why there can be none


class Changes(Struct, frozen=True):
    """All rows, why a kind has none, and what must be said beside them."""

    rows: tuple[Change, ...]
    absent: dict[str, str]
    notes: tuple[str, ...]


def changes(pairs: Pairs, measures: Sequence[tuple[Measure, Measure]], *, profiled: bool) -> Changes:
    """What differs. `measures` are the pairs behind the headline, `profiled` if they are of steps in traces."""
    diffs = traced.diffs([(one.traced, other.traced) for one, other in pairs])
    floor = thresholds.CHANGE_FLOOR * _mean_step_ms(measures, diffs)
    found_phases = [] if profiled else phases.changes(measures, floor)  # there, categories are the same parts
    categories, note = traced.categories(diffs, floor)
    untraced = _untraced(pairs)
    judged, silent = _findings(pairs, floor)
    kinds: list[Kind] = [
        ("phase", found_phases, _no_phases(measures, profiled=profiled)),
        ("category", categories, untraced or traced.why_absent(diffs, "overview")),
        ("function", _functions(pairs, floor), _why(pairs, "function")),
        ("line", _lines(pairs, floor), _why(pairs, "line")),
        ("operator", traced.operators(diffs, floor), untraced or traced.why_absent(diffs, "operators")),
        ("kernel", traced.kernels(diffs, floor), untraced or traced.why_absent(diffs, "kernels")),
        ("finding", judged, _why(pairs, "finding")),
        ("utilisation", utilisation.changes(*_sides(pairs, lambda one: one.utilisation)), None),
        ("environment", environment.changes(*_sides(pairs, lambda one: one.environment)), None),
        ("window", windows.changes(*_sides(pairs, lambda one: one.windows)), None),
    ]
    absent = {kind: why for kind, found, why in kinds if why is not None and not found}
    absent |= {f"finding {rule}": why for rule, why in silent.items()}
    notes = [note] if note else []
    notes += [
        f"{kind}: the {len(found) - MAX_ROWS} smallest differences are left out"
        for kind, found, _ in kinds
        if len(found) > MAX_ROWS
    ]
    rows = tuple(change for _, found, _ in kinds for change in found[:MAX_ROWS])
    return Changes(rows, absent, (*notes, *_notes(diffs)))


def _no_phases(measures: Sequence[tuple[Measure, Measure]], *, profiled: bool) -> str | None:
    if not measures:
        return "no step time is known of both sides"
    return "traces know no phases; categories are the parts of their steps" if profiled else None


def _untraced(pairs: Pairs) -> str | None:
    """Which sides have no traces at all, in any run."""
    lacking = [side[0].side for side in zip(*pairs, strict=True) if not any(_is_traced(one) for one in side)]
    return f"{' and '.join(lacking)}: no traces of torch.profiler" if lacking else None


def _is_traced(one: Profile) -> bool:
    return bool(one.traced.overviews or one.traced.operators or one.traced.kernels)


def _sides(pairs: Pairs, value: Callable[[Profile], Value]) -> tuple[list[Value], list[Value]]:
    """A part of all profiles of either side."""
    return [value(one) for one, _ in pairs], [value(other) for _, other in pairs]


def _mean_step_ms(measures: Sequence[tuple[Measure, Measure]], diffs: Sequence[Diff]) -> float:
    """Of the baseline; where no step is known, all the time that its operators or kernels take."""
    if measures:
        return sum(one.mean_ms for one, _ in measures) / len(measures)
    steps = [row.base_ns for one in diffs for row in one.tables.get("overview", ()) if row.key == STEP and row.base_ns]
    if steps:
        return sum(steps) / len(steps) / NS_PER_MS
    totals = [
        sum(row.base_ns or 0 for row in one.tables[table])
        for one in diffs
        for table in ("operators", "kernels")
        if table in one.tables
    ]
    return max(totals, default=0) / NS_PER_MS


def _functions(pairs: Pairs, floor: float) -> list[Change]:
    known = [pair for pair in pairs if pair[0].functions and pair[1].functions and pair[0].shares == pair[1].shares]
    shares = bool(known) and known[0][0].shares
    return functions.changes([(one.functions, other.functions) for one, other in known], floor, shares=shares)


def _lines(pairs: Pairs, floor: float) -> list[Change]:
    known = [pair for pair in pairs if pair[0].shares == pair[1].shares]
    sampled, device = _both(known, lambda one: one.lines), _both(pairs, lambda one: one.device_lines)
    return lines.changes(sampled, device, floor, shares=bool(known) and known[0][0].shares)


def _both(pairs: Pairs, amounts: Callable[[Profile], Amounts]) -> list[tuple[Amounts, Amounts]]:
    """Of the pairs in which both sides have some."""
    found = [(amounts(one), amounts(other)) for one, other in pairs]
    return [pair for pair in found if pair[0] and pair[1]]


def _findings(pairs: Pairs, floor: float) -> tuple[list[Change], dict[str, str]]:
    sides = [
        [Judged(one.diagnosis, one.roots) for one in side if one.diagnosis is not None]
        for side in ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    ]
    return findings.changes(sides[0], sides[1], floor) if all(sides) else ([], {})


def _why(pairs: Pairs, kind: str) -> str | None:
    """Why a side has none of a kind; sides that lack it for the same reason together."""
    sides = ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    lacking: dict[str, list[str]] = {}
    for side in sides:
        reason = absent_of(side, kind)
        if reason is not None:
            lacking.setdefault(reason, []).append(side[0].side)
    return "; ".join(f"{' and '.join(labels)}: {reason}" for reason, labels in lacking.items()) or None


def _notes(diffs: Sequence[Diff]) -> tuple[str, ...]:
    """What the comparison of traces says of itself, but for how many steps each has: that is among the windows."""
    said = (note for one in diffs if one.tables for note in (one.notes[1:] if one.per_step else one.notes))
    return tuple(dict.fromkeys(said))
