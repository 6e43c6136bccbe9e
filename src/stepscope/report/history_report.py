"""The history of a script as JSON, and what was changed from run to run in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from stepscope.model.comparison import Change, Version
from stepscope.report.values import plain_mapping

SCHEMA = "stepscope.history/1"
MOST = 8  # changes in a cell; JSON has all
LONGEST = 60  # characters of a value in words
ONE_RUN = "One run of each: what is a few percent faster or slower may be chance; `stepscope compare` tells from three."


def document(versions: Sequence[Version], notes: Sequence[str]) -> dict[str, Any]:
    """`runs`, the oldest first, with `said`: what was changed, in words."""
    rows = [{**plain_mapping(version), "said": list(said(version))} for version in versions]
    return {"schema": SCHEMA, "runs": rows, "notes": [*notes, *([ONE_RUN] if len(rows) > 1 else [])]}


def said(version: Version) -> Iterator[str]:
    """What was changed since the run before: files first, then knobs and arguments, then the rest."""
    texts = [(_rank(change), text) for change in version.changed for text in _words(change)]
    yield from (text for _, text in sorted(texts, key=lambda each: each[0]))


def _rank(change: Change) -> int:
    if change.kind == "source":
        return 0
    return 1 if change.name == "command" or change.name.startswith("knob ") else 2


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
