"""A trace as it comes from its reader: slices to Parquet, on a second thread, and columns of numbers kept in memory.

Only what the reader itself says is written here; where a slice stands in its tree is known when the last one has come.
One chunk is in the making at a time, so what waits is bounded. Polars works without the interpreter's lock. `Columns`
keeps the few numbers that nesting and linking must know of the whole trace at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.ma  # Polars would import it at its first array, which is on the thread, beside the reader
import numpy.typing as npt
import polars as pl

from stepscope.read.trace import MISSING, Slices, Text
from stepscope.tables.arrays import Int32, Int64
from stepscope.tables.schema import SCHEMAS

AnyArray = npt.NDArray[np.generic]

ROWS_PER_FILE = 1 << 17
COMPRESSION: Any = "zstd"
COMPRESSION_LEVEL = 1

# column of a reader's slices -> column of the table `events`, where it is called something else
_CALLED = {"shared_memory": "shared_memory_bytes", "occupancy": "occupancy_percent"}
_READ = {_CALLED.get(name, name): name for name in Slices.__struct_fields__}
PART_COLUMNS = tuple(name for name in SCHEMAS["events"] if name in _READ and name not in ("start_ns", "duration_ns"))


def part_frame(slices: Slices) -> pl.DataFrame:
    """What the reader says of some slices, as columns of the table `events`; what is missing is null."""
    schema = SCHEMAS["events"]
    series: list[pl.Series] = []
    wanted: list[pl.Expr] = []
    for name in PART_COLUMNS:
        given, dtype, known = getattr(slices, _READ[name]), schema[name], pl.col(name)
        if isinstance(given, Text):
            absent = not given.values
        else:
            absent = is_absent(given)
            present = pl.when(known != MISSING).then(known.cast(dtype, strict=False)).alias(name)
            known = known.fill_nan(None) if dtype == pl.Float64 else present
        if absent:
            wanted.append(pl.lit(None, dtype).alias(name))
        else:
            column = decode(given.values, given.codes) if isinstance(given, Text) else pl.Series(given)
            series.append(column.alias(name))
            wanted.append(known)
    return pl.DataFrame(series).select(wanted)


def write_parquet(frame: pl.DataFrame, path: Path | BytesIO) -> None:
    """Write a frame as the cache keeps it; raises OSError."""
    try:
        frame.write_parquet(path, compression=COMPRESSION, compression_level=COMPRESSION_LEVEL, statistics=False)
    except pl.exceptions.PolarsError as error:  # a full disk
        raise OSError(str(error)) from error


def _warm_up() -> None:
    """Let Polars set itself up, which it does at first use, while the reader is at its first chunk."""
    frame = pl.DataFrame({"one": [1]}).select(pl.when(pl.col("one") > 0).then(pl.col("one")))
    write_parquet(frame, BytesIO())


class PartWriter:
    """Writes slices and other frames to a folder, if there is one; leave the `with` block to know that all is written.

    With `keep` the frames of the slices are also kept, and nothing waits for the files: `then` says what to do once
    they are there. What goes wrong on the thread is raised by the next call, or at the end.
    """

    def __init__(self, folder: Path | None, *, keep: bool) -> None:
        self.files = 0
        self.kept: list[pl.DataFrame] = []
        self._folder, self._keep = folder, keep
        self._rest: list[pl.DataFrame] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stepscope-parts")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="stepscope-files") if keep and folder else self._pool
        self._jobs: list[Future[None]] = [self._pool.submit(_warm_up)]
        self._writes: list[Future[None]] = []

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        for pool in (self._pool, self._writing):
            pool.shutdown(wait=kind is not None or not self._keep, cancel_futures=kind is not None)

    def add(self, slices: Slices) -> None:
        self.wait()
        if len(slices):
            self._jobs.append(self._pool.submit(self._take, slices))

    def finish(self) -> None:
        self._jobs.append(self._pool.submit(self._flush))

    def write(self, frame: pl.DataFrame, name: str) -> pl.DataFrame:
        """Write a frame of another table; returns it."""
        if self._folder is not None:
            jobs = self._writes if self._keep else self._jobs
            jobs.append(self._writing.submit(write_parquet, frame, self._folder / f"{name}.parquet"))
        return frame

    def then(self, settle: Callable[[bool], None]) -> None:
        """Call `settle` on the thread once no file is being written any more, with whether all of them were."""

        self.wait()  # the last files are only asked for when the last slices are done

        def settled() -> None:
            settle(all(write.exception() is None for write in self._writes))

        self._writing.submit(settled)

    def wait(self) -> None:
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def _take(self, slices: Slices) -> None:
        self._rest.append(part_frame(slices))
        while sum(frame.height for frame in self._rest) >= ROWS_PER_FILE:
            whole = pl.concat(self._rest)
            self._rest = [whole[ROWS_PER_FILE:]] if whole.height > ROWS_PER_FILE else []
            self._write_part(whole[:ROWS_PER_FILE])

    def _flush(self) -> None:
        if self._rest:
            self._write_part(pl.concat(self._rest))
            self._rest = []

    def _write_part(self, frame: pl.DataFrame) -> None:
        frame = frame.rechunk()
        name, self.files = part_name(self.files), self.files + 1
        if self._keep:
            self.kept.append(frame)
        if self._folder is None:
            return
        if self._keep:
            self._writes.append(self._writing.submit(write_parquet, frame, self._folder / name))
        else:
            write_parquet(frame, self._folder / name)


def part_name(number: int) -> str:
    return f"events-{number:05d}.parquet"


class TextCodes:
    """Codes of one column of texts, in order of first appearance."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def add(self, text: Text) -> Int32:
        codes = self._codes
        mapped = [codes.setdefault(value, len(codes)) for value in text.values]
        return np.array([*mapped, -1], np.int32)[text.codes]

    @property
    def values(self) -> list[str]:
        return list(self._codes)


