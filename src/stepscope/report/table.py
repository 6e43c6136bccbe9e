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
from typing import Any

from msgspec import Struct

from stepscope.errors import UsageError
from stepscope.model.views import PARTS, Diff
from stepscope.report.definitions import definition
from stepscope.report.escape import visible
from stepscope.report.values import field_names, is_record, json_bytes

THREADS = "Host times are summed over threads: they can add up to more than the time that passed."
STREAMS = "Kernel times are summed over streams: what runs side by side counts twice."
USE = (
    "100 % utilisation means that some kernel ran at every moment, not that the GPU was full: see SM efficiency and "
    "occupancy."
)
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


_SPAN = "worker; span"
_CAUSE = "backend; kind; why: cause; what: subject; operator"
_OFTEN = "times: count; time: total_ms; in steps: step_count; first: first_step; last: last_step; line: file; function"
_PARTS = "; ".join(f"{re.sub('^(exposed|idle|host)_', '', part)}: {part}_ns" for part in PARTS)

SHOWN: dict[str, Shown] = {
    "overview": Shown(
        "Overview: parts of a step", headed(f"{_SPAN}; split: partition; part; mean_ns; median_ns; p95_ns; share")
    ),
    "steps": Shown(
        "Steps: parts of each",
        headed(f"{_SPAN}; step; wall_ns; {_PARTS}"),
        quiet=tuple(key for _, key in headed(_PARTS)),
    ),
    "gpus": Shown(
        "GPUs",
        headed(
            f"{_SPAN}; device; name; memory_bytes; capability; utilisation: utilization_pct; "
            "SM efficiency: sm_efficiency_pct; occupancy: achieved_occupancy_pct; tensor cores: tensor_core_pct"
        ),
        notes=(USE,),
        define=True,
    ),
    "operators": Shown(
        "Operators",
        headed(
            "operator: name; shapes; calls; a step: calls_per_step; device_self_ns; total: device_total_ns; "
            "host_self_ns; total: host_total_ns; memory: self_device_memory_bytes; "
            "tensor cores: tensor_core_self_pct; line: file"
        ),
        sort="device_self_ns",
        notes=(THREADS,),
    ),
    "stacks": Shown(
        "Call stacks behind an operator",
        headed("calls; host_self_ns; device_self_ns; stack"),
        sort="host_self_ns",
        notes=(THREADS,),
    ),
    "kernels": Shown(
        "Kernels",
        headed(
            "kernel: short_name; operator; grid; block; calls; total_ns; share; mean_ns; max_ns; "
            "blocks/SM: blocks_per_sm; occupancy_pct; tensor: tensor_cores; delay: launch_delay_ns; line: file"
        ),
        sort="total_ns",
        notes=(STREAMS,),
    ),
    "memory": Shown(
        "Memory by device",
        headed("source; worker; span; device; peak_allocated_bytes; peak_reserved_bytes; capacity_bytes"),
    ),
    "memory-curve": Shown(
        "Memory over time", headed(f"{_SPAN}; device; time: since_start_ns; allocated_bytes; reserved_bytes")
    ),
    "memory-operators": Shown(
        "Memory by operator",
        headed(
            f"{_SPAN}; operator: name; device; calls; allocations; allocated, self: self_allocated_bytes; "
            "total: total_allocated_bytes; increase, self: self_increase_bytes; total: total_increase_bytes"
        ),
        sort="self_allocated_bytes",
    ),
    "memory-lines": Shown(
        "Memory by line of your code",
        headed(
            f"{_SPAN}; line: file; device; allocations; allocated_bytes; at the peak: at_peak_bytes; "
            "not released: unreleased_bytes"
        ),
        sort="at_peak_bytes",
    ),
    "memory-blocks": Shown(
        "Largest allocations",
        headed(
            f"{_SPAN}; size: bytes; device; allocated_ns; released_ns; operator; category; at the peak: at_peak; "
            "line: file"
        ),
        sort="bytes",
    ),
    "memory-states": Shown(
        "Memory of each device when the snapshot was taken",
        headed(
            "snapshot: worker; device; reserved_bytes; in_use_bytes; rounding_bytes; pending_bytes; free_bytes; "
            "releasable_bytes; fragmented_bytes; largest free: largest_free_block_bytes"
        ),
        sort="reserved_bytes",
    ),
    "out-of-memory": Shown(
        "Allocations that failed",
        headed(
            "snapshot: worker; device; asked for: requested_bytes; free: device_free_bytes; allocated_bytes; "
            "reserved_bytes; line: file"
        ),
    ),
    "modules": Shown(
        "Modules",
        headed(
            "module: name; calls; host_self_ns; total: host_total_ns; device_self_ns; total: device_total_ns; "
            "backward host: backward_host_total_ns; device: backward_device_total_ns"
        ),
        notes=(THREADS,),
    ),
    "counters": Shown(
        "Counters over time", headed(f"{_SPAN}; device; counter: metric; time: since_start_ns; value; unit")
    ),
    "communication": Shown(
        "Collectives of each rank",
        headed(
            f"{_SPAN}; collective: name; group; ranks: group_size; type: dtype; calls; size: total_bytes; "
            "total_ns; mean_ns; overlapped_ns; exposed_ns; bus: bus_bytes_per_s"
        ),
        sort="total_ns",
    ),
    "distributed": Shown(
        "Workers: a mean step of each",
        headed(
            f"{_SPAN}; rank; step: wall_ns; computation_ns; overlap_ns; communication_ns; other_ns; "
            "synchronising: synchronizing_ns; transferring_ns"
        ),
    ),
    "distributed-collectives": Shown(
        "Collectives over all workers",
        headed(
            "collective: name; group; calls; workers; size: total_bytes; mean_ns; transferring_ns; "
            "synchronising: synchronizing_ns; last_rank"
        ),
        sort="synchronizing_ns",
    ),
    "compiles": Shown("Compiles by cause", headed(f"{_CAUSE}; step; old; new; {_OFTEN}; versions: cache_entries")),
    "compile-steps": Shown(
        "Compiling in steps",
        headed(
            "backend; step; kind; steps; compiled: compiling_steps; wall_ms; compile time: compile_ms; share; "
            "after warm-up: late_share; a compiling step: mean_compiling_ms; another: mean_quiet_ms; compiles; "
            "recompiles; breaks; transfers"
        ),
    ),
    "graph-breaks": Shown("Graph breaks by cause", headed(f"{_CAUSE}; {_OFTEN}; reason: text")),
    "transfers": Shown("Transfers to the host, and operators that run there", headed(f"{_CAUSE}; {_OFTEN}")),
    "xla-metrics": Shown(
        "Metrics of torch_xla, whole run",
        headed(
            "rank; name; unit; samples; total; samples a second: per_second; value a second: value_per_second; "
            "p50; p90; p99"
        ),
        notes=("Percentiles and rates stand on the last samples only, 1,024 by default.",),
    ),
    "metrics": Shown(
        "Metrics",
        headed(
            "step; time: since_start_ns; name; value; points; first; last; lowest; highest; not finite: not_finite; "
            "from step: not_finite_step; source; rank"
        ),
        quiet=("not_finite",),
    ),
}


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


