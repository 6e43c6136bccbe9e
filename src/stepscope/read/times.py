"""Microseconds as any writer puts them, to integer nanoseconds without loss.

Old files write whole microseconds since 1970, newer ones three decimals, since 2024 relative to a base. A float is
exact for the relative ones and wrong for decimals since 1970 (its steps there are a quarter of a microsecond), so
only those are parsed as decimals.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stepscope.read.text import LATEST_NS
from stepscope.read.trace import Int64

# Below, a float of microseconds with three decimals rounds to the right nanosecond: 2**43 us are 101 days, and the
# writer's base is at most three months old.
EXACT_MICROSECONDS = 2.0**43
_WHOLE_MICROSECONDS = 2.0**53
_US = 1000
_FAR_NS = 2 * LATEST_NS
_POINT = (ord(".") - ord("0")) % 256  # among digits, as bytes without a sign


def loses_nanoseconds(microseconds: Sequence[float]) -> bool:
    """Whether one of these floats has decimals that a float cannot hold."""
    times = np.fromiter(microseconds, np.float64, len(microseconds))
    far = times[np.abs(times) >= EXACT_MICROSECONDS]
    return bool((far != np.rint(far)).any())


def nanoseconds(values: Sequence[Any]) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Floats of microseconds, or their raw JSON, as nanoseconds, and which of them are usable. One kind at a time."""
    if len(values) and isinstance(values[0], msgspec.Raw):  # which numpy would take for text of a float
        return _exact(values)
    times = np.fromiter(values, np.float64, len(values))
    ok = np.abs(times) < _WHOLE_MICROSECONDS  # False for NaN too
    if not ok.all():
        times = np.where(ok, times, 0.0)
    whole = times.astype(np.int64)
    result = whole * _US + np.rint((times - whole) * _US).astype(np.int64)
    return result, ok & (np.abs(result) <= _FAR_NS)


def _exact(values: Sequence[Any]) -> tuple[Int64, npt.NDArray[np.bool_]]:
    usual = _three_decimals(values)
    if usual is not None:
        return usual, np.abs(usual) <= _FAR_NS
    texts = list(map(bytes, values))
    exact = [_one(text) for text in texts]
    ok = np.fromiter((value is not None for value in exact), bool, len(exact))
    return np.array([value or 0 for value in exact], dtype=np.int64), ok


def _three_decimals(values: Sequence[Any]) -> Int64 | None:
    """Times since 1970 have as many digits each and three decimals: all at once, or None where they have not."""
    data = b"".join(values)
    width = len(data) // len(values)
    if width * len(values) != len(data) or not 5 <= width <= 20:
        return None
    digits = np.frombuffer(data, np.uint8).reshape(len(values), width) - np.uint8(ord("0"))
    if (digits[:, -4] != _POINT).any():
        return None
    digits = np.delete(digits, width - 4, axis=1)
    if (digits > 9).any():
        return None
    result = np.zeros(len(values), np.int64)
    for column in digits.T:
        result = result * 10 + column
    return result


def _one(text: bytes) -> int | None:
    """One JSON number or text of a number, rounded to nanoseconds where it has more decimals; None if it is none."""
    try:
        number = Decimal(text.decode("ascii").strip().strip('"').strip())
        if not number.is_finite() or number.adjusted() > 20:
            return None
        result = int((number * _US).to_integral_value())
    except (InvalidOperation, UnicodeDecodeError):
        return None
    return result if abs(result) <= _FAR_NS else None
