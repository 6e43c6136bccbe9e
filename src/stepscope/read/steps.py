"""The step journal, `rank-N/steps.jsonl`: a header that names the columns, then one array per step.

Columns go by name, so a journal of an older or newer recorder reads too: a column it lacks is None, one we do not know
is left out. A row that breaks a bound (a negative duration, a time outside 1970 to 2100, text for a number) is skipped
and counted, as is a step number that was there before; rows out of order are sorted and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.model import PHASES, STEP_COLUMNS
from stepscope.read import jsonl
from stepscope.read.raw import Losses, Row
from stepscope.read.text import boolean, integer, length_ns, moment_ns, string

MAX_COUNT = 10**12  # steps, samples or fetches beyond this are damage


def _count(value: Any) -> int | None:
    number = integer(value)
    return number if number is not None and 0 <= number <= MAX_COUNT else None


_CHECKS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(STEP_COLUMNS, _count),
    **{f"{phase}_ns": length_ns for phase in PHASES},
    "wall_ns": length_ns,
    "device_ns": length_ns,
    "start_ns": moment_ns,
    "kind": string,
    "signal": string,
    "first_batch": boolean,
    "in_window": boolean,
}
_REQUIRED = ("step", "kind", "start_ns", "wall_ns")


def read_steps(path: Path, losses: Losses, label: str) -> list[Row]:
    """The steps of a journal in order of time; every row has all of `STEP_COLUMNS` and `before_forward_ns`."""
    columns: tuple[str, ...] | None = None
    rows: dict[int, Row] = {}
    last_start = -1
    for value in jsonl.read_values(path, losses, label):
        if isinstance(value, dict):
            # An appended second header (a recorder that was started again) may name other columns.
            columns = _header(value) or columns
            if _header(value) is None:
                losses.add("bad_lines", label)
            continue
        row = _row(value, columns or STEP_COLUMNS)
        if row is None or row["step"] in rows:
            losses.add("bad_steps", label)
            continue
        if row["start_ns"] < last_start:
            losses.add("unordered_steps", label)
        last_start = row["start_ns"]
        rows[row["step"]] = row
    return sorted(rows.values(), key=lambda row: (row["start_ns"], row["step"]))


def _header(value: Row) -> tuple[str, ...] | None:
    columns = value.get("columns")
    if isinstance(columns, list) and columns and all(isinstance(name, str) for name in columns):
        return tuple(columns)
    return None


def _row(value: Any, columns: tuple[str, ...]) -> Row | None:
    if not isinstance(value, list) or len(value) != len(columns):
        return None
    given = dict(zip(columns, value, strict=True))
    row: Row = {}
    for name in STEP_COLUMNS:
        raw = given.get(name)
        checked = None if raw is None else _CHECKS[name](raw)
        if checked is None and (raw is not None or name in _REQUIRED):
            return None
        row[name] = checked
    row["before_forward_ns"] = None
    if row["fetches"] == 0:  # no loader was asked: nothing says that this was a wait for data
        row["before_forward_ns"], row["data_wait_ns"] = row["data_wait_ns"], None
    return row
