"""A trace reduced to what is asked of it across ranks: its collectives, how long devices worked, pieces of work.

The file is read once, in pieces, and of its slices only those of devices, their launches, collectives and marks of
steps are kept, so that memory does not grow with what the host did.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.analyze.views.communication import Calls, calls
from stepscope.analyze.views.communication import Group as Named
from stepscope.engine import intervals, scene
from stepscope.engine.collective_names import is_collective_call
from stepscope.engine.device_work import FILL, KERNEL, work
from stepscope.engine.spans import Span, spans
from stepscope.read.kineto import KinetoTrace
from stepscope.read.raw import Losses, RawHost, RawRank, RawRun, TraceRef
from stepscope.read.trace import MISSING, TraceChunk
from stepscope.tables import build, categories
from stepscope.tables.arrays import NONE, Int64
from stepscope.tables.compiles import SPANS, span_rows
from stepscope.tables.ingest import ingest
from stepscope.tables.reduced import SCHEMAS, Group, group_id
from stepscope.tables.schema import SCHEMAS as TABLES
from stepscope.tables.trace_entry import joined, load

MAX_COLLECTIVES = 1_000_000  # of a trace; the first ones are kept
NO_GROUP = Group(group_id((), "not recorded"), (), "not recorded")  # of traces that tell none of their groups
_DEVICE_ANNOTATION = "gpu_user_annotation"  # a range of the host's, as long as the work launched in it takes
# What the schedules of torch.distributed.pipelining name their pieces: "Forward 3", and "PP:1F3" of stage 1.
_PIECE = re.compile(r"(Forward|Backward) (\d{1,6})|PP:(\d{1,6})([FBIW])(\d{1,6})")
_KINDS = {"Forward": "forward", "Backward": "backward", "F": "forward", "B": "backward", "I": "backward",
          "W": "backward"}  # fmt: skip
# A call of a runtime that starts device work; others (events, queries, waits) are half of all there are.
_STARTS_WORK = re.compile(r"launch|enqueue|copy|cpy|memset|fill", re.IGNORECASE)
_FORWARD = ("DistributedDataParallel.forward", "FullyShardedDataParallel.forward")
_LOADER = "enumerate(DataLoader)#"
_WHOLE = "Trace"  # of the one slice that is as long as the recording
_OF_HOST = categories.OPERATORS | {categories.ANNOTATION, categories.FUNCTION}
MAX_NAMES = 10_000  # that are remembered: real traces have some hundred
_UNUSED = ("external_id", "sequence", "forward_thread", "bytes", "python_module", "blocks", "threads", "registers",
           "shared_memory")  # fmt: skip
_UNUSED_FLOATS = ("blocks_per_sm", "warps_per_sm", "occupancy")

_TABLES: dict[str, dict[str, Any]] = {
    "collectives": SCHEMAS["collectives"],
    "work": SCHEMAS["work"],
    "step_sums": {"process": pl.String, "step": pl.Int64, "compute_us": pl.Int64, "collective_us": pl.Int64},
    "cut": {"process": pl.String, "start_ns": pl.Int64, "cut_ns": pl.Int64, "end_ns": pl.Int64},  # engine.trace_steps
    "compiles": TABLES["compiles"],
}


class TraceRows(Struct, frozen=True):
    """What is kept of a trace. `tables` are Parquet files by name: collectives, work, step_sums, cut, compiles.

    `steps` are rows of the table of steps, of a rank without a journal. `left_out` says what was not kept, in words.
    """

    tables: dict[str, bytes]
    groups: tuple[Group, ...] = ()
    world_size: int | None = None
    device: str | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    left_out: tuple[str, ...] = ()
    start_ns: int | None = None
    offset_ns: int = 0  # what its clock was moved by to be the journal's

    def frame(self, name: str) -> pl.DataFrame:
        """Raises PolarsError where the part is damaged."""
        return pl.read_parquet(io.BytesIO(self.tables[name]))


class _Essentials(KinetoTrace):
    """A trace without what the host did, but for collectives, launches, and marks of steps and of compiling.

    What is left out is so before columns are made of it, which takes longer than decoding. Of each stretch the first
    and the last slice of the host stay: they say which steps lie in the trace.
    """

    def _stretches(self) -> Iterator[list[Any]]:
        for events in super()._stretches():
            kept: list[Any] = []
            rest: list[Any] = []
            for event in events:
                if event.ph == "X":
                    category, name = (text if isinstance(text, str) else "" for text in (event.cat, event.name))
                    if _is_kept(category, name):
                        kept.append(event)
                    elif category in _OF_HOST:
                        rest.append(event)
            yield kept + ([rest[0], rest[-1]] if len(rest) > 1 else rest)

    def chunks(self) -> Iterator[TraceChunk]:
        for chunk in super().chunks():
            count = len(chunk.slices)
            unused: dict[str, Any] = {name: np.broadcast_to(np.int64(MISSING), count) for name in _UNUSED}
            unused |= {name: np.broadcast_to(np.float64("nan"), count) for name in _UNUSED_FLOATS}
            yield TraceChunk(replace(chunk.slices, **unused), chunk.flows, chunk.memory)


@lru_cache(MAX_NAMES)
def _is_kept(category: str, name: str) -> bool:
    if categories.is_runtime(category):
        return _STARTS_WORK.search(name) is not None
    if category == _DEVICE_ANNOTATION:
        return _kind_of_piece(name) is not None
    if category in categories.OPERATORS or category == categories.ANNOTATION:
        marks = name.startswith(categories.STEP) or name in SPANS
        return marks or is_collective_call(name) or _kind_of_piece(name) is not None
    return category in categories.DEVICE or category == _WHOLE


def _kind_of_piece(name: str) -> str | None:
    """What work a range of this name is, None for any other range."""
    if name.startswith(categories.OPTIMIZER):
        return "optimizer"
    if name.startswith(_LOADER):
        return "data"
    if name in _FORWARD:
        return "forward"
    match = _PIECE.fullmatch(name)
    return _KINDS[match[1] or match[4]] if match else None


def reduce_trace(ref: TraceRef, rank: RawRank, host: str, *, recorded: bool) -> TraceRows:
    """What is kept of one trace of `rank`, whose steps say what lies in which of them.

    Raises UnreadableInputError, OSError or PolarsError where nothing of it can be read.

    Args:
        recorded: the rank is of a run folder of ours.
    """
    stored = ingest(_Essentials(ref.path), None)
    read, frames = load(stored, rank, ref, 0, None)
    if not rank.steps:
        rank = replace(rank, steps=tuple(read.steps))
    hosts = (RawHost(host, {}),) if recorded else ()
    alone = replace(rank, traces=(), journal=(), metrics=())
    tables = build(RawRun(Path(), hosts, (alone,), Losses()))
    tables = replace(tables, **joined(frames))
    left_out = [f"{rank.name}/{ref.name}: {problem}" for problem in read.index.problems]
    (span,) = spans(tables) or (None,)
    if span is None:
        return TraceRows(_packed({}), left_out=tuple(left_out))
    done = work(span)
    found = calls(span, done)
    if len(found) > MAX_COLLECTIVES:
        left_out.append(f"{rank.name}/{ref.name}: all but the first {MAX_COLLECTIVES:,} of {len(found):,} collectives")
    groups = [_group(message.group, found, read.index.world_size) for message in found.messages]
    return TraceRows(
        tables=_packed(
            {
                "collectives": _collectives(found, groups, rank.rank),
                "work": _pieces(span, rank.rank),
                "step_sums": _step_sums(span, found),
                "cut": scene.cut([span], recorded=recorded),
                "compiles": span_rows(tables.events),
            }
        ),
        groups=tuple(sorted({group for group in groups if group is not None}, key=lambda group: group.id)),
        world_size=read.index.world_size,
        device=read.index.device,
        steps=read.steps,
        left_out=tuple(left_out),
        start_ns=int(span.start_ns.min()),
        offset_ns=read.offset_ns,
    )


def nothing(name: str) -> pl.DataFrame:
    """A table of a trace without a row."""
    return pl.DataFrame(schema=_TABLES[name])


def _packed(frames: dict[str, pl.DataFrame]) -> dict[str, bytes]:
    packed = {}
    for name in _TABLES:
        file = io.BytesIO()
        frame = frames.get(name, nothing(name))
        frame.rechunk().write_parquet(file, compression="zstd", compression_level=1)
        packed[name] = file.getvalue()
    return packed


def _group(named: Named | None, found: Calls, world_size: int | None) -> Group | None:
    """The group of a call; None where others have one and its members are not known, as its name tells nothing then."""
    if named is None:
        return NO_GROUP if all(message.group is None for message in found.messages) else None
    ranks = named.ranks
    if ranks is None and named.size is not None and named.size == world_size:
        ranks = tuple(range(named.size))
    return None if ranks is None else Group(group_id(ranks, named.description), ranks, named.description)


def _collectives(found: Calls, groups: list[Group | None], rank: int) -> pl.DataFrame:
    """The calls in order of their starts. One without a number of its library is counted within its step."""
    ids = pl.Series([None if group is None else group.id for group in groups], dtype=pl.String)
    kinds = pl.Series([message.kind for message in found.messages], dtype=pl.String)
    sizes = pl.Series([message.bytes for message in found.messages], dtype=pl.Int64)
    key = ("step", "group", "kind")
    return (
        pl.DataFrame(
            {
                "step": found.step,
                "group": ids.gather(found.message),
                "sequence": found.sequence,
                "kind": kinds.gather(found.message),
                "start_ns": found.start_ns,
                "end_ns": found.end_ns,
                "bytes": sizes.gather(found.message),
                "basis": pl.Series(np.where(found.on_device, "device", "host"), dtype=pl.String),
            }
        )
        .sort("start_ns", "end_ns", "kind", "group", maintain_order=True)
        .head(MAX_COLLECTIVES)
        .with_columns(
            rank=pl.lit(rank, pl.Int32),
            sequence=pl.when(pl.col("sequence") != NONE)
            .then(pl.col("sequence"))
            .when(pl.col("step") != NONE)
            .then(pl.int_range(pl.len()).over(key)),
            step=pl.when(pl.col("step").is_between(0, 2**31 - 1)).then(pl.col("step")),
        )
        .select(pl.col(name).cast(kind) for name, kind in SCHEMAS["collectives"].items())
    )


def _step_sums(span: Span, found: Calls) -> pl.DataFrame:
    """Of each step that lies in the trace, how long devices worked and how long it stood in collectives.

    Work belongs to the step that launched it. Without a device, compute is not known; collectives of the host are.
    """
    numbers = span.steps["step"].unique().sort().to_numpy()
    done = work(span)

    def by_step(keys: Int64, starts: Int64, ends: Int64) -> pl.Series:
        inside = keys != NONE
        known, lengths = intervals.union_by(keys[inside], starts[inside], ends[inside])
        sums = dict(zip(known.tolist(), lengths.tolist(), strict=True))
        return pl.Series([sums.get(number, 0) // 1000 for number in numbers.tolist()], dtype=pl.Int64)

    own = np.isin(done.kind, (KERNEL, FILL))
    compute = by_step(span.step_numbers[done.rows[own]], done.start_ns[own], done.end_ns[own])
    return pl.DataFrame(
        {
            "process": pl.repeat(span.ref.process, len(numbers), eager=True, dtype=pl.String),
            "step": pl.Series(numbers, dtype=pl.Int64),
            "compute_us": compute if len(done) else pl.repeat(None, len(numbers), eager=True, dtype=pl.Int64),
            "collective_us": by_step(found.step, found.start_ns, found.end_ns),
        }
    )


def _pieces(span: Span, rank: int) -> pl.DataFrame:
    """Ranges that name a piece of the rank's work, as long as on the device where they are known there.

    What schedules of pipelines name goes before the forward pass of a wrapped model, which would lie inside.
    """
    kinds = [_kind_of_piece(name) for name in span.names.values]
    rows = np.flatnonzero(span.names.pick([kind is not None for kind in kinds]))
    codes = span.names.codes[rows]
    frame = pl.DataFrame(
        {
            "name": pl.Series(span.names.values, dtype=pl.String).gather(codes),
            "kind": pl.Series(kinds, dtype=pl.String).gather(codes),
            "start_ns": span.start_ns[rows],
            "end_ns": span.ends(rows),
            "step": span.step_numbers[rows],
            "on_device": span.categories.where([_DEVICE_ANNOTATION])[rows],
        }
    ).filter(pl.col("end_ns") > pl.col("start_ns"))
    # the n-th range of a name on the device is the n-th of the host's
    frame = frame.sort("start_ns", "end_ns", "name").unique(["name", "start_ns", "on_device"], maintain_order=True)
    frame = frame.with_columns(nth=pl.int_range(pl.len()).over("name", "on_device"))
    device = frame.filter("on_device").select("name", "nth", device_start="start_ns", device_end="end_ns")
    frame = (
        frame.filter(~pl.col("on_device") & (pl.col("step") != NONE))
        .join(device, on=["name", "nth"], how="left", maintain_order="left")
        .with_columns(
            start_ns=pl.coalesce("device_start", "start_ns"),
            end_ns=pl.coalesce("device_end", "end_ns"),
        )
    )
    schedule = pl.col("name").str.extract_groups(rf"^(?:{_PIECE.pattern})$").struct
    frame = frame.with_columns(
        microbatch=pl.coalesce(schedule[1], schedule[4]).cast(pl.Int32), stage=schedule[2].cast(pl.Int32)
    )
    scheduled = frame["microbatch"].is_not_null().any()
    passes = pl.col("name").is_in(_FORWARD)
    frame = frame.filter(~passes) if scheduled else frame
    return frame.with_columns(
        rank=pl.lit(rank, pl.Int32),
        microbatch=pl.when(passes).then(pl.int_range(pl.len()).over("name", "step")).otherwise("microbatch"),
        chunk=pl.when(pl.col("stage").drop_nulls().n_unique() > 1).then(pl.col("stage").rank("dense") - 1),
    ).select(pl.col(name).cast(kind) for name, kind in SCHEMAS["work"].items())
