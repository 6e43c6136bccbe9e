"""CSV and Parquet: a folder with the long table of all curves, the steps, the findings, and the report.

The table `metrics` has the columns of `analyze --table metrics`, values in full precision; a missing step is an empty
field. `steps` has every step with the reason why it counts or not, those included that no `perf/…` curve stands on.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import msgspec
import polars as pl

from stepscope.errors import UsageError
from stepscope.report.outputs import write_file
from stepscope.report.table import csv_cell
from stepscope.sinks import Sent, Target
from stepscope.sinks.exported import PAGE, Exported
from stepscope.tables.trace_entry import write_parquet

COLUMNS = ("step", "time_ns", "since_start_ns", "name", "value", "source", "rank", "process")
ABOUT = "run.json"


def csv(run: Exported, target: Target) -> Sent:
    """Files of comma-separated values. Texts are made harmless as in every table; NaN and inf stand as such."""
    return _write(run, target, "csv", _csv_bytes)


def parquet(run: Exported, target: Target) -> Sent:
    """Files of Parquet."""
    return _write(run, target, "parquet", _parquet_bytes)


def _write(run: Exported, target: Target, kind: str, encoded: Callable[[pl.DataFrame], bytes]) -> Sent:
    folder = target.folder(kind, run.name)
    names = [*(f"{name}.{kind}" for name in ("metrics", "steps", "findings")), ABOUT, PAGE]
    there = next((name for name in names if (folder / name).exists()), None)
    if there is not None and not target.force:
        raise UsageError(f"{folder / there}: exists; add --force to overwrite it, or name another folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: a file; name a folder")
    since = (pl.col("time_ns") - (run.started_ns or 0)).alias("since_start_ns")
    schema = dict.fromkeys(_FINDING_TEXTS, pl.String) | dict.fromkeys(_FINDING_FIGURES, pl.Float64)
    parts = {
        "metrics": encoded(run.rows.with_columns(since).select(COLUMNS)),
        "steps": encoded(run.steps),
        "findings": encoded(pl.DataFrame(run.findings, schema=schema)),
    }
    for name, data in parts.items():
        write_file(folder / f"{name}.{kind}", data, make_folder=True)
    write_file(folder / ABOUT, msgspec.json.format(msgspec.json.encode(run.config | {"summary": run.summary})) + b"\n")
    write_file(folder / PAGE, run.page)
    return Sent(str(folder), run.rows.height)


_FINDING_TEXTS = (
    *("kind", "id", "rule", "category", "severity", "confidence", "title", "cost"),
    *("place", "function", "fix", "caveat", "evidence"),
)
_FINDING_FIGURES = ("cost_ms_per_step", "share", "gain_ceiling")


def _csv_bytes(frame: pl.DataFrame) -> bytes:
    texts = [name for name, kind in frame.schema.items() if kind == pl.String]
    known = {name: frame[name].unique().drop_nulls().to_list() for name in texts}
    harmless = [
        pl.col(name).replace_strict(words, [csv_cell(word) for word in words], return_dtype=pl.String)
        for name, words in known.items()
        if words
    ]
    return frame.with_columns(harmless).write_csv().encode()


def _parquet_bytes(frame: pl.DataFrame) -> bytes:
    out = io.BytesIO()
    write_parquet(frame, out)
    return out.getvalue()
