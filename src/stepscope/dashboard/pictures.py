"""The larger parts of pages: charts, cards of findings, timelines and flame graphs. `blocks.py` hands them on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stepscope.dashboard.values import MAX_TEXT, UNITS, Block, Help, cleaned, number
from stepscope.report.escape import plain


def series(
    name: str,
    unit: str,
    values: Iterable[Any],
    *,
    low: Iterable[Any] | None = None,
    high: Iterable[Any] | None = None,
    points: Iterable[Iterable[Any]] | None = None,
    role: str | None = None,
) -> dict[str, Any]:
    """One line, area or set of bars; `role` gives it one colour on all pages.

    Of intervals `low` and `high`, and `points`: for every x the measurements that its value is the mean of.
    """
    made: dict[str, Any] = {
        "name": plain(name),
        "unit": UNITS.get(unit, "number"),
        "values": [number(value) for value in values],
        "role": role,
    }
    if low is not None and high is not None:
        made["low"] = [number(value) for value in low]
        made["high"] = [number(value) for value in high]
    if points is not None:
        made["points"] = [[number(value) for value in each] for each in points]
    return made


def mark(start: float | str, end: float | str, label: str) -> dict[str, Any]:
    """A point (`start` equal to `end`) or range of x that is pointed out."""
    ends = {"from": start, "to": end}
    return {
        **{key: plain(at) if isinstance(at, str) else number(at) for key, at in ends.items()},
        "label": plain(label),
    }


def chart(
    id: str,
    title: str,
    type: str,
    *,
    sentence: str,
    x: tuple[str, str, Iterable[Any]],
    y: tuple[str, str],
    series: Iterable[Mapping[str, Any]],
    y_min: float | None = None,
    y_max: float | None = None,
    marks: Iterable[Mapping[str, Any]] = (),
    help: Help | None = None,
    notes: Iterable[str] = (),
    sync: str | None = None,
    select: str | None = None,
) -> Block:
    """A chart of type line, stacked_area, stacked_bars, bars, histogram, scatter or interval.

    Args:
        sentence: what the picture says, for those who do not see it.
        x: label, unit and values; every series has as many.
        y: label and unit.
        sync: charts with the same name zoom together.
        select: "steps" where a range drawn on x (step numbers) selects steps on all pages.
    """
    along = [plain(value) if isinstance(value, str) else number(value) for value in x[2]]
    return {
        "kind": "chart",
        "id": id,
        "title": plain(title),
        "type": type,
        "sentence": plain(sentence, MAX_TEXT),
        "x": {"label": plain(x[0]), "unit": UNITS.get(x[1], "number"), "values": along},
        "y": {"label": plain(y[0]), "unit": UNITS.get(y[1], "number"), "min": number(y_min), "max": number(y_max)},
        "series": [dict(each) for each in series],
        "marks": [dict(each) for each in marks],
        "help": help,
        "notes": [plain(note, MAX_TEXT) for note in notes],
        "sync": sync,
        "select": select,
    }


def findings(
    cards: Iterable[Mapping[str, Any]],
    risks: Iterable[Mapping[str, Any]],
    *,
    healthy: str | None = None,
    abstained: Iterable[Mapping[str, Any]] = (),
    ignored: Iterable[Mapping[str, Any]] = (),
) -> Block:
    """Cards as `pages.findings` makes them; `healthy` says that nothing is worth fixing, where that is so."""
    return {
        "kind": "findings",
        "findings": [cleaned(card) for card in cards],
        "risks": [cleaned(card) for card in risks],
        "healthy": None if healthy is None else plain(healthy, MAX_TEXT),
        "abstained": [{"rule": plain(row["rule"]), "needs": plain(row["needs"], MAX_TEXT)} for row in abstained],
        "ignored": [{"rule": plain(row["rule"]), "reason": plain(row["reason"], MAX_TEXT)} for row in ignored],
    }


def timeline(
    id: str,
    *,
    from_ns: int,
    to_ns: int,
    steps: Iterable[Mapping[str, Any]],
    tracks: Iterable[Mapping[str, Any]],
    window: Mapping[str, Any],
    sliceable: bool,
    details: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> Block:
    """Tracks of slices. `window` is the first one, a stepscope.timeline/1 document with harmless names."""
    return {
        "kind": "timeline",
        "id": id,
        "from_ns": from_ns,
        "to_ns": to_ns,
        "steps": [cleaned(row) for row in steps],
        "tracks": [cleaned(row) for row in tracks],
        "window": {**window, "names": [plain(name) for name in window.get("names", ())]},
        "notes": [plain(note, MAX_TEXT) for note in notes],
        "sliceable": sliceable,
        "details": None if details is None else {str(key): cleaned(item) for key, item in details.items()},
    }


def flame(id: str, document: Mapping[str, Any], first: str | None = None) -> Block:
    """A stepscope.flame/1 document; `first` is the key of the tree to begin with."""
    harmless = {name: [plain(each, MAX_TEXT) for each in document[name]] for name in ("names", "files")}
    return {"kind": "flame", "id": id, "document": {**document, **harmless}, "first": first}
