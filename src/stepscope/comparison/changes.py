"""What grew, shrank, came or went between two sides: rows of each kind. A new kind is a function here and one line in
`changes`.

Runs are compared pair by pair; a row holds the means over the pairs in which both sides know its kind. Where no pair
does, the kind is absent, with the reason. A row needs more than the floor of `thresholds`, more than sampling can make
of nothing, and more than runs differ among themselves: with three pairs or more by the interval of the paired
differences, with fewer by a share of the amount. The rest is "same" and left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from stepscope.analyze.views import trace_diff as views
from stepscope.analyze.views.trace_diff import STEP
from stepscope.comparison import estimates, thresholds
from stepscope.comparison.profile import (
    CORES_USED,
    LOAD,
    LONGEST,
    MADE,
    Amount,
    Amounts,
    Profile,
    Thing,
    absent_of,
    merged,
    relative_to,
)
from stepscope.model import Diagnosis, Finding
from stepscope.model.comparison import Change, Measure
from stepscope.model.views import Diff, DiffRow

MAX_ROWS = 200  # of a kind; the rest are smaller than all of these
NS_PER_MS = 1e6
PER_STEP = "ms per step"
DEVICE_PER_STEP = "ms of the device per step"
IN_ALL = "ms"
OF_SAMPLES = "% of samples"  # where no step is known
GREW, SHRANK, NEW, GONE, CHANGED, SAME = "grew", "shrank", "new", "gone", "changed", "same"
ALL_KERNELS = "all kernels"
ALL_OPERATORS = "all operators, on the host"
OTHER_BASIS = (
    "one side's traces hold device work and the other's do not: parts of their steps have nothing in common, so the "
    "TensorBoard plugin's parts stand in"
)
_PRESENCE = (MADE, "knob ", "$")  # of these, being there is what differs

Value = TypeVar("Value")
Profiles = Sequence[tuple[Profile, Profile]]
Kind = tuple[str, list[Change], str | None]  # its name, its rows, and why there can be none
Pair = tuple[Amounts, Amounts]  # (baseline, candidate)
Of = Callable[[DiffRow], tuple[float | None, float | None]]
NOTHING = Amount(0.0)


class Changes(Struct, frozen=True):
    """All rows, why a kind has none, and what must be said beside them."""

    rows: tuple[Change, ...]
    absent: dict[str, str]
    notes: tuple[str, ...]


def changes(pairs: Profiles, measures: Sequence[tuple[Measure, Measure]], *, profiled: bool) -> Changes:
    """What differs. `measures` are the pairs behind the headline, `profiled` if they are of steps in traces."""
    diffs = [views.diff(one.traced, other.traced) for one, other in pairs]
    floor = thresholds.CHANGE_FLOOR * _mean_step_ms(measures, diffs)
    found_phases = [] if profiled else _phases(measures, floor)  # there, categories are the same parts
    categories, note = category_changes(diffs, floor)
    untraced = _untraced(pairs)
    judged, silent = _findings(pairs, floor)
    kinds: list[Kind] = [
        ("phase", found_phases, _no_phases(measures, profiled=profiled)),
        ("category", categories, untraced or why_absent(diffs, "overview")),
        ("function", _functions(pairs, floor), _why(pairs, "function")),
        ("line", _lines(pairs, floor), _why(pairs, "line")),
        ("operator", _operators(diffs, floor), untraced or why_absent(diffs, "operators")),
        ("kernel", kernel_changes(diffs, floor), untraced or why_absent(diffs, "kernels")),
        ("finding", judged, _why(pairs, "finding")),
        ("utilisation", utilisation_changes(*_sides(pairs, lambda one: one.utilisation)), None),
        ("environment", environment_changes(*_sides(pairs, lambda one: one.environment)), None),
        ("window", window_changes(*_sides(pairs, lambda one: one.windows)), None),
    ]
    absent = {kind: why for kind, found, why in kinds if why is not None and not found}
    absent |= {f"finding {rule}": why for rule, why in silent.items()}
    notes = [note] if note else []
    notes += [
        f"{kind}: the {len(found) - MAX_ROWS} smallest differences are left out"
        for kind, found, _ in kinds
        if len(found) > MAX_ROWS
    ]
    shown = tuple(change for _, found, _ in kinds for change in found[:MAX_ROWS])
    return Changes(shown, absent, (*notes, *_notes(diffs)))


def _no_phases(measures: Sequence[tuple[Measure, Measure]], *, profiled: bool) -> str | None:
    if not measures:
        return "no step time is known of both sides"
    return "traces know no phases; categories are the parts of their steps" if profiled else None


def _untraced(pairs: Profiles) -> str | None:
    """Which sides have no traces at all, in any run."""
    lacking = [
        side[0].side
        for side in zip(*pairs, strict=True)
        if not any(one.traced.overviews or one.traced.operators or one.traced.kernels for one in side)
    ]
    return f"{' and '.join(lacking)}: no traces of torch.profiler" if lacking else None


def _sides(pairs: Profiles, value: Callable[[Profile], Value]) -> tuple[list[Value], list[Value]]:
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


def _why(pairs: Profiles, kind: str) -> str | None:
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


def _phases(measures: Sequence[tuple[Measure, Measure]], floor: float) -> list[Change]:
    """Exclusive parts of the measured step: what the difference of the mean step is made of."""

    def of(side: Measure) -> Amounts:
        return {Thing(part.category): Amount(part.ms) for part in side.phases}

    return rows("phase", PER_STEP, [(of(one), of(other)) for one, other in measures], floor)


def category_changes(found: Sequence[Diff], floor: float) -> tuple[list[Change], str | None]:
    """Parts of the profiled step, all that there are, and what must be said of them."""
    ours = _traced(found, "overview", _host)
    before, after = ({thing.name for pair in ours for thing in pair[side]} - {STEP} for side in (0, 1))
    if before and after and not before & after:
        return _parts(_traced(found, "tensorboard", _host), _unit(found), floor), OTHER_BASIS
    return _parts(ours, _unit(found), floor), None


def _operators(found: Sequence[Diff], floor: float) -> list[Change]:
    """Operators by self time of the host, and by self time of the device where there is one; their sum first."""
    unit = _unit(found)
    host, device = _traced(found, "operators", _host), _traced(found, "operators", _device)
    sums = _sum(host, ALL_OPERATORS, "operator", unit, floor)
    on_device = DEVICE_PER_STEP if unit == PER_STEP else "ms of the device"
    return [*sums, *rows("operator", unit, host, floor), *rows("operator", on_device, device, floor)]


def kernel_changes(found: Sequence[Diff], floor: float) -> list[Change]:
    """Kernels by time on the device; their sum first."""
    pairs = _traced(found, "kernels", _host)
    unit = DEVICE_PER_STEP if _unit(found) == PER_STEP else "ms of the device"
    return [*_sum(pairs, ALL_KERNELS, "kernel", unit, floor), *rows("kernel", unit, pairs, floor)]


def why_absent(found: Sequence[Diff], table: str) -> str | None:
    """Why no pair has the table."""
    reasons = [one.absent[table] for one in found if table in one.absent]
    return reasons[0] if reasons and len(reasons) == len(found) else None


def _parts(pairs: Sequence[Pair], unit: str, floor: float) -> list[Change]:
    return [change for change in rows("category", unit, pairs, floor) if change.name != STEP]


def _sum(pairs: Sequence[Pair], name: str, kind: str, unit: str, floor: float) -> list[Change]:
    """The row of all together, kept where nothing changed: that all stayed the same is worth a line."""
    sums = [(total(name, one), total(name, other)) for one, other in pairs]
    return [row(kind, Thing(name), unit, sums, floor)] if any(one or other for one, other in sums) else []


def _unit(found: Sequence[Diff]) -> str:
    return PER_STEP if all(one.per_step for one in found) else IN_ALL


def _host(one: DiffRow) -> tuple[float | None, float | None]:
    return one.base_ns, one.other_ns


def _device(one: DiffRow) -> tuple[float | None, float | None]:
    return one.base_device_ns, one.other_device_ns


def _traced(found: Sequence[Diff], table: str, value: Of) -> list[Pair]:
    """The amounts of a table, of the pairs whose traces have it."""
    pairs: list[Pair] = []
    for one in found:
        if table in one.tables:
            sides: tuple[dict[Thing, Amount], dict[Thing, Amount]] = ({}, {})
            for row in one.tables[table]:
                for side, ns in zip(sides, value(row), strict=True):
                    if ns is not None:
                        side[Thing(row.key)] = Amount(ns / NS_PER_MS)
            pairs.append(sides)
    return pairs


def _functions(pairs: Profiles, floor: float) -> list[Change]:
    """Functions in which the training process stands for another time."""
    known = [pair for pair in pairs if pair[0].functions and pair[1].functions and pair[0].shares == pair[1].shares]
    shares = bool(known) and known[0][0].shares
    return _sampled("function", [(one.functions, other.functions) for one, other in known], floor, shares=shares)


def _sampled(kind: str, pairs: Sequence[Pair], floor: float, *, shares: bool) -> list[Change]:
    """Rows of sampled time, which is percent of the samples where no step is known (`shares`)."""
    if shares:
        return rows(kind, OF_SAMPLES, pairs, thresholds.SHARE_FLOOR)
    return rows(kind, PER_STEP, pairs, floor)


def _lines(pairs: Profiles, floor: float) -> list[Change]:
    known = [pair for pair in pairs if pair[0].shares == pair[1].shares]
    sampled, device = _both(known, lambda one: one.lines), _both(pairs, lambda one: one.device_lines)
    return line_changes(sampled, device, floor, shares=bool(known) and known[0][0].shares)


def _both(pairs: Profiles, amounts: Callable[[Profile], Amounts]) -> list[tuple[Amounts, Amounts]]:
    """Of the pairs in which both sides have some."""
    found = [(amounts(one), amounts(other)) for one, other in pairs]
    return [pair for pair in found if pair[0] and pair[1]]


def line_changes(sampled: Sequence[Pair], device: Sequence[Pair], floor: float, *, shares: bool) -> list[Change]:
    """Lines of the user's code whose time differs, of the training process and of the device that they keep busy.

    Where a script was edited, the lines of a function may all have moved. A function of which both sides know lines,
    but none in common, is therefore compared as a whole.
    """
    return [
        *_sampled("line", _matched(sampled), floor, shares=shares),
        *rows("line", DEVICE_PER_STEP, _matched(device), floor),
    ]


def _matched(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs, with the lines of functions that moved as a whole added up."""
    ours = _lines_of(side for side, _ in pairs)
    theirs = _lines_of(side for _, side in pairs)
    moved = {key for key, lines in ours.items() if key in theirs and not lines & theirs[key]}
    if not moved:
        return list(pairs)
    return [(_without_lines(one, moved), _without_lines(other, moved)) for one, other in pairs]