def decode(values: Sequence[str | None], codes: npt.NDArray[np.integer]) -> pl.Series:
    """A column of texts from codes, which are positions in `values`; -1 is null."""
    index = pl.Series(codes, dtype=pl.Int32)
    if not len(values):
        return pl.repeat(None, len(codes), dtype=pl.String, eager=True)
    if len(codes) and codes.min() < 0:
        index = index.set(index < 0, None)
    return pl.Series(values, dtype=pl.String).gather(index)


def with_ids(columns: dict[str, Any], *ids: str) -> pl.DataFrame:
    """A frame of these columns; `ids` are numbers of rows, in which `NONE` becomes null."""
    known = (pl.when(pl.col(name) >= 0).then(pl.col(name).cast(pl.Int64)).alias(name) for name in ids)
    return pl.DataFrame(columns).with_columns(known)


class Columns:
    """Columns of one kind of row, appended chunk by chunk, then read as often as needed.

    Columns that every row has are kept whole. Of others (a correlation, a sequence number) only the rows with a value
    are kept, with their numbers. Texts are codes of one dictionary per column: traces repeat their texts.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[AnyArray]] = {}
        self.count = 0

    def append(self, dense: dict[str, AnyArray], sparse: dict[str, Int64]) -> None:
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
        parts = self._parts.get(name)
        if parts is None:
            return np.empty(0, np.int64)
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0]

    def given(self) -> Columns:
        other = Columns()
        other._parts, self._parts = self._parts, {}
        return other

    def forget(self, *names: str) -> None:
        for name in names:
            self._parts.pop(name, None)

    def sparse(self, name: str) -> tuple[Int64, AnyArray]:
        return self.dense(f"{name}.rows").astype(np.int64, copy=False), self.dense(name)


def is_absent(values: npt.NDArray[Any]) -> bool:
    """Whether a reader's column is one missing value that stands for all rows; False where that takes a search."""
    return values.strides == (0,) and bool(values[0] == MISSING or values[0] != values[0])
