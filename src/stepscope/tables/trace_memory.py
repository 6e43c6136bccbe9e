"""Allocations and releases of a trace as rows of the table `memory`, without what only a run knows."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.read.trace import MISSING
from stepscope.tables.columns import Columns, Int64, TextCodes, decode

NUMBERS = ("time_ns", "address", "bytes", "device_type", "device", "allocated_bytes", "reserved_bytes")
_KEPT = ("bytes", "allocated_bytes", "reserved_bytes", "address")
# c10::DeviceType
_DEVICES = {0: "cpu", 1: "cuda", 6: "hip", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuse1"}


def memory_frame(rows: Columns, tracks: TextCodes, base_ns: int) -> pl.DataFrame:
    """The rows in file order; `base_ns` is added to their times."""
    columns: dict[str, Int64] = {name: rows.dense(name).astype(np.int64, copy=False) for name in NUMBERS}
    frame = pl.DataFrame(
        {
            "device": _devices(columns["device_type"], columns["device"]),
            "time_ns": columns["time_ns"] + base_ns,
            **{name: columns[name] for name in _KEPT},
            "track": decode(tracks.series(), rows.dense("track").astype(np.int32, copy=False)),
        }
    )
    return frame.with_columns(pl.when(pl.col(name) != MISSING).then(pl.col(name)).alias(name) for name in _KEPT)


def _devices(kinds: Int64, numbers: Int64) -> pl.Series:
    """The device of each row; a trace has few of them."""
    codes = np.zeros(len(kinds), np.int32)
    names: list[str | None] = []
    for kind in np.unique(kinds).tolist():
        of_kind = np.flatnonzero(kinds == kind)
        found, place = np.unique(numbers[of_kind], return_inverse=True)
        codes[of_kind] = place + len(names)
        names += [_device(kind, number) for number in found.tolist()]
    return decode(pl.Series(names, dtype=pl.String), codes)


def _device(kind: int, number: int) -> str | None:
    if kind == MISSING:
        return None
    name = _DEVICES.get(kind, f"device-{kind}")
    return name if kind == 0 or number < 0 else f"{name}:{number}"
