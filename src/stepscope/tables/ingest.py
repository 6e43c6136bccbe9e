"""One trace to Parquet: its slices are written as they come, then repaired, nested and linked as a whole.

What is kept of a trace in memory at once is a few numbers per slice; texts and arguments are on disk by then, unless
they are asked for. Ids are rows of the trace; `loaded` moves them when several traces become one table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.cached import INDEX
from stepscope.read.trace import TraceSource, TraceSummary
from stepscope.tables import categories, forward, links, stored
from stepscope.tables.arrays import NONE
from stepscope.tables.columns import Int32, Int64, decode
from stepscope.tables.marks import marks_frame
from stepscope.tables.nesting import Nesting, nest
from stepscope.tables.parts import PartWriter
from stepscope.tables.repair import repair
from stepscope.tables.stored import LINKS, MARKS, MEMORY, TREE, Stored, TraceIndex
from stepscope.tables.taken import FORWARD_ARROWS, LAUNCH_ARROWS, Flags, Taken, arrows, numbered, take
from stepscope.tables.trace_memory import memory_frame

_TIMES = (("track", np.int32), ("start_ns", np.int64), ("duration_ns", np.int64))


def ingest(
    source: TraceSource,
    target: Path | None,
    *,
    schema: str,
    version: str,
    settle: Callable[[bool], None] | None = None,
) -> Stored:
    """Take in `source` and write it to the empty folder `target`; raises UnreadableInputError and OSError.

    Without `settle` the slices are handed on as files of `target`. With it, or without a target, they are handed on in
    memory, and nothing waits for the files: once they are there, `settle` is called on a thread, with whether all are.
    """
    keep = settle is not None or target is None
    frames: dict[str, pl.DataFrame] = {}
    with PartWriter(target, keep=keep) as writer:
        taken = take(source, writer)
        base_ns = taken.summary.base_ns
        track, start, duration = (taken.whole(name, dtype) for name, dtype in _TIMES)
        flags = Flags(taken)
        repaired = repair(track, start, duration, is_device=flags.device)
        frames[MEMORY] = writer.write(memory_frame(taken.memory.given(), taken.texts["track"], base_ns), MEMORY)
        frames[MARKS] = writer.write(marks_frame(taken, start, duration, base_ns), MARKS)
        taken.slices.forget("category", "name", "start_ns", "duration_ns")
        nesting = nest(
            track,
            start,
            duration,
            is_function=flags.function,
            is_annotation=flags.annotation,
            precedence=flags.precedence,
        )
        linked, forward_of = _link(taken, track, start, duration, flags, nesting)
        frames[LINKS] = writer.write(_links_frame(*linked), LINKS)
        counts, clipped = _link_counts(linked, duration), nesting.clipped
        summary, device = taken.summary, categories.device_kind(taken.texts["category"].values)
        del taken, flags, track, linked  # a large trace is in memory once, not twice
        start += base_ns
        frames[TREE] = writer.write(_tree_frame(start, duration, nesting, forward_of), TREE)
        del start, duration, nesting, forward_of
        writer.wait()  # how many files there are is known when the last slices are done
        index = _index(summary, schema=schema, version=version, slices=frames[TREE].height, clipped=clipped,
                       repaired=repaired, files=writer.files, link_counts=counts, device=device)  # fmt: skip
        if target is None:
            return Stored(index, **frames, parts=writer.kept)
        if settle is not None:
            writer.then(partial(_settled, settle, target, index))
            return Stored(index, **frames, parts=writer.kept)
    (target / INDEX).write_bytes(msgspec.json.encode(index))
    return Stored(index, **frames, parts=stored.slice_files(target, index))


def _settled(settle: Callable[[bool], None], target: Path, index: TraceIndex, whole: bool) -> None:
    try:
        if whole:
            (target / INDEX).write_bytes(msgspec.json.encode(index))
    except OSError:
        whole = False
    settle(whole)


def _index(summary: TraceSummary, **known: Any) -> TraceIndex:
    quality = summary.quality
    return TraceIndex(
        world_size=summary.world_size,
        events=quality.events,
        salvaged=quality.salvaged,
        lost=quality.lost,
        unsupported=quality.unsupported,
        problems=quality.problems,
        metadata=summary.metadata,
        threads=summary.threads,
        **known,
    )


_Linked = tuple[links.Links, Int64, Int64]  # links, forward operators of them, and how those were found


def _link(
    taken: Taken, track: Int32, start: Int64, duration: Int64, flags: Flags, nesting: Nesting
) -> tuple[_Linked, Int32]:
    """The links, and the forward operator of each slice that is one of the backward pass."""
    known = links.Slices(
        track=track,
        start_ns=start,
        duration_ns=duration,
        parent=nesting.parent,
        frame=nesting.frame,
        is_device=flags.device,
        is_runtime=flags.runtime,
        is_operator=flags.operator,
        is_graph_launch=flags.graph_launch,
        correlation=taken.sparse("correlation"),
        external_id=taken.sparse("external_id"),
    )
    found = links.link(known, arrows(taken, LAUNCH_ARROWS))
    operators = np.flatnonzero(flags.operator)
    ends = start[operators] + duration[operators]
    by_operator, how = forward.forwards(
        len(start),
        numbered(taken, track, start, flags.operator),
        arrows(taken, FORWARD_ARROWS),
        links.Moments(operators, track[operators], start[operators], ends),
    )
    onward, holder = forward.nearest(nesting.parent, by_operator, found.operator)
    method = np.where(holder >= 0, how[holder] if len(how) else 0, NONE)
    return (found, onward, method), by_operator


def _links_frame(found: links.Links, onward: Int64, onward_method: npt.NDArray[np.integer]) -> pl.DataFrame:
    frame = pl.DataFrame(
        {
            "event": found.event,
            "launch": found.launch,
            "operator": found.operator,
            "frame": found.frame,
            "method": _words(links.METHODS, found.method),
            "state": _words(links.STATES, found.state),
            "forward": onward,
            "forward_method": _words(forward.METHODS, onward_method),
        }
    )
    return frame.with_columns(known_id(name) for name in ("launch", "operator", "frame", "forward"))


def _link_counts(linked: _Linked, duration: Int64) -> dict[str, int]:
    """Device time by what became of it, in ns, and the number of device slices."""
    found = linked[0]
    ns = duration[found.event]
    counts = {"device_slices": len(ns), "device_ns": int(ns.sum())}
    for code, state in enumerate(links.STATES):
        mine = found.state == code
        if code != links.LINKED:
            if mine.any():
                counts[f"{state}_ns"] = int(ns[mine].sum())
            continue
        for number, method in enumerate(links.METHODS):
            by_method = mine & (found.method == number)
            if by_method.any():
                counts[f"linked_by_{method}_ns"] = int(ns[by_method].sum())
    return counts


def _tree_frame(start: Int64, duration: Int64, nesting: Nesting, forward_of: Int32) -> pl.DataFrame:
    frame = pl.DataFrame(
        {
            "start_ns": start,
            "duration_ns": duration,
            "self_ns": nesting.self_ns,
            "depth": nesting.depth,
            "parent": nesting.parent,
            "frame": nesting.frame,
            "forward": forward_of,
        }
    )
    return frame.with_columns(known_id(name) for name in ("parent", "frame", "forward"))


def known_id(name: str) -> pl.Expr:
    """A column of row numbers in which `NONE` becomes null."""
    return pl.when(pl.col(name) >= 0).then(pl.col(name).cast(pl.Int64)).alias(name)


def _words(words: tuple[str, ...], codes: npt.NDArray[np.integer]) -> pl.Series:
    return decode(pl.Series(words, dtype=pl.String), codes.astype(np.int32))
