"""Findings that went, came, or cost another amount, matched by rule and place.

A rule that was not judged on a side says nothing there: such a finding is neither gone nor new. Of several runs a side
has a finding when more than half of them do; its cost is the mean over those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from stepscope.comparison import thresholds
from stepscope.comparison.changes.names import relative_to
from stepscope.comparison.changes.rows import GONE, GREW, NEW, PER_STEP, SAME, SHRANK, ordered
from stepscope.model import Diagnosis, Finding
from stepscope.model.comparison import Change


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


def changes(
    baseline: Sequence[Judged], candidate: Sequence[Judged], floor: float
) -> tuple[list[Change], dict[str, str]]:
    """Rows, the largest difference of cost first; and by rule why it could not be told."""
    sides = [_most(side) for side in (baseline, candidate)]
    silent = [_not_judged(side) for side in (baseline, candidate)]
    found, absent = [], {}
    for before, after in _pairs(*sides):
        key = before or after
        assert key is not None
        why = silent[1 if after is None else 0].get(key.rule) if before is None or after is None else None
        if why is not None:
            absent[key.rule] = why
            continue
        found.append(_change(sides[0].get(before) if before else None, sides[1].get(after) if after else None, floor))
    return ordered(change for change in found if change.status != SAME), absent


def _change(before: _Seen | None, after: _Seen | None, floor: float) -> Change:
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


def _pairs(ours: dict[_Key, _Seen], theirs: dict[_Key, _Seen]) -> list[tuple[_Key | None, _Key | None]]:
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
            of_run.setdefault(_key(finding, name), _seen(finding, name))
        for key, one in of_run.items():
            seen.setdefault(key, []).append(one)
    return {
        key: msgspec.structs.replace(runs[0], cost_ms=math.fsum(one.cost_ms for one in runs) / len(runs))
        for key, runs in seen.items()
        if 2 * len(runs) > len(side)
    }


def _key(finding: Finding, name: Callable[[str], str]) -> _Key:
    place = finding.where[0] if finding.where else None
    if place is None:
        return _Key(finding.rule, None, None)
    return _Key(finding.rule, name(place.file), place.function or place.line)


def _seen(finding: Finding, name: Callable[[str], str]) -> _Seen:
    place = finding.where[0] if finding.where else None
    file, line = (name(place.file), place.line) if place is not None else (None, None)
    return _Seen(finding.rule, finding.title, finding.cost_ms_per_step, file, line)


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
