"""Sampled stacks of main threads made ready for questions: what matters of each picked out, and whether it was steady.

`steady` marks samples of segments that steady training steps fill.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine import intervals
from stepscope.engine.call_tree import CallTree, call_tree
from stepscope.engine.stack_picks import picks
from stepscope.engine.step_labels import LabelledSteps
from stepscope.engine.user_code import UserCode
from stepscope.model import PHASES
from stepscope.tables.arrays import NONE
from stepscope.tables.schema import Tables

STEADY_COVERAGE = 0.5  # a segment counts when steady steps fill at least half of it


class Samples(Struct, frozen=True, dict=True):
    """`rows`: one per stack of a main thread, with what `stack_picks` picks of it."""

    rows: pl.DataFrame
    calls: CallTree
    code: UserCode
    fallback: bool  # no segment was steady: all segments that touch a step are used

    @cached_property
    def frames(self) -> pl.DataFrame:
        """(row, position, function, file, line, user_file): a row per frame of a stack, root first."""
        return _frames(self.rows, self.calls, self.code)

    def rank_steps(self) -> pl.DataFrame:
        """Main threads of ranks, in steady state, inside one of the five phases.

        A stack without a frame is in none: so the sampler shows a process that ends, or one it could not read.
        """
        seen = pl.col("node").is_not_null() & pl.col("phase").is_in(PHASES)
        in_step = (pl.col("role") == "rank") & seen & ~pl.col("in_profiler")
        return self.rows.filter(pl.col("steady") & in_step)

    def through(self, file: str, function: str, first_line: int | None, last_line: int | None) -> pl.Series:
        """`row` of the stacks with a frame of this function, between the lines where they are given."""
        here = self.frames.filter((pl.col("user_file") == file) & (short(pl.col("function")) == bare(function)))
        if first_line is not None and last_line is not None:
            here = here.filter(pl.col("line").is_between(first_line, last_line))
        return here["row"].unique()

    def workers(self) -> pl.DataFrame:
        """Main threads of loader workers in steady state."""
        return self.rows.filter(pl.col("steady") & (pl.col("role") == "loader_worker"))


def bare(function: str | None) -> str:
    """The last part of a qualified name, as `short`."""
    return (function or "").rsplit(".", 1)[-1]


def short(function: pl.Expr) -> pl.Expr:
    """The last part of a qualified name: samplers say `Net.forward`, traces say `forward`."""
    return function.str.extract(r"([^.]+)$")


def prepare(tables: Tables, code: UserCode, labelled: LabelledSteps, calls: CallTree | None = None) -> Samples | None:
    """None when no stack of a main thread was sampled."""
    stacks = tables.stacks.filter(pl.col("main_thread").fill_null(False) & (pl.col("samples") > 0))
    if stacks.is_empty():
        return None
    stacks = stacks.with_row_index("row")
    calls = calls or call_tree(tables)
    steady, fallback = _steady_segments(stacks, labelled)
    rows = stacks.hstack(picks(stacks, calls, code)).join(steady, on="row", how="left", maintain_order="left")
    rows = rows.with_columns(pl.col("steady", "waiting").fill_null(False))
    return Samples(rows, calls, code, fallback)


def _frames(stacks: pl.DataFrame, calls: CallTree, code: UserCode) -> pl.DataFrame:
    rows, nodes = [], []
    row = stacks["row"].to_numpy().astype(np.int64)
    node = stacks["node"].fill_null(NONE).to_numpy().astype(np.int64)
    while len(row := row[node >= 0]):
        node = node[node >= 0]
        rows.append(row)
        nodes.append(node)
        node = calls.parent[node].astype(np.int64)
    row, node = (np.concatenate([np.zeros(0, np.int64), *parts]) for parts in (rows, nodes))
    names = pl.DataFrame(
        calls.frames, schema={"function": pl.String, "file": pl.String, "line": pl.Int64}, orient="row"
    )
    mine = pl.Series("user_file", [code.resolve(frame.file) for frame in calls.frames], dtype=pl.String)
    places = pl.DataFrame({"row": pl.Series(row, dtype=pl.UInt32), "position": calls.depth[node].astype(np.int64)})
    return places.hstack(names.with_columns(mine)[calls.frame[node]]).sort("row", "position")


def _steady_segments(stacks: pl.DataFrame, labelled: LabelledSteps) -> tuple[pl.DataFrame, bool]:
    """(row, steady) by how much of each segment steady train steps of the same process fill."""
    segments = stacks.select("process", "start_ns", "end_ns").unique()
    kind = "train" if (labelled.frame["kind"] == "train").any() else "eval"
    good = labelled.frame.filter(
        (pl.col("kind") == kind) & pl.col("reason").is_in(["steady", "first_batch"]) & pl.col("start_ns").is_not_null()
    )
    parts = []
    for part in segments.partition_by("process"):
        own = good.filter(pl.col("process") == part["process"][0]) if part["process"][0] is not None else good
        parts.append(part.with_columns(pl.Series("coverage", _coverage(part, own.sort("start_ns")), dtype=pl.Float64)))
    covered = pl.concat(parts)
    enough = covered["coverage"] >= STEADY_COVERAGE
    fallback = not enough.any()
    limit = STEADY_COVERAGE if not fallback else 1e-9
    if fallback and not (covered["coverage"] > 0).any():
        limit = 0.0
    covered = covered.with_columns((pl.col("coverage") >= limit).alias("steady"))
    joined = stacks.select("row", "process", "start_ns", "end_ns").join(
        covered, on=["process", "start_ns", "end_ns"], how="left", nulls_equal=True
    )
    return joined.select("row", "steady"), fallback


def _coverage(segments: pl.DataFrame, steps: pl.DataFrame) -> np.ndarray:
    """The share of each segment that lies inside `steps` (sorted, of one process)."""
    if steps.is_empty():
        return np.zeros(segments.height)
    starts = steps["start_ns"].to_numpy()
    inside = intervals.union(starts, starts + steps["wall_ns"].to_numpy())
    begin = segments["start_ns"].fill_null(0).to_numpy()
    end = segments["end_ns"].fill_null(0).to_numpy()
    share: np.ndarray = intervals.covered(inside, begin, end) / np.maximum(1, end - begin)
    return share
