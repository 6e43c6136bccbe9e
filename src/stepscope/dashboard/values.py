"""Values from a run as JSON and the front end take them: harmless texts, finite numbers, known units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from stepscope.report.escape import plain

Block: TypeAlias = dict[str, Any]
Help: TypeAlias = dict[str, Any]
Link: TypeAlias = dict[str, Any]

MAX_TEXT: Final = 4_000  # characters of a sentence or a paragraph
MAX_NAME: Final = 400  # characters of a name or a cell
MAX_DEPTH: Final = 12  # of what `cleaned` looks into

# units as docs/metrics.md words them, in the words of the front end
UNITS: Final = {
    **{unit: unit for unit in ("ns", "us", "ms", "s", "bytes", "share", "pct", "count", "per_s", "bytes_per_s")},
    **{unit: unit for unit in ("celsius", "W", "MHz", "number", "text", "")},
    "percent": "pct",
    "%": "pct",
    "1/s": "per_s",
    "bytes/s": "bytes_per_s",
    "C": "celsius",
    "fraction": "share",
    "steps": "count",
    "ratio": "number",
    "cores": "number",
    "Hz": "per_s",
}
# ends of names that tell a unit, the longest first
ENDINGS: Final = (
    *(("bytes_per_s", "bytes_per_s"), ("_per_s", "per_s"), ("per_second", "per_s"), ("bytes", "bytes")),
    *(("_ns", "ns"), ("_us", "us"), ("_ms", "ms"), ("_s", "s"), ("_pct", "pct"), ("share", "share")),
    *(("_celsius", "celsius"), ("_c", "celsius"), ("_w", "W"), ("_mhz", "MHz"), ("ratio", "number")),
    *(("ms_per_step", "ms"), ("bytes_per_step", "bytes"), ("_per_step", "number"), ("_cores", "number")),
)


def number(value: Any) -> int | float | None:
    """A number as JSON can carry it: integers, finite floats, also of numpy; None for everything else."""
    if value is None or isinstance(value, (str, bytes)):
        return None
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    item = getattr(value, "item", None)
    return number(item()) if callable(item) else None


def cell(value: Any) -> Any:
    """A value of a table: number, text, truth value, place, or None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return plain(value, MAX_NAME)
    if isinstance(value, Mapping):
        return cleaned(value)
    if isinstance(value, (list, tuple)):
        return plain(", ".join(str(part) for part in value), MAX_NAME)
    return number(value)


def cleaned(value: Any, depth: int = 0) -> Any:
    """`value` with every text harmless and every number finite, however it is nested."""
    if isinstance(value, str):
        return plain(value, MAX_TEXT)
    if value is None or isinstance(value, bool):
        return value
    if depth >= MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {plain(key): cleaned(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [cleaned(item, depth + 1) for item in value]
    return number(value)


def unit_of(key: str, stated: str = "") -> str:
    """The front end's unit of a figure: as its definition states it, else by the end of its name."""
    if stated and stated in UNITS:
        return UNITS[stated]
    return next((unit for ending, unit in ENDINGS if key.endswith(ending)), "number" if stated else "")
