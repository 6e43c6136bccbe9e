"""What must be found in a tool: the values of `analyze --table metrics`, each once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from stepscope import api


def table(run: Path) -> list[dict[str, Any]]:
    """The rows of the table."""
    return list(api.open_run(run).table("metrics").rows)


def values(run: Path, *, single: bool = False) -> Counter[tuple[int, str]]:
    """How often each value is there at each time (µs); `single`: as single precision has it."""
    return Counter(key(row["time_ns"], row["value"], single=single) for row in table(run))


def key(time_ns: float, value: float, *, single: bool = False) -> tuple[int, str]:
    """A time to the microsecond, and a value as text: NaN is equal to itself, and 0.0 is not -0.0."""
    with np.errstate(over="ignore"):
        return round(time_ns / 1e3), repr(float(np.float32(value)) if single else float(value))


def micro(seconds: float) -> float:
    """Nanoseconds of seconds in double, which hold a quarter of a microsecond."""
    return seconds * 1e9
