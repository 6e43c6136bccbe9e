"""What a `metrics` event holds: stretches of curves, each with its times and values, or the values of many curves at
one moment (docs/run_folder.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from stepscope.read.raw import RawSeries, Row
from stepscope.read.text import LONGEST_NS, integer, moment_ns, number, string

MAX_NAME = 200  # characters
_COLUMNS = ("name", "source", "start_ns", "after_ns", "values", "updates", "optimizers")
_WORDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def read_series(event: Row) -> Iterator[RawSeries | None]:
    """The stretches of an event; None for each that makes no sense."""
    series = event.get("series", [] if "together" in event else None)
    for entry in series if isinstance(series, list) else (None,):
        yield _stretch(entry) if isinstance(entry, dict) else None


def read_moments(events: Iterable[Row]) -> Iterator[RawSeries | None]:
    """The values that events hold together, of one moment each; None for each that makes no sense.

    An event gives the names or, by number, those of an event before it.
    """
    known: dict[int, tuple[str, ...]] = {}
    found: dict[tuple[str, tuple[str, ...]], list[tuple[int, list[float]]]] = {}
    for event in events:
        moment = event.get("together")
        if moment is None:
            continue
        moment = moment if isinstance(moment, dict) else {}
        names, told, number_of = moment.get("names"), moment.get("values"), integer(moment.get("set"))
        own = known.get(number_of) if number_of is not None else None
        if isinstance(names, list) and all(isinstance(name, str) and name for name in names):
            own = tuple(name[:MAX_NAME] for name in names)
            if number_of is not None:
                known[number_of] = own
        source, time = string(moment.get("source")), moment_ns(moment.get("time_ns"))
        values = [_value(value) for value in told] if isinstance(told, list) else [None]
        if source is None or time is None or own is None or len(values) != len(own) or None in values:
            yield None
            continue
        found.setdefault((source[:MAX_NAME], own), []).append((time, values))  # type: ignore[arg-type]
    for (source, own), moments in found.items():
        times, table = np.array([time for time, _ in moments], np.int64), np.array([row for _, row in moments])
        for column, name in enumerate(own):
            yield RawSeries(name=name, source=source, times_ns=times, values=table[:, column])


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
