"""The tables of report.html. A new one is one line in `TABLES`.

A column is a heading and a function from a row of the document to its text; every text is escaped in one place,
`table`. Rows are bounded, and what was left out is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.model import Report
from stepscope.report import words
from stepscope.report.escape import markup
from stepscope.report.places import Shortener, command_line

Row = dict[str, Any]
Cell = Callable[[Row, Shortener], Any]
RUN_FACTS = ("folder", "cwd", "tags", "hosts", "ranks", "world_size", "exit_status")
CELL = 240  # characters of a cell


@dataclass(frozen=True)
class Column:
    """`style`: "" for words, "right" for figures, "code" for names, "line" for whole ones, "source" for cut ones."""

    heading: str
    cell: Cell
    style: str = ""


@dataclass(frozen=True)
class View:
    """A table under a fold: its title, what a row is, where its rows are in the document, and its columns."""

    title: str
    caption: str
    rows: Callable[[Report], Sequence[Row] | None]
    columns: tuple[Column, ...]


def _place(row: Row, shorten: Shortener) -> str:
    place = row.get("place") if "place" in row else row
    return shorten(place["file"], place["line"]) if place else words.MISSING


def _field(key: str) -> Cell:
    return lambda row, _: row.get(key)


def _figure(key: str, show: Callable[[Any], str]) -> Cell:
    return lambda row, _: show(row.get(key))


def _arguments(row: Row, _: Shortener) -> str:
    return ", ".join(f"{name}={value}" for name, value in (row.get("arguments") or {}).items())


def _view(name: str) -> Callable[[Report], Sequence[Row] | None]:
    return lambda report: report.views.get(name)


def _inside(name: str, key: str) -> Callable[[Report], Sequence[Row] | None]:
    return lambda report: (report.views.get(name) or {}).get(key)


def _pairs(mapping: dict[str, Any] | None) -> list[Row]:
    return [{"name": words.term(key), "value": _flat(value)} for key, value in (mapping or {}).items()]


def _flat(value: Any) -> str:
    if value is None:
        return words.MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return words.count(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_flat(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_flat(item) for item in value)
    return str(value)


def _run(report: Report) -> list[Row]:
    run = report.run
    facts: dict[str, Any] = {"command": command_line(run)}
    facts |= {key: run.get(key) for key in RUN_FACTS}
    for part in ("versions", "hardware", "noise"):
        facts |= run.get(part) or {}
    return _pairs({**facts, "git": run.get("git")})


_LINE_COLUMNS = (
    Column("Share", _figure("share", words.percent), "right"),
    Column("Per step", _figure("ms_per_step", words.milliseconds), "right"),
    Column("Line", _place, "line"),
    Column("Function", _field("function"), "line"),
    Column("Source", _field("code"), "source"),
    Column("Process", _figure("role", words.term)),
    Column("Phase", _figure("phase", words.term)),
    Column("Waiting", _figure("waiting_share", words.percent), "right"),
    Column("On top", lambda row, shorten: shorten(row.get("library_leaf") or ""), "source"),
)
_PAIR_COLUMNS = (Column("Name", _field("name")), Column("Value", _field("value"), "code"))

TABLES: tuple[View, ...] = (
    View("Hot lines", "Lines of your code by sampled time.", _inside("stacks", "hot_lines"), _LINE_COLUMNS),
    View(
        "Lines of the loader",
        "Data set, collate and transform lines, hottest first.",
        _inside("loader", "lines"),
        _LINE_COLUMNS,
    ),
    View(
        "Operators",
        "Operators in the profiled window, per step of the window.",
        _view("operator_calls"),
        (
            Column("Operator", _field("name"), "code"),
            Column("Calls a step", _figure("calls_per_step", words.count), "right"),
            Column("Host, self", _figure("host_self_ms_per_step", words.milliseconds), "right"),
            Column("Host, total", _figure("host_total_ms_per_step", words.milliseconds), "right"),
            Column("Line", _place, "line"),
        ),
    ),
    View(
        "Python loops",
        "Loops that call the same thing once per item, in the profiled window.",
        _view("loops"),
        (
            Column("Calls", _field("callee"), "code"),
            Column("Calls a step", _figure("calls_per_step", words.count), "right"),
            Column("Per step", _figure("ms_per_step", words.milliseconds), "right"),
            Column("Operators a call", _figure("operators_per_call", words.count), "right"),
            Column("Line", _place, "line"),
            Column("Source", _field("code"), "source"),
            Column("Equals", _field("dimension")),
        ),
    ),
    View(
        "Python on the main thread",
        "Lines that are neither waiting for data nor inside torch operators.",
        _view("python"),
        (
            Column("Share", _figure("share", words.percent), "right"),
            Column("Per step", _figure("ms_per_step", words.milliseconds), "right"),
            Column("Line", _place, "line"),
            Column("Source", _field("code"), "source"),
            Column("Phase", _figure("phase", words.term)),
            Column("Outside operators", _figure("python_fraction", words.percent), "right"),
            Column("Waiting", _figure("waiting_share", words.percent), "right"),
            Column("Samples", _figure("samples", words.count), "right"),
        ),
    ),
    View(
        "Input and output in steps",
        "Blocking file access of the main thread inside steady steps.",
        _view("io"),
        (
            Column("Operation", _field("operation")),
            Column("Calls a step", _figure("calls_per_step", words.count), "right"),
            Column("Per step", _figure("ms_per_step", words.milliseconds), "right"),
            Column("Line", _place, "line"),
            Column("Source", _field("code"), "source"),
            Column("Seen in", _field("source")),
        ),
    ),
    View(
        "Regions",
        "Ranges you named in the code.",
        _view("regions"),
        (
            Column("Region", _field("name"), "code"),
            Column("Calls", _figure("calls", words.count), "right"),
            Column("Calls a step", _figure("calls_per_step", words.count), "right"),
            Column("Per step", _figure("ms_per_step", words.milliseconds), "right"),
            Column("Seen in", _field("source")),
        ),
    ),
    View(
        "Profiler windows",
        "Steps for which torch.profiler recorded everything; left out of the statistics.",
        _view("windows"),
        (
            Column("Rank", _figure("rank", words.count), "right"),
            Column("Trace", _field("trace"), "code"),
            Column("Opened by", _field("owner")),
            Column("Steps", _figure("steps", words.count), "right"),
            Column("Stop", _figure("stop_ms", words.milliseconds), "right"),
            Column("Export", _figure("export_ms", words.milliseconds), "right"),
            Column("Size", _figure("bytes", words.size), "right"),
            Column("Step time, times", _figure("overhead_ratio", words.number), "right"),
            Column("Why then", _field("reason")),
        ),
    ),
    View(
        "Construction sites",
        "Where the script made what findings speak of.",
        _view("sites"),
        (
            Column("What", _field("what"), "code"),
            Column("Line", _place, "line"),
            Column("Arguments", _arguments, "code"),
            Column("Rank", _figure("rank", words.count), "right"),
        ),
    ),
    View(
        "Processes",
        "Processes of the run, and whether the recorder inside them reported.",
        _view("processes"),
        (
            Column("PID", _field("pid"), "right"),
            Column("Role", _figure("role", words.term)),
            Column("Reported", _figure("reported", _flat)),
            Column("Command", _field("command"), "code"),
            Column("Remedy", _field("remedy")),
        ),
    ),
    View("System", "Telemetry, summed up.", lambda report: _pairs(report.views.get("system")), _PAIR_COLUMNS),
    View(
        "Traces",
        "What reading each trace cost, and how much of its device time was linked to operators.",
        lambda report: report.quality.get("traces"),
        (
            Column("Rank", _figure("rank", words.count), "right"),
            Column("Trace", _field("trace"), "line"),
            Column("Events", _figure("events", words.count), "right"),
            Column("Salvaged", _figure("salvaged", words.count), "right"),
            Column("Lost", _figure("lost", words.count), "right"),
            Column("Overlaps cut", _figure("clipped", words.count), "right"),
            Column("Durations repaired", _figure("repaired", words.count), "right"),
            Column("Device time", _figure("device_ns", words.nanoseconds), "right"),
            Column("Linked", _figure("link_rate", words.percent), "right"),
            Column("Problems", lambda row, _: "; ".join(row["problems"])),
        ),
    ),
    View("What was read", "Counts of the reader.", lambda report: _pairs(report.quality.get("counts")), _PAIR_COLUMNS),
    View("The run", "Command, versions and hardware.", _run, _PAIR_COLUMNS),
)


def tables(report: Report, shorten: Shortener, *, rows: int) -> str:
    """All tables that have rows, each under a fold, at most `rows` rows each."""
    parts = []
    for view in TABLES:
        found = view.rows(report)
        if found:
            parts.append(
                f"<details><summary>{markup(view.title)} <span class='soft'>({len(found)})</span></summary>"
                f"{table(view.caption, view.columns, found, shorten, rows)}</details>"
            )
    return "\n".join(parts)


def table(caption: str, columns: Sequence[Column], rows: Sequence[Row], shorten: Shortener, limit: int) -> str:
    """One table; columns in which no shown row says anything are left out."""
    shown = [{column.heading: column.cell(row, shorten) for column in columns} for row in rows[:limit]]
    used = [column for column in columns if any(row[column.heading] not in (None, "", words.MISSING) for row in shown)]
    head = "".join(f"<th scope='col'{_class(column)}>{markup(column.heading)}</th>" for column in used)
    body = "\n".join("<tr>" + "".join(_cell(column, row) for column in used) + "</tr>" for row in shown)
    more = f" The first {limit} of {len(rows)}." if len(rows) > limit else ""
    return (
        f"<div class='scroll'><table><caption>{markup(caption + more)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def _class(column: Column) -> str:
    return f" class='{column.style}'" if column.style in ("right", "line", "source") else ""


def _cell(column: Column, row: Row) -> str:
    value = row[column.heading]
    text = markup(words.MISSING if value is None else value, CELL)
    if column.style == "source":  # one line, cut by the page; whole where the pointer rests
        return f"<td class='source'><code title='{text}'>{text}</code></td>"
    return f"<td{_class(column)}>{f'<code>{text}</code>' if column.style in ('code', 'line') else text}</td>"
