"""The journal's readings of memory as columns, by process: what was held between two steps."""

from __future__ import annotations

from typing import Any

import polars as pl
from msgspec import Struct

from stepscope.analyze.windows import event_data
from stepscope.engine.step_labels import LabelledSteps
from stepscope.tables.schema import Tables

HOST = "cpu"
_BYTES = (
    *("private_bytes", "shared_bytes", "allocated_bytes", "peak_allocated_bytes", "reserved_bytes"),
    *("peak_reserved_bytes", "free_bytes", "total_bytes", "retries", "out_of_memory"),
)
_SCHEMA: dict[str, Any] = {
    "rank": pl.Int64,
    "process": pl.String,
    "time_ns": pl.Int64,
    "step": pl.Int64,
    "device": pl.String,
    "device_name": pl.String,
    "fraction": pl.Float64,
    **dict.fromkeys(_BYTES, pl.Int64),
}


class Readings(Struct, frozen=True):
    """Readings of one process, in order of time. `all_rows` holds those before the steps are steady too.

    `steady` has a row for each reading after a steady step, the first and the last of the run's among them.
    """

    rank: int | None
    process: str
    all_rows: pl.DataFrame
    steady: pl.DataFrame

    def devices(self) -> list[str]:
        """Devices that were read."""
        return sorted(self.all_rows["device"].drop_nulls().unique().to_list())

    def of(self, device: str) -> pl.DataFrame:
        """(time_ns, step, bytes) of the steady readings; `device` may be the host."""
        if device == HOST:
            rows, value = self.steady, pl.col("private_bytes") + pl.col("shared_bytes").fill_null(0)
        else:
            rows, value = self.steady.filter(pl.col("device") == device), pl.col("allocated_bytes")
        return rows.select("time_ns", "step", bytes=value).drop_nulls().unique("step", keep="last").sort("step")


def readings(tables: Tables, labelled: LabelledSteps) -> tuple[Readings, ...]:
    """One for each process that has any, by its folder's name; broken ones are passed over."""
    rows = [_row(row, data) for row, data in event_data(tables, "memory")]
    if not rows:
        return ()
    frame = pl.DataFrame(rows, schema=_SCHEMA, orient="row").drop_nulls("time_ns")
    found = []
    for (process,), own in sorted(frame.group_by("process", maintain_order=True), key=lambda part: str(part[0][0])):
        steps = labelled.steady().filter((pl.col("process") == process) & pl.col("start_ns").is_not_null())
        first, last = steps["step"].min(), steps["step"].max()
        steady = own.filter(pl.col("step").is_between(first, last)) if steps.height else own.clear()
        found.append(Readings(own["rank"][0], str(process), own, steady))
    return tuple(found)


def _row(row: dict[str, Any], data: dict[str, Any]) -> list[Any]:
    values = {**{name: data.get(name) for name in _SCHEMA}, **{name: row[name] for name in ("rank", "process")}}
    values["time_ns"], values["step"] = row["time_ns"], row["step"]
    return [_value(values[name], kind) for name, kind in _SCHEMA.items()]


def _value(value: object, kind: Any) -> Any:
    """The value where it is of that kind, and no negative number."""
    if kind == pl.String:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**62:
        return None
    return float(value) if kind == pl.Float64 else int(value)
