"""The numbers of one trace while it is taken in: what nesting and linking must know of all of it at once.

Columns every slice has are kept whole. All others are sparse (a correlation, a sequence number): of them only the
rows that have a value are kept, with their row numbers. Texts are codes of one dictionary per column: traces repeat
their texts. What is written as it comes, and never looked at again, does not pass through here (see `parts`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.read.trace import MISSING, Text

Int64: TypeAlias = npt.NDArray[np.int64]
Int32: TypeAlias = npt.NDArray[np.int32]
AnyArray: TypeAlias = npt.NDArray[np.generic]


class TextCodes:
    """Codes of one column of texts, in order of first appearance."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def add(self, text: Text) -> Int32:
        """The codes of a chunk's column in this dictionary; -1 stays -1."""
        codes = self._codes
        mapped = [codes.setdefault(value, len(codes)) for value in text.values]
        return np.array([*mapped, -1], np.int32)[text.codes]

    @property
    def values(self) -> list[str]:
        """The texts, by code."""
        return list(self._codes)

    def series(self) -> pl.Series:
        """The texts, by code, for `decode`."""
        return pl.Series(list(self._codes), dtype=pl.String)


def decode(values: pl.Series, codes: Int32) -> pl.Series:
    """A column of texts from codes; -1 is null."""
    index = pl.Series(codes, dtype=pl.Int32)
    if not len(values):
        return pl.repeat(None, len(codes), dtype=pl.String, eager=True)
    if len(codes) and codes.min() < 0:
        index = index.set(index < 0, None)
    return values.gather(index)


class Columns:
    """Columns of one kind of row, appended chunk by chunk, then read as often as needed."""

    def __init__(self) -> None:
        self._parts: dict[str, list[AnyArray]] = {}
        self.count = 0

    def append(self, dense: dict[str, AnyArray], sparse: dict[str, Int64]) -> None:
        """Add rows; all arrays have the same length. A sparse value is missing where it is MISSING."""
        for name, values in dense.items():
            self._parts.setdefault(name, []).append(values)
        for name, values in sparse.items():
            if is_absent(values):
                continue
            rows = np.flatnonzero(values != MISSING)
            if len(rows):
                self._parts.setdefault(f"{name}.rows", []).append(rows + self.count)
                self._parts.setdefault(name, []).append(values[rows])
        self.count += len(next(iter(dense.values())))

    def dense(self, name: str) -> AnyArray:
        """A column that every row has."""
        parts = self._parts.get(name)
        if parts is None:
            return np.empty(0, np.int64)
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0]

    def given(self) -> Columns:
        """These columns for who needs them last; here they are empty from now on."""
        other = Columns()
        other._parts, self._parts = self._parts, {}
        return other

    def forget(self, *names: str) -> None:
        """Free columns that nobody needs any more."""
        for name in names:
            self._parts.pop(name, None)

    def sparse(self, name: str) -> tuple[Int64, AnyArray]:
        """The rows that have a value, ascending, and the values."""
        return self.dense(f"{name}.rows").astype(np.int64, copy=False), self.dense(name)


def is_absent(values: npt.NDArray[Any]) -> bool:
    """Whether a reader's column is one missing value that stands for all rows; False where that takes a search."""
    return values.strides == (0,) and bool(values[0] == MISSING or values[0] != values[0])
