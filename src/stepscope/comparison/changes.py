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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from stepscope.analyze.views import trace_diff as views
from stepscope.analyze.views.trace_diff import STEP
from stepscope.comparison import thresholds
from stepscope.comparison.profile import (
    CORES_USED,
    LOAD,
    LONGEST,
    MADE,
    Amount,
    Amounts,
    Profile,
    Thing,
    merged,
    relative_to,
)
from stepscope.comparison.verdicts import margin
from stepscope.model import Diagnosis, Finding
from stepscope.model.comparison import Change, Left, Measure, Version
from stepscope.model.views import Diff

MAX_ROWS = 200  # of a kind; the rest are smaller than all of these
NS_PER_MS = 1e6
PER_STEP = "ms per step"
OF_DEVICE = "ms of the device"
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

Profiles = Sequence[tuple[Profile, Profile]]
Pair = tuple[Amounts, Amounts]  # (baseline, candidate)
Finder = tuple[str, str | None, str | int | None]  # what a finding is matched by: rule, file, function (else line)
Found = dict[Finder, list[tuple[Finding, str | None]]]  # in each run that has it, with its file as it is shown
NOTHING = Amount(0.0)
OF_A_MACHINE = frozenset({LOAD})  # what no fix changes
SOURCE = "source"


def changes(
    pairs: Profiles, measures: Sequence[tuple[Measure, Measure]], *, profiled: bool
) -> tuple[tuple[Change, ...], dict[str, str], list[str]]:
    """(all rows, why a kind has none, what must be said beside them).

    `measures` are the pairs behind the headline, `profiled` if they are of steps in traces.
    """
    sides = ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    diffs = [views.diff(one.traced, other.traced) for one, other in pairs]
    floor = thresholds.CHANGE_FLOOR * _mean_step_ms(measures, diffs)
    unphased = "traces know no phases; categories are the parts of their steps" if profiled else None
    categories, note = _categories(diffs, floor)
    kernels, on_device = _traced(diffs, "kernels"), _unit(diffs, device=True)  # by time on the device
    findings, silent = finding_changes(ours, theirs, floor)
    utilisation = utilisation_changes([one.utilisation for one in ours], [one.utilisation for one in theirs])
    environment = environment_changes([one.environment for one in ours], [one.environment for one in theirs])
    windows = text_changes("window", [one.windows for one in ours], [one.windows for one in theirs], "; ".join)
    kinds: list[tuple[str, list[Change], str | None]] = [  # the name, the rows, and why there can be none
        (
            "phase",
            [] if profiled else _phases(measures, floor),  # there, categories are the same parts
            unphased if measures else "no step time is known of both sides",
        ),
        ("category", categories, _untraced(sides, diffs, "overview")),
        ("function", _sampled("function", pairs, lambda one: one.functions, floor), _why(sides, "function")),
        ("line", _lines(pairs, floor), _why(sides, "line")),
        ("operator", _operators(diffs, floor), _untraced(sides, diffs, "operators")),
        ("kernel", rows("kernel", on_device, kernels, floor, together=ALL_KERNELS), _untraced(sides, diffs, "kernels")),
        ("finding", findings, _why(sides, "finding")),
        ("utilisation", utilisation, None),
        ("environment", environment, None),
        ("window", windows, None),
    ]
    absent = {kind: why for kind, found, why in kinds if why is not None and not found}
    absent |= {f"finding {rule}": why for rule, why in silent.items()}
    notes = [note] if note else []
    notes += [
        f"{kind}: the {len(found) - MAX_ROWS} smallest differences are left out"
        for kind, found, _ in kinds
        if len(found) > MAX_ROWS
    ]
    for one in diffs:  # what it says of itself, but for how many steps each has: that is among the windows
        notes += one.notes[1 if one.per_step else 0 :] if one.tables else ()
    shown = tuple(change for _, found, _ in kinds for change in found[:MAX_ROWS])
    return shown, absent, notes


