"""Rows as CSV: names of a run are text there, for spreadsheets that would take them for formulas and for terminals."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from stepscope.report.escape import visible

_FORMULA = ("=", "+", "-", "@")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


def encoded(rows: Iterable[Sequence[Any]]) -> bytes:
    """UTF-8, a line per row, quoted where needed; a missing value is an empty field."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue().encode("utf-8", errors="backslashreplace")


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text
