"""Histories as tables: the runs of a script, the oldest first, and hosts over several runs, those late most often
first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Alone, Block, Row, rows_table
from stepscope.dashboard.pages import PageContext
from stepscope.report import words
from stepscope.report.comparison_report import signed_percent
from stepscope.report.history_report import MOST

MOST_NAMED = 6  # runs that were not judged
MOST_ROWS = 30  # hosts; files have all

_RUN: dict[str, Callable[[Row], Any]] = {
    "ratio": lambda row: signed_percent(row["ratio"]) if row["ratio"] is not None else None,
    "of_first": lambda row: signed_percent(row["of_first"]) if row["of_first"] is not None else None,
    "left": lambda row: len(row["findings"]),
    "gone": lambda row: len(row["gone"]),
    "new": lambda row: len(row["new"]),
}


def table(context: PageContext | Alone, document: dict[str, Any], title: str) -> Iterator[Block]:
    """The blocks of a history: its runs, what was changed from each to the next, and what the last still loses."""
    runs = document["runs"]
    yield from rows_table(context, "history", runs, title=title, say=_RUN, notes=document["notes"])
    changed = [blocks.fact(row["label"], _changed(row)) for row in runs[1:]]
    if changed:
        yield blocks.facts("What was changed", changed)
    last = runs[-1]
    yield from rows_table(context, "history-left", last["findings"], title=f"What {last['label']} still loses")


def _changed(row: Row) -> str:
    said = row["said"]
    more = f"; and {words.things(len(said) - MOST, 'other')}" if len(said) > MOST else ""
    return ("; ".join(said[:MOST]) or "nothing that is recorded") + more


def hosts(context: Alone, document: dict[str, Any]) -> Iterator[Block]:
    """The blocks of the hosts of several runs, and which runs count for none."""
    rows, left = document["hosts"], document["not_judged"]
    runs = words.things(document["runs"], "run")
    shown = rows[: max(MOST_ROWS, sum(row["late"] > 0 for row in rows))]
    yield from rows_table(context, "histories/hosts", shown, title=f"Hosts over {runs}", say=_HOST)
    if len(rows) > len(shown):
        text = f"And {words.things(len(rows) - len(shown), 'host')} that was late in no run; --json and --csv have all."
        yield blocks.text(text.replace("hosts that was", "hosts that were"), "note")
    if not rows:
        yield blocks.text(f"No host is named by {runs}.", "note")
    for each in left[:MOST_NAMED]:
        yield blocks.text(f"Not judged: {each['run']}: {each['reason']}", "note")
    if len(left) > MOST_NAMED:
        yield blocks.text(f"And {len(left) - MOST_NAMED} more runs that were not judged.", "note")


def _causes(row: Row) -> str | None:
    times = row["causes"].items()
    said = (words.term(cause) + (f" ({count} times)" if count != 1 else "") for cause, count in times)
    return ", ".join(said) or None


def _day(time_ns: int | None) -> str | None:
    try:
        return None if time_ns is None else f"{datetime.fromtimestamp(time_ns / 1e9, tz=timezone.utc):%Y-%m-%d}"
    except (OverflowError, ValueError, OSError):
        return None


_HOST = {
    "causes": _causes,
    "last_seen_ns": lambda row: _day(row["last_seen_ns"]),
    "last_late_ns": lambda row: _day(row["last_late_ns"]),
}
