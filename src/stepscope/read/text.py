"""Checks on single values of untrusted files: text that can be stored, integers that fit, numbers that are finite.

Every function returns None for what it cannot accept; the caller counts.
"""

from __future__ import annotations

import math
from typing import Any

INT64_MAX = 2**63 - 1
LATEST_NS = 4_102_444_800 * 10**9  # the year 2100; later times are damage, and sums with them stay inside 64 bits
LONGEST_NS = 10 * 366 * 86_400 * 10**9  # ten years


def clean(text: str) -> str:
    """`text` with lone surrogates (bytes that were no UTF-8) spelled out, so that it can be stored and printed."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # Where every one of them stands for one byte, as os.fsdecode makes them, those bytes.
        bytes_only = all(not "\ud800" <= char <= "\udfff" or "\udc80" <= char <= "\udcff" for char in text)
        data = text.encode("utf-8", "surrogateescape" if bytes_only else "backslashreplace")
        return data.decode("utf-8", "backslashreplace")
    return text


def clean_value(value: Any) -> Any:
    """A decoded JSON value with all text cleaned; nesting is bounded by what the JSON decoder accepted."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [clean_value(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): clean_value(item) for key, item in value.items()}
    return value


def integer(value: Any) -> int | None:
    if type(value) is int and -INT64_MAX <= value <= INT64_MAX:
        return value
    return None


def within(value: Any, highest: int) -> int | None:
    """An integer from zero to `highest`, or None."""
    return value if type(value) is int and 0 <= value <= highest else None


def moment_ns(value: Any) -> int | None:
    """A point in time between 1970 and 2100, or None."""
    return within(value, LATEST_NS)


def length_ns(value: Any) -> int | None:
    """A duration from zero to ten years, or None."""
    return within(value, LONGEST_NS)


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if type(value) is float and math.isfinite(value):
        return value
    whole = integer(value)
    return float(whole) if whole is not None else None


def whole_number(value: Any) -> int | None:
    """An integer, also where a writer put it into text."""
    if type(value) is str and value.strip().removeprefix("-").isdecimal() and len(value) < 20:
        return integer(int(value))
    if type(value) is float and value.is_integer():
        return integer(int(value))
    return integer(value)


def string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def boolean(value: Any) -> bool | None:
    """True and false, or 1 and 0 as some files write them; else None."""
    if isinstance(value, bool):
        return value
    return bool(value) if value in (0, 1) and isinstance(value, int) else None
