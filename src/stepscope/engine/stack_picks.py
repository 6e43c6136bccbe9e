"""The frames of a sampled stack that questions are asked about, picked once per call path.

Picked: the innermost frame of the user's own code and the function it calls, the leaf, and, below a DataLoader, the
outermost and innermost user frames. Of a loader worker only frames below its worker loop count: above it stands what it
inherited from its parent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from stepscope.engine.call_tree import CallFrame, CallTree
from stepscope.engine.user_code import UserCode
from stepscope.tables.arrays import NONE, Bools, Int32

_FORK_POINT = "_worker_loop"
_LOADER_FILE = "torch/utils/data/"
_FETCH_FILE = "torch/utils/data/_utils/fetch.py"
# Opening, stopping and exporting a profiler window happens between two steps and is no part of any.
_PROFILER_FILES = ("torch/autograd/profiler.py", "torch/profiler/profiler.py")
_PROFILER_WORK = {
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
}


def picks(rows: pl.DataFrame, calls: CallTree, code: UserCode) -> pl.DataFrame:
    """The picked columns for `rows` (with `node` and `role`), in their order.

    user_file/line/function/position, below_file/function, leaf_file/function/position, entry_file/line/function,
    inner_file/line/function: null where there is no such frame; in_loader, in_fetch, in_profiler: false there.
    """
    node = rows["node"].fill_null(NONE).to_numpy()
    worker = (rows["role"] == "loader_worker").fill_null(False).to_numpy()
    files = [code.resolve(frame.file) for frame in calls.frames]
    found = _Picker(calls, files, only_below_fork=False).columns(node)
    if worker.any():
        below = _Picker(calls, files, only_below_fork=True).columns(node)
        choose = pl.Series("worker", worker)
        found = found.with_columns(
            pl.when(choose).then(below[name]).otherwise(pl.col(name)).alias(name) for name in found.columns
        )
    return found


class _Picker:
    """The picks of every path. With `only_below_fork` frames count only below a loader's worker loop."""

    def __init__(self, calls: CallTree, files: list[str | None], *, only_below_fork: bool) -> None:
        self._calls, self._files = calls, files
        self._counts = np.ones(len(calls), bool)
        if only_below_fork:
            fork = calls.innermost(self._marked(lambda frame: _short(frame.function) == _FORK_POINT))
            self._counts = (fork >= 0) & (calls.depth > calls.depth[np.maximum(fork, 0)])
        user = calls.by_node(np.array([file is not None for file in files], bool)).astype(bool) & self._counts
        loader = self._marked(lambda frame: _LOADER_FILE in frame.file) & self._counts
        self._user = calls.innermost(user)
        self._below = _below(calls, self._user)
        self._boundary = calls.outermost(loader)
        inside = user & (self._boundary >= 0) & (calls.depth > calls.depth[np.maximum(self._boundary, 0)])
        self._entry, self._inner = calls.outermost(inside), calls.innermost(inside)
        self._fetch = calls.innermost(self._marked(lambda frame: _FETCH_FILE in frame.file))
        self._profiler = calls.innermost(self._marked(_profiles))

    def _marked(self, of: Callable[[CallFrame], bool]) -> Bools:
        marked: Bools = self._calls.by_node(np.array([of(frame) for frame in self._calls.frames], bool)).astype(bool)
        return marked

    def columns(self, node: Int32) -> pl.DataFrame:
        """The picks for these nodes (-1 for none)."""
        function, file, line = self._names()
        mine = pl.Series(self._files, dtype=pl.String)
        user, below, entry, inner = (self._at(of, node) for of in (self._user, self._below, self._entry, self._inner))
        columns = {
            "user_file": self._frame_of(mine, user),
            "user_line": self._frame_of(line, user),
            "user_function": self._frame_of(function, user),
            "user_position": self._depth_of(user),
            "below_function": self._frame_of(function, below),
            "below_file": self._frame_of(file, below),
            "leaf_file": self._frame_of(file, node),
            "leaf_function": self._frame_of(function, node),
            "leaf_position": self._depth_of(node),
            "in_loader": pl.Series(self._at(self._boundary, node) >= 0),
            "in_fetch": pl.Series(self._at(self._fetch, node) >= 0),
            "in_profiler": pl.Series(self._at(self._profiler, node) >= 0),
        }
        for prefix, at in (("entry", entry), ("inner", inner)):
            columns[f"{prefix}_file"] = self._frame_of(mine, at)
            columns[f"{prefix}_line"] = self._frame_of(line, at)
            columns[f"{prefix}_function"] = self._frame_of(function, at)
        return pl.DataFrame(columns)

    def _names(self) -> tuple[pl.Series, pl.Series, pl.Series]:
        frames = self._calls.frames
        return (
            pl.Series([frame.function for frame in frames], dtype=pl.String),
            pl.Series([frame.file for frame in frames], dtype=pl.String),
            pl.Series([frame.line for frame in frames], dtype=pl.Int64),
        )

    def _at(self, of: Int32, node: Int32) -> Int32:
        """`of` the nodes, -1 where there is none."""
        if not len(of):
            return np.full(len(node), NONE, np.int32)
        found: Int32 = np.where(node >= 0, of[np.maximum(node, 0)], NONE).astype(np.int32)
        return found

    def _frame_of(self, values: pl.Series, node: Int32) -> pl.Series:
        """What is known of the frames of these nodes, null for none."""
        if not len(values):
            return pl.Series([None] * len(node), dtype=values.dtype)
        frame = self._calls.frame[np.maximum(node, 0)]
        return values[pl.Series(frame)].set(pl.Series(node < 0), None)

    def _depth_of(self, node: Int32) -> pl.Series:
        if not len(self._calls):
            return pl.Series([None] * len(node), dtype=pl.Int64)
        return pl.Series(self._calls.depth[np.maximum(node, 0)].astype(np.int64)).set(pl.Series(node < 0), None)


def _below(calls: CallTree, user: Int32) -> Int32:
    """For every node the one that its innermost user frame calls on the way to it; -1 for none."""
    found = np.full(len(calls), NONE, np.int32)
    for level in calls.levels[1:]:
        above = calls.parent[level]
        here = np.where(user[level] == above, level, found[above])
        found[level] = np.where((user[level] == level) | (user[level] < 0), NONE, here)
    return found


def _short(function: str) -> str:
    return function.rpartition(".")[2] or function


def _profiles(frame: CallFrame) -> bool:
    return _short(frame.function) in _PROFILER_WORK and any(
        frame.file == file or frame.file.endswith("/" + file) for file in _PROFILER_FILES
    )
