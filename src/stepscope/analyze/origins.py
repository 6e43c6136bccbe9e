"""From a slice of a trace to the user's function or line that caused it, for many slices at once.

Every slice knows its parent. Walking up from a launch, the first function of the user's is its origin; an operator of
the backward pass is a boundary, because above it stands only `backward()`: its origin is that of its forward operator.
Old traces hold no Python functions but the call stack of each operator, with exact lines; those count alike. Where no
code of the user's is on the way, the innermost library function outside torch may stand in, as a guess.

All walks go level by level over arrays of row numbers, so that millions of slices take seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analyze.device import Int64, positions
from stepscope.analyze.places import UserCode
from stepscope.tables.categories import FUNCTION, OPERATORS
from stepscope.tables.schema import Tables

Int32 = npt.NDArray[np.int32]
MAX_DEPTH = 100_000  # a broken (cyclic) tree ends here
NONE = -1
STRETCH = 500_000  # rows whose names are looked at together
_FRAME = re.compile(r"(.*)\((\d{1,9})\): (.*)", re.DOTALL)
MAX_FRAMES = 2_000  # of one recorded call stack


class Origin(NamedTuple):
    """A function or line found on the way up. `exact`: the line is the call's, not the definition's."""

    file: str
    function: str
    line: int | None
    exact: bool
    guess: bool


_Pair = tuple["Origin | None", "Origin | None"]
_Parser = Callable[[str, UserCode], _Pair]


@dataclass(frozen=True)
class Walk:
    """Where walks ended: `stop` the row of the origin, `below` the row under it, `backward` a boundary that was met."""

    stop: Int64
    below: Int64
    backward: Int64


@dataclass(frozen=True)
class Origins:
    """The slices of all traces as a tree. Row numbers are positions in the table `events`.

    `user` and `library` give for each row the index of its origin in `places`, or -1; `is_backward` marks operators of
    the backward pass, `engine` rows of a thread that runs nothing but the backward pass.
    """

    parent: Int64
    user: Int32
    library: Int32
    is_backward: npt.NDArray[np.bool_]
    engine: npt.NDArray[np.bool_]
    places: tuple[Origin, ...]
    any_frames: bool

    def walk(self, start: Int64, *, library: bool = False, boundary: bool = True) -> Walk:
        """Up from each of `start` (row numbers, -1 for none) to the first row that is an origin, itself included.

        With `boundary` a walk ends at an operator of the backward pass too, before looking above it.
        """
        stops = self.library if library else self.user
        stop, below = np.full(len(start), NONE, np.int64), np.full(len(start), NONE, np.int64)
        backward = np.full(len(start), NONE, np.int64)
        node = start.astype(np.int64, copy=True)
        active = np.flatnonzero(node >= 0)
        for _ in range(MAX_DEPTH):
            if not len(active):
                break
            current = node[active]
            hit = stops[current] >= 0
            stop[active[hit]] = current[hit]
            active, current = active[~hit], current[~hit]
            if boundary:
                back = self.is_backward[current]
                backward[active[back]] = current[back]
                active, current = active[~back], current[~back]
            below[active] = current
            node[active] = self.parent[current]
            active = active[node[active] >= 0]
        below[stop < 0] = NONE
        return Walk(stop, below, backward)


def prepare(tables: Tables, code: UserCode) -> Origins:
    """The tree of all slices of `tables`, with the origins marked in it."""
    events = tables.events
    places: list[Origin] = []
    user = np.full(events.height, NONE, np.int32)
    library = np.full(events.height, NONE, np.int32)
    functions = pl.when(pl.col("category") == FUNCTION).then("name")
    any_frames = _mark(events, functions, _named, code, places, user, library)
    any_frames |= _mark(events, pl.col("call_stack"), _innermost, code, places, user, library)
    is_backward = events.select((pl.col("category").is_in(OPERATORS) & (pl.col("forward_thread") > 0)).fill_null(False))
    return Origins(
        parent=positions(events["id"], events["parent"]),
        user=user,
        library=library,
        is_backward=is_backward.to_series().to_numpy(),
        engine=_engine(events, is_backward.to_series()),
        places=tuple(places),
        any_frames=any_frames,
    )


def _engine(events: pl.DataFrame, is_backward: pl.Series) -> npt.NDArray[np.bool_]:
    """Rows of threads that run operators of the backward pass and hold neither Python functions nor call stacks."""
    thread = ["process", "trace", "track"]
    engine = np.zeros(events.height, bool)
    engines = events.select(thread).filter(is_backward).unique()
    if engines.is_empty():
        return engine
    framed = (pl.col("category") == FUNCTION) | pl.col("call_stack").is_not_null()
    own = events.select(*thread, framed.fill_null(False).alias("framed")).with_row_index("row")
    own = own.join(engines, on=thread, how="semi")
    own = own.join(own.filter("framed").select(thread).unique(), on=thread, how="anti")
    engine[own["row"].to_numpy()] = True
    return engine


def forward_rows(tables: Tables) -> Int64:
    """For each row of `events` that is an operator of the backward pass its forward operator's row, else -1.

    Nodes carry the sequence number that was next when their operator ran. Operators that need no gradient leave it
    unused, so of all forward operators with that number the one that began last made the node.
    """
    forward = np.full(tables.events.height, NONE, np.int64)
    operators = (
        tables.events.select("process", "trace", "category", "sequence", "forward_thread", "start_ns")
        .with_row_index("row")
        .filter(pl.col("category").is_in(OPERATORS) & (pl.col("sequence") >= 0))
        .with_columns(pl.col("row").cast(pl.Int64), (pl.col("forward_thread").fill_null(0) > 0).alias("backward"))
        .sort("start_ns")
    )
    key = ["process", "trace", "sequence"]
    ahead = operators.filter(~pl.col("backward")).select(*key, "start_ns", pl.col("row").alias("forward"))
    back = operators.filter("backward").select(*key, "start_ns", "row")
    pairs = back.join_asof(ahead, on="start_ns", by=key, check_sortedness=False).drop_nulls("forward")
    forward[pairs["row"].to_numpy()] = pairs["forward"].to_numpy()
    return forward


def _mark(
    events: pl.DataFrame,
    text: pl.Expr,
    parse: _Parser,
    code: UserCode,
    places: list[Origin],
    user: Int32,
    library: Int32,
) -> bool:
    """Enter the origins that the rows' `text` names into both arrays, by stretches; whether there was any text."""
    known: dict[str, tuple[int, int]] = {}
    seen = False
    for first in range(0, len(user), STRETCH):
        rows = events.slice(first, STRETCH).select(text=text).with_row_index("row", offset=first).drop_nulls()
        seen |= rows.height > 0
        # built-in functions are as many as the objects they belong to
        rows = rows.filter(pl.col("text").str.contains(r"\(\d+\): "))
        distinct = rows["text"].unique().to_list()
        for name in distinct:
            if name not in known:
                known[name] = _entered(parse(name, code), places)
        found = pl.DataFrame(
            {"text": distinct, "user": [known[t][0] for t in distinct], "library": [known[t][1] for t in distinct]},
            schema={"text": pl.String, "user": pl.Int32, "library": pl.Int32},
        )
        hits = rows.join(found.filter((pl.col("user") >= 0) | (pl.col("library") >= 0)), on="text")
        at = hits["row"].to_numpy()
        user[at] = hits["user"].to_numpy()
        library[at] = hits["library"].to_numpy()
    return seen


def _entered(pair: _Pair, places: list[Origin]) -> tuple[int, int]:
    """The indices of both origins in `places`, which they are added to; -1 for none."""
    numbers = []
    for origin in pair:
        numbers.append(len(places) if origin else NONE)
        if origin:
            places.append(origin)
    return numbers[0], numbers[1]


def _named(name: str, code: UserCode) -> _Pair:
    """The origins (user's, library's) that a Python function of a trace is, from its name."""
    return _frame(name, code, exact=False)


def _innermost(stack: str, code: UserCode) -> _Pair:
    """The innermost frames (user's, library's) of a call stack as old traces hold it, innermost first."""
    library: Origin | None = None
    for text in stack.split(";", MAX_FRAMES)[:MAX_FRAMES]:
        own, other = _frame(text.strip(), code, exact=True)
        if own is not None:
            return own, library
        library = library or other
    return None, library


def _frame(text: str, code: UserCode, *, exact: bool) -> _Pair:
    match = _FRAME.fullmatch(text)
    if match is None:
        return None, None
    file = code.resolve(match[1])
    if file is not None:
        return Origin(file, match[3], int(match[2]), exact, False), None
    short = code.library(match[1])
    return None, Origin(short, match[3], int(match[2]), exact, True) if short is not None else None
