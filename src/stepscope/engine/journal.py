"""Events of the journal as values: the rows of a kind, each with its own fields, which the run folder holds as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from stepscope.model import Place
from stepscope.tables.schema import Tables

MOST_DIGITS, LARGEST = 20, 2**62  # of a whole number in what a recording says


def event_data(tables: Tables, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The journal's rows of a kind in order of time, each with its own fields; broken ones are passed over."""
    if tables.journal.is_empty():  # a query takes its time even so, and many ask
        return
    for row in tables.journal.filter(pl.col("kind") == kind).sort("time_ns").iter_rows(named=True):
        data = parse_json(row["data"])
        if isinstance(data, dict):
            yield row, data


def events_in_steps(
    tables: Tables, kind: str, steps: pl.DataFrame, *, at_end: bool = False
) -> Iterator[tuple[dict[str, Any], dict[str, Any], tuple[int, int]]]:
    """Those of `event_data` with a duration that began in one of `steps`, with the number and the end (ns) of it.

    `at_end`: that ended in one, as the fetch of its batch does, which may begin before our own work between two steps.
    """
    own = {
        part["process"][0]: (part["start_ns"], part["start_ns"] + part["wall_ns"], part["step"])
        for part in steps.sort("start_ns").partition_by("process")
    }
    for row, data in event_data(tables, kind):
        time = row["time_ns"]
        if row["process"] not in own or time is None or row["duration_ns"] is None:
            continue
        time += row["duration_ns"] if at_end else 0
        starts, ends, numbers = own[row["process"]]
        at = int(starts.search_sorted(time, side="right")) - 1
        if at >= 0 and time < ends[at]:
            yield row, data, (numbers[at], ends[at])


def place_of(event: Mapping[str, Any] | None) -> Place | None:
    """The line of the user's that an event names."""
    if not event or not isinstance(event.get("file"), str):
        return None
    line, function = event.get("line"), event.get("function")
    return Place(
        event["file"], line if isinstance(line, int) else None, function if isinstance(function, str) else None
    )


def parse_json(text: object) -> Any:
    """The value of a JSON text, None where it is absent or broken (what a recording says is untrusted input)."""
    try:
        return json.loads(text, parse_int=_fitting) if isinstance(text, str) and text else None
    except (ValueError, RecursionError):
        return None


def json_list(text: str | None) -> list[Any]:
    """The list that a JSON text is; empty where it is absent, broken or something else."""
    value = parse_json(text)
    return value if isinstance(value, list) else []


def json_object(text: str | None) -> dict[str, Any]:
    value = parse_json(text)
    return value if isinstance(value, dict) else {}


def first_sizes(text: str | None) -> tuple[int, ...] | None:
    """The first shape of a JSON list of shapes; () for a number, None where it is something else."""
    return sizes(next(iter(json_list(text)), None))


def sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        return None
    return tuple(value)


def _fitting(digits: str) -> int | None:
    """A whole number that a column can hold, and the sum of two; what is larger counts or measures nothing."""
    value = int(digits) if len(digits) < MOST_DIGITS else None
    return value if value is not None and abs(value) < LARGEST else None


def mean(values: pl.Series) -> float:
    value = values.mean()
    return float(value) if isinstance(value, int | float) else 0.0
