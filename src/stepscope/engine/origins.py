"""From a slice of a trace to the user's function or line that caused it, for many slices at once.

Every slice knows its parent. Walking up from a launch, the first function of the user's is its origin; an operator of
the backward pass is a boundary, because above it stands only `backward()`: its origin is that of its forward operator.
Old traces hold no Python functions but the call stack of each operator, with exact lines; those count alike. Where no
code of the user's is on the way, the innermost library function outside torch may stand in, as a guess.

All walks go level by level over arrays of row numbers, so that millions of slices take seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct, field

from stepscope.engine import slice_tree
from stepscope.engine.slice_names import python_frame
from stepscope.engine.user_code import UserCode
from stepscope.tables.arrays import NONE, Bools, Int32, Int64, Rows, climb, positions
from stepscope.tables.categories import FUNCTION, OPERATORS
from stepscope.tables.schema import Tables

STEPS_OF_LOOP = 2  # that begin while a function runs: it is the training loop, or calls it
STRETCH = 500_000  # rows whose names are looked at together
MAX_FRAMES = 2_000  # of one recorded call stack
_IS_FUNCTION = pl.col("category") == FUNCTION
_IS_OPERATOR = pl.col("category").is_in(OPERATORS)
_IS_BACKWARD = (_IS_OPERATOR & (pl.col("forward_thread") > 0)).fill_null(False)


class Origin(NamedTuple):
    """A function or line found on the way up. `exact`: the line is the call's, not the definition's."""

    file: str
    function: str
    line: int | None
    exact: bool
    guess: bool


_Pair = tuple["Origin | None", "Origin | None"]  # the user's and a library's, of which a frame is one at most


class Walk(Struct, frozen=True):
    """Where walks ended: `stop` the row of the origin, `below` the row under it, `backward` a boundary that was met."""

    stop: Int64
    below: Int64
    backward: Int64


class Origins(Struct, frozen=True, dict=True):
    """The slices of all traces as a tree. Row numbers are positions in the table `events`.

    `user` and `library` give for each row the index of its origin in `places`, or -1.
    """

    events: pl.DataFrame
    user: Int32
    library: Int32
    places: tuple[Origin, ...]
    any_frames: bool
    _stops: dict[tuple[bool, bool], Bools] = field(default_factory=dict)  # where walks of each sort end, by row

    @cached_property
    def parent(self) -> Int32:
        """The row of the slice around each, -1 for none."""
        return positions(self.events["id"], self.events["parent"])

    @cached_property
    def is_backward(self) -> Bools:
        """Operators of the backward pass."""
        marked: Bools = self.events.select(_IS_BACKWARD).to_series().to_numpy()
        return marked

    def walk(self, start: Rows, *, library: bool = False, boundary: bool = True) -> Walk:
        """Up from each of `start` (row numbers, -1 for none) to the first row that is an origin, itself included.

        With `boundary` a walk ends at an operator of the backward pass too, before looking above it.
        """
        places = self.library if library else self.user
        if (library, boundary) not in self._stops:
            self._stops[library, boundary] = (places >= 0) | self.is_backward if boundary else places >= 0
        below = np.full(len(start), NONE, np.int64)
        met = climb(self.parent, start, self._stops[library, boundary], passed=below)
        origin = (met >= 0) & (places[met] >= 0)
        stop, backward = np.where(origin, met, NONE), np.where(origin, NONE, met)
        below[stop < 0] = NONE
        return Walk(stop, below, backward)


def prepare(tables: Tables, code: UserCode) -> Origins:
    """The tree of all slices of `tables`, with the origins marked in it."""
    events = tables.events
    functions = (events["category"] == FUNCTION) & events["name"].is_not_null()
    any_frames = bool(functions.any()) or bool(events.select(pl.col("call_stack").count()).item())
    places: list[Origin] = []
    user = library = np.broadcast_to(np.int32(NONE), events.height)  # takes no memory
    if any_frames:
        user, library = (np.full(events.height, NONE, np.int32) for _ in range(2))
        named = partial(_frame, code=code, exact=False)
        _mark(events, pl.when(_IS_FUNCTION).then("name"), named, places, user, library)
        _mark(events, pl.col("call_stack"), partial(_innermost, code=code), places, user, library)
        user[_leading(events, user, library)] = NONE
    return Origins(events, user, library, tuple(places), any_frames)


def _leading(events: pl.DataFrame, user: Int32, library: Int32) -> Int64:
    """Rows of the user's that only lead to a library's training, as the caller of `trainer.train()` does.

    A function of the library that runs for several steps lies below them: their line would stand for all that it does.
    """
    trace = ["process", "trace"]
    rows = events.lazy().select(*trace, "step", "start_ns", "duration_ns").with_row_index("row")
    foreign = pl.Series(library >= 0)
    if not foreign.any() or not (user >= 0).any():
        return np.empty(0, np.int64)
    calls = rows.filter(foreign, pl.col("duration_ns") > 0).sort("start_ns").collect()
    begins = rows.filter(pl.col("step").is_not_null()).group_by(*trace, "step").agg(pl.col("start_ns").min()).collect()
    loops = [np.empty(0, np.int64)]
    for key, own in calls.group_by(trace):
        begin = begins.filter(process=key[0], trace=key[1])["start_ns"].sort().to_numpy()
        start = own["start_ns"].to_numpy()
        inside = np.searchsorted(begin, start + own["duration_ns"].to_numpy()) - np.searchsorted(begin, start, "right")
        loops.append(own["row"].to_numpy()[inside >= STEPS_OF_LOOP].astype(np.int64))
    parent = positions(events["id"], events["parent"])
    return np.flatnonzero(slice_tree.ancestors(parent, np.concatenate(loops)) & (user >= 0))


def _mark(
    events: pl.DataFrame,
    text: pl.Expr,
    parse: Callable[[str], _Pair],
    places: list[Origin],
    user: Int32,
    library: Int32,
) -> None:
    """Enter the origins (user's, library's) that the rows' `text` names into `places` and both arrays, by stretches."""
    known: dict[str, list[int]] = {}
    for first in range(0, len(user), STRETCH):
        rows = events[first : first + STRETCH].lazy().select(text=text).with_row_index("row", offset=first)
        # built-in functions are as many as the objects they belong to
        found = rows.filter(pl.col("text").str.contains(r"\(\d+\): ")).collect()
        if found.is_empty():
            continue
        distinct = found["text"].unique(maintain_order=True).to_list()
        for name in distinct:
            if name not in known:
                known[name] = []
                for origin in parse(name):
                    known[name].append(len(places) if origin else NONE)
                    places.extend([origin] if origin else [])
        entries = pl.DataFrame(
            {"text": distinct, "user": [known[t][0] for t in distinct], "library": [known[t][1] for t in distinct]},
            schema={"text": pl.String, "user": pl.Int32, "library": pl.Int32},
        )
        hits = found.join(entries.filter((pl.col("user") >= 0) | (pl.col("library") >= 0)), on="text")
        at = hits["row"].to_numpy()
        user[at] = hits["user"].to_numpy()
        library[at] = hits["library"].to_numpy()


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
    frame = python_frame(text)
    file = code.resolve(frame.file) if frame else None
    if frame and file is not None:
        return Origin(file, frame.function, frame.line, exact, False), None
    short = code.library(frame.file) if frame else None
    return None, Origin(short, frame.function, frame.line, exact, True) if frame and short is not None else None
