"""The tables of one trace, in memory where they were just made, else from the files of its entry in the cache.

Rows are the trace's own: ids count from 0, and what belongs to a run (rank, process, trace, step) is not in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from msgspec import Struct, field

from stepscope.tables.parts import PART_COLUMNS, part_name

TREE, LINKS, MEMORY, MARKS = "tree", "links", "memory", "marks"
# Of a slice, what is known once all of them have come; the rest is in the parts.
TREE_COLUMNS = ("start_ns", "duration_ns", "self_ns", "depth", "parent", "frame", "forward")


class TraceIndex(msgspec.Struct, frozen=True):
    """What is known of a taken-in trace beside its slices; written last, so that a folder with it is whole."""

    schema: str
    version: str
    world_size: int | None
    events: int
    slices: int
    salvaged: int
    lost: int
    unsupported: int
    clipped: int
    repaired: int
    problems: tuple[str, ...]
    metadata: dict[str, Any]
    threads: dict[str, str]
    files: int  # of slices
    device: str | None  # the kind of device that worked, "cpu" where none did
    link_counts: dict[str, int]  # device slices, and their time by what became of it


class Stored(Struct, frozen=True):
    """One trace. `parts` are the columns of its slices that the reader gave, in order, or the files with them."""

    index: TraceIndex
    tree: pl.DataFrame
    links: pl.DataFrame
    memory: pl.DataFrame
    marks: pl.DataFrame
    parts: list[pl.DataFrame] | list[Path] = field(default_factory=list)

    def each_part(self) -> Iterator[pl.DataFrame]:
        """The parts, one by one."""
        for part in self.parts:
            yield pl.read_parquet(part) if isinstance(part, Path) else part


def slice_files(entry: Path, index: TraceIndex) -> list[Path]:
    """The files of the slices, in order."""
    return [entry / part_name(number) for number in range(index.files)]


def read(entry: Path, index: TraceIndex) -> Stored:
    """Open an entry; raises OSError or PolarsError where it is damaged."""
    tree, links, memory, marks = (pl.read_parquet(entry / f"{name}.parquet") for name in (TREE, LINKS, MEMORY, MARKS))
    return Stored(index, tree, links, memory, marks, slice_files(entry, index))


def rows(entry: Path, index: TraceIndex) -> int:
    """The rows of an entry's slices, or -1 where a file has other columns; raises OSError or PolarsError."""
    files = slice_files(entry, index)
    for name in (LINKS, MEMORY, MARKS):
        pl.read_parquet_schema(entry / f"{name}.parquet")
    tree = pl.scan_parquet(entry / f"{TREE}.parquet")
    if tuple(tree.collect_schema()) != TREE_COLUMNS:
        return -1
    count: int = pl.scan_parquet(files).select(pl.len()).collect().item() if files else 0
    if files and tuple(pl.read_parquet_schema(files[0])) != PART_COLUMNS:
        return -1
    return count if count == tree.select(pl.len()).collect().item() else -1
