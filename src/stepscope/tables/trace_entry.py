"""What is stored of a trace that was taken in, in memory or as files of its entry in the cache, and a run's rows of it.

What is stored are the trace's own rows, ids from 0. `PartWriter` writes slices as they come from the reader, on a
second thread: one chunk is in the making at a time, so what waits is bounded, and Polars works without the
interpreter's lock. `Columns` keeps the few numbers that nesting and linking must know of the whole trace at once.
`load` makes rows of the run's tables: the run's row numbers, the journal's clock, the step of each slice. What must be
known of the whole trace (its tree) is there at once; the other columns come part by part, so that no second copy of
them is ever made.

The occupancy of kernels whose trace gives none: warps held by warps that fit, by NVIDIA's published rules.

Kineto asks NVIDIA's calculator (cuda_occupancy.h) without saying that a kernel may take more shared memory than the
48 KB every kernel may: one that does, as most matrix kernels from Ampere on, gets 0 %. The rules here are that
calculator's, its constants those of "Technical Specifications per Compute Capability" in the CUDA programming guide.
They are for Volta and later: no earlier device lets a block have more than 48 KB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.ma
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field
from msgspec.structs import asdict

from stepscope import __version__
from stepscope.errors import UnreadableInputError
from stepscope.files import INDEX, LAYOUT
from stepscope.model.trace import OTHER_MAKERS
from stepscope.read.raw import RawRank, TraceRef
from stepscope.read.text import integer
from stepscope.read.trace import MISSING, Slices, Text
from stepscope.tables.arrays import (
    NONE,
    Bools,
    Floats,
    Int32,
    Int64,
    covered_before,
    decode,
    return_freed_memory,
    unique,
)
from stepscope.tables.categories import OPTIMIZER
from stepscope.tables.journal import Steps, chosen, step_at, trace_steps
from stepscope.tables.links import LINKED, STATES
from stepscope.tables.schema import SCHEMAS, empty

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

    def only(self, kept: Bools) -> None:
        """Leave out all other slices, once the last ones are done."""
        self.wait()
        first = 0
        for number, name in enumerate(map(part_name, range(self.files))):
            part = self.kept[number] if self._keep or self._folder is None else pl.read_parquet(self._folder / name)
            rest = part.filter(pl.Series(kept[first : first + part.height]))
            first += part.height
            if self._keep:
                self.kept[number] = rest
            self.write(rest, Path(name).stem)

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


class Columns:
    """Columns of one kind of row, appended chunk by chunk, then read as often as needed.

    Columns that every row has are kept whole. Of others (a correlation, a sequence number) only the rows with a value
    are kept, with their numbers. Texts are codes of one dictionary per column: traces repeat their texts.
    """

    def __init__(self, kinds: Mapping[str, Any]) -> None:
        """`kinds` of columns that are none of 64-bit integers."""
        self._parts: dict[str, list[Any]] = {}
        self._kinds = kinds
        self.count = 0

    def append(self, dense: dict[str, Any], sparse: dict[str, Int64]) -> None:
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

    def dense(self, name: str) -> Any:
        parts = self._parts.get(name)
        if parts is None:
            return np.empty(0, self._kinds.get(name, np.int64))
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0]

    def given(self) -> Columns:
        other = Columns(self._kinds)
        other._parts, self._parts = self._parts, {}
        return other

    def only(self, kept: Bools) -> None:
        """Leave out all other rows."""
        new = np.cumsum(kept) - 1
        for name in [name for name in self._parts if not name.endswith(".rows")]:
            rows, sparse = self.dense(f"{name}.rows"), f"{name}.rows" in self._parts
            chosen = kept[rows] if sparse else kept
            self._parts[name] = [self.dense(name)[chosen]]
            if sparse:
                self._parts[f"{name}.rows"] = [new[rows[chosen]]]
        self.count = int(kept.sum())

    def forget(self, *names: str) -> None:
        for name in names:
            self._parts.pop(name, None)

    def sparse(self, name: str) -> tuple[Int64, Int64]:
        return self.dense(f"{name}.rows"), self.dense(name)


def is_absent(values: npt.NDArray[Any]) -> bool:
    """Whether a reader's column is one missing value that stands for all rows; False where that takes a search."""
    return values.strides == (0,) and bool(values[0] == MISSING or values[0] != values[0])


