"""From slices of a trace to the user's function or line that caused them, for many slices at once, as all views do it.

Walking up from a launch, the first function of the user's is its origin; an operator of the backward pass is a
boundary, whose origin is that of its forward operator. Old traces hold the call stack of each operator instead. Where
no code of the user's is on the way, the innermost library function outside torch may stand in, as a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct, field

from stepscope.engine.source_lines import MANY, MODULE_BODY, Call
from stepscope.engine.spans import Base, Span, texts
from stepscope.engine.user_code import MODULE_CALL, Origin, called_by_name, origin_of, origins_of_stack
from stepscope.model.findings import Place
from stepscope.tables import arrays
from stepscope.tables.arrays import NONE, Bools, Int32, Int64, Numbers, Rows, by_code, climb, unique
from stepscope.tables.categories import OPERATORS

STEPS_OF_LOOP = 2  # that begin while a function runs: it is the training loop, or calls it
_PLACE = {"file": pl.String, "line": pl.Int64, "function": pl.String, "exact": pl.Boolean}


class Origins(Struct, frozen=True):
    """The slices of a trace as a tree: `user` and `library` give for each row the index of its origin in `Base.places`,
    or -1. `is_backward` are operators of the backward pass.
    """

    parent: Int64
    is_backward: Bools
    user: Int32
    library: Int32
    _stops: dict[tuple[bool, bool], Bools] = field(default_factory=dict)  # where walks of each sort end, by row

    def walk(self, start: Int64, *, library: bool = False, boundary: bool = True) -> tuple[Int64, Int64, Int64]:
        """Up from each of `start` (rows, -1 for none) to the first row that is an origin, itself included.

        Gives that row, the row under it, and the row of a boundary that was met instead. With `boundary` a walk ends at
        an operator of the backward pass too, before looking above it.
        """
        places = self.library if library else self.user
        if (library, boundary) not in self._stops:
            self._stops[library, boundary] = (places >= 0) | self.is_backward if boundary else places >= 0
        below = np.full(len(start), NONE, np.int64)
        met = climb(self.parent, start, self._stops[library, boundary], passed=below)
        origin = (met >= 0) & (places[met] >= 0)
        stop, backward = np.where(origin, met, NONE), np.where(origin, NONE, met)
        below[stop < 0] = NONE
        return stop, below, backward


def origins(base: Base, span: Span) -> Origins:
    if "origins" not in span.kept:
        span.kept["origins"] = _origins(base, span)
    found: Origins = span.kept["origins"]
    return found


def _origins(base: Base, span: Span) -> Origins:
    user = library = np.broadcast_to(np.int32(NONE), len(span))  # takes no memory
    if span.has_stacks:
        user, library = (np.full(len(span), NONE, np.int32) for _ in range(2))
        numbers: Numbers[Origin] = Numbers((origin, index) for index, origin in enumerate(base.places))
        stacks = texts(span.series("call_stack"))
        for column, rows in (
            (span.names, np.flatnonzero(span.is_function)),
            (stacks, np.flatnonzero(stacks.codes >= 0)),
        ):
            entries = np.full((2, len(column.values) + 1), NONE, np.int32)
            used = unique(column.codes[rows])
            for code in used[used >= 0].tolist():
                text = column.values[code]
                found = origins_of_stack(text, base.code) if column is stacks else (origin_of(text, base.code),)
                for origin in filter(None, found):
                    entries[int(origin.guess), code] = numbers[origin]
            hits = rows[(entries[:, column.codes[rows]] >= 0).any(axis=0)]
            user[hits], library[hits] = entries[:, column.codes[hits]]
        base.places[:] = numbers
        user[_leading(span, user, library)] = NONE
    is_backward = span.categories.where(OPERATORS) & (span.column("forward_thread") > 0)
    return Origins(span.parent, is_backward, user, library)


def _leading(span: Span, user: Int32, library: Int32) -> Int64:
    """Rows of the user's that only lead to a library's training loop, as the caller of `trainer.train()` does."""
    calls = np.flatnonzero((library >= 0) & (span.duration_ns > 0))
    stepped = span.events.lazy().filter(pl.col("step").is_not_null()).group_by("step")
    begins = stepped.agg(pl.col("start_ns").min()).collect()["start_ns"].sort().to_numpy()
    inside = np.searchsorted(begins, span.ends(calls)) - np.searchsorted(begins, span.start_ns[calls], "right")
    return np.flatnonzero(arrays.ancestors(span.parent, calls[inside >= STEPS_OF_LOOP]) & (user >= 0))


class Found(Struct, frozen=True):
    """For each row that was asked for the index of its origin in `base.places`, and the row of the span that
    its code calls (which tells the exact line); `NONE` where nothing was found.
    """

    place: Int64
    called: Int64
    ahead: Bools  # the way led through the forward operator of an operator of the backward pass
    backward: Bools  # such an operator was met


def trace_back(base: Base, span: Span, rows: Int64) -> Found:
    """The origins of rows of the span; `NONE` (-1) among the rows stays `NONE`."""
    ascending = bool((rows[1:] > rows[:-1]).all())
    distinct, back = (rows, slice(None)) if ascending else np.unique(rows, return_inverse=True)
    found = trace_linked(base, span, distinct)
    return Found(found.place[back], found.called[back], found.ahead[back], found.backward[back])


def trace_linked(
    base: Base, span: Span, rows: Int64, forward: Int64 | None = None, frame: Int64 | None = None
) -> Found:
    """As `trace_back`, of work whose links are known: the forward operator behind each, and a function to start from
    where nothing else leads to a place; both as rows of the span.
    """
    backward = np.zeros(len(rows), bool)
    if not base.any_frames or not len(rows):
        nothing = np.full(len(rows), NONE, np.int64)
        return Found(nothing, nothing, backward, backward)
    tree = origins(base, span)
    stop, below, met = tree.walk(rows)
    found, backward = _entries(tree.user, stop), met >= 0
    known = None
    if forward is not None:
        known = np.where(backward, forward, NONE)
    elif backward.any():  # the forward operator of operators of the backward pass, or of the nearest slice around them
        ahead_of = span.forward
        holder = climb(span.parent, met, ahead_of >= 0)
        known = np.where(holder >= 0, ahead_of[holder], NONE)
    ahead = np.zeros(len(rows), bool)
    for library in (False, True):
        # what no forward operator explains belongs to the call of backward()
        for begin in (known, rows, frame):
            if begin is not None:
                rest = np.flatnonzero((found < 0) & (begin >= 0))
                stop, under, _ = tree.walk(begin[rest], library=library, boundary=False)
                hit = stop >= 0
                found[rest[hit]] = _entries(tree.library if library else tree.user, stop[hit])
                below[rest[hit]], ahead[rest[hit]] = under[hit], begin is known
    return Found(found, below, ahead, backward)


def calls(base: Base, span: Span, called: Int64) -> Int64:
    """For each of `called`, rows that the user's code calls, its number in `base.calls`; `NONE` for what is none."""
    if "calls" not in span.kept:
        span.kept["calls"] = _Calls(base, span)
    made: _Calls = span.kept["calls"]
    found = np.full(len(called), NONE, np.int64)
    if len(made.rows):
        at = np.minimum(np.searchsorted(made.rows, called), len(made.rows) - 1)
        hit = np.flatnonzero(made.rows[at] == called)
        keys, back = np.unique(made.keys[at[hit]], return_inverse=True)
        numbers = Numbers((call, number) for number, call in enumerate(base.calls))
        found[hit] = np.asarray([numbers[made.call(key)] for key in keys.tolist()], np.int64)[back]
        base.calls[:] = numbers
    return found


