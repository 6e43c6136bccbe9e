"""Sampled stacks made ready for questions: one row per stack with the frames that matter picked out of it.

Picked: the innermost frame of the user's own code and the function it calls, the leaf, and, below a DataLoader, the
outermost and innermost user frames. A forked loader worker carries its parent's stack, so a worker's frames count
from `_worker_loop` on only. `steady` marks samples of segments that steady training steps fill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from stepscope.analyze.call_tree import NONE, CallTree, call_tree
from stepscope.analyze.places import UserCode
from stepscope.analyze.steps import LabelledSteps
from stepscope.model import PHASES
from stepscope.tables.schema import Tables

STEADY_COVERAGE = 0.5  # a segment counts when steady steps fill at least half of it
_FORK_POINT = "_worker_loop"
_LOADER_FILE = "torch/utils/data/"
_FETCH_FILE = "torch/utils/data/_utils/fetch.py"
# Opening, stopping and exporting a profiler window happens between two steps and is no part of any.
_PROFILER_FILES = r"(^|/)torch/(autograd|profiler)/profiler\.py$"
_PROFILER_WORK = (
    "__enter__",
    "__exit__",
    "start",
    "stop",
    "start_trace",
    "stop_trace",
    "prepare_trace",
    "step",
    "_start_trace",
    "_prepare_trace",
    "_transit_action",
    "export_chrome_trace",
    "_parse_kineto_results",
)


@dataclass(frozen=True)
class Samples:
    """`rows`: one per stack of a main thread, see `_pick`. `frames`: one per frame, with `row` and `position`."""

    rows: pl.DataFrame
    frames: pl.DataFrame
    fallback: bool  # no segment was steady: all segments that touch a step are used

    def rank_steps(self) -> pl.DataFrame:
        """Main threads of ranks, in steady state, inside one of the five phases."""
        in_step = (pl.col("role") == "rank") & pl.col("phase").is_in(PHASES) & ~pl.col("in_profiler")
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
    frames = _frames(stacks, calls or call_tree(tables), code)
    steady, fallback = _steady_segments(stacks, labelled)
    rows = stacks.join(_pick(frames), on="row", how="left").join(steady, on="row", how="left")
    rows = rows.with_columns(
        pl.col("steady", "in_loader", "in_fetch", "in_profiler").fill_null(False), pl.col("waiting").fill_null(False)
    )
    return Samples(rows, frames, fallback)


def _frames(stacks: pl.DataFrame, calls: CallTree, code: UserCode) -> pl.DataFrame:
    """(row, role, position, function, file, line, user_file, loader), a row per frame of a stack, root first."""
    rows, nodes = [], []
    row = stacks["row"].to_numpy().astype(np.int64)
    node = stacks["node"].fill_null(NONE).to_numpy().astype(np.int64)
    while len(row := row[node >= 0]):
        node = node[node >= 0]
        rows.append(row)
        nodes.append(node)
        node = calls.parent[node].astype(np.int64)
    node = np.concatenate(nodes) if nodes else np.zeros(0, np.int64)
    frame = calls.frame[node] if len(node) else np.zeros(0, np.int64)
    names = pl.DataFrame(
        calls.frames, schema={"function": pl.String, "file": pl.String, "line": pl.Int64}, orient="row"
    )
    frames = (
        pl.DataFrame(
            {
                "row": pl.Series(np.concatenate(rows) if rows else [], dtype=pl.UInt32),
                "position": pl.Series(calls.depth[node] if len(node) else [], dtype=pl.Int64),
            }
        )
        .hstack(names[frame])
        .join(stacks.select("row", "role"), on="row", how="left", maintain_order="left")
        .sort("row", "position")
    )
    mapping = code.mapping(frames["file"])
    frames = frames.with_columns(
        pl.col("file").replace_strict(mapping, default=None, return_dtype=pl.String).alias("user_file"),
        pl.col("file").fill_null("").str.contains(_LOADER_FILE, literal=True).alias("loader"),
    )
    fork = (
        frames.filter((pl.col("role") == "loader_worker") & (short(pl.col("function")) == _FORK_POINT))
        .group_by("row")
        .agg(fork=pl.col("position").max())
    )
    frames = frames.join(fork, on="row", how="left", maintain_order="left")
    above = (pl.col("role") == "loader_worker") & (pl.col("position") <= pl.col("fork").fill_null(1 << 30))
    return frames.with_columns(
        pl.when(above).then(None).otherwise(pl.col("user_file")).alias("user_file"),
        pl.when(above).then(False).otherwise(pl.col("loader")).alias("loader"),
    )


def _pick(frames: pl.DataFrame) -> pl.DataFrame:
    """(row, user_file/line/function/position, below_file/function, leaf_*, entry_*, inner_*, in_loader, in_*)."""
    user = frames.filter(pl.col("user_file").is_not_null())
    innermost = user.group_by("row", maintain_order=True).agg(
        pl.col("user_file", "line", "function", "position").last()
    )
    below = frames.select(
        "row",
        (pl.col("position") - 1).alias("position"),
        pl.col("function").alias("below_function"),
        pl.col("file").alias("below_file"),
    )
    innermost = innermost.join(below, on=["row", "position"], how="left").rename(
        {"line": "user_line", "function": "user_function", "position": "user_position"}
    )
    leaf = frames.group_by("row", maintain_order=True).agg(
        pl.col("file").last().alias("leaf_file"),
        pl.col("function").last().alias("leaf_function"),
        pl.col("position").last().alias("leaf_position"),
        pl.col("loader").any().alias("in_loader"),
        pl.col("file").fill_null("").str.contains(_FETCH_FILE, literal=True).any().alias("in_fetch"),
        (pl.col("file").fill_null("").str.contains(_PROFILER_FILES) & short(pl.col("function")).is_in(_PROFILER_WORK))
        .any()
        .alias("in_profiler"),
        pl.col("position").filter(pl.col("loader")).first().alias("boundary"),
    )
    loaded = user.join(leaf.select("row", "boundary"), on="row").filter(pl.col("position") > pl.col("boundary"))
    ends = loaded.group_by("row", maintain_order=True).agg(
        pl.col("user_file").first().alias("entry_file"),
        pl.col("line").first().alias("entry_line"),
        pl.col("function").first().alias("entry_function"),
        pl.col("user_file").last().alias("inner_file"),
        pl.col("line").last().alias("inner_line"),
        pl.col("function").last().alias("inner_function"),
    )
    return leaf.join(innermost, on="row", how="left").join(ends, on="row", how="left")


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
    ends = starts + steps["wall_ns"].to_numpy()
    done = np.concatenate([[0], np.cumsum(ends - starts)])

    def before(moments: np.ndarray) -> np.ndarray:
        index = np.searchsorted(starts, moments, side="right")
        last = np.maximum(index - 1, 0)
        overhang = np.where(index > 0, np.maximum(0, ends[last] - moments), 0)
        covered: np.ndarray = done[index] - overhang
        return covered

    begin = segments["start_ns"].fill_null(0).to_numpy()
    end = segments["end_ns"].fill_null(0).to_numpy()
    share: np.ndarray = (before(end) - before(begin)) / np.maximum(1, end - begin)
    return share
