"""Hosts over several runs as a table: a row for each, those that are late most often first."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Alone, Block, rows_table
from stepscope.report import words

MOST_NAMED = 6  # runs that were not judged
MOST_ROWS = 30  # hosts; files have all

_HOSTS = blocks.columns(
    "Host: host; Runs: runs count; Judged: judged count; Late in: late count; Of the judged: late_share share; "
    "Works longer by: excess_ms ms; Costs a step: cost_ms ms; Causes: causes; "
    "Last seen: last_seen_ns; Last late: last_late_ns",
    causes=lambda row: ", ".join(_times(*each) for each in row["causes"].items()) or None,
    last_seen_ns=lambda row: _day(row["last_seen_ns"]),
    last_late_ns=lambda row: _day(row["last_late_ns"]),
)


def table(context: Alone, document: dict[str, Any]) -> Iterator[Block]:
    """The blocks of the hosts of several runs, and which runs count for none."""
    rows, left = document["hosts"], document["not_judged"]
    runs = words.things(document["runs"], "run")
    shown = rows[: max(MOST_ROWS, sum(row["late"] > 0 for row in rows))]
    yield from rows_table(context, "hosts", f"Hosts over {runs}", "HostHistory", _HOSTS, shown)
    if len(rows) > len(shown):
        text = f"And {words.things(len(rows) - len(shown), 'host')} that was late in no run; --json and --csv have all."
        yield blocks.text(text.replace("hosts that was", "hosts that were"), "note")
    if not rows:
        yield blocks.text(f"No host is named by {runs}.", "note")
    for each in left[:MOST_NAMED]:
        yield blocks.text(f"Not judged: {each['run']}: {each['reason']}", "note")
    if len(left) > MOST_NAMED:
        yield blocks.text(f"And {len(left) - MOST_NAMED} more runs that were not judged.", "note")


def _times(cause: str, count: int) -> str:
    return words.term(cause) if count == 1 else f"{words.term(cause)} ({count} times)"


def _day(time_ns: int | None) -> str | None:
    try:
        return None if time_ns is None else f"{datetime.fromtimestamp(time_ns / 1e9, tz=timezone.utc):%Y-%m-%d}"
    except (OverflowError, ValueError, OSError):
        return None
