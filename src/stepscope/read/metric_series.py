"""What a `metrics` event holds: stretches of curves, each with its times and values (docs/run_folder.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stepscope.read.raw import RawSeries, Row
from stepscope.read.text import LONGEST_NS, integer, moment_ns, number, string

MAX_NAME = 200  # characters
_COLUMNS = ("name", "source", "start_ns", "after_ns", "values", "updates", "optimizers")
_WORDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def read_series(event: Row) -> Iterator[RawSeries | None]:
    """The stretches of an event; None for each that makes no sense."""
    series = event.get("series")
    for entry in series if isinstance(series, list) else (None,):
        yield _stretch(entry) if isinstance(entry, dict) else None


def _stretch(entry: Row) -> RawSeries | None:
    name, source, start = string(entry.get("name")), string(entry.get("source")), moment_ns(entry.get("start_ns"))
    after, values = entry.get("after_ns"), entry.get("values")
    if not name or source is None or start is None or not isinstance(after, list) or not isinstance(values, list):
        return None
    known = [_value(value) for value in values]
    updates, optimizers = (entry.get(column) for column in ("updates", "optimizers"))
    columns = [column for column in (after, updates, optimizers) if column is not None]
    if None in known or not all(isinstance(column, list) and len(column) == len(known) for column in columns):
        return None
    if not all(integer(number) is not None for column in columns for number in column):
        return None
    if not all(type(time) is int and 0 <= time <= LONGEST_NS for time in after):
        return None
    return RawSeries(
        name=name[:MAX_NAME],
        source=source[:MAX_NAME],
        times_ns=np.array(after, np.int64) + start,
        values=np.array(known, np.float64),
        updates=None if updates is None else np.array(updates, np.int64),
        optimizers=None if optimizers is None else np.array(optimizers, np.int64),
        about={key: value for key, value in entry.items() if key not in _COLUMNS},
    )


def _value(value: Any) -> float | None:
    return _WORDS.get(value) if isinstance(value, str) else number(value)
