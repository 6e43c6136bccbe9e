"""Decoded entries to columns: numbers to arrays, texts to codes, entry by kind.

Columns are taken with comprehensions and C loops over whole stretches; nothing here runs a Python function per event
unless the event is odd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from stepscope.read.metadata import whole
from stepscope.read.text import clean
from stepscope.read.trace import MISSING, Float64, Int32, Int64, Text

_NO_CODE = np.int32(-1)
MAX_NAME_CHARS = 4096
MAX_ARGUMENT_CHARS = 65_536  # shapes, types, call stacks
MAX_ID_CHARS = 200


class Codes:
    """Values to codes in order of appearance; None and no bytes are -1."""

    def __init__(self) -> None:
        self._codes: defaultdict[Any, int] = defaultdict(count().__next__)
        self._codes[None] = self._codes[b""] = -1
        self._parts: list[Int32] = []

    def add(self, values: Iterable[Any], size: int) -> Int32:
        """Append `size` hashable values; returns their codes."""
        part = self.codes(values, size)
        self._parts.append(part)
        return part

    def add_codes(self, codes: Int32 | None, size: int) -> None:
        """Append `size` codes that `codes` gave, or as many missing values."""
        self._parts.append(np.broadcast_to(_NO_CODE, size) if codes is None else codes)

    def codes(self, values: Iterable[Any], size: int) -> Int32:
        """The codes of `size` hashable values, which are not appended yet."""
        return np.fromiter(map(self._codes.__getitem__, values), np.int32, size)

    def values(self) -> list[Any]:
        return list(self._codes)[2:]

    def text(self, spell: Any) -> Text:
        """The column, with every distinct value spelled by `spell` (which may return None for missing)."""
        spelled = [spell(value) for value in self.values()]
        codes = np.concatenate(self._parts) if self._parts else np.empty(0, np.int32)
        known: dict[str, int] = {}
        final = [-1 if value is None else known.setdefault(value, len(known)) for value in spelled]
        if len(known) < len(final) and len(codes):  # spelled alike, or not at all
            codes = np.array([*final, -1], np.int32)[codes]
        return Text(list(known), codes)


def name_text(value: str) -> str:
    """A name that can be stored: valid Unicode of bounded length."""
    return clean(value[:MAX_NAME_CHARS])


def argument_text(value: str) -> str | None:
    """A long text, or missing where it has no sensible length."""
    return clean(value[:MAX_ARGUMENT_CHARS]) or None


def json_text(value: bytes) -> str | None:
    """Raw JSON as compact text; missing where it is null, empty or absurdly long."""
    if len(value) > MAX_ARGUMENT_CHARS or value == b"null":
        return None
    try:
        return msgspec.json.format(value, indent=-1).decode() or None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def track_text(ids: tuple[Any, Any]) -> str:
    """ "pid/tid"."""
    return "/".join(id_text(part) for part in ids)


def id_text(value: Any) -> str:
    """A process or thread id as text; "?" for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return "?"
    return clean(str(value)[:MAX_ID_CHARS])


class Numbers:
    """An integer or float column that is filled in parts."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._missing = np.nan if kind is np.float64 else MISSING
        self._parts: list[Any] = []
        self._any = False

    def add(self, part: Any) -> None:
        self._parts.append(part)
        self._any = True

    def add_missing(self, size: int) -> None:
        self._parts.append(self._absent(size))

    def array(self) -> Any:
        """The whole column. Where no row has a value, one value stands for all (its stride is 0)."""
        if not self._any:
            return self._absent(sum(map(len, self._parts)))
        return self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)

    def _absent(self, size: int) -> Any:
        return np.broadcast_to(self._kind(self._missing) if size else np.empty(0, self._kind), size)


def integers(values: Sequence[Any]) -> Int64:
    """Whole numbers as int64; text of a number counts, anything else is MISSING."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.fromiter(map(_integer, values), np.int64, len(values))


def _integer(value: Any) -> int:
    if type(value) is int and 2**63 <= value < 2**64:
        return value - 2**64 if value > 2**63 else MISSING  # an address or handle: distinct ones stay distinct
    number = whole(value)
    return MISSING if number is None else number


def attribute(name: str, records: Sequence[Any]) -> Int64:
    """The integers that `records` hold under `name`."""
    try:
        return np.fromiter(map(attrgetter(name), records), np.int64, len(records))
    except (TypeError, ValueError, OverflowError):
        return integers([getattr(record, name) for record in records])


def decimals(name: str, records: Sequence[Any]) -> Float64:
    """The floats that `records` hold under `name`; null is NaN."""
    return np.array([getattr(record, name) for record in records], dtype=np.float64)


def volumes(sides: Sequence[tuple[int, int, int] | None]) -> Int64:
    """The product of three sides, where there are any and it is no absurd number."""
    products = [MISSING if side is None else side[0] * side[1] * side[2] for side in sides]
    return np.fromiter([p if 0 < p < 2**62 else MISSING for p in products], np.int64, len(products))