class _Calls:
    """The slices that the user's functions call in a trace, `rows`, with what tells their lines as one number each."""

    def __init__(self, base: Base, span: Span) -> None:
        tree = origins(base, span)
        self.rows = np.flatnonzero(_entries(tree.user, tree.parent) >= 0)
        caller, codes = tree.parent[self.rows], span.names.codes[self.rows].astype(np.int64)
        self._names = [called_by_name(name) for name in span.names.values]
        # any module is the next one: what the source names them by is not their classes
        kinds: Numbers[str] = Numbers()
        kind = [kinds[MODULE_CALL if name.startswith(MODULE_CALL) else name] for name in self._names]
        turn, turns = _ordered(caller, np.asarray([*kind, NONE])[codes], span.start_ns[self.rows])
        again, repeats = _ordered(caller, codes, span.start_ns[self.rows])
        is_module = by_code(np.asarray([*(name.startswith(MODULE_CALL) for name in self._names), False]), codes)
        modules = np.bincount(caller[is_module & (again == 0)], minlength=len(span))[caller]
        places = tree.user[caller].astype(np.int64)
        pairs, which = np.unique(places * len(self._names) + codes, return_inverse=True)
        most = np.zeros(len(pairs), np.int64)
        np.maximum.at(most, which, turns)
        others: dict[int, set[tuple[str, int]]] = {}
        for pair, often in zip(pairs.tolist(), most.tolist(), strict=True):
            others.setdefault(pair // len(self._names), set()).add((self._names[pair % len(self._names)], often))
        self._others = {place: frozenset(names) for place, names in others.items()}
        self.keys = places * len(self._names) + codes
        for count in (np.where(turns < MANY, turn, 0), turns, repeats, modules):
            self.keys = self.keys * (MANY + 1) + np.minimum(count, MANY)

    def call(self, key: int) -> Call:
        key, modules = divmod(key, MANY + 1)
        key, repeats = divmod(key, MANY + 1)
        key, turns = divmod(key, MANY + 1)
        key, turn = divmod(key, MANY + 1)
        place, code = divmod(key, len(self._names))
        return Call(self._names[code], turn, turns, repeats, modules, self._others[place])


def _ordered(caller: Int64, kind: Int64 | Int32, start: Int64) -> tuple[Int64, Int64]:
    """Which one of its kind in its caller, by time, each call is, from 0; and how many of the kind the caller makes."""
    order = np.lexsort((start, kind, caller))
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(caller[order]) != 0) | (np.diff(kind[order]) != 0)
    begins = np.flatnonzero(first)
    group = np.cumsum(first) - 1
    turn, turns = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    turn[order] = np.arange(len(order)) - begins[group]
    turns[order] = np.diff(np.append(begins, len(order)))[group]
    return turn, turns


