"""Events of the journal as values: the rows of a kind, each with its own fields, which the run folder holds as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import polars as pl

from stepscope.tables.schema import Tables

MOST_DIGITS, LARGEST = 20, 2**62  # of a whole number in what a recording says


def event_data(tables: Tables, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The journal's rows of a kind in order of time, each with its own fields; broken ones are passed over."""
    if tables.journal.is_empty():
        return
    for row in tables.journal.filter(pl.col("kind") == kind).sort("time_ns").iter_rows(named=True):
        data = parse_json(row["data"])
        if isinstance(data, dict):
            yield row, data


def parse_json(text: str | None) -> object:
    """The value of a JSON text, None where it is absent or broken (the run folder is untrusted input)."""
    if not text:
        return None
    try:
        value: object = json.loads(text, parse_int=_fitting)
    except ValueError:
        return None
    return value


def _fitting(digits: str) -> int | None:
    """A whole number that a column can hold, and the sum of two; what is larger counts or measures nothing."""
    value = int(digits) if len(digits) < MOST_DIGITS else None
    return value if value is not None and abs(value) < LARGEST else None


def mean(values: pl.Series) -> float:
    """The mean of a column, 0 where it holds nothing."""
    value = values.mean()
    return float(value) if isinstance(value, int | float) else 0.0