TREE, LINKS, MEMORY, MARKS = "tree", "links", "memory", "marks"
# Of a slice, what is known once all of them have come; the rest is in the parts.
TREE_COLUMNS = ("start_ns", "duration_ns", "self_ns", "depth", "parent", "frame", "forward")
# The two make up the table `events`: columns that are there as a whole, and those that come part by part.
TREE_SCHEMA = {name: SCHEMAS["events"][name] for name in ("id", *TREE_COLUMNS, "step")}
_TOGETHER = 4  # columns that are read at once
PART_SCHEMA = {name: dtype for name, dtype in SCHEMAS["events"].items() if name not in TREE_SCHEMA}
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
    """A trace, and its rows for `joined`, slices numbered from `first_id` on.

    Raises OSError or PolarsError where its files are damaged.
    """
    return_freed_memory(trace.index.slices)
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
        TREE: [_full(TREE_SCHEMA, tree, whose)],
        "events": list(_parts(trace, kept, whose)),
        "links": [_full(SCHEMAS["links"], _renumbered(linked, _LINK_IDS, numbers), whose)],
        "memory": [_full(SCHEMAS["memory"], memory, whose)],
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


def _parts(trace: StoredTrace, kept: Bools | None, whose: dict[str, Any]) -> Iterable[pl.DataFrame]:
    first = 0
    devices = occupancy_devices(trace.index.metadata)
    for there in trace.parts if kept is not None else _whole(trace.parts):
        part = pl.read_parquet(there) if isinstance(there, Path) else there
        chosen = part if kept is None else part.filter(pl.Series(kept[first : first + part.height]))
        first += part.height
        yield _full(PART_SCHEMA, with_occupancy(chosen, devices), whose)


def _whole(parts: list[pl.DataFrame] | list[Path]) -> list[pl.DataFrame] | list[Path]:
    """Files as one frame, a few columns at a time: what these let go is room for the next ones, and for them alone."""
    files = [part for part in parts if isinstance(part, Path)]
    if not files:
        return parts
    columns = []
    for at in range(0, len(PART_COLUMNS), _TOGETHER):
        schema = {name: PART_SCHEMA[name] for name in PART_COLUMNS[at : at + _TOGETHER]}
        columns.append(_one_frame([_full(schema, pl.read_parquet(files, columns=list(schema)), {})]))
    return [pl.concat(columns, how="horizontal")]


def joined(frames: dict[str, list[pl.DataFrame]]) -> dict[str, pl.DataFrame]:
    """The tables that the frames of `load` make, of one trace or of many; empties `frames`."""
    tree, parts = frames.pop(TREE), frames.pop("events")
    made = {name: _one_frame(rows) if rows else empty(name) for name, rows in frames.items()}
    whole = _one_frame(parts).hstack(_one_frame(tree)).select(*SCHEMAS["events"]) if parts else empty("events")
    return {"events": whole, **made}