def _mean_step_ms(measures: Sequence[tuple[Measure, Measure]], diffs: Sequence[Diff]) -> float:
    """Of the baseline; where no step is known, all the time that its operators or kernels take."""
    if measures:
        return sum(one.mean_ms for one, _ in measures) / len(measures)
    steps = [row.base_ns for one in diffs for row in one.tables.get("overview", ()) if row.key == STEP and row.base_ns]
    if steps:
        return sum(steps) / len(steps) / NS_PER_MS
    tables = [one.tables[table] for one in diffs for table in ("operators", "kernels") if table in one.tables]
    return max((sum(row.base_ns or 0 for row in rows) for rows in tables), default=0) / NS_PER_MS


def _why(sides: tuple[list[Profile], list[Profile]], kind: str) -> str | None:
    """Why all runs of a side have none of a kind; sides that lack it for the same reason together."""
    lacking: dict[str, list[str]] = {}
    for side in sides:
        reasons = [one.absent.get(kind) for one in side]
        if reasons[0] is not None and None not in reasons:
            lacking.setdefault(reasons[0], []).append(side[0].side)
    return "; ".join(f"{' and '.join(labels)}: {reason}" for reason, labels in lacking.items()) or None


def _untraced(sides: tuple[list[Profile], list[Profile]], diffs: Sequence[Diff], table: str) -> str | None:
    """Which sides have no traces at all, in any run; else why no pair has the table."""
    lacking = [
        side[0].side
        for side in sides
        if not any(one.traced.overviews or one.traced.operators or one.traced.kernels for one in side)
    ]
    if lacking:
        return f"{' and '.join(lacking)}: no traces of torch.profiler"
    reasons = [one.absent.get(table) for one in diffs]
    return None if None in reasons else reasons[0]


def _phases(measures: Sequence[tuple[Measure, Measure]], floor: float) -> list[Change]:
    """Exclusive parts of the measured step: what the difference of the mean step is made of."""

    def of(side: Measure) -> Amounts:
        return {Thing(part.category): Amount(part.ms) for part in side.phases}

    return rows("phase", PER_STEP, [(of(one), of(other)) for one, other in measures], floor)


def _categories(diffs: Sequence[Diff], floor: float) -> tuple[list[Change], str | None]:
    """Parts of the profiled step, all that there are, and what must be said of them."""
    parts, note = _traced(diffs, "overview"), None
    before, after = ({thing.name for pair in parts for thing in pair[side]} - {STEP} for side in (0, 1))
    if before and after and not before & after:
        parts, note = _traced(diffs, "tensorboard"), OTHER_BASIS
    found = rows("category", _unit(diffs), parts, floor)
    return [change for change in found if change.name != STEP], note


def _operators(diffs: Sequence[Diff], floor: float) -> list[Change]:
    """Operators by self time of the host, and by self time of the device where there is one; their sum first."""
    host, device = _traced(diffs, "operators"), _traced(diffs, "operators", device=True)
    unit = _unit(diffs)
    on_device = rows("operator", _unit(diffs, device=True), device, floor)
    return [*rows("operator", unit, host, floor, together=ALL_OPERATORS), *on_device]


def _unit(diffs: Sequence[Diff], *, device: bool = False) -> str:
    if all(one.per_step for one in diffs):
        return DEVICE_PER_STEP if device else PER_STEP
    return OF_DEVICE if device else IN_ALL


def _traced(diffs: Sequence[Diff], table: str, *, device: bool = False) -> list[Pair]:
    """The amounts of a table, of the pairs whose traces have it."""
    ending = "_device_ns" if device else "_ns"

    def amounts(one: Diff, side: str) -> Amounts:
        values = ((row.key, getattr(row, side + ending)) for row in one.tables[table])
        return {Thing(key): Amount(ns / NS_PER_MS) for key, ns in values if ns is not None}

    return [(amounts(one, "base"), amounts(one, "other")) for one in diffs if table in one.tables]


def _lines(pairs: Profiles, floor: float) -> list[Change]:
    """Lines of the user's code whose time differs, of the training process and of the device that they keep busy."""
    device = [(one.device_lines, other.device_lines) for one, other in pairs if one.device_lines and other.device_lines]
    on_device = rows("line", DEVICE_PER_STEP, _matched(device), floor)
    return [*_sampled("line", pairs, lambda one: one.lines, floor), *on_device]


