"""Values as torch_xla's reports write them: times, sizes in bytes, plain numbers.

A time is a chain of parts, `05s089ms084.194us`. Its writer rounds every part to the nearest whole instead of cutting
it off, so each part whose remainder is above one half stands one too high: 59.6 s of 46 minutes are `47m60s600ms…`.
Read from the smallest part on, that can be undone. Sizes are 1024-based whatever their suffix says.
"""

from __future__ import annotations

import math
import re

NS = "ns"
BYTES = "bytes"
COUNT = "count"

_TIME = re.compile(
    r"(?:(\d{1,6})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m(?!s))?(?:(\d{1,9})s)?(?:(\d{1,9})ms)?(?:(\d{1,12}(?:\.\d{1,9})?)us)?"
)
_PART_NS = (86_400 * 10**9, 3_600 * 10**9, 60 * 10**9, 10**9, 10**6)  # days to milliseconds
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)(B|KB|MB|GB|TB|PB)")
_SIZES = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40, "PB": 2**50}
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{0,18})?(?:e[+-]?\d{1,3})?")
_WHOLE = re.compile(r"\d{1,18}")
_MAX_CHARS = 64


def time_ns(text: str) -> int | None:
    """Nanoseconds of a time, or None where `text` is none."""
    match = _TIME.fullmatch(text) if 0 < len(text) <= _MAX_CHARS else None
    if match is None:
        return None
    parts = [(int(digits), unit) for digits, unit in zip(match.groups(), _PART_NS, strict=False) if digits is not None]
    below = round(float(match[6]) * 1000) if match[6] is not None else 0
    cut_off = below + sum(count * unit for count, unit in parts)
    total = below
    for place, (count, unit) in reversed(list(enumerate(parts))):
        floor = count - 1 if 2 * total > unit else count
        if floor < 0 or (floor == 0 and place == 0):
            return cut_off  # no rounding writer writes this: its first part is never below one
        total += floor * unit
    return total


def value(text: str) -> tuple[str, float] | None:
    """(unit, value) of a time in ns, a size in bytes or a plain number; None where `text` is none of them."""
    text = text.strip()
    size = _SIZE.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if size is not None:
        return BYTES, float(size[1]) * _SIZES[size[2]]
    figure = number(text)
    if figure is not None:
        return COUNT, figure
    nanoseconds = time_ns(text)
    return (NS, float(nanoseconds)) if nanoseconds is not None else None


def number(text: str) -> float | None:
    """A finite plain number, or None."""
    text = text.strip()
    if len(text) > _MAX_CHARS or not _NUMBER.fullmatch(text):
        return None
    figure = float(text)
    return figure if math.isfinite(figure) else None


def whole(text: str) -> int | None:
    """A whole number from zero on, or None."""
    text = text.strip()
    return int(text) if _WHOLE.fullmatch(text) else None


def per_second(text: str) -> str:
    """The value of a rate, `851ms / second`."""
    return text.partition("/")[0].strip()
