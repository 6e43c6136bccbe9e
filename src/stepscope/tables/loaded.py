"""One taken-in trace as rows of the run's tables: the run's row numbers, the journal's clock, the step of each slice.

What must be known of the whole trace (its tree) is there at once; the other columns come part by part, so that no
second copy of them is ever made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from stepscope.read.raw import RawRank, TraceRef
from stepscope.tables.clocks import offset_ns
from stepscope.tables.schema import SCHEMAS
from stepscope.tables.steps import NONE, step_at
from stepscope.tables.stored import Stored, TraceIndex
from stepscope.tables.trace_steps import missing_steps, trace_steps

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_TREE_IDS = ("parent", "frame", "forward")
_LINK_IDS = ("event", "launch", "operator", "frame", "forward")


class TraceTables(Struct, frozen=True):
    """The rows of one trace, by table; `steps` where the rank has no journal, `offset` what its clock was moved by."""

    frames: dict[str, list[pl.DataFrame]]
    index: TraceIndex
    steps: list[dict[str, Any]]
    offset: int
    counts: Counter[str]
    rows: int


def load(trace: Stored, rank: RawRank, ref: TraceRef, first_id: int, steps: tuple[int, int] | None) -> TraceTables:
    """The rows of a trace, slices numbered from `first_id` on.

    Raises OSError or PolarsError where its files are damaged.
    """
    offset = offset_ns(trace.marks, rank)
    counts: Counter[str] = Counter(trace.index.link_counts)
    own: list[dict[str, Any]] = []
    known: list[dict[str, Any]] = list(rank.steps)
    if not known:
        known = trace_steps(trace.marks)
        own = _chosen(known, steps)
        counts["missing_steps"] = missing_steps(known)
    linked, memory = trace.links, trace.memory
    step = _steps_of(trace.tree["start_ns"].to_numpy() + offset, known)
    _step_of_launch(step, linked)
    if offset:
        memory = memory.with_columns(pl.col("time_ns") + offset)
    kept: Bools | None = None
    if steps is not None:
        kept = _kept(step, trace.tree["parent"].fill_null(NONE).to_numpy(), linked, steps)
        linked = linked.filter(pl.Series(kept).gather(linked["event"]))
        memory = memory.filter(pl.Series(_steps_of(memory["time_ns"].to_numpy(), own or _chosen(known, steps)) != NONE))
    numbers = _numbers(kept, first_id, trace.index.slices)
    whose = {"rank": rank.rank, "process": rank.name, "trace": ref.name}
    tree = _tree(trace.tree, offset, step, kept, numbers, first_id)
    frames = {
        "events": list(_parts(trace, tree, kept, whose)),
        "links": [_full("links", _renumbered(linked, _LINK_IDS, numbers), whose)],
        "memory": [_full("memory", memory, whose)],
        "traces": [_trace_row(ref, trace.index, whose)],
    }
    return TraceTables(frames, trace.index, own, offset, counts, tree.height)


def _tree(
    tree: pl.DataFrame, offset: int, step: Int64, kept: Bools | None, numbers: Int64 | int, first_id: int
) -> pl.DataFrame:
    """The tree with the run's numbers, times and steps, of the slices that are kept."""
    count = tree.height if kept is None else int(kept.sum())
    tree = tree.with_columns(pl.Series("step", step))
    if kept is not None:
        tree = _renumbered(tree.filter(pl.Series(kept)), _TREE_IDS, numbers)
    new = [pl.when(pl.col("step") != NONE).then(pl.col("step")).alias("step")]
    if offset:
        new.append(pl.col("start_ns") + offset)
    if isinstance(numbers, int) and numbers:
        new += [pl.col(name) + numbers for name in _TREE_IDS]
    return tree.with_columns(pl.Series("id", np.arange(first_id, first_id + count)), *new)


