"""A report in a few kilobytes, for programs that edit code: `analyze --brief`, and the tools of `stepscope mcp`.

An answer is one JSON document of bounded size. What does not fit is left out by whole rows, never in the middle of
one, and `left_out` says what and how to get it. Keys mean what they mean in report.json.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.errors import UsageError
from stepscope.model import Report
from stepscope.report import sentences
from stepscope.report.escape import plain, visible
from stepscope.report.source import MAX_LINE_CHARACTERS

Row = dict[str, Any]

SCHEMA = "stepscope.brief/1"
USUAL_BYTES = 4_000  # of an answer: a few of them fit beside code in what a language model reads at once
LEAST_BYTES, MOST_BYTES = 2_000, 200_000
DIGITS = 4  # significant ones of a figure; no measurement of ours has more
SPARE_BYTES = 300  # for what an answer says of itself
AGAIN = "ask with offset={}"
_LINES = re.compile(r"[^\n\t]+")
WARNINGS, WARNING = 3, 200
KEPT = ("id", "rule", "title", "severity", "confidence", "cost_ms_per_step", "share", "gain_ceiling", "basis")
ADVICE = ("fix", "caveat", "falsified_by")
DETAIL = ("category", "expected_gain", "ranks", "disagreements", "learn")

EVIDENCE, PLACE = ("metric", "value", "unit", "source"), ("function", "share")


class Page(Struct, frozen=True):
    """Which rows of an answer are wanted, and how large it may be; `max_bytes` is of all of it, in UTF-8."""

    offset: int = 0
    limit: int | None = None
    max_bytes: int = USUAL_BYTES

    def check(self) -> None:
        """Raises `UsageError`."""
        if not LEAST_BYTES <= self.max_bytes <= MOST_BYTES:
            raise UsageError(f"max_bytes {self.max_bytes}: give {LEAST_BYTES} to {MOST_BYTES}")
        if self.offset < 0 or (self.limit is not None and self.limit < 1):
            raise UsageError("offset counts rows from 0 on, and limit is 1 or more")


def answer(head: Row, key: str, rows: Sequence[Any], page: Page, more: str = AGAIN) -> bytes:
    """`head`, and below `key` as many of the wanted `rows` as fit; `more` says how to get those from {} on.

    Where not even one row fits, its lists and texts are cut, and `cut` says so. Raises `UsageError` where it then does
    not fit either.
    """
    page.check()
    wanted = rows[page.offset :][: page.limit][: page.max_bytes]  # more cannot fit
    whole = _Cut().plain({**head, key: wanted})
    size = len(_encoded(whole)) + SPARE_BYTES
    for cut in (_Cut(), *CUTS):
        short = whole if cut.characters is None else cut.plain({**head, key: wanted[:1]})
        told = {} if cut.characters is None else {"cut": cut.told(size)}
        shown = list(short[key])
        while shown or not wanted:
            made = _encoded({**short, key: shown, **_left_out(key, len(rows), page.offset, len(shown), more), **told})
            if len(made) <= page.max_bytes:
                return made
            if not shown:
                break
            # what is too much, in rows of mean size; at least one
            del shown[-max(1, int(len(shown) * (1 - page.max_bytes / len(made)))) :]
    raise UsageError(f"nothing of it fits in {page.max_bytes} bytes; ask for fewer columns, or with a larger max_bytes")


def _left_out(key: str, total: int, offset: int, shown: int, more: str) -> Row:
    after = total - offset - shown
    if after <= 0 and not offset:
        return {}
    said, rest = f"{shown} of {total} {key}, from {offset} on", more.replace("{}", str(offset + shown))
    return {"left_out": f"{said}; {after} more: {rest}" if after > 0 else said}


class _Cut(Struct, frozen=True):
    """How short lists and texts are made; None leaves them whole."""

    items: int | None = None
    characters: int | None = None

    def plain(self, value: Any, key: str = "") -> Any:
        """`value` with few digits and texts that are harmless to print. Half a command is none: it is kept whole, or
        left out where everything else has been made short."""
        if isinstance(value, bool):
            return value
        if isinstance(value, float):
            return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)  # JSON has no number for it
        if isinstance(value, Mapping):
            return {str(name): self.plain(item, str(name)) for name, item in value.items()}
        if key in WHOLE and self.characters is not None:
            kept = self is not CUTS[-1] or len(str(value)) <= self.characters
            return _Cut().plain(value) if kept else None
        if isinstance(value, str):
            shown = _LINES.sub(lambda text: visible(text[0]), value)
            limit = self.characters
            return shown if limit is None or len(shown) <= limit else shown[: limit - 1] + "…"
        if isinstance(value, (list, tuple)):
            return [self.plain(item) for item in value[: self.items]]
        return value

    def told(self, size: int) -> str:
        said = f"lists after {self.items} items, texts after {self.characters} characters"
        return f"{said}; max_bytes={min(size, MOST_BYTES)} holds {'more' if size > MOST_BYTES else 'all'}"


CUTS = tuple(_Cut(*each) for each in ((20, 400), (10, 400), (5, 200), (3, 100), (1, 40)))
WHOLE = ("diff", "command", "prove", "folder", "cwd", "at", "id", "run", "path")


def _encoded(document: Row) -> bytes:
    """JSON with a line for each key, and for each row of a list: rows can be told apart, and indentation costs."""
    lines = []
    for key, value in document.items():
        text = msgspec.json.encode(value).decode()
        if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
            text = "[\n" + ",\n".join(msgspec.json.encode(row).decode() for row in value) + "\n]"
        lines.append(f"{msgspec.json.encode(key).decode()}:{text}")
    return ("{" + ",\n".join(lines) + "}\n").encode()


def findings(report: Report, page: Page, *, only: str | None = None, detail: bool = False, more: str = AGAIN) -> bytes:
    """The findings of a report, causes by cost, each with what it explains behind it; then its risks, without cost.

    Args:
        page: which of them, and how much.
        only: the id of one.
        detail: all evidence and all places beside the first.
        more: how to get those that do not fit, from {} on.

    Raises `UsageError` for an id that there is not.
    """
    ordered = [row for group in sentences.groups(report) for row in (group.finding, *group.explained)]
    rows = [*ordered, *report.risks]
    if only is not None:
        rows = [find(report, only)]
    made = [_finding(row, report, detail=detail) for row in rows]
    return answer(_head(report), "findings", made, page, more)


def find(report: Report, id: str) -> Row:
    """The finding or risk of an id; raises `UsageError`."""
    rows = {row["id"]: row for row in (*report.findings, *report.risks)}
    if id not in rows:
        known = f"there are {', '.join(list(rows)[:20])}" if rows else "the run has none"
        raise UsageError(f"{id}: no such finding; {known}")
    return rows[id]


def _head(report: Report) -> Row:
    run, steps = report.run, report.steps
    head: Row = {"schema": SCHEMA, "run": {key: run[key] for key in ("folder", "cwd", "command") if run.get(key)}}
    if steps is None:
        head["steps"] = None
    else:
        kept = ("kind", "count", "mean_ms", "median_ms", "p95_ms", "samples_per_second")
        parts = {part["category"]: part["share"] for part in steps["partition"] if part["share"]}
        head["steps"] = {**{key: steps[key] for key in kept}, "partition": parts}
    head["warnings"] = [plain(text, WARNING) for text in sentences.warnings(report)[:WARNINGS]]
    judged = sentences.is_judged(report)
    said = {
        "overlap": sentences.overlap(report),
        "healthy": sentences.healthy(report) if not report.findings and judged else None,
        "not_judged": None if judged else sentences.without_steps(report),
        "unexplained": sentences.unexplained(report),
    }
    return {**head, **{key: text for key, text in said.items() if text}}


def _finding(row: Row, report: Report, *, detail: bool) -> Row:
    """A finding with its first place alone; `cost_ms_per_step` of a risk is missing."""
    place = row["where"][0] if row["where"] else {}
    made = {key: row.get(key) for key in KEPT}
    if place:
        made |= {"at": _at(place, report), "function": place["function"], "code": _line(place)}
    made |= {key: row[key] for key in ADVICE if row[key]}
    made["explains"] = row["explains"] or None
    made["prove"] = proof(row, report.run)
    if detail:
        made |= {key: row[key] for key in DETAIL if row.get(key)}
        made["evidence"] = [[each[key] for key in EVIDENCE] for each in row["evidence"]]
        made["where"] = [{"at": _at(each, report), **{key: each[key] for key in PLACE}} for each in row["where"]]
        made["try"] = [f"{each['knob']}={each['value']}" for each in row["try"]]
    return {key: value for key, value in made.items() if value is not None or key == "cost_ms_per_step"}


def _at(place: Row, report: Report) -> str:
    """`file:line`, the file from the run's working directory on where it lies there, else its whole path."""
    file, cwd = str(place["file"]), str(report.run.get("cwd") or "").rstrip(os.sep) + os.sep
    shown = file[len(cwd) :] if cwd != os.sep and file.startswith(cwd) else file
    return shown if place["line"] is None else f"{shown}:{place['line']}"


def _line(place: Row) -> str | None:
    """The text of the line, where it may be quoted; one that changed since is not."""
    quoted = place.get("source")
    if not quoted or quoted["changed_since"]:
        return None
    text: str = quoted["lines"][place["line"] - quoted["first_line"]]
    return text.strip()[:MAX_LINE_CHARACTERS] or None


def proof(row: Mapping[str, Any], run: Mapping[str, Any]) -> str | None:
    """The command that says with an interval whether a fix helps: by the finding's knobs, the script unedited, else by
    runs before and after the change. None where how the run was started is not known."""
    command = [str(word) for word in run.get("command") or ()]
    if not command:
        return None
    if row.get("try"):
        return sentences.proof(row, run)
    before = str(run.get("folder") or "RUN")
    after = f"{before.rstrip(os.sep)}-after"
    made = shlex.join(["stepscope", "run", "--out", after, "--", *command])
    return f"{made}; {shlex.join(['stepscope', 'compare', before, after])}"