def place(base: Base, index: int, call: int = NONE) -> tuple[Place, bool]:
    """The place, and whether its line is that of the call rather than of the definition.

    Args:
        call: the number of the call that the code there makes; where the source is known it tells the exact line.
    """
    origin = exact(base, index, call)
    return Place(origin.file, origin.line, origin.function), origin.exact


def place_sums(base: Base, span: Span, groups: Rows, rows: Int64, weights: Int64) -> pl.DataFrame:
    """(group, file, line, function, exact, weight, rows): weights summed by group and place, where one was found."""
    if not base.any_frames:
        groups, rows, weights = groups[:0], rows[:0], weights[:0]
    found = trace_back(base, span, rows)
    hit = found.place >= 0
    call = calls(base, span, found.called[hit])
    sums = (
        pl.DataFrame({"group": groups[hit], "place": found.place[hit], "call": call, "weight": weights[hit]})
        .group_by("group", "place", "call")
        .agg(pl.col("weight").sum(), rows=pl.len().cast(pl.Int64))
    )
    pairs = list(zip(sums["place"].to_list(), sums["call"].to_list(), strict=True))
    known = {pair: exact(base, *pair) for pair in set(pairs)}
    places = {name: [getattr(known[pair], name) for pair in pairs] for name in _PLACE}
    columns = {"group": sums["group"], **places, "weight": sums["weight"], "rows": sums["rows"]}
    return pl.DataFrame(columns, schema_overrides=_PLACE)


def heaviest(sums: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Of `place_sums`, with columns `keys` in place of or beside `group`: each key's place of most weight, and it."""
    return _by_weight(sums, keys).unique(keys, keep="first", maintain_order=True).select(*keys, *_PLACE, "weight")


def _by_weight(sums: pl.DataFrame, keys: Sequence[str] = ()) -> pl.DataFrame:
    if sums.is_empty():
        return sums
    total = sums.lazy().group_by(*keys, *_PLACE).agg(pl.col("weight").sum(), pl.col("rows").sum())
    return total.sort("weight", "rows", *_PLACE, descending=[True, True, *(False for _ in _PLACE)]).collect()


class HeavyLine(NamedTuple):
    """A line of the user's with the weight and the number of the rows behind it."""

    place: Place
    exact: bool
    weight: int
    rows: int


def heaviest_lines(parts: Iterable[tuple[Base, Span, Int64, Int64]], count: int) -> list[HeavyLine]:
    """At most `count` lines behind rows of spans, (base, span, rows, weights), those of most weight first.

    `weights` are ns, bytes or calls; where all are 0 the number of rows decides.
    """
    sums = [place_sums(base, span, np.zeros(len(rows), np.int64), rows, weights) for base, span, rows, weights in parts]
    if not sums:
        return []
    found = _by_weight(pl.concat(sums)).head(count)
    return [HeavyLine(*place_of_row(row), row["weight"], row["rows"]) for row in found.iter_rows(named=True)]


def place_of_row(row: Mapping[str, Any]) -> tuple[Place, bool]:
    """The place, and whether its line is exact, of a row of `heaviest`."""
    return Place(row["file"], row["line"], row["function"]), bool(row["exact"])


def exact(base: Base, index: int, call: int) -> Origin:
    """The origin with the line that makes the call, where its source tells which one it is."""
    origin = base.places[index]
    if origin.exact or origin.guess:
        return origin
    if call >= 0:
        line = base.lines.only_line(origin.file, origin.function, origin.line, base.calls[call])
        if line is not None:
            return origin._replace(line=line, exact=True)
    if origin.function == MODULE_BODY:
        return origin._replace(line=None)  # it is the line that the file was at when the recording began
    first = base.lines.definition(origin.file, origin.function, origin.line)
    return origin if first is None else origin._replace(line=first)


def _entries(places: Int32, rows: Int64) -> Int64:
    return np.where(rows >= 0, places[np.maximum(rows, 0)], NONE).astype(np.int64)