def _lines_of(sides: Iterable[Amounts]) -> dict[tuple[str, str | None], set[int | None]]:
    found: dict[tuple[str, str | None], set[int | None]] = {}
    for side in sides:
        for thing in side:
            found.setdefault((thing.name, thing.file), set()).add(thing.line)
    return found


def _without_lines(side: Amounts, moved: set[tuple[str, str | None]]) -> Amounts:
    return merged(
        (Thing(thing.name, thing.file) if (thing.name, thing.file) in moved else thing, amount)
        for thing, amount in side.items()
    )


def _findings(pairs: Profiles, floor: float) -> tuple[list[Change], dict[str, str]]:
    sides = [
        [Judged(one.diagnosis, one.roots) for one in side if one.diagnosis is not None]
        for side in ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    ]
    return finding_changes(sides[0], sides[1], floor) if all(sides) else ([], {})


class Judged(Struct, frozen=True):
    """What the rules said of one run; `roots` are the folders of its own code."""

    diagnosis: Diagnosis
    roots: tuple[str, ...]


class _Key(Struct, frozen=True):
    rule: str
    file: str | None
    place: str | int | None  # the function, and where none is known the line


class _Seen(Struct, frozen=True):
    rule: str
    title: str
    cost_ms: float
    file: str | None
    line: int | None


