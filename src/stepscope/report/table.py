"""One table in full: what is declared of it, its rows as a document, and that document as CSV and JSON.

`SHOWN` says what the terminal shows of each table: its title, the columns that fit a line, the order, and what must be
said. A document has plain rows, chosen and ordered as asked, and columns with their meaning; nothing is computed:
nested records become columns of their own, rows are left out or ordered. CSV and JSON hold every column with the raw
figures; CSV starts with a line of column names, and a missing figure is an empty field.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from stepscope.errors import UsageError
from stepscope.model.views import PARTS, Diff
from stepscope.report import sentences
from stepscope.report.definitions import definition
from stepscope.report.escape import field_names, is_record, json_bytes, visible

if TYPE_CHECKING:
    from stepscope.analyze.views.select import Selection
    from stepscope.api import Run

_UNIT = re.compile("_(ns|ms|bytes|pct)$")


class Shown(Struct, frozen=True):
    """`columns` are (heading, key); `sort` is the column rows are ordered by, None for the order they come in."""

    title: str
    columns: tuple[tuple[str, str], ...]
    sort: str | None = None
    notes: tuple[str, ...] = ()
    define: bool = False  # say below the table what its columns mean
    quiet: tuple[str, ...] = ()  # columns left out where all of them are 0


def headed(text: str) -> tuple[tuple[str, str], ...]:
    """(heading, key) of columns written as `key`, whose heading is its name without the unit, or as `heading: key`."""
    split = (column.rpartition(": ") for column in text.split("; "))
    return tuple((heading or _UNIT.sub("", key).replace("_", " "), key) for heading, _, key in split)


class _Layout(Struct, frozen=True):
    """`columns` are those of `headed`."""

    title: str
    columns: str
    sort: str | None = None
    notes: tuple[str, ...] = ()
    define: bool = False
    quiet: tuple[str, ...] = ()


class _Tables(Struct, frozen=True):
    """`sorts`: what `--sort` takes beside the names of columns."""

    shown: dict[str, _Layout]
    sorts: dict[str, tuple[str, ...]]


_PARTS = "; ".join(f"{re.sub('^(exposed|idle|host)_', '', part)}: {part}_ns" for part in PARTS)
_TABLES = msgspec.json.decode(Path(__file__).with_name("table.json").read_bytes(), type=_Tables)
SHOWN = {
    name: Shown(one.title, headed(one.columns.replace("{parts}", _PARTS)), one.sort, one.notes, one.define, one.quiet)
    for name, one in _TABLES.shown.items()
}
SHOWN["steps"] = msgspec.structs.replace(SHOWN["steps"], quiet=tuple(key for _, key in headed(_PARTS)))


def diff_shown(table: str, found: Diff) -> Shown:
    """The columns of a comparison, under the names of its two sides."""
    per = " a step" if found.per_step else ""
    return Shown(
        f"{table.capitalize()}: {found.base} → {found.other}",
        headed(
            f"what: key; calls{per}: base_calls; →: other_calls; time{per}: base_ns; →: other_ns; change: delta_ns; "
            f"ratio; device{per}: base_device_ns; →: other_device_ns; change: device_delta_ns"
        ),
    )


IN_UNIT = re.compile(r"total|value_per_second|p\d+(\.\d+)?")  # columns whose unit stands in the row, as `unit`
TABLE_SCHEMA = "stepscope.table/1"
CURVE_VALUES = ("value", "first", "last", "lowest", "highest")
METRICS = "metrics"  # whose values need not be finite
OWN_FILTER = ("stacks", METRICS)  # make the rows that a pattern asks for, and no others
OF_PROFILED = ("overview", "steps", "operators", "kernels", "modules", "stacks")  # times of profiled steps
TEXT_COLUMNS = (
    *("name", "part", "path", "key", "stack", "metric", "file", "function", "operator", "kernel"),
    *("kind", "cause", "subject", "text"),  # of compilers
)


class Column(Struct, frozen=True):
    key: str
    unit: str
    definition: str


class TableDocument(Struct, frozen=True):
    """What a table shows. `total` counts the rows before `--top`; `absent` says why there is none."""

    table: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[dict[str, Any], ...]
    total: int
    sorted_by: str | None
    notes: tuple[str, ...]
    absent: str | None
    shown: Shown


class Choice(Struct, frozen=True):
    """Which rows, in which order. `top` None is all; `pattern` is a regular expression, its case ignored."""

    sort: str | None = None
    top: int | None = None
    pattern: str | None = None


def of_run(run: Run, table: str, selection: Selection, choice: Choice) -> TableDocument:
    """One of the tables of a run, with what a reader must know of its figures; raises `UsageError`."""
    from stepscope.analyze.views.select import FirstRows

    own = table in OWN_FILTER
    if own:
        selection = msgspec.structs.replace(selection, name=choice.pattern)
    if choice.sort is None:
        selection = msgspec.structs.replace(selection, top=choice.top)
    found = run.table(table, selection)
    slowed = sentences.profiled(run.profiled) if table in OF_PROFILED else None
    read = run.ranks_read
    some = None if read is None else f"this table is of {sentences.looked_at(msgspec.structs.asdict(read))}"
    return document(
        table,
        found.rows,
        Choice(choice.sort, choice.top, None if own else choice.pattern),
        notes=(*found.notes, *filter(None, (slowed, some))),
        absent=found.absent,
        total=found.total if isinstance(found, FirstRows) else None,
    )


def document(
    table: str,
    rows: Sequence[Any],
    choice: Choice,
    *,
    notes: tuple[str, ...] = (),
    absent: str | None = None,
    shown: Shown | None = None,
    total: int | None = None,
) -> TableDocument:
    """Rows of an analysis (dataclasses or mappings) as a document; raises `UsageError` for a sort that is no column.

    `total` counts them where `rows` have been cut.
    """
    shown = shown or SHOWN[table]
    flat = [flatten(row) for row in rows]
    keys = tuple(dict.fromkeys(key for row in flat for key in row))
    chosen = _matching(flat, keys, choice.pattern)
    by = _sort_key(table, choice.sort, keys) if choice.sort else shown.sort
    if choice.sort is None and (by is None or not any(row.get(by) for row in flat)):
        by = None  # as of devices where there are none: the rows have an order of their own
    if by is not None:
        chosen = _ordered(chosen, by)
    return TableDocument(
        table=table,
        title=shown.title,
        columns=tuple(
            Column(key, found.unit, found.definition) if (found := definition(table, key)) else Column(key, "", "")
            for key in keys
        ),
        rows=tuple(chosen[: choice.top]),
        total=len(chosen) if total is None else total,
        sorted_by=by,
        notes=(*shown.notes, *notes) if flat else notes,
        absent=absent if not flat else None,
        shown=shown,
    )


def flatten(row: Any) -> dict[str, Any]:
    """Record as one level: fields of nested records beside the others, lists and mappings of figures left out."""
    items: Iterable[tuple[str, Any]]
    items = row.items() if isinstance(row, Mapping) else ((name, getattr(row, name)) for name in field_names(row))
    flat: dict[str, Any] = {}
    for key, value in items:
        if key == "place":  # its share is of something else in each table
            flat.update({name: getattr(value, name, None) for name in ("file", "line", "function")})
        elif is_record(value):
            for inner, part in flatten(value).items():
                flat.setdefault(inner, part)
        elif not isinstance(value, (list, tuple, Mapping)):
            flat[key] = value
    return flat


def unit_of_row(row: Mapping[str, Any], key: str) -> str | None:
    """The unit of the value under `key` where the row names it itself, as `unit`."""
    unit = row.get("unit")
    return unit if isinstance(unit, str) and IN_UNIT.fullmatch(key) else None


def to_json(found: TableDocument) -> bytes:
    rows = found.rows
    if found.table == METRICS:  # with words for values that JSON has no number for
        rows = tuple(
            {**row, **{key: str(row[key]) for key in CURVE_VALUES if not isfinite(row.get(key) or 0.0)}} for row in rows
        )
    return json_bytes(
        {
            "schema": TABLE_SCHEMA,
            "table": found.table,
            "title": found.title,
            "columns": found.columns,
            "rows": rows,
            "rows_total": found.total,
            "sorted_by": found.sorted_by,
            "notes": found.notes,
            "absent": found.absent,
        }
    )


def _matching(rows: list[dict[str, Any]], keys: tuple[str, ...], pattern: str | None) -> list[dict[str, Any]]:
    if pattern is None:
        return rows
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"--filter {pattern}: not a regular expression ({error}); put \\ before ( [ + * ?") from None
    texts = [key for key in TEXT_COLUMNS if key in keys]
    return [row for row in rows if any(wanted.search(str(row.get(key) or "")) for key in texts)]


def _sort_key(table: str, wanted: str, keys: tuple[str, ...]) -> str | None:
    name = wanted.replace("-", "_")
    for key in (name, *_TABLES.sorts.get(name, ()), f"{name}_ns", f"{name}_ms", f"{name}_bytes", f"{name}_pct"):
        if key in keys:
            return key
    if not keys:
        return None
    known = [name for name, columns in _TABLES.sorts.items() if any(key in keys for key in columns)]
    raise UsageError(f"--sort {wanted}: the table {table} has no such column; it knows {', '.join([*known, *keys])}")


def _ordered(rows: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    there = [row for row in rows if row.get(by) is not None]
    missing = [row for row in rows if row.get(by) is None]
    if there and isinstance(there[0][by], str):
        return [*sorted(there, key=lambda row: str(row[by])), *missing]
    return [*sorted(there, key=lambda row: -_size(by, row[by])), *missing]


def _size(by: str, value: Any) -> float:
    if value != value:  # NaN is what one looks for
        return inf
    return abs(value) if by == "delta_ns" else float(value)


_FORMULA = ("=", "+", "-", "@")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


def csv_bytes(rows: Iterable[Sequence[Any]]) -> bytes:
    """UTF-8, a line per row, quoted where needed; a missing value is an empty field."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([csv_cell(value) for value in row] for row in rows)
    return out.getvalue().encode("utf-8", errors="backslashreplace")


def csv_cell(value: Any) -> Any:
    """A value as it stands in a file that a spreadsheet may open: no text in it is a formula."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text


def to_csv(found: TableDocument) -> bytes:
    keys = [column.key for column in found.columns]
    return csv_bytes([keys, *([row.get(key) for key in keys] for row in found.rows)])


def worth_showing(found: TableDocument, key: str) -> bool:
    """Whether any row has a value there; of spans only where there are several."""
    if key in ("worker", "span"):
        return len({(row.get("worker"), row.get("span")) for row in found.rows}) > 1
    values = {row.get(key) for row in found.rows} - {None}
    return bool(values - {0} if key in found.shown.quiet else values)