def _sampled(kind: str, pairs: Profiles, of: Callable[[Profile], Amounts], floor: float) -> list[Change]:
    """Rows of where the training process stands for another time: per step on both sides, or, where no step is known,
    percent of the samples on both."""
    known = [pair for pair in pairs if pair[0].shares == pair[1].shares and of(pair[0]) and of(pair[1])]
    amounts = _matched([(of(one), of(other)) for one, other in known])
    if known and known[0][0].shares:
        return rows(kind, OF_SAMPLES, amounts, thresholds.SHARE_FLOOR)
    return rows(kind, PER_STEP, amounts, floor)


def _matched(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """The pairs, with the lines of functions that moved as a whole added up.

    Where a script was edited, the lines of a function may all have moved. A function of which both sides know lines,
    but none in common, is therefore compared as a whole.
    """
    sides: tuple[dict[Thing, set[int | None]], dict[Thing, set[int | None]]] = ({}, {})
    for pair in pairs:
        for lines, amounts in zip(sides, pair, strict=True):
            for thing in amounts:
                lines.setdefault(Thing(thing.name, thing.file), set()).add(thing.line)
    moved = {key for key, lines in sides[0].items() if key in sides[1] and not lines & sides[1][key]}

    def together(side: Amounts) -> Amounts:
        wholes = ((Thing(thing.name, thing.file), thing, amount) for thing, amount in side.items())
        return merged((whole if whole in moved else thing, amount) for whole, thing, amount in wholes)

    return [(together(one), together(other)) for one, other in pairs] if moved else pairs


def finding_changes(
    baseline: Sequence[Profile], candidate: Sequence[Profile], floor: float
) -> tuple[list[Change], dict[str, str]]:
    """Findings that went, came, or cost another amount, the largest difference first; and by rule why it is not told.

    A rule that was not judged on a side says nothing there: such a finding is neither gone nor new. Of several runs a
    side has a finding when more than half of them do; its cost is the mean over those.
    """
    sides = [
        [(one.diagnosis, relative_to(one.roots)) for one in side if one.diagnosis is not None]
        for side in (baseline, candidate)
    ]
    if not all(sides):
        return [], {}
    ours, theirs = (_usual(side) for side in sides)
    silent = [_not_judged([diagnosis for diagnosis, _ in side]) for side in sides]
    found, absent = [], {}
    for before, after in _same_findings(ours, theirs):
        runs = [ours[before] if before else [], theirs[after] if after else []]
        shown, file = (runs[1] or runs[0])[0]
        why = [
            reasons[shown.rule]
            for side, reasons in zip(runs, silent, strict=True)
            if not side and shown.rule in reasons
        ]
        if why:
            absent[shown.rule] = why[0]
            continue
        costs = [statistics.fmean(one.cost_ms_per_step for one, _ in side) if side else None for side in runs]
        difference = (costs[1] or 0.0) - (costs[0] or 0.0)
        status = NEW if costs[0] is None else GONE if costs[1] is None else GREW if difference > 0 else SHRANK
        least = max(floor, thresholds.SAME_SHARE * max(each or 0.0 for each in costs))
        if status in {NEW, GONE} or abs(difference) >= least:
            line = shown.where[0].line if shown.where else None
            cost, other = costs
            found.append(
                Change("finding", shown.title, cost, other, difference, PER_STEP, status, file, line, shown.rule)
            )
    return ordered(found), absent


def _same_findings(ours: Found, theirs: Found) -> list[tuple[Finder | None, Finder | None]]:
    """Keys that mean the same: equal ones first; of a rule that is left once on each side, those two."""
    pairs: list[tuple[Finder | None, Finder | None]] = [(key, key) for key in ours if key in theirs]
    left = [key for key in ours if key not in theirs]
    right = [key for key in theirs if key not in ours]
    for key in left:
        same = [other for other in right if other[0] == key[0]]
        alone = len(same) == 1 and sum(other[0] == key[0] for other in left) == 1
        pairs.append((key, same[0] if alone else None))
    matched = {after for _, after in pairs}
    return [*pairs, *((None, key) for key in right if key not in matched)]


def _usual(side: Sequence[tuple[Diagnosis, Callable[[str], str]]]) -> Found:
    seen: Found = {}
    for diagnosis, name in side:
        of_run: dict[Finder, tuple[Finding, str | None]] = {}
        for finding in diagnosis.findings:
            place = finding.where[0] if finding.where else None
            file = name(place.file) if place is not None else None
            inside = (place.function or place.line) if place is not None else None
            of_run.setdefault((finding.rule, file, inside), (finding, file))
        for key, each in of_run.items():
            seen.setdefault(key, []).append(each)
    return {key: runs for key, runs in seen.items() if 2 * len(runs) > len(side)}


def _not_judged(side: Sequence[Diagnosis]) -> dict[str, str]:
    """Rule -> what it lacked, of those that were judged in no run of the side."""
    found = {one.rule: one.needs for diagnosis in side for one in diagnosis.abstained if not one.quiet}
    found |= {one.rule: f"ignored: {one.reason}" for diagnosis in side for one in diagnosis.ignored}
    silent = [{one.rule for one in each.abstained} | {one.rule for one in each.ignored} for each in side]
    nowhere = set.intersection(*silent)
    return {rule: why for rule, why in found.items() if rule in nowhere}


def text_changes(
    kind: str,
    baseline: Sequence[Mapping[str, str]],
    candidate: Sequence[Mapping[str, str]],
    joined: Callable[[Iterable[str]], str],
) -> list[Change]:
    """A row for each name, equal or not; the values that it has on a side are `joined`."""
    found = []
    for name in dict.fromkeys(name for run in (*baseline, *candidate) for name in run):
        known = [dict.fromkeys(run[name] for run in side if name in run) for side in (baseline, candidate)]
        before, after = (joined(values) if values else None for values in known)
        status = SAME if before == after else NEW if before is None else GONE if after is None else CHANGED
        found.append(Change(kind, name, before, after, None, "", status))
    return found


def environment_changes(baseline: Sequence[Mapping[str, str]], candidate: Sequence[Mapping[str, str]]) -> list[Change]:
    """What differs between the sides, in the order of the report. A value that varies within a side names them all.

    What one side does not know is no difference, nor are mean loads that are alike.
    """
    found = text_changes("environment", baseline, candidate, lambda values: ", ".join(sorted(values))[:LONGEST])
    differ = [one for one in found if one.status == CHANGED or (one.status != SAME and one.name.startswith(_PRESENCE))]
    for one in [one for one in differ if one.name == LOAD]:
        with suppress(ValueError):
            before, after = (statistics.fmean(map(float, text.split(", "))) for text in (one.baseline, one.candidate))
            if abs(before - after) < thresholds.LOAD_FLOOR:
                differ.remove(one)
    return differ


def utilisation_changes(
    baseline: Sequence[Mapping[str, float]], candidate: Sequence[Mapping[str, float]]
) -> list[Change]:
    """What both sides know and what differs, means over runs. Less in a shorter step is no loss: figures alone."""
    found = []
    for name in dict.fromkeys(name for run in baseline for name in run):
        sides = [[run[name] for run in side if name in run] for side in (baseline, candidate)]
        if not all(sides):
            continue
        before, after = map(statistics.fmean, sides)
        of_cores = name == CORES_USED
        unit, least = ("cores", thresholds.CORES_FLOOR) if of_cores else ("%", thresholds.UTILISATION_FLOOR)
        if abs(after - before) >= least:
            status = GREW if after > before else SHRANK
            found.append(Change("utilisation", name, before, after, after - before, unit, status))
    return ordered(found)


def rows(kind: str, unit: str, pairs: Sequence[Pair], floor: float, *, together: str | None = None) -> list[Change]:
    """A row for each thing that differs, the largest difference first.

    `together` names the row of all of them, which is kept where nothing changed: that all stayed the same is worth a
    line.
    """
    things = dict.fromkeys(thing for pair in pairs for side in pair for thing in side)
    found = (row(kind, thing, unit, pairs, floor) for thing in things)
    differ = ordered(change for change in found if change.status != SAME)
    if together is None or not things:
        return differ
    whole = Thing(together)
    sums = [
        tuple({whole: Amount(math.fsum(amount.value for amount in side.values()))} if side else {} for side in pair)
        for pair in pairs
    ]
    return [row(kind, whole, unit, sums, floor), *differ]


def row(kind: str, thing: Thing, unit: str, pairs: Sequence[Sequence[Amounts]], floor: float) -> Change:
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


def ordered(changes: Iterable[Change]) -> list[Change]:
    """The largest difference first; what has none by name."""
    return sorted(changes, key=lambda one: (-abs(one.difference or 0), one.name, one.file or "", one.line or 0))


def _is_told(amounts: Sequence[tuple[Amount, Amount]], means: Sequence[float]) -> bool:
    """Whether the difference is more than counting samples makes (n of them vary by their root), and than runs do."""
    difference, count = abs(means[1] - means[0]), len(amounts)
    variance = math.fsum(_variance(amount, other) for pair in amounts for amount, other in (pair, pair[::-1]))
    if difference <= thresholds.SAMPLING_SIGMAS * math.sqrt(variance) / max(1, count):
        return False
    differences = [other.value - one.value for one, other in amounts]
    half = margin(statistics.stdev(differences), count) if count > 1 else None
    return difference > half if half is not None else difference >= thresholds.SAME_SHARE * max(map(abs, means))


def _variance(amount: Amount, other: Amount) -> float:
    if amount.samples:
        return amount.value**2 / amount.samples
    # nothing was seen here: one sample could have been missed, and is worth what it is on the other side
    return (other.value / other.samples) ** 2 if other.samples else 0.0


# --------------------------------------------------------------------------------------- one script through its fixes


def versions(profiles: Iterable[Profile]) -> tuple[Version, ...]:
    """One script through its fixes: runs in the order in which they started, each with what was changed since the one
    before, and which findings are left.

    One run of each cannot tell a small change of the step time from chance; `compare` can, of several.
    """
    ordered = sorted(profiles, key=lambda one: (one.started_ns or 0, one.path))
    found: list[Version] = []
    for before, one in zip([None, *ordered], ordered, strict=False):
        measure = one.measured.measure if one.measured is not None else None
        findings = one.diagnosis.findings if one.diagnosis is not None else ()
        version = Version(
            label=one.label,
            path=one.path,
            started_ns=one.started_ns,
            mean_ms=measure.mean_ms if measure is not None else None,
            samples_per_second=measure.samples_per_second if measure is not None else None,
            findings=tuple(Left(each.rule, each.title, each.cost_ms_per_step) for each in findings),
        )
        if before is not None:
            changed = environment_changes([before.environment], [one.environment])
            known = [each for each in (version.mean_ms, found[-1].mean_ms) if each]
            of_findings = finding_changes([before], [one], thresholds.THRESHOLD * min(known, default=0.0))[0]
            first = next((each.mean_ms for each in found if each.mean_ms), None)
            version = replace(
                version,
                ratio=_ratio(version.mean_ms, found[-1].mean_ms),
                of_first=_ratio(version.mean_ms, first),
                changed=(*_sources(before, one), *(each for each in changed if each.name not in OF_A_MACHINE)),
                new=tuple(each.name for each in of_findings if each.status == NEW),
                gone=tuple(each.name for each in of_findings if each.status == GONE),
            )
        found.append(version)
    return tuple(found)


def _ratio(after: float | None, before: float | None) -> float | None:
    return after / before if after is not None and before else None


def _sources(before: Profile, one: Profile) -> Iterator[Change]:
    """The user's files that are not what they were; None where one of the runs did not keep what its files held."""
    sides = []
    for each in (before, one):
        name = relative_to(each.roots)
        sides.append({name(file): told for file, told in each.source_files.hashes.items()})
    ours, theirs = sides
    for file in sorted({*ours, *theirs}) if ours and theirs else ():
        if ours.get(file) != theirs.get(file):
            status = NEW if file not in ours else GONE if file not in theirs else CHANGED
            yield Change(SOURCE, file, ours.get(file), theirs.get(file), None, "", status, file)