def finding_changes(
    baseline: Sequence[Judged], candidate: Sequence[Judged], floor: float
) -> tuple[list[Change], dict[str, str]]:
    """Findings that went, came, or cost another amount, the largest difference first; and by rule why it is not told.

    A rule that was not judged on a side says nothing there: such a finding is neither gone nor new. Of several runs a
    side has a finding when more than half of them do; its cost is the mean over those.
    """
    sides = [_most(side) for side in (baseline, candidate)]
    silent = [_not_judged(side) for side in (baseline, candidate)]
    found, absent = [], {}
    for before, after in _same_findings(*sides):
        key = before or after
        assert key is not None
        why = silent[1 if after is None else 0].get(key.rule) if before is None or after is None else None
        if why is not None:
            absent[key.rule] = why
            continue
        found.append(_finding(sides[0].get(before) if before else None, sides[1].get(after) if after else None, floor))
    return ordered(change for change in found if change.status != SAME), absent


def _finding(before: _Seen | None, after: _Seen | None, floor: float) -> Change:
    shown = after or before
    assert shown is not None
    difference = (after.cost_ms if after else 0.0) - (before.cost_ms if before else 0.0)
    if before is None or after is None:
        status = NEW if before is None else GONE
    else:
        least = max(floor, thresholds.SAME_SHARE * max(before.cost_ms, after.cost_ms))
        status = SAME if abs(difference) < least else GREW if difference > 0 else SHRANK
    return Change(
        kind="finding",
        name=shown.title,
        baseline=before.cost_ms if before else None,
        candidate=after.cost_ms if after else None,
        difference=difference,
        unit=PER_STEP,
        status=status,
        file=shown.file,
        line=shown.line,
        rule=shown.rule,
    )


