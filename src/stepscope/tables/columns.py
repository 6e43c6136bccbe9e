"""The slices of one trace on disk while it is taken in: a file per column, so that memory does not grow with it.

Columns every slice has are written whole. All others are sparse (a kernel's grid, an operator's shapes): of them only
the rows that have a value are written, with their row numbers. Texts are codes of one dictionary per column, which
stays in memory: traces repeat their texts.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.read.trace import MISSING, Text

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
AnyArray = npt.NDArray[np.generic]


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


class ColumnFiles:
    """Columns of one kind of row, appended chunk by chunk, then read as often as needed."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self._files: dict[str, BinaryIO] = {}
        self._dtypes: dict[str, np.dtype[np.generic]] = {}
        self._rows: dict[str, int] = {}  # of sparse columns: values so far
        self._stack = ExitStack()
        self.count = 0

    def append(self, dense: dict[str, AnyArray], sparse: dict[str, AnyArray]) -> None:
        """Add rows; all arrays have the same length. A sparse value is missing where MISSING, NaN or code -1."""
        length = len(next(iter(dense.values())))
        for name, values in dense.items():
            self._write(name, values)
        for name, values in sparse.items():
            rows = np.flatnonzero(_present(values))
            if len(rows):
                self._write(f"{name}.rows", rows + self.count)
                self._write(name, values[rows])
                self._rows[name] = self._rows.get(name, 0) + len(rows)
        self.count += length

    def close(self) -> None:
        """No more rows; buffers go to disk."""
        self._stack.close()

    def dense(self, name: str, first: int = 0, count: int = -1) -> AnyArray:
        """A column that every row has, or `count` rows of it from `first` on."""
        return self._read(name, first, count)

    def sparse(self, name: str) -> tuple[Int64, AnyArray]:
        """The rows that have a value, ascending, and the values."""
        if name not in self._rows:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return self._read(f"{name}.rows", 0, -1).astype(np.int64, copy=False), self._read(name, 0, -1)

    def names(self) -> frozenset[str]:
        """The sparse columns that have any value."""
        return frozenset(self._rows)

    def _write(self, name: str, values: AnyArray) -> None:
        file = self._files.get(name)
        if file is None:
            file = self._stack.enter_context((self._folder / f"{self._prefix}{name}.bin").open("wb"))
            self._files[name] = file
            self._dtypes[name] = values.dtype
        file.write(np.ascontiguousarray(values).data)

    def _read(self, name: str, first: int, count: int) -> AnyArray:
        dtype = self._dtypes.get(name)
        if dtype is None:
            return np.empty(0, np.int64)
        path = self._folder / f"{self._prefix}{name}.bin"
        return np.fromfile(path, dtype=dtype, count=count, offset=first * dtype.itemsize)


def _present(values: AnyArray) -> npt.NDArray[np.bool_]:
    if values.dtype == np.float64:
        return ~np.isnan(values)
    missing = -1 if values.dtype == np.int32 else MISSING  # codes are 32 bits wide
    return np.asarray(values.astype(np.int64, copy=False) > missing)
