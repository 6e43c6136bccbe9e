"""The compilers' part of report.html: what they did, the steps they took, and every cause with all its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stepscope.model import Report
from stepscope.report import compiler_words as said
from stepscope.report import words
from stepscope.report.escape import markup, one_line
from stepscope.report.html_columns import Column, Row, field, figure, place
from stepscope.report.html_figures import compile_series
from stepscope.report.html_tables import fold, table
from stepscope.report.places import Shortener

SENTENCE = 600  # characters
MAX_CHANGES = 60  # of a cause
_STEPS = "Steps that compiled count whole in the time; compile time is the union of what overlaps."
_CAUSES = "Events of one cause, counted; the most expensive first. Times are summed."
_WORDED = "The last reason of each cause, where its function begins, and your line that called it."
_POINTS = "Steps in which something was compiled, broken off or moved to the host."
_METRICS = (
    "Whole-run totals; percentiles and rates stand on the last samples only, 1,024 by default, as torch_xla keeps them."
)
_LIMITS = "Functions that reached their limit of versions: inputs that match no version run eagerly since then."


def compilers(report: Report, shorten: Shortener, rows: int) -> str:
    """The section; empty where nothing was compiled."""
    view = said.view_of(report)
    if view is None:
        return ""
    parts = ["<h2>Compilers</h2>"]
    parts += [f"<p>{markup(one_line(said.backend(facts)), SENTENCE)}</p>" for facts in view["backends"]]
    notes = "".join(_notes(view))
    parts.append(f"<ul class='notes' aria-label='Warnings on compiling'>{notes}</ul>" if notes else "")
    if view["steps"]:
        parts.append(table(_STEPS, _for(view, _STEP_COLUMNS), view["steps"], shorten, rows))
    parts += [compile_series(kind, [row for row in view["points"] if row["kind"] == kind]) for kind in _kinds(view)]
    if view["causes"]:
        parts.append(table(_CAUSES, _for(view, _CAUSE_COLUMNS), view["causes"], shorten, rows))
    for title, caption, columns, found in _folds(view):
        if found:
            parts.append(fold(title, len(found), table(caption, columns, found, shorten, rows)))
    return f"<section>{''.join(parts)}</section>"


def _kinds(view: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in view["points"]))


def _folds(view: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[Column, ...], Sequence[Row]]]:
    causes = {row["id"]: row for row in view["causes"]}
    yield "Causes in the compiler's words", _WORDED, (*_WORDED_COLUMNS, *_ranks(view)), view["causes"]
    yield "Changes of each cause", "What a compiled version expected and what came.", _CHANGE_COLUMNS, _changes(view)
    unknown: Row = {"place": None, "function": None}  # of a cause that the list has no room for
    limits = [{**causes.get(row["cause"], unknown), **row} for row in view["limits"]]
    yield "Limits of versions", _LIMITS, _LIMIT_COLUMNS, limits
    yield "Steps that compiled", _POINTS, _POINT_COLUMNS, view["points"]
    yield "Metrics of torch_xla", _METRICS, _METRIC_COLUMNS, view["metrics"]


def _notes(view: Mapping[str, Any]) -> Iterator[str]:
    for row in view["warnings"]:
        text, note = said.warning(row)
        yield f"<li>{markup(one_line(text), SENTENCE)} <span class='soft'>({markup(note)})</span></li>"
    texts: list[str | None] = [text for row in view["storms"] for text in said.storm(row)]
    texts += [said.after_warmup(row) for row in view["steps"]]
    texts += [*said.operators(view["causes"]), *view["notes"]]
    for text in filter(None, texts):
        yield f"<li class='plain'>{markup(one_line(text), SENTENCE)}</li>"


def _changes(view: Mapping[str, Any]) -> list[Row]:
    """A row per change, as the compiler worded old and new."""
    return [
        {"cause": cause, "subject": change["subject"] or cause["subject"], **_without(change, "subject")}
        for cause in view["causes"]
        for change in cause["changes"][:MAX_CHANGES]
    ]


def _without(row: Row, key: str) -> Row:
    return {name: value for name, value in row.items() if name != key}


def _at(key: str) -> Callable[[Row, Shortener], str]:
    def cell(row: Row, shorten: Shortener) -> str:
        found = row.get(key)
        return shorten(found["file"], found["line"]) if found else words.MISSING

    return cell


def _for(view: Mapping[str, Any], columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """`columns`, with the backend before them where there are several."""
    several = len({facts["backend"] for facts in view["backends"]}) > 1
    return (Column("Backend", field("backend")), *columns) if several else columns


def _ranks(view: Mapping[str, Any]) -> tuple[Column, ...]:
    return (Column("Ranks", lambda row, _: said.of_ranks(row, view) or "all"),) if _many_ranks(view) else ()


def _many_ranks(view: Mapping[str, Any]) -> bool:
    return any(len(facts["ranks"]) > 1 for facts in view["backends"])


def _versions(row: Row, _: Shortener) -> str:
    if row["cache_entries"] is None:
        return words.MISSING
    limit = f" of {words.count(row['limit'])}" if row["limit"] is not None else ""
    return f"{words.count(row['cache_entries'])}{limit}"


def _amount(value: float | None, unit: str) -> str:
    """A figure of a metric in its own unit."""
    if unit == "ms":
        return words.milliseconds(value)
    return words.size(value) if unit == "bytes" else words.count(value)


def _percentiles(row: Row, _: Shortener) -> str:
    return ", ".join(f"{percent:g} %: {_amount(value, row['unit'])}" for percent, value in row["percentiles"])


_STEP_COLUMNS = (
    Column("Steps of", field("kind")),
    Column("Steps", figure("steps", words.count), "right"),
    Column("compiled", figure("compiling_steps", words.count), "right"),
    Column("Compile time", figure("compile_ms", words.milliseconds), "right"),
    Column("of the time", figure("share", words.percent), "right"),
    Column("after warm-up", figure("late_compile_ms", words.milliseconds), "right"),
    Column("of it", figure("late_share", words.percent), "right"),
    Column("A compiling step", figure("mean_compiling_ms", words.milliseconds), "right"),
    Column("Another", figure("mean_quiet_ms", words.milliseconds), "right"),
    Column("Compiles", figure("compiles", words.count), "right"),
    Column("Recompiles", figure("recompiles", words.count), "right"),
    Column("Breaks", figure("breaks", words.count), "right"),
    Column("Transfers", figure("transfers", words.count), "right"),
    Column("Estimated", lambda row, _: "by rates" if row["estimated"] else None),
)
_CAUSE_COLUMNS = (
    Column("Kind", figure("kind", words.term)),
    Column("What", lambda row, _: said.what(row)),
    Column("Line", place, "line"),
    Column("Source", field("code"), "source"),
    Column("Count", figure("count", words.count), "right"),
    Column("Time", figure("total_ms", words.milliseconds), "right"),
    Column("Longest", figure("longest_ms", words.milliseconds), "right"),
    Column("When", lambda row, _: said.when(row)),
    Column("Versions", _versions, "right"),
)
_WORDED_COLUMNS = (
    Column("Kind", figure("kind", words.term)),
    Column("Function", field("function"), "line"),
    Column("begins", _at("definition"), "line"),
    Column("called at", _at("call"), "line"),
    Column("As the compiler words it", field("text"), "code"),
    Column("Its advice", field("hint"), "code"),
    Column("Told by", field("source")),
)
_CHANGE_COLUMNS = (
    Column("Function", lambda row, _: row["cause"]["function"], "line"),
    Column("Kind", lambda row, _: words.term(row["cause"]["kind"])),
    Column("Line", lambda row, shorten: place(row["cause"], shorten), "line"),
    Column("Changed", field("subject"), "code"),
    Column("Step", figure("step", words.count), "right"),
    Column("Expected", field("old"), "code"),
    Column("Came", field("new"), "code"),
)
_LIMIT_COLUMNS = (
    Column("Function", field("function"), "line"),
    Column("Line", place, "line"),
    Column("Since step", figure("step", words.count), "right"),
    Column("Median before", figure("before_ms", words.milliseconds), "right"),
    Column("Steps", figure("before_steps", words.count), "right"),
    Column("Median after", figure("after_ms", words.milliseconds), "right"),
    Column("Steps then", figure("after_steps", words.count), "right"),
)
_POINT_COLUMNS = (
    Column("Step", figure("step", words.count), "right"),
    Column("Kind", field("kind")),
    Column("Time", figure("wall_ms", words.milliseconds), "right"),
    Column("Compiling", figure("compile_ms", words.milliseconds), "right"),
    Column("Compiles", figure("compiles", words.count), "right"),
    Column("Recompiles", figure("recompiles", words.count), "right"),
    Column("Breaks", figure("breaks", words.count), "right"),
    Column("Transfers", figure("transfers", words.count), "right"),
)
_METRIC_COLUMNS = (
    Column("Rank", figure("rank", words.count), "right"),
    Column("Name", field("name"), "code"),
    Column("Kind", field("kind")),
    Column("Samples", figure("samples", words.count), "right"),
    Column("Total", lambda row, _: _amount(row["total"], row["unit"]), "right"),
    Column("Samples a second", figure("per_second", words.number), "right"),
    Column("Value a second", lambda row, _: _amount(row["value_per_second"], row["unit"]), "right"),
    Column("Percentiles", _percentiles, "code"),
)
