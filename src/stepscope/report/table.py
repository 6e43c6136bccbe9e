"""One table in full as a document: rows with plain values, chosen and ordered as asked, columns with their meaning.

Nothing is computed here: nested records become columns of their own, rows are left out or ordered. The terminal, CSV
and JSON show this document (`report.table_output`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.errors import UsageError
from stepscope.report.metrics import metric
from stepscope.report.table_columns import SHOWN, Shown
from stepscope.report.values import field_names, is_record

IN_UNIT = re.compile(r"total|value_per_second|p\d+(\.\d+)?")  # columns whose unit stands in the row, as `unit`
TABLE_SCHEMA = "stepscope.table/1"
TEXT_COLUMNS = (
    *("name", "part", "path", "key", "stack", "metric", "file", "function", "operator", "kernel"),
    *("kind", "cause", "subject", "text"),  # of compilers
)
# what `--sort` takes beside the names of columns
SORTS = {
    "self_device": ("device_self_ns",),
    "total_device": ("device_total_ns",),
    "self_host": ("host_self_ns",),
    "total_host": ("host_total_ns",),
    "self_memory": ("self_memory_bytes", "self_allocated_bytes"),
    "total_memory": ("total_memory_bytes", "total_allocated_bytes"),
    "self_device_memory": ("self_device_memory_bytes",),
    "total_device_memory": ("total_device_memory_bytes",),
    "memory": ("bytes", "allocated_bytes", "peak_allocated_bytes"),
    "total": ("total_ns", "wall_ns", "total_ms", "wall_ms"),
    "mean": ("mean_ns",),
    "min": ("min_ns",),
    "max": ("max_ns",),
    "delta": ("delta_ns",),
    "delay": ("launch_delay_ns",),
    "occupancy": ("occupancy_pct",),
}


class Column(Struct, frozen=True):
    """`unit` and `definition` as docs/metrics.md gives them; empty for names."""

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


def document(
    table: str,
    rows: Sequence[Any],
    choice: Choice,
    *,
    notes: tuple[str, ...] = (),
    absent: str | None = None,
    shown: Shown | None = None,
) -> TableDocument:
    """Rows of an analysis (dataclasses or mappings) as a document; raises `UsageError` for a sort that is no column."""
    shown = shown or SHOWN[table]
    flat = [flatten(row) for row in rows]
    keys = tuple(dict.fromkeys(key for row in flat for key in row))
    chosen = _matching(flat, keys, choice.pattern)
    by = _sort_key(table, choice.sort, keys) if choice.sort else shown.sort
    if by is not None and by in keys:
        chosen = _ordered(chosen, by)
    if not flat:
        by = None
    return TableDocument(
        table=table,
        title=shown.title,
        columns=tuple(_column(table, key) for key in keys),
        rows=tuple(chosen[: choice.top]),
        total=len(chosen),
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


def as_json(found: TableDocument) -> dict[str, Any]:
    """The document as JSON carries it."""
    return {
        "schema": TABLE_SCHEMA,
        "table": found.table,
        "title": found.title,
        "columns": [msgspec.structs.asdict(column) for column in found.columns],
        "rows": list(found.rows),
        "rows_total": found.total,
        "sorted_by": found.sorted_by,
        "notes": list(found.notes),
        "absent": found.absent,
    }


def _matching(rows: list[dict[str, Any]], keys: tuple[str, ...], pattern: str | None) -> list[dict[str, Any]]:
    """Rows in which one of the texts matches."""
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
    for key in (name, *SORTS.get(name, ()), f"{name}_ns", f"{name}_ms", f"{name}_bytes", f"{name}_pct"):
        if key in keys:
            return key
    if not keys:
        return None
    known = [name for name, columns in SORTS.items() if any(key in keys for key in columns)]
    raise UsageError(f"--sort {wanted}: the table {table} has no such column; it knows {', '.join([*known, *keys])}")


def _ordered(rows: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Largest first, missing last; texts in their own order."""
    there = [row for row in rows if row.get(by) is not None]
    missing = [row for row in rows if row.get(by) is None]
    if there and isinstance(there[0][by], str):
        return [*sorted(there, key=lambda row: str(row[by])), *missing]
    return [*sorted(there, key=lambda row: -_size(by, row[by])), *missing]


def _size(by: str, value: Any) -> float:
    return abs(value) if by == "delta_ns" else float(value)


def _column(table: str, key: str) -> Column:
    found = metric(table, key)
    return Column(key, found.unit if found else "", found.definition if found else "")
