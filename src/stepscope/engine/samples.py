"""Sampled stacks of main threads made ready for questions: what matters of each picked out, and whether it was steady.

`steady` marks samples of segments that steady training steps fill, but of no path mostly sampled between such steps.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine import intervals
from stepscope.engine.call_tree import CallTree, UserPaths, at, rows_of
from stepscope.engine.step_labels import LabelledSteps, times_of
from stepscope.engine.user_code import UserCode
from stepscope.model import PHASES
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE, Bools, Int32, Int64
from stepscope.tables.phases import in_file, last_part
from stepscope.tables.schema import Tables

STEADY_COVERAGE = 0.5  # a segment counts when steady steps fill at least half of it
_SEGMENT = ["process", "start_ns", "end_ns"]
_PATH = ["process", "file", "thread", "node"]


class Samples(Struct, frozen=True, dict=True):
    """`rows`: one per stack of a main thread, with the columns of `frames_of_interest`."""

    rows: pl.DataFrame
    calls: CallTree
    code: UserCode
    fallback: bool  # no segment was steady: all segments that touch a step are used

    @cached_property
    def frames(self) -> pl.DataFrame:
        """(row, position, function, file, line, user_file): a row per frame of a stack, root first."""
        calls, rows, nodes = self.calls, [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        row, node = self.rows["row"].to_numpy().astype(np.int64), rows_of(self.rows["node"])
        while len(row := row[node >= 0]):
            node = node[node >= 0]
            rows.append(row)
            nodes.append(node)
            node = calls.parent[node].astype(np.int64)
        row, node = np.concatenate(rows), np.concatenate(nodes)
        schema = {"function": pl.String, "file": pl.String, "line": pl.Int64}
        names = pl.DataFrame(calls.frames, schema=schema, orient="row").with_columns(
            pl.Series("user_file", [self.code.resolve(frame.file) for frame in calls.frames], dtype=pl.String)
        )
        places = pl.DataFrame({"row": pl.Series(row, dtype=pl.UInt32), "position": calls.depth[node].astype(np.int64)})
        return places.hstack(names[calls.frame[node]]).sort("row", "position")

    def rank_steps(self) -> pl.DataFrame:
        """Main threads of ranks, in steady state, inside one of the five phases.

        A stack without a frame is in none: so the sampler shows a process that ends, or one it could not read.
        """
        seen = pl.col("node").is_not_null() & pl.col("phase").is_in(PHASES)
        in_step = (pl.col("role") == "rank") & seen & ~pl.col("in_profiler")
        return self.rows.filter(pl.col("steady") & in_step)

    def ms_per_sample(self, labelled: LabelledSteps) -> dict[int, float]:
        """Of each rank, ascending, what one sample of its main thread in steady steps is of its mean step."""
        means = mean_step_ms(labelled)
        counts = self.rank_steps().group_by("rank").agg(pl.col("samples").sum()).sort("rank").rows()
        return {int(rank): means[rank] / count for rank, count in counts if count and rank in means}

    def in_steady_steps(self, stacks: pl.DataFrame) -> tuple[Bools, Bools]:
        """Which stacks are of segments that steady steps fill; which stand in a phase of a step, not in a profiler."""
        segments = self.rows.group_by(_SEGMENT).agg(pl.col("steady").any())
        joined = stacks.select(_SEGMENT).join(
            segments, on=_SEGMENT, how="left", nulls_equal=True, maintain_order="left"
        )
        profiling = self.rows.filter(pl.col("in_profiler"))["node"].unique()
        in_profiler = stacks["node"].is_in(profiling.implode()).fill_null(False)
        in_phase = stacks["phase"].is_in(PHASES).fill_null(False) & ~in_profiler
        return joined["steady"].fill_null(False).to_numpy(), in_phase.to_numpy()

    def through(self, file: str, function: str, first_line: int | None, last_line: int | None) -> pl.Series:
        """`row` of the stacks with a frame of this function, between the lines where they are given."""
        here = self.frames.filter((pl.col("user_file") == file) & (short(pl.col("function")) == bare(function)))
        if first_line is not None and last_line is not None:
            here = here.filter(pl.col("line").is_between(first_line, last_line))
        return here["row"].unique()

    def workers(self) -> pl.DataFrame:
        return self.rows.filter(pl.col("steady") & (pl.col("role") == "loader_worker"))


def bare(function: str | None) -> str:
    return (function or "").rsplit(".", 1)[-1]


def short(function: pl.Expr) -> pl.Expr:
    """The last part of a qualified name: samplers say `Net.forward`, traces say `forward`."""
    return function.str.extract(r"([^.]+)$")


def steps_of_means(labelled: LabelledSteps) -> pl.DataFrame:
    steady = labelled.steady("train")
    return labelled.steady("eval") if steady.is_empty() else steady


def mean_step_ms(labelled: LabelledSteps) -> dict[int, float]:
    means = steps_of_means(labelled).group_by("rank").agg(ms=pl.col("wall_ns").mean() / 1e6)
    return {int(rank): float(ms) for rank, ms in means.rows() if rank is not None}


def prepare(tables: Tables, code: UserCode, labelled: LabelledSteps, calls: CallTree) -> Samples | None:
    """None when no stack of a main thread was sampled."""
    stacks = tables.stacks.filter(pl.col("main_thread").fill_null(False) & (pl.col("samples") > 0))
    if stacks.is_empty():
        return None
    stacks = stacks.with_row_index("row")
    steady, fallback = _in_steady_segments(stacks, labelled)
    steady &= ~_between_steps(stacks, tables.stretches, labelled)
    rows = stacks.hstack(frames_of_interest(stacks, calls, code)).with_columns(steady.alias("steady"))
    return Samples(rows.with_columns(pl.col("steady", "waiting").fill_null(False)), calls, code, fallback)


def _in_steady_segments(stacks: pl.DataFrame, labelled: LabelledSteps) -> tuple[pl.Series, bool]:
    """By how much of its segment steady train steps of the same process fill, whether each stack is of a steady one."""
    segments = stacks.select(_SEGMENT).unique()
    kind = "train" if (labelled.frame["kind"] == "train").any() else "eval"
    good = labelled.frame.filter(
        (pl.col("kind") == kind) & pl.col("reason").is_in(["steady", "first_batch"]) & pl.col("start_ns").is_not_null()
    )
    parts = []
    for part in segments.partition_by("process"):
        own = good.filter(pl.col("process") == part["process"][0]) if part["process"][0] is not None else good
        begin, end = (part[name].fill_null(0).to_numpy() for name in ("start_ns", "end_ns"))
        share = intervals.covered(times_of(own), begin, end) / np.maximum(1, end - begin)
        parts.append(part.with_columns(pl.Series("coverage", share, dtype=pl.Float64)))
    covered = pl.concat(parts)
    fallback = not (covered["coverage"] >= STEADY_COVERAGE).any()
    enough = pl.col("coverage") > 0 if (covered["coverage"] > 0).any() else pl.lit(True)
    steady = covered.with_columns((enough if fallback else pl.col("coverage") >= STEADY_COVERAGE).alias("steady"))
    return stacks.join(steady, on=_SEGMENT, how="left", nulls_equal=True, maintain_order="left")["steady"], fallback


def _between_steps(stacks: pl.DataFrame, stretches: pl.DataFrame, labelled: LabelledSteps) -> pl.Series:
    """Which stacks of ranks were mostly sampled between training steps, as in evaluation; false where no time tells."""
    known = labelled.frame.filter((pl.col("kind") == "train") & pl.col("start_ns").is_not_null())
    parts = [stretches.filter(pl.col("role") == "rank").select(*_PATH, apart=pl.lit(0, pl.Int64)).clear()]
    for process, steps in known.partition_by("process", as_dict=True).items():
        own = stretches.filter((pl.col("role") == "rank") & (pl.col("process") == process[0]))
        begin, end = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
        inside = intervals.covered(times_of(steps), begin, end)
        parts.append(own.select(*_PATH, apart=pl.Series(end - begin - 2 * inside, dtype=pl.Int64)))
    times = pl.concat(parts).group_by(_PATH).agg(pl.col("apart").sum() > 0)
    return stacks.join(times, on=_PATH, how="left", nulls_equal=True, maintain_order="left")["apart"].fill_null(False)


_FORK_POINT = "_worker_loop"
LOADER_FILE = "torch/utils/data/"
_FETCH_FILE = "torch/utils/data/_utils/fetch.py"
# Opening, stopping and exporting a profiler window happens between two steps and is no part of any.
_PROFILER_FILES = ("torch/autograd/profiler.py", "torch/profiler/profiler.py")
_PROFILER_WORK = frozenset(
    (
        *("__enter__", "__exit__", "start", "stop", "start_trace", "stop_trace", "prepare_trace", "step"),
        *("_start_trace", "_prepare_trace", "_transit_action", "export_chrome_trace", "_parse_kineto_results"),
    )
)


def frames_of_interest(rows: pl.DataFrame, calls: CallTree, code: UserCode) -> pl.DataFrame:
    """The picked columns for `rows` (with `node` and `role`), in their order.

    user_file/line/function/position, below_file/function, leaf_file/function/position, entry_file/line/function,
    inner_file/line/function: null where there is no such frame; in_loader, in_fetch, in_profiler: false there.
    """
    users = UserPaths(calls, code)
    nodes = rows_of(rows["node"])
    found = _columns(users, nodes, np.ones(len(calls), bool))
    workers = (rows["role"] == "loader_worker").fill_null(False)
    if workers.any():  # only frames below the worker loop count
        fork = users.innermost_of(lambda frame: last_part(frame.function) == _FORK_POINT)
        below = _columns(users, nodes, (fork >= 0) & users.is_below(users.nodes, fork))
        found = found.with_columns(
            pl.when(workers).then(below[name]).otherwise(pl.col(name)).alias(name) for name in found.columns
        )
    return found


def _columns(users: UserPaths, nodes: Int64, counts: Bools) -> pl.DataFrame:
    """The picks for these nodes (-1 for none), of the frames that count."""
    tree, frames = users.tree, users.tree.frames
    user = users.user & counts
    innermost = tree.innermost(user)
    loader = tree.outermost(users.marked(lambda frame: LOADER_FILE in frame.file) & counts)
    inside = user & (loader >= 0) & users.is_below(users.nodes, loader)
    known = {
        "user_file": pl.Series(users.files, dtype=pl.String),
        "file": pl.Series([frame.file for frame in frames], dtype=pl.String),
        "line": pl.Series([frame.line for frame in frames], dtype=pl.Int64),
        "function": pl.Series([frame.function for frame in frames], dtype=pl.String),
    }
    columns: dict[str, pl.Series] = {}
    for prefix, picked, names in (
        ("user", innermost, ("user_file", "line", "function", "position")),
        ("below", _below(tree, innermost), ("function", "file")),
        ("leaf", users.nodes, ("file", "function", "position")),
        ("entry", tree.outermost(inside), ("user_file", "line", "function")),
        ("inner", tree.innermost(inside), ("user_file", "line", "function")),
    ):
        at_node = at(picked, nodes, NONE)
        frame = pl.Series(at(tree.frame, at_node, NONE))
        for name in names:
            if name == "position":
                depth = pl.Series(at(tree.depth, at_node, NONE).astype(np.int64))
                columns[f"{prefix}_{name}"] = depth.set(depth < 0, None)
            else:
                told = known[name].gather(frame.set(frame < 0, None))
                columns[f"{prefix}_{name.removeprefix('user_')}"] = told
    for name, passes in (
        ("in_loader", loader >= 0),
        ("in_fetch", users.passes(lambda frame: _FETCH_FILE in frame.file)),
        ("in_profiler", users.passes(_profiles)),
    ):
        columns[name] = pl.Series(at(passes, nodes, False))
    return pl.DataFrame(columns)


def _below(calls: CallTree, user: Int32) -> Int32:
    """For every node the one that its innermost user frame calls on the way to it; -1 for none."""
    found = np.full(len(calls), NONE, np.int32)
    for level in calls.levels[1:]:
        above = calls.parent[level]
        here = np.where(user[level] == above, level, found[above])
        found[level] = np.where((user[level] == level) | (user[level] < 0), NONE, here)
    return found


def _profiles(frame: Frame) -> bool:
    return last_part(frame.function) in _PROFILER_WORK and any(in_file(frame.file, file) for file in _PROFILER_FILES)
