"""The history of a script as JSON and as a table, the oldest run first; and hosts over several runs, latest first."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Alone, Block, Row, rows_table
from stepscope.dashboard.pages import PageContext
from stepscope.model.comparison import Change, Version
from stepscope.report import words
from stepscope.report.comparison_report import signed_percent
from stepscope.report.escape import plain_mapping

SCHEMA = "stepscope.history/1"
MOST = 8  # changes in a cell; JSON has all
LONGEST = 60  # characters of a value in words
ONE_RUN = "One run of each: what is a few percent faster or slower may be chance; `stepscope compare` tells from three."
MOST_NAMED = 6  # runs that were not judged
MOST_ROWS = 30  # hosts; files have all


def document(versions: Sequence[Version], notes: Sequence[str]) -> dict[str, Any]:
    """`runs`, the oldest first, with `said`: what was changed, in words."""
    rows = [{**plain_mapping(version), "said": list(said(version))} for version in versions]
    return {"schema": SCHEMA, "runs": rows, "notes": [*notes, *([ONE_RUN] if len(rows) > 1 else [])]}


def said(version: Version) -> Iterator[str]:
    """What was changed since the run before: files first, then knobs and arguments, then the rest."""

    def rank(change: Change) -> int:
        if change.kind == "source":
            return 0
        return 1 if change.name == "command" or change.name.startswith("knob ") else 2

    for change in sorted(version.changed, key=rank):
        yield from _words(change)


def _words(change: Change) -> Iterator[str]:
    if change.kind == "source":
        yield f"{change.name} {'edited' if change.baseline and change.candidate else change.status}"
    elif change.name == "command":
        yield from _arguments(str(change.baseline or ""), str(change.candidate or ""))
    else:
        name = change.name.removeprefix("knob ")
        yield f"{name}: {_short(change.baseline)} → {_short(change.candidate)}"


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _arguments(before: str, after: str) -> Iterator[str]:
    """Words of a command line that differ, each with the option that it is of."""
    try:
        old, new = shlex.split(before), shlex.split(after)
    except ValueError:  # cut in the middle of a quoted word
        old, new = before.split(), after.split()
    for what, start, end, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if what == "equal":
            continue
        option = f"{old[start - 1]} " if start and old[start - 1].startswith("-") and start < end else ""
        yield f"{option}{_short(' '.join(old[start:end]) or None)} → {_short(' '.join(new[first:last]) or None)}"


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


_HOST = {
    "causes": _causes,
    "last_seen_ns": lambda row: words.moment(row["last_seen_ns"], "%Y-%m-%d"),
    "last_late_ns": lambda row: words.moment(row["last_late_ns"], "%Y-%m-%d"),
}