def _same_findings(ours: dict[_Key, _Seen], theirs: dict[_Key, _Seen]) -> list[tuple[_Key | None, _Key | None]]:
    """Keys that mean the same: equal ones first; of a rule that is left once on each side, those two."""
    pairs: list[tuple[_Key | None, _Key | None]] = [(key, key) for key in ours if key in theirs]
    left = [key for key in ours if key not in theirs]
    right = [key for key in theirs if key not in ours]
    for key in left:
        same = [other for other in right if other.rule == key.rule]
        alone = len(same) == 1 and sum(other.rule == key.rule for other in left) == 1
        pairs.append((key, same[0] if alone else None))
    matched = {after for _, after in pairs}
    return [*pairs, *((None, key) for key in right if key not in matched)]


def _most(side: Sequence[Judged]) -> dict[_Key, _Seen]:
    """The findings of more than half of the runs."""
    seen: dict[_Key, list[_Seen]] = {}
    for judged in side:
        name = relative_to(judged.roots)
        of_run: dict[_Key, _Seen] = {}
        for finding in judged.diagnosis.findings:
            key, one = _seen(finding, name)
            of_run.setdefault(key, one)
        for key, one in of_run.items():
            seen.setdefault(key, []).append(one)
    return {
        key: msgspec.structs.replace(runs[0], cost_ms=math.fsum(one.cost_ms for one in runs) / len(runs))
        for key, runs in seen.items()
        if 2 * len(runs) > len(side)
    }


def _seen(finding: Finding, name: Callable[[str], str]) -> tuple[_Key, _Seen]:
    """A finding with what it is matched by."""
    place = finding.where[0] if finding.where else None
    if place is None:
        file, line, inside = None, None, None
    else:
        file, line, inside = name(place.file), place.line, place.function or place.line
    return _Key(finding.rule, file, inside), _Seen(finding.rule, finding.title, finding.cost_ms_per_step, file, line)


def _not_judged(side: Sequence[Judged]) -> dict[str, str]:
    """Rule -> what it lacked, of those that were judged in no run of the side."""
    found: dict[str, str] = {}
    for judged in side:
        found |= {one.rule: one.needs for one in judged.diagnosis.abstained if not one.quiet}
        found |= {one.rule: f"ignored: {one.reason}" for one in judged.diagnosis.ignored}
    for judged in side:
        own = {one.rule for one in judged.diagnosis.abstained} | {one.rule for one in judged.diagnosis.ignored}
        found = {rule: why for rule, why in found.items() if rule in own}
    return found


def environment_changes(baseline: Sequence[Mapping[str, str]], candidate: Sequence[Mapping[str, str]]) -> list[Change]:
    """What differs between the sides, in the order of the report. A value that varies within a side names them all."""
    found = []
    for name in dict.fromkeys(name for side in (*baseline, *candidate) for name in side):
        before, after = (_joined(side, name) for side in (baseline, candidate))
        if before == after or (name == LOAD and _is_near(before, after)):
            continue
        if (before is None or after is None) and not name.startswith(_PRESENCE):
            continue  # not known is no difference
        status = NEW if before is None else GONE if after is None else CHANGED
        found.append(Change("environment", name, before, after, None, "", status))
    return found


def _joined(side: Sequence[Mapping[str, str]], name: str) -> str | None:
    known = sorted({run[name] for run in side if name in run})
    return ", ".join(known)[:LONGEST] if known else None


def _is_near(before: str | None, after: str | None) -> bool:
    sides = [_numbers(text) for text in (before, after)]
    if not all(sides):
        return False
    means = [sum(side) / len(side) for side in sides]
    return abs(means[0] - means[1]) < thresholds.LOAD_FLOOR


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        return []


