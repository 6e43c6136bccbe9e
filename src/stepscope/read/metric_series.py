"""What a `metrics` event holds: stretches of curves, each with its times and values, or the values of many curves at
one moment (docs/run_folder.md)."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from stepscope.read.raw import RawSeries, Row
from stepscope.read.text import LATEST_NS, LONGEST_NS, integer, moment_ns, number, string

MAX_NAME = 200  # characters
_COLUMNS = ("name", "source", "start_ns", "after_ns", "times_ns", "values", "updates", "optimizers")
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
    name, source = string(entry.get("name")), string(entry.get("source"))
    values = _numbers(entry.get("values"), np.float64)
    times = _numbers(entry.get("times_ns"), np.int64)
    if "times_ns" not in entry:  # as recordings of before have them
        start, times = moment_ns(entry.get("start_ns")), _numbers(entry.get("after_ns"), np.int64)
        known = start is not None and times is not None and not ((times < 0) | (times > LONGEST_NS)).any()
        times = times + start if known else None  # type: ignore[operator]
    columns = {key: _numbers(entry[key], np.int64) for key in ("updates", "optimizers") if entry.get(key) is not None}
    if not name or source is None or values is None or times is None:
        return None
    if any(column is None or len(column) != len(values) for column in (times, *columns.values())):
        return None
    if ((times < 0) | (times > LATEST_NS)).any():
        return None
    return RawSeries(
        name=name[:MAX_NAME],
        source=source[:MAX_NAME],
        times_ns=times,
        values=values,
        about={key: value for key, value in entry.items() if key not in _COLUMNS},
        **columns,
    )


def _numbers(column: Any, kind: type[np.generic]) -> npt.NDArray[Any] | None:
    """A column of numbers of eight bytes as base64, or, of recordings of before, a list; None where it is neither."""
    if isinstance(column, str):
        try:
            return np.frombuffer(base64.b64decode(column, validate=True), np.dtype(kind).newbyteorder("<")).astype(kind)
        except ValueError:
            return None
    read = _value if kind is np.float64 else integer
    numbers = [read(number) for number in column] if isinstance(column, list) else [None]
    return None if None in numbers else np.array(numbers, kind)


def _value(value: Any) -> float | None:
    return _WORDS.get(value) if isinstance(value, str) else number(value)
