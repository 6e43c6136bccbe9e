"""The table of steps, and the step each moment falls into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.read.raw import RawRank
from stepscope.read.text import integer, length_ns
from stepscope.tables.schema import SCHEMAS

Int64 = npt.NDArray[np.int64]
NONE = -1


def steps_table(ranks: Iterable[RawRank]) -> pl.DataFrame:
    """All steps; `device_ns` also from `device_step` events, which arrive after the step's row was written."""
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        on_device = _device_steps(rank)
        for step in rank.steps:
            row = {**step, "rank": rank.rank, "process": rank.name}
            if row["device_ns"] is None:
                row["device_ns"] = on_device.get(row["step"])
            rows.append(row)
    schema = SCHEMAS["steps"]
    return pl.DataFrame([{name: row.get(name) for name in schema} for row in rows], schema=schema)


def _device_steps(rank: RawRank) -> dict[int, int]:
    found: dict[int, int] = {}
    for event in rank.journal:
        if event["kind"] != "device_step":
            continue
        step = integer(event.get("step"))
        duration = length_ns(event.get("device_ns"))
        duration = event["duration_ns"] if duration is None else duration
        if step is not None and duration is not None:
            found[step] = duration
    return found


def step_at(times_ns: Int64, starts_ns: Int64, walls_ns: Int64, numbers: Int64) -> Int64:
    """The number of the step whose [start, start + wall) holds each time, else `NONE`; `starts_ns` is sorted."""
    if not len(starts_ns):
        return np.full(len(times_ns), NONE, dtype=np.int64)
    index = np.searchsorted(starts_ns, times_ns, side="right") - 1
    index = np.maximum(index, 0)
    inside = (times_ns >= starts_ns[index]) & (times_ns < starts_ns[index] + walls_ns[index])
    return np.where(inside, numbers[index], NONE)