# ---- the document ----------------------------------------------------------------------------------------------------

IN_UNIT = re.compile(r"total|value_per_second|p\d+(\.\d+)?")  # columns whose unit stands in the row, as `unit`
TABLE_SCHEMA = "stepscope.table/1"
CURVE_VALUES = ("value", "first", "last", "lowest", "highest")
METRICS = "metrics"  # whose values need not be finite
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
    """`unit` and `definition` as docs/definitions.md gives them; empty for names."""

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
    if by is not None and by in keys:
        chosen = _ordered(chosen, by)
    if not flat:
        by = None
    return TableDocument(
        table=table,
        title=shown.title,
        columns=tuple(_column(table, key) for key in keys),
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
    """The document as indented JSON."""
    return json_bytes(
        {
            "schema": TABLE_SCHEMA,
            "table": found.table,
            "title": found.title,
            "columns": found.columns,
            "rows": found.rows if found.table != METRICS else [_worded(row) for row in found.rows],
            "rows_total": found.total,
            "sorted_by": found.sorted_by,
            "notes": found.notes,
            "absent": found.absent,
        }
    )


def _worded(row: dict[str, Any]) -> dict[str, Any]:
    """With words for values that JSON has no number for."""
    return {
        key: str(value) if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()
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
    if value != value:  # NaN is what one looks for
        return inf
    return abs(value) if by == "delta_ns" else float(value)


def _column(table: str, key: str) -> Column:
    found = definition(table, key)
    return Column(key, found.unit if found else "", found.definition if found else "")


# ---- as CSV --------------------------------------------------------------------------------------------------------

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


def to_csv(found: TableDocument) -> bytes:
    """UTF-8, one line per row, quoted where needed."""
    keys = [column.key for column in found.columns]
    return csv_bytes([keys, *([row.get(key) for key in keys] for row in found.rows)])


def worth_showing(found: TableDocument, key: str) -> bool:
    """Whether any row has a value there; of spans only where there are several."""
    if key in ("worker", "span"):
        return len({(row.get("worker"), row.get("span")) for row in found.rows}) > 1
    values = {row.get(key) for row in found.rows} - {None}
    return bool(values - {0} if key in found.shown.quiet else values)