def utilisation_changes(
    baseline: Sequence[Mapping[str, float]], candidate: Sequence[Mapping[str, float]]
) -> list[Change]:
    """What both sides know and what differs, means over runs. Less in a shorter step is no loss: figures alone."""
    found = []
    for name in dict.fromkeys(name for side in baseline for name in side):
        sides = [[run[name] for run in side if name in run] for side in (baseline, candidate)]
        if not all(sides):
            continue
        before, after = (math.fsum(side) / len(side) for side in sides)
        unit, least = ("%", thresholds.UTILISATION_FLOOR)
        if name == CORES_USED:
            unit, least = "cores", thresholds.CORES_FLOOR
        difference = after - before
        status = SAME if abs(difference) < least else GREW if difference > 0 else SHRANK
        found.append(Change("utilisation", name, before, after, difference, unit, status))
    return ordered(change for change in found if change.status != SAME)


def window_changes(baseline: Sequence[Mapping[str, str]], candidate: Sequence[Mapping[str, str]]) -> list[Change]:
    """Which steps the figures are of: how many, left out or profiled. A row for each name, equal or not."""
    found = []
    for name in dict.fromkeys(name for side in (*baseline, *candidate) for name in side):
        known = [dict.fromkeys(run[name] for run in side if name in run) for side in (baseline, candidate)]
        before, after = ("; ".join(values) if values else None for values in known)
        status = SAME if before == after else NEW if before is None else GONE if after is None else CHANGED
        found.append(Change("window", name, before, after, None, "", status))
    return found


def rows(kind: str, unit: str, pairs: Sequence[Pair], floor: float) -> list[Change]:
    """A row for each thing that differs, the largest difference first."""
    things = dict.fromkeys(thing for pair in pairs for side in pair for thing in side)
    found = (row(kind, thing, unit, pairs, floor) for thing in things)
    return ordered(change for change in found if change.status != SAME)


def row(kind: str, thing: Thing, unit: str, pairs: Sequence[Pair], floor: float) -> Change:
    """Of one thing, also where it stayed the same. Values are means over the runs of a side."""
    values = [[side.get(thing) for side in pair] for pair in pairs]
    known = [any(value[side] is not None for value in values) for side in (0, 1)]
    amounts = [(one or NOTHING, other or NOTHING) for one, other in values]
    means = [math.fsum(pair[side].value for pair in amounts) / max(1, len(amounts)) for side in (0, 1)]
    difference = means[1] - means[0]
    status = SAME
    if abs(difference) >= floor and _is_told(amounts, means):
        status = NEW if not known[0] else GONE if not known[1] else GREW if difference > 0 else SHRANK
    return Change(
        kind=kind,
        name=thing.name,
        baseline=means[0] if known[0] else None,
        candidate=means[1] if known[1] else None,
        difference=difference,
        unit=unit,
        status=status,
        file=thing.file,
        line=thing.line,
    )


def total(name: str, amounts: Amounts) -> Amounts:
    """The sum of all under one name."""
    return {Thing(name): Amount(math.fsum(amount.value for amount in amounts.values()))} if amounts else {}


def ordered(changes: Iterable[Change]) -> list[Change]:
    """The largest difference first; what has none by name."""
    return sorted(changes, key=lambda one: (-abs(one.difference or 0), one.name, one.file or "", one.line or 0))


def _is_told(amounts: Sequence[tuple[Amount, Amount]], means: Sequence[float]) -> bool:
    difference = abs(means[1] - means[0])
    if difference <= thresholds.SAMPLING_SIGMAS * _sampling_error(amounts):
        return False
    count = len(amounts)
    if count < thresholds.INTERVAL_PAIRS:
        return difference >= thresholds.SAME_SHARE * max(abs(mean) for mean in means)
    spread = statistics.stdev(other.value - one.value for one, other in amounts)
    return difference > estimates.student(thresholds.CONFIDENCE, count - 1) * spread / math.sqrt(count)


def _sampling_error(amounts: Sequence[tuple[Amount, Amount]]) -> float:
    """Standard error of the difference of means, as far as counting samples makes it: n of them vary by their root."""
    variance = math.fsum(_variance(amount, other) for pair in amounts for amount, other in (pair, pair[::-1]))
    return math.sqrt(variance) / max(1, len(amounts))


def _variance(amount: Amount, other: Amount) -> float:
    if amount.samples:
        return amount.value**2 / amount.samples
    # nothing was seen here: one sample could have been missed, and is worth what it is on the other side
    return (other.value / other.samples) ** 2 if other.samples else 0.0
