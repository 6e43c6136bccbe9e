"""What the user asked for: steps, a time range, ranks, categories. Texts become integers here, and only here."""

from __future__ import annotations

import re
from decimal import Decimal

from msgspec import Struct

from stepscope.errors import UsageError

_TIME = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(ms|s|us)?")
_UNITS_NS = {"us": 1000, "ms": 10**6, "s": 10**9}
FOREVER_NS = 2**63 - 1


class Cut(Struct, frozen=True):
    """`steps` are the first and the last wanted, `range_ns` a start and an end since the trace's start; None is all."""

    steps: tuple[int, int] | None = None
    range_ns: tuple[int, int] | None = None
    ranks: tuple[int, ...] = ()
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps is not None and self.range_ns is not None:
            raise UsageError("--steps and --range exclude each other; give one")

    @property
    def whole(self) -> bool:
        """Whether every event of the chosen ranks is wanted."""
        return self.steps is None and self.range_ns is None and not self.categories


def parse_range(text: str) -> tuple[int, int]:
    """`START:END` in ns; each side has its own unit (us, ms, s) or the other side's, either may be left out."""
    start_text, colon, end_text = text.partition(":")
    start, end = _TIME.fullmatch(start_text.strip()), _TIME.fullmatch(end_text.strip())
    malformed = not colon or (not start and start_text.strip()) or (not end and end_text.strip())
    units = [match[2] for match in (start, end) if match and match[2]]
    if malformed or not (start or end) or not units:
        raise UsageError(f"--range {text}: not a range of time; write --range 100ms:250ms or --range 1.5s:2s")
    start_ns = _nanoseconds(start, units[0]) if start else 0
    end_ns = _nanoseconds(end, units[0]) if end else FOREVER_NS
    if end_ns <= start_ns:
        raise UsageError(f"--range {text}: ends before it begins; write the earlier time first")
    return start_ns, end_ns


def _nanoseconds(match: re.Match[str], unit: str) -> int:
    return int(Decimal(match[1]) * _UNITS_NS[match[2] or unit])


def parse_categories(texts: list[str] | None) -> tuple[str, ...]:
    """Names of categories from options that hold one or several, separated by commas."""
    names = tuple(name.strip() for text in texts or () for name in text.split(","))
    if not all(names):
        raise UsageError("--categories: an empty name; write --categories kernel,cuda_runtime")
    return names
