"""The sampled time of the training loop on the main threads of ranks.

Where steps are known, the loop is what steady steps fill. Where they are not (files that others recorded), it is the
user's function in which a batch is fetched and a model is called, forwards, backwards or by an optimizer, from the line
of the fetch on; without a loader, the innermost function below which all of these are called. Setting up a parallel
model, and what is imported or compiled, belongs to no loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.context import Context
from stepscope.engine.call_tree import UserPaths, at, rows_of
from stepscope.engine.intervals import EMPTY, Intervals, union
from stepscope.read.raw import Frame
from stepscope.tables import phases
from stepscope.tables.arrays import Bools, Int32

_SET_UP = ("__init__", "init_process_group")
_SET_UP_FOLDERS = ("torch/nn/parallel/", "torch/distributed/", "torch/optim/")


class SampledLoop(Struct, frozen=True, dict=True):
    """`rows` of the table `stacks`: main threads of ranks in their loop. `inside`, by node, says what is in the loop.

    `inside` is None where steps tell it; `steady` holds the steady steps then. `basis` is said to the reader.
    """

    rows: pl.DataFrame
    inside: Bools | None
    steady: pl.DataFrame
    basis: str

    def times(self, process: str) -> Intervals:
        """When a process was in steady steps."""
        return self._times.get(process, EMPTY)

    @cached_property
    def _times(self) -> dict[str, Intervals]:
        known = self.steady.filter(pl.col("start_ns").is_not_null()).select(
            "process", "start_ns", end_ns=pl.col("start_ns") + pl.col("wall_ns")
        )
        return {
            str(key[0]): union(own["start_ns"].to_numpy(), own["end_ns"].to_numpy())
            for key, own in known.partition_by("process", as_dict=True).items()
        }

    def within(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Those of other rows with nodes that lie in the loop as far as paths tell."""
        if self.inside is None:
            return rows
        return rows.filter(pl.Series(at(self.inside, rows_of(rows["node"]), False)))


def sampled_loop(context: Context, users: UserPaths) -> SampledLoop | None:
    """None without a sample in a loop."""
    if context.sampled is None:
        return None
    labelled = context.labelled
    rows = context.sampled.rank_steps().filter(pl.col("stage").is_null() & pl.col("node").is_not_null())
    kinds = labelled.frame["kind"].unique().drop_nulls().to_list()
    steady = labelled.steady("train" if "train" in kinds or not kinds else kinds[0])
    if labelled.frame.height:
        loop = SampledLoop(rows, None, steady, "steady steps")
    else:
        inside = _inside(users, rows)
        rows = rows.filter(pl.Series(at(inside, rows_of(rows["node"]), False)))
        loop = SampledLoop(rows, inside, steady, "the function that runs the loop, as no step is known")
    return loop if loop.rows.height else None


def is_fetch(frame: Frame) -> bool:
    """Whether a batch is asked for here."""
    return phases.phase_mark(frame) == phases.DATA_WAIT


def _inside(users: UserPaths, rows: pl.DataFrame) -> Bools:
    """Whether a path lies in the loop, by node."""
    tree = users.tree
    own = np.zeros(len(tree), np.float64)
    own[rows_of(rows["node"])] = 1.0
    reached = tree.totals(own) > 0
    fetch = users.marked(is_fetch) & reached
    in_fetch = tree.innermost(fetch) >= 0
    calls = {
        phase: _outermost(users, users.marked(_opens(phase)) & reached & ~in_fetch)
        for phase in (phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER)
    }
    callers = [_callers(users, nodes) for nodes in calls.values() if nodes.any()]
    if fetch.any():
        functions = np.unique(np.concatenate(callers)) if callers else np.empty(0, np.int32)
        marks = np.flatnonzero(_outermost(users, fetch))
    elif callers:
        functions = callers[0]
        for more in callers[1:]:
            functions = np.intersect1d(functions, more)
        marks = np.flatnonzero(np.logical_or.reduce(list(calls.values())))
    else:
        return np.zeros(len(tree), bool)
    home = tree.innermost(users.user & np.isin(users.function, functions))[marks]
    home = np.where(home >= 0, home, tree.innermost(users.user)[marks])
    home = np.unique(home[home >= 0])
    loops = _from_fetch_on(users, home) if fetch.any() else users.user & np.isin(users.function, users.function[home])
    found: Bools = (tree.innermost(loops) >= 0) & ~users.passes(_sets_up)
    return found


def _from_fetch_on(users: UserPaths, home: Int32) -> Bools:
    """Frames of the functions of these nodes, not before the first line that fetches."""
    functions, which = np.unique(users.function[home], return_inverse=True)
    first = np.full(len(functions), np.iinfo(np.int64).max)
    np.minimum.at(first, which, users.source_line[home])
    found = users.user & np.isin(users.function, functions)
    at_or_after = np.zeros(len(found), bool)
    where = np.flatnonzero(found)
    line = users.source_line[where]
    at_or_after[where] = (line < 0) | (line >= first[np.searchsorted(functions, users.function[where])])
    return at_or_after


def _outermost(users: UserPaths, marked: Bools) -> Bools:
    """Those of the marked nodes that have no marked one above them."""
    found: Bools = marked & (users.tree.outermost(marked) == np.arange(len(marked)))
    return found


def _callers(users: UserPaths, marked: Bools) -> Int32:
    """The user's functions that stand above marked nodes."""
    above = users.tree.totals(marked.astype(np.float64)) > 0
    return np.unique(users.function[users.user & above])


def _opens(phase: str) -> Callable[[Frame], bool]:
    return lambda frame: phases.phase_mark(frame) == phase


def _sets_up(frame: Frame) -> bool:
    return phases.last_part(frame.function) in _SET_UP and any(folder in frame.file for folder in _SET_UP_FOLDERS)
