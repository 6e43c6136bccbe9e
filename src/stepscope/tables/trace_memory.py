"""Allocations and releases of a trace as rows of the table `memory`, without what only a run knows."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.read.trace import MISSING
from stepscope.tables.columns import ColumnFiles, Int64, TextCodes, decode

NUMBERS = ("time_ns", "address", "bytes", "device_type", "device", "allocated_bytes", "reserved_bytes")
_KEPT = ("bytes", "allocated_bytes", "reserved_bytes", "address")
# c10::DeviceType
_DEVICES = {0: "cpu", 1: "cuda", 6: "hip", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuse1"}


def memory_frame(files: ColumnFiles, tracks: TextCodes, base_ns: int) -> pl.DataFrame:
    """The rows in file order; `base_ns` is added to their times."""
    columns: dict[str, Int64] = {name: files.dense(name).astype(np.int64, copy=False) for name in NUMBERS}
    devices = pl.DataFrame({"kind": columns["device_type"], "number": columns["device"]})
    kinds = devices.unique()
    names = [_device(kind, number) for kind, number in kinds.iter_rows()]
    named = kinds.with_columns(pl.Series("name", names, dtype=pl.String))
    return pl.DataFrame(
        {
            "device": devices.join(named, on=["kind", "number"], how="left", maintain_order="left")["name"],
            "time_ns": columns["time_ns"] + base_ns,
            **{name: _present(columns[name]) for name in _KEPT},
            "track": decode(tracks.series(), files.dense("track").astype(np.int32, copy=False)),
        }
    )


def _device(kind: int, number: int) -> str | None:
    if kind == MISSING:
        return None
    name = _DEVICES.get(kind, f"device-{kind}")
    return name if kind == 0 or number < 0 else f"{name}:{number}"


def _present(values: Int64) -> pl.Series:
    series = pl.Series(values)
    return series.set(series == MISSING, None)
