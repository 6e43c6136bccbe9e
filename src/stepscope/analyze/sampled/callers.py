"""Which lines of the user's stand above which others in the sampled loop: who calls whom, by share of the samples.

A loss at a line inside a helper function is the caller's, where nearly nobody else calls it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl

from stepscope.analyze.sampled.loop import SampledLoop
from stepscope.analyze.sampled.user_paths import UserPaths, at, rows_of
from stepscope.model.sampled import CallerLine
from stepscope.tables.arrays import NONE

SHARE = 0.5  # of the inner line's samples: with fewer the line is mostly another caller's
SAMPLES = 3  # fewer are chance
MAX_NODES = 2_000  # paths looked at, the most sampled first
MAX_LINES = 100


def facts(loop: SampledLoop, users: UserPaths) -> tuple[CallerLine, ...]:
    """Pairs of lines, the most sampled first."""
    nodes = at(users.innermost, rows_of(loop.rows["node"]), NONE)
    counted = (
        pl.DataFrame({"node": nodes, "samples": loop.rows["samples"]})
        .filter(pl.col("node") >= 0)
        .group_by("node")
        .agg(pl.col("samples").sum())
        .sort(["samples", "node"], descending=[True, False])
        .head(MAX_NODES)
    )
    own: dict[int, int] = defaultdict(int)
    below: dict[tuple[int, int], int] = defaultdict(int)
    for node, samples in counted.iter_rows():
        inner = int(users.line[node])
        own[inner] += samples
        for outer in _lines_above(users, node) - {inner}:
            below[outer, inner] += samples
    pairs = sorted(below.items(), key=lambda pair: (-pair[1], pair[0]))
    found = []
    for (outer, inner), samples in pairs:
        caller, callee = users.place(outer), users.place(inner)
        if caller is not None and callee is not None and samples >= max(SAMPLES, SHARE * own[inner]):
            found.append(CallerLine(caller, callee, samples, samples / own[inner]))
    found.sort(key=lambda pair: (-pair.samples, pair.caller.file, pair.caller.line or 0, pair.callee.line or 0))
    return tuple(found[:MAX_LINES])


def _lines_above(users: UserPaths, node: int) -> set[int]:
    """The numbers of the user's lines on the path to a node."""
    found = set()
    parent, user, line = users.tree.parent, users.user, users.line
    node = int(parent[node])
    while node != NONE:
        if np.bool_(user[node]):
            found.add(int(line[node]))
        node = int(parent[node])
    return found
