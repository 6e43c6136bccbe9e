"""The tables of report.html. A new one is one line in `TABLES`.

A column is a heading and a function from a row of the document to its text; every text is escaped in one place,
`table`. Rows are bounded, and what was left out is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.model import Report
from stepscope.report import words
from stepscope.report.escape import markup
from stepscope.report.html_columns import Column, Row, View, arguments, field, figure, inside, place, view
from stepscope.report.html_sampled import SAMPLED
from stepscope.report.places import Shortener, command_line

RUN_FACTS = ("folder", "cwd", "tags", "hosts", "ranks", "world_size", "exit_status")
CELL = 240  # characters of a cell


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
    Column("Share", figure("share", words.percent), "right"),
    Column("Per step", figure("ms_per_step", words.milliseconds), "right"),
    Column("Line", place, "line"),
    Column("Function", field("function"), "line"),
    Column("Source", field("code"), "source"),
    Column("Process", figure("role", words.term)),
    Column("Phase", figure("phase", words.term)),
    Column("Waiting", figure("waiting_share", words.percent), "right"),
    Column("On top", lambda row, shorten: shorten(row.get("library_leaf") or ""), "source"),
)
_PAIR_COLUMNS = (Column("Name", field("name")), Column("Value", field("value"), "code"))

TABLES: tuple[View, ...] = (
    View("Hot lines", "Lines of your code by sampled time.", inside("stacks", "hot_lines"), _LINE_COLUMNS),
    *SAMPLED,
    View(
        "Lines of the loader",
        "Data set, collate and transform lines, hottest first.",
        inside("loader", "lines"),
        _LINE_COLUMNS,
    ),
    View(
        "Operators",
        "By device self time, without a device by the host's. A step is a profiled one; ~: where the function begins.",
        view("operators"),
        (
            Column("Operator", field("name"), "code"),
            Column("Calls", figure("calls", words.count), "right"),
            Column("Calls a step", figure("calls_per_step", words.count), "right"),
            Column("Device, self", figure("device_self_ns", words.nanoseconds), "right"),
            Column("Device, total", figure("device_total_ns", words.nanoseconds), "right"),
            Column("Host, self", figure("host_self_ns", words.nanoseconds), "right"),
            Column("Host, total", figure("host_total_ns", words.nanoseconds), "right"),
            Column("Host self a step", figure("host_self_ns_per_step", words.nanoseconds), "right"),
            Column("Host total a step", figure("host_total_ns_per_step", words.nanoseconds), "right"),
            Column("Line", place, "line"),
        ),
        total="operators_total",
    ),
    View(
        "Python loops",
        "Loops that call the same thing once per item, in the profiled window.",
        view("loops"),
        (
            Column("Calls", field("callee"), "code"),
            Column("Calls a step", figure("calls_per_step", words.count), "right"),
            Column("Per step", figure("ms_per_step", words.milliseconds), "right"),
            Column("Operators a call", figure("operators_per_call", words.count), "right"),
            Column("Line", place, "line"),
            Column("Source", field("code"), "source"),
            Column("Equals", field("dimension")),
        ),
    ),
    View(
        "Python on the main thread",
        "Lines that are neither waiting for data nor inside torch operators.",
        view("python"),
        (
            Column("Share", figure("share", words.percent), "right"),
            Column("Per step", figure("ms_per_step", words.milliseconds), "right"),
            Column("Line", place, "line"),
            Column("Source", field("code"), "source"),
            Column("Phase", figure("phase", words.term)),
            Column("Outside operators", figure("python_fraction", words.percent), "right"),
            Column("Waiting", figure("waiting_share", words.percent), "right"),
            Column("Samples", figure("samples", words.count), "right"),
        ),
    ),
    View(
        "Input and output in steps",
        "Blocking file access of the main thread inside steady steps.",
        view("io"),
        (
            Column("Operation", field("operation")),
            Column("Calls a step", figure("calls_per_step", words.count), "right"),
            Column("Per step", figure("ms_per_step", words.milliseconds), "right"),
            Column("Line", place, "line"),
            Column("Source", field("code"), "source"),
            Column("Seen in", field("source")),
        ),
    ),
    View(
        "Regions",
        "Ranges you named in the code.",
        view("regions"),
        (
            Column("Region", field("name"), "code"),
            Column("Calls", figure("calls", words.count), "right"),
            Column("Calls a step", figure("calls_per_step", words.count), "right"),
            Column("Per step", figure("ms_per_step", words.milliseconds), "right"),
            Column("Seen in", field("source")),
        ),
    ),
    View(
        "Profiler windows",
        "Steps for which torch.profiler recorded everything; left out of the statistics.",
        view("windows"),
        (
            Column("Rank", figure("rank", words.count), "right"),
            Column("Trace", field("trace"), "code"),
            Column("Opened by", field("owner")),
            Column("Steps", figure("steps", words.count), "right"),
            Column("Stop", figure("stop_ms", words.milliseconds), "right"),
            Column("Export", figure("export_ms", words.milliseconds), "right"),
            Column("Size", figure("bytes", words.size), "right"),
            Column("Step time, times", figure("overhead_ratio", words.number), "right"),
            Column("Why then", field("reason")),
        ),
    ),
    View(
        "Construction sites",
        "Where the script made what findings speak of.",
        view("sites"),
        (
            Column("What", field("what"), "code"),
            Column("Line", place, "line"),
            Column("Arguments", arguments, "code"),
            Column("Rank", figure("rank", words.count), "right"),
        ),
    ),
    View(
        "Processes",
        "Processes of the run, and whether the recorder inside them reported.",
        view("processes"),
        (
            Column("PID", field("pid"), "right"),
            Column("Role", figure("role", words.term)),
            Column("Reported", figure("reported", _flat)),
            Column("Command", field("command"), "code"),
            Column("Remedy", field("remedy")),
        ),
    ),
    View("System", "Telemetry, summed up.", lambda report: _pairs(report.views.get("system")), _PAIR_COLUMNS),
    View(
        "Traces",
        "What reading each trace cost, and how much of its device time was linked to operators.",
        lambda report: report.quality.get("traces"),
        (
            Column("Rank", figure("rank", words.count), "right"),
            Column("Trace", field("trace"), "line"),
            Column("Events", figure("events", words.count), "right"),
            Column("Salvaged", figure("salvaged", words.count), "right"),
            Column("Lost", figure("lost", words.count), "right"),
            Column("Overlaps cut", figure("clipped", words.count), "right"),
            Column("Durations repaired", figure("repaired", words.count), "right"),
            Column("Device time", figure("device_ns", words.nanoseconds), "right"),
            Column("Linked", figure("link_rate", words.percent), "right"),
            Column("Problems", lambda row, _: "; ".join(row["problems"])),
        ),
    ),
    View("What was read", "Counts of the reader.", lambda report: _pairs(report.quality.get("counts")), _PAIR_COLUMNS),
    View("The run", "Command, versions and hardware.", _run, _PAIR_COLUMNS),
)


def tables(report: Report, shorten: Shortener, *, rows: int) -> str:
    """All tables that have rows, each under a fold, at most `rows` rows each."""
    parts = []
    for shown in TABLES:
        found = shown.rows(report)
        if found:
            total = report.views[shown.total] if shown.total is not None else len(found)
            content = table(shown.caption, shown.columns, found, shorten, rows, total)
            parts.append(fold(shown.title, total, content))
    return "\n".join(parts)


def fold(title: str, count: int, content: str) -> str:
    """Ready markup under a title that opens it."""
    return f"<details><summary>{markup(title)} <span class='soft'>({count})</span></summary>{content}</details>"


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    shorten: Shortener,
    limit: int,
    total: int | None = None,
) -> str:
    """One table, of the first `limit` of `total` rows; columns in which no shown row says anything are left out."""
    total = len(rows) if total is None else total
    shown = [{column.heading: column.cell(row, shorten) for column in columns} for row in rows[:limit]]
    used = [column for column in columns if any(row[column.heading] not in (None, "", words.MISSING) for row in shown)]
    head = "".join(f"<th scope='col'{_class(column)}>{markup(column.heading)}</th>" for column in used)
    body = "\n".join("<tr>" + "".join(_cell(column, row) for column in used) + "</tr>" for row in shown)
    more = f" The first {len(shown)} of {total}." if total > len(shown) else ""
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
