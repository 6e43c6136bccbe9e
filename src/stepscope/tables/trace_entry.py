"""What is stored of a trace that was taken in, in memory or as files of its entry in the cache, and a run's rows of it.

What is stored are the trace's own rows, ids from 0. `load` makes rows of the run's tables: the run's row numbers, the
journal's clock, the step of each slice. What must be known of the whole trace (its tree) is there at once; the other
columns come part by part, so that no second copy of them is ever made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field
from msgspec.structs import asdict

from stepscope import __version__
from stepscope.cached import INDEX, LAYOUT
from stepscope.errors import UnreadableInputError
from stepscope.read.raw import RawRank, TraceRef
from stepscope.tables.arrays import NONE, Bools, Int64, covered_before
from stepscope.tables.categories import OPTIMIZER
from stepscope.tables.journal import step_at, trace_steps
from stepscope.tables.links import LINKED, STATES
from stepscope.tables.parts import PART_COLUMNS, part_name
from stepscope.tables.schema import SCHEMAS
from stepscope.tables.step_range import Steps, chosen

TREE, LINKS, MEMORY, MARKS = "tree", "links", "memory", "marks"
# Of a slice, what is known once all of them have come; the rest is in the parts.
TREE_COLUMNS = ("start_ns", "duration_ns", "self_ns", "depth", "parent", "frame", "forward")
# name in the counts of the quality report -> field of a trace's index
_COUNTED = {
    "trace_events": "slices",
    "trace_events_lost": "lost",
    "trace_events_salvaged": "salvaged",
    "clipped_overlaps": "clipped",
    "repaired_durations": "repaired",
}
_TREE_IDS = ("parent", "frame", "forward")
_LINK_IDS = ("event", "launch", "operator", "frame", "forward")


class TraceIndex(Struct, frozen=True):
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


class StoredTrace(Struct, frozen=True):
    """One trace. `parts` are the columns of its slices that the reader gave, in order, or the files with them."""

    index: TraceIndex
    tree: pl.DataFrame
    links: pl.DataFrame
    memory: pl.DataFrame
    marks: pl.DataFrame
    parts: list[pl.DataFrame] | list[Path] = field(default_factory=list)


def slice_files(entry: Path, index: TraceIndex) -> list[Path]:
    return [entry / part_name(number) for number in range(index.files)]


def index_of(entry: Path) -> TraceIndex | None:
    """The index of an entry that is whole and of this version, else None."""
    try:
        index = msgspec.json.decode((entry / INDEX).read_bytes(), type=TraceIndex)
        if (index.schema, index.version) != (LAYOUT, __version__):
            return None
        return index if _rows(entry, index) == index.slices else None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, pl.exceptions.PolarsError):
        return None


def read(entry: Path) -> StoredTrace:
    """Open an entry; raises UnreadableInputError, OSError or PolarsError where it is damaged."""
    index = index_of(entry)
    if index is None:
        raise UnreadableInputError(f"{entry}: tables of a trace that are not whole; delete the folder")
    tree, links, memory, marks = (pl.read_parquet(entry / f"{name}.parquet") for name in (TREE, LINKS, MEMORY, MARKS))
    return StoredTrace(index, tree, links, memory, marks, slice_files(entry, index))


def _rows(entry: Path, index: TraceIndex) -> int:
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


class ReadTrace(Struct, frozen=True):
    """A trace that was read, with the rank it belongs to.

    `steps` are those it marks where the rank has no journal, `offset_ns` is what its clock was moved by; `counts` has
    what the quality report says of its slices.
    """

    rank: RawRank
    name: str
    index: TraceIndex
    steps: list[dict[str, Any]]
    offset_ns: int
    counts: Counter[str]


def load(
    trace: StoredTrace, rank: RawRank, ref: TraceRef, first_id: int, steps: Steps | None
) -> tuple[ReadTrace, dict[str, list[pl.DataFrame]]]:
    """A trace, and its rows by table, slices numbered from `first_id` on.

    Raises OSError or PolarsError where its files are damaged.
    """
    offset = offset_ns(trace.marks, rank)
    own: list[dict[str, Any]] = []
    known: list[dict[str, Any]] = list(rank.steps)
    if not known:
        known = trace_steps(trace.marks)
        own = chosen(known, steps)
    linked, memory = trace.links, trace.memory
    step = _steps_of(trace.tree["start_ns"].to_numpy() + offset, known)
    launch = linked["launch"].fill_null(NONE).to_numpy()
    launched = launch >= 0  # a device slice belongs to the step that launched it, wherever the host was by then
    step[linked["event"].to_numpy()[launched]] = step[launch[launched]]
    if offset:
        memory = memory.with_columns(pl.col("time_ns") + offset)
    kept: Bools | None = None
    slices = trace.tree
    if steps is not None:
        kept = _kept(step, trace.tree["parent"].fill_null(NONE).to_numpy(), linked, steps)
        slices = slices.with_columns(self_ns=_self_in_steps(slices, offset, linked["event"], chosen(known, steps)))
        linked = linked.filter(pl.Series(kept).gather(linked["event"]))
        memory = memory.filter(pl.Series(_steps_of(memory["time_ns"].to_numpy(), own or chosen(known, steps)) != NONE))
    counts = _link_counts(linked, trace.tree["duration_ns"])
    counts.update({name: getattr(trace.index, known) for name, known in _COUNTED.items()})
    if not rank.steps:
        # numbers left out between one step and the next of the same cycle
        pairs = pairwise([row["step"] for row in known])
        counts["missing_steps"] = sum([after - before - 1 for before, after in pairs if after > before + 1])
    # the run's number of each row, or what to add to its own where all are kept
    numbers = first_id if kept is None else np.where(kept, first_id + np.cumsum(kept) - 1, NONE)
    whose = {"rank": rank.rank, "process": rank.name, "trace": ref.name}
    tree = _tree(slices, offset, step, kept, numbers, first_id)
    frames = {
        "events": list(_parts(trace, tree, kept, whose)),
        "links": [_full("links", _renumbered(linked, _LINK_IDS, numbers), whose)],
        "memory": [_full("memory", memory, whose)],
        "traces": [_trace_row(ref, trace.index, whose)],
    }
    return ReadTrace(rank, ref.name, trace.index, own, offset, counts), frames


def _tree(
    tree: pl.DataFrame, offset: int, step: Int64, kept: Bools | None, numbers: Int64 | int, first_id: int
) -> pl.DataFrame:
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


def _parts(trace: StoredTrace, tree: pl.DataFrame, kept: Bools | None, whose: dict[str, Any]) -> Iterable[pl.DataFrame]:
    first = done = 0
    for there in trace.parts:
        part = pl.read_parquet(there) if isinstance(there, Path) else there
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
    return step_at(times_ns, *_step_times(steps, "start_ns", "wall_ns", "step"))


def _step_times(steps: Iterable[dict[str, Any]], *names: str) -> Iterator[Int64]:
    rows = sorted(steps, key=lambda row: int(row["start_ns"]))
    return (np.array([row[name] for row in rows], np.int64) for name in names)


def _link_counts(linked: pl.DataFrame, durations_ns: pl.Series) -> Counter[str]:
    """Device time by what became of it, in ns, and the number of device slices."""
    device = linked.select("state", "method", duration_ns=durations_ns.gather(linked["event"]))
    counts = Counter({"device_slices": device.height, "device_ns": int(device["duration_ns"].sum())})
    for state, method, duration_ns in device.group_by("state", "method").sum().iter_rows():
        counts[f"linked_by_{method}_ns" if state == STATES[LINKED] else f"{state}_ns"] += duration_ns
    return counts


def _kept(step: Int64, parents: Int64, linked: pl.DataFrame, wanted: Steps) -> Bools:
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


def _self_in_steps(tree: pl.DataFrame, offset: int, on_device: pl.Series, rows: Iterable[dict[str, Any]]) -> Int64:
    """The self time of each slice; of the host's that reach out of the chosen steps (`rows`), what of it lies in them.

    `offset` is ns from the slices' clock to the steps'; `on_device` are rows of device slices, left as they are.
    """
    starts, walls = _step_times(rows, "start_ns", "wall_ns")
    steps = (starts, starts + walls)
    self_ns: Int64 = tree["self_ns"].to_numpy(writable=True)
    start_ns, duration_ns = tree["start_ns"].to_numpy() + offset, tree["duration_ns"].to_numpy()
    within_ns = covered_before(*steps, start_ns + duration_ns) - covered_before(*steps, start_ns)
    reaches_out = within_ns < duration_ns
    reaches_out[on_device.to_numpy()] = False
    parents = tree["parent"].fill_null(NONE).to_numpy()
    below_ns = np.zeros(len(within_ns) + 1, np.int64)  # the last for slices without a parent
    np.add.at(below_ns, parents, within_ns)
    self_ns[reaches_out] = np.maximum(within_ns - below_ns[:-1], 0)[reaches_out]
    return self_ns


def _renumbered(frame: pl.DataFrame, columns: Iterable[str], numbers: Int64 | int) -> pl.DataFrame:
    if isinstance(numbers, int):
        return frame.with_columns(pl.col(name) + numbers for name in columns) if numbers else frame
    old = {name: frame[name].fill_null(NONE).to_numpy() for name in columns}
    new = (pl.Series(name, np.where(rows >= 0, numbers[rows], NONE)) for name, rows in old.items())
    return frame.with_columns(series.set(series < 0, None) for series in new)


def _trace_row(ref: TraceRef, index: TraceIndex, whose: dict[str, Any]) -> pl.DataFrame:
    row = {
        **asdict(index),
        **whose,
        "owner": ref.owner,
        "folder": ref.folder,
        "claimed_rank": ref.claimed_rank,
        "problems": list(index.problems),
        "metadata": msgspec.json.encode(index.metadata).decode(),
        "threads": msgspec.json.encode(index.threads).decode(),
    }
    schema = SCHEMAS["traces"]
    return pl.DataFrame({name: [row[name]] for name in schema}, schema=schema)


MAX_OFFSET_NS = 2_000_000_000  # further apart than this is another run's trace, not a clock that drifted
MIN_ANCHORS = 2
# The journal's boundary lies before the annotation's end by what a profiler with stacks makes of leaving the optimizer
# step: 0.3 to 0.5 ms were seen on the same clock. Less than this is no sign of drift.
NEGLIGIBLE_NS = 1_000_000


def offset_ns(marks: pl.DataFrame, rank: RawRank) -> int:
    """What to add to the times of a trace with these `marks` to get the journal's; 0 where that is not known or
    implausible.

    Both see the ends of an optimizer's steps, and the profiler converts its own clock to time of day when a window
    opens, which after hours or a correction is another. The last step of a window tells nothing: its annotation lasts
    as long as stopping the profiler takes, 150 ms and more.
    """
    of_host = pl.col("name").str.starts_with(OPTIMIZER) & ~pl.col("category").str.starts_with("gpu_")
    ends_ns = marks.filter(of_host).select(pl.col("start_ns") + pl.col("duration_ns")).to_series()
    seen = np.sort(ends_ns.to_numpy())
    if len(seen) < MIN_ANCHORS:
        return 0
    medians = [_median(ends, seen) for ends in _windows(rank) if len(ends) >= MIN_ANCHORS]
    if not medians:
        return 0
    median = min(medians, key=abs)  # the trace is that of the window it lies nearest to
    return median if NEGLIGIBLE_NS < abs(median) <= MAX_OFFSET_NS else 0


def _windows(rank: RawRank) -> list[npt.NDArray[np.int64]]:
    """Ends of the steps of each window: steps that follow each other."""
    steps = [row for row in rank.steps if row["in_window"] and row["signal"] == "optimizer"]
    ends = np.array([row["start_ns"] + row["wall_ns"] for row in steps], dtype=np.int64)
    numbers = np.array([row["step"] for row in steps], dtype=np.int64)
    return np.split(ends, np.flatnonzero(np.diff(numbers) != 1) + 1)


def _median(ends: npt.NDArray[np.int64], seen: npt.NDArray[np.int64]) -> int:
    if len(ends) == len(seen):
        differences = ends - seen
    else:
        # Several optimizer calls a step, or a step only partly traced: each end belongs to the nearest annotation.
        right = np.clip(np.searchsorted(seen, ends), 1, len(seen) - 1)
        left = right - 1
        nearest = np.where(np.abs(ends - seen[left]) <= np.abs(ends - seen[right]), seen[left], seen[right])
        differences = ends - nearest
    return int(np.median(differences[:-1]))