def _parts(trace: Stored, tree: pl.DataFrame, kept: Bools | None, whose: dict[str, Any]) -> Iterable[pl.DataFrame]:
    first = done = 0
    for part in trace.each_part():
        chosen = part if kept is None else part.filter(pl.Series(kept[first : first + part.height]))
        first += part.height
        yield _full("events", tree.slice(done, chosen.height).hstack(chosen.get_columns()), whose)
        done += chosen.height


def _full(name: str, frame: pl.DataFrame, whose: dict[str, Any]) -> pl.DataFrame:
    """All columns of a table, with those that say whose the rows are; what is absent is null."""
    # a column without any value takes no memory as a literal, and eight bytes a row as it is
    there = {column.name for column in frame.iter_columns() if column.null_count() < max(frame.height, 1)}
    return frame.select(
        pl.col(column) if column in there else pl.lit(whose.get(column), dtype).alias(column)
        for column, dtype in SCHEMAS[name].items()
    )


def _steps_of(times_ns: Int64, steps: Iterable[dict[str, Any]]) -> Int64:
    rows = sorted(steps, key=lambda row: int(row["start_ns"]))
    columns = (np.array([row[name] for row in rows], np.int64) for name in ("start_ns", "wall_ns", "step"))
    return step_at(times_ns, *columns)


def _step_of_launch(step: Int64, linked: pl.DataFrame) -> None:
    """A device slice belongs to the step that launched it, wherever the host was by then."""
    launch = linked["launch"].fill_null(NONE).to_numpy()
    known = launch >= 0
    step[linked["event"].to_numpy()[known]] = step[launch[known]]


def _chosen(steps: list[dict[str, Any]], wanted: tuple[int, int] | None) -> list[dict[str, Any]]:
    return steps if wanted is None else [row for row in steps if wanted[0] <= row["step"] <= wanted[1]]


def _kept(step: Int64, parents: Int64, linked: pl.DataFrame, wanted: tuple[int, int]) -> Bools:
    """The slices of the wanted steps, what encloses them, and where they come from."""
    kept = (step >= max(wanted[0], 0)) & (step <= wanted[1])
    mine = linked.filter(pl.Series(kept).gather(linked["event"]))
    for name in _LINK_IDS[1:]:
        kept[mine[name].drop_nulls().to_numpy()] = True
    inner = np.flatnonzero(kept)
    while len(inner):
        outer = np.unique(parents[inner])
        outer = outer[outer >= 0]
        inner = outer[~kept[outer]]
        kept[inner] = True
    return kept


def _numbers(kept: Bools | None, first_id: int, count: int) -> Int64 | int:
    """The run's number of each row of the trace, or what to add to its own where all rows are kept."""
    if kept is None:
        return first_id
    numbers = np.full(count, NONE, np.int64)
    numbers[kept] = np.arange(first_id, first_id + int(kept.sum()))
    return numbers


def _renumbered(frame: pl.DataFrame, columns: Iterable[str], numbers: Int64 | int) -> pl.DataFrame:
    if isinstance(numbers, int):
        return frame.with_columns(pl.col(name) + numbers for name in columns) if numbers else frame
    new = []
    for name in columns:
        old = frame[name].fill_null(NONE).to_numpy()
        series = pl.Series(name, np.where(old >= 0, numbers[old], NONE))
        new.append(series.set(series < 0, None))
    return frame.with_columns(new)


def _trace_row(ref: TraceRef, index: TraceIndex, whose: dict[str, Any]) -> pl.DataFrame:
    row = {
        **whose,
        "owner": ref.owner,
        "folder": ref.folder,
        "claimed_rank": ref.claimed_rank,
        "events": index.events,
        "salvaged": index.salvaged,
        "lost": index.lost,
        "unsupported": index.unsupported,
        "clipped": index.clipped,
        "repaired": index.repaired,
        "problems": list(index.problems),
        "metadata": msgspec.json.encode(index.metadata).decode(),
        "threads": msgspec.json.encode(index.threads).decode(),
    }
    schema = SCHEMAS["traces"]
    return pl.DataFrame({name: [row[name]] for name in schema}, schema=schema)