def _one_frame(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """All rows, each column in one piece; empties `parts`. Else whatever looks at one makes a copy."""
    whole = pl.concat(parts, rechunk=False)  # keeps a value that stands for all rows as one
    parts.clear()
    names = whole.columns
    pieces = dict(zip(names, whole.n_chunks("all"), strict=True))
    made = [whole.drop_in_place(name).rechunk() for name in names if pieces[name] > 1]
    return whole.hstack(made).select(names) if made else whole


def _full(schema: dict[str, Any], frame: pl.DataFrame, whose: dict[str, Any]) -> pl.DataFrame:
    """All columns of a schema, with those that say whose the rows are; what is absent is null."""
    # a column without any value takes no memory as a literal, and eight bytes a row as it is
    there = {column.name for column in frame.iter_columns() if column.null_count() < max(frame.height, 1)}
    absent = (pl.lit(whose.get(name), dtype).alias(name) for name, dtype in schema.items() if name not in there)
    return frame.with_columns(absent).select(*schema)


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
        outer = unique(parents[inner])
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
NEGLIGIBLE_NS = 1_000_000  # less than this is no sign of drift: clocks are compared by events that take as long
# What our hooks may take under a profiler with stacks, between boundary and end of the annotation: 0.3 to 1.5 ms were
# seen on the same clock, on a slow host of a GPU; three times that.
HOOKS_NS = 5_000_000


def offset_ns(marks: pl.DataFrame, rank: RawRank) -> int:
    """What to add to the times of a trace with these `marks` to get the journal's; 0 where that is not known or
    implausible.

    Both see the ends of an optimizer's steps, and the profiler converts its own clock to time of day when a window
    opens, which after hours or a correction is another. Where the journal's boundary lies within the annotation, and
    before its end by no more than our hooks may take, they agree. A process that loses its core between the two only
    makes that way longer, so the shortest tells. The last step of a window tells nothing: its annotation lasts as long
    as stopping the profiler takes, 150 ms and more.
    """
    of_host = pl.col("name").str.starts_with(OPTIMIZER) & ~pl.col("category").str.starts_with("gpu_")
    seen = marks.filter(of_host).select("start_ns", end=pl.col("start_ns") + pl.col("duration_ns")).sort("end")
    if seen.height < MIN_ANCHORS:
        return 0
    starts, ends = seen["start_ns"].to_numpy(), seen["end"].to_numpy()
    offsets = [_shortest(window, starts, ends) for window in _windows(rank) if len(window) >= MIN_ANCHORS]
    if not offsets:
        return 0
    offset = min(offsets, key=abs)  # the trace is that of the window it lies nearest to
    return offset if NEGLIGIBLE_NS < abs(offset) <= MAX_OFFSET_NS else 0


def _windows(rank: RawRank) -> list[npt.NDArray[np.int64]]:
    """Of each window's steps, which follow each other, the ends and where the optimizer began."""
    steps = [row for row in rank.steps if row["in_window"] and row["signal"] == "optimizer"]
    ends = np.array([row["start_ns"] + row["wall_ns"] for row in steps], dtype=np.int64)
    begins = ends - np.array([(row["optimizer_ns"] or 0) + (row["other_ns"] or 0) for row in steps], dtype=np.int64)
    numbers = np.array([row["step"] for row in steps], dtype=np.int64)
    return np.split(np.stack([ends, begins], axis=1), np.flatnonzero(np.diff(numbers) != 1) + 1)


def _shortest(steps: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> int:
    """The shortest way from an annotation's end to its boundary; 0 where the same clock would put them there."""
    boundaries, begins = steps.T
    at = np.arange(len(ends))
    if len(boundaries) != len(ends):
        # Several optimizer calls a step, or a step only partly traced: each end belongs to the nearest annotation.
        right = np.clip(np.searchsorted(ends, boundaries), 1, len(ends) - 1)
        at = np.where(np.abs(boundaries - ends[right - 1]) <= np.abs(boundaries - ends[right]), right - 1, right)
    shortest = int((boundaries - ends[at])[:-1].max())
    inside = np.mean((boundaries >= starts[at])[:-1]) > 0.5
    alike = shortest >= -HOOKS_NS or np.abs(begins - starts[at])[:-1].min() <= NEGLIGIBLE_NS
    return 0 if inside and shortest <= 0 and alike else shortest


_BLOCKS = {  # that a multiprocessor holds at most, by compute capability
    **dict.fromkeys(((7, 0), (7, 2), (8, 0), (9, 0), (10, 0), (10, 3)), 32),
    **dict.fromkeys(((7, 5), (8, 6), (8, 7)), 16),
    **dict.fromkeys(((8, 9), (10, 1), (11, 0), (12, 0), (12, 1)), 24),
}
_WARP = 32
_PARTITIONS = 4  # of a multiprocessor; a warp's registers lie in one of them
_REGISTERS = 256  # are given to a warp at a time
_FIRST_RESERVING = 8  # capability from which on a block takes _RESERVED bytes of shared memory for the system
_RESERVED = 1024
_ROUNDED_PCT = 0.5  # Kineto writes whole percent: its 0 is right below this


class _Device(Struct, frozen=True):
    """What one multiprocessor has, and their number."""

    major: int
    blocks: int
    threads: int
    registers: int
    shared_bytes: int
    multiprocessors: int

    def occupancy_pct(self, blocks: Floats, threads: Floats, registers: Floats, shared_bytes: Floats) -> Floats:
        """In Kineto's meaning: a grid too small to fill the device holds what it has; nan where anything is missing."""
        reserved, unit = (_RESERVED, 128) if self.major >= _FIRST_RESERVING else (0, 256)
        warps = np.ceil(threads / _WARP)
        of_warp = np.maximum(_up(registers * _WARP, _REGISTERS), 1)
        of_block = np.maximum(_up(shared_bytes + reserved, unit), 1)
        fit = np.minimum(self.threads // _WARP // warps, self.shared_bytes // of_block)
        fit = np.minimum(fit, self.registers // _PARTITIONS // of_warp * _PARTITIONS // warps)
        held = np.minimum(np.minimum(fit, self.blocks), blocks / self.multiprocessors)
        could_run = (fit > 0) & (threads > 0)
        return np.where(could_run, 100 * held * threads / self.threads, np.nan)


def _up(value: Floats, unit: int) -> Floats:
    return np.ceil(value / unit) * unit


def occupancy_devices(metadata: dict[str, Any]) -> dict[int, _Device]:
    """By number those of a trace that the rules are known for."""
    listed = metadata.get("deviceProperties")
    found = {}
    for item in [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else ():
        major, minor = integer(item.get("computeMajor")) or 0, integer(item.get("computeMinor")) or 0
        keys = ("maxThreadsPerMultiprocessor", "regsPerMultiprocessor", "sharedMemPerMultiprocessor", "numSms")
        figures = [integer(item.get(key)) or 0 for key in keys]
        other = item.get("warpSize") != _WARP or any(maker in str(item.get("name")) for maker in OTHER_MAKERS)
        if (major, minor) in _BLOCKS and min(figures) > 0 and not other:
            found[integer(item.get("id")) or 0] = _Device(major, _BLOCKS[major, minor], *figures)
    return found


def with_occupancy(events: pl.DataFrame, known: dict[int, _Device]) -> pl.DataFrame:
    """Rows of `events`, with an estimate where the writer gave none or a 0 that is not its rounding.

    Where what is needed is missing, so is the occupancy: a kernel that ran held some warp.
    """
    given = pl.col("occupancy_percent")
    rows = events.select(pl.arg_where(pl.col("threads").is_not_null() & ~(given > 0).fill_null(False))).to_series()
    if rows.is_empty():
        return events
    names = ("device", "blocks", "threads", "registers", "shared_memory_bytes", "occupancy_percent")
    device, *launch, written = (events[name].gather(rows).cast(pl.Float64).to_numpy() for name in names)
    found = np.full(len(rows), np.nan)
    for number, one in known.items():
        of_device = np.flatnonzero(device == number)
        found[of_device] = one.occupancy_pct(*(column[of_device] for column in launch))
    found = np.where((found < _ROUNDED_PCT) & (written == 0), 0.0, found)
    return events.with_columns(events["occupancy_percent"].scatter(rows, pl.Series(found, nan_to_null=True)))
