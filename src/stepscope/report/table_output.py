"""A table document on a terminal, as CSV and as JSON.

The terminal shows the columns that fit a line and formats them by the unit in their name; CSV and JSON hold every
column with the raw figures. CSV starts with a line of column names; a missing figure is an empty field.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from stepscope.report import words
from stepscope.report.escape import one_line, plain, visible
from stepscope.report.places import Shortener
from stepscope.report.table import TableDocument, as_json, unit_of_row
from stepscope.report.terminal_parts import TextColumn, lines

_FORMULA = ("=", "+", "-", "@")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


def csv_bytes(rows: Iterable[Sequence[Any]]) -> bytes:
    """UTF-8, a line per row, quoted where needed; a missing value is an empty field."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue().encode("utf-8", errors="backslashreplace")


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text


MAX_NAME = 60  # characters of a name in a table
MAX_NOTES = 4
MIN_WIDTH = 132  # of a table that goes to a file or a pipe: nobody has to fit it on a screen


def to_json(found: TableDocument) -> bytes:
    """Indented UTF-8 JSON that ends in a line break."""
    return msgspec.json.format(msgspec.json.encode(as_json(found)), indent=1) + b"\n"


def to_csv(found: TableDocument) -> bytes:
    """UTF-8, one line per row, quoted where needed."""
    keys = [column.key for column in found.columns]
    return csv_bytes([keys, *([row.get(key) for key in keys] for row in found.rows)])


def show(found: TableDocument, console: Console, shorten: Shortener, *, define: bool = False) -> None:
    """Print the table; with `define`, what its columns mean below it."""
    if found.absent is not None:
        console.print(Text(f"{found.title}: {one_line(found.absent)}"), soft_wrap=True)
        return
    width = console.width if console.is_terminal else max(console.width, MIN_WIDTH)
    order = f", by {words.term(found.sorted_by)}" if found.sorted_by else ""
    some = f", {len(found.rows)} of {found.total}" if len(found.rows) < found.total else ""
    console.print(Text.assemble((found.title, "bold"), (f"{order}{some}", "dim")), soft_wrap=True)
    if not found.rows:
        console.print(Text("no row", style="dim"))
    else:
        for line in lines(_columns(found, shorten), width):
            console.print(line, soft_wrap=True)
    for note in found.notes[:MAX_NOTES]:
        console.print(Text(one_line(note), style="dim"), soft_wrap=True)
    if len(found.notes) > MAX_NOTES:
        console.print(Text(f"and {len(found.notes) - MAX_NOTES} more notes with --json", style="dim"))
    if define or found.shown.define:
        for text in _definitions(found):
            console.print(Text(text, style="dim"), soft_wrap=True)


def _columns(found: TableDocument, shorten: Shortener) -> list[TextColumn]:
    return [
        TextColumn(heading, [shown_value(row, key, shorten) for row in found.rows], _is_text(found, key))
        for heading, key in found.shown.columns
        if _worth_showing(found, key)
    ]


def _worth_showing(found: TableDocument, key: str) -> bool:
    """Whether any row has a value there; of spans only where there are several."""
    values = {row.get(key) for row in found.rows} - {None}
    if key in ("worker", "span"):
        return len({(row.get("worker"), row.get("span")) for row in found.rows}) > 1
    if key in found.shown.quiet:
        return bool(values - {0})
    return bool(values)


def _is_text(found: TableDocument, key: str) -> bool:
    return any(isinstance(row.get(key), str) for row in found.rows)


def shown_value(row: dict[str, Any], key: str, shorten: Shortener) -> str:
    """A value as people read it, by the unit at the end of its name."""
    value = row.get(key)
    if value is None:
        return words.MISSING
    if key == "file":
        guess = "" if row.get("place_exact", True) else "~"
        return guess + shorten(str(value), row.get("line"))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        indent = "  " * (row.get("depth") or row.get("level") or 0) if key in ("name", "key") else ""
        return indent + plain(value, MAX_NAME + len(indent))
    unit = unit_of_row(row, key)
    return _figure(key, value) if unit is None else _in_unit(value, unit)


def _in_unit(value: float, unit: str) -> str:
    if unit == "ms":
        return _time(value * 1e6)
    return words.size(value) if unit == "bytes" else words.count(value)


def _figure(key: str, value: float) -> str:
    if key.endswith("_per_s"):
        return f"{words.size(value)}/s"
    if key.endswith("_ns"):
        return _time(value)
    if key.endswith("_ms"):
        return words.milliseconds(value)
    if key.endswith("bytes"):
        return words.size(value)
    if key.endswith("_pct"):
        return f"{words.number(value)} %"
    if key.endswith("share"):
        return words.percent(value)
    if key in ("ratio", "value", "blocks_per_sm", "per_second"):
        return words.number(value)
    return words.count(value)


def _time(ns: float) -> str:
    """Kernels take microseconds, steps milliseconds."""
    return words.milliseconds(ns / 1e6) if abs(ns) >= 999_500 or ns == 0 else f"{words.number(ns / 1e3)} µs"


def _definitions(found: TableDocument) -> Iterator[str]:
    shown = {key for _, key in found.shown.columns if _worth_showing(found, key)}
    for column in found.columns:
        if column.key in shown and column.definition:
            unit = f" ({column.unit})" if column.unit else ""
            yield f"{column.key}{unit}: {one_line(column.definition)}"
