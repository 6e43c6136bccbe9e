"""From rows of a span to the user's lines, one way for all views.

A row belongs to the innermost function or line of the user's around it. One of the backward pass belongs to that of its
forward operator, because above it stands only `backward()`. Where there is no code of the user's, a library's outside
torch may stand in, as a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine.origins import Origin
from stepscope.engine.slice_names import called_by_name
from stepscope.engine.spans import Base, Span
from stepscope.model.findings import Place
from stepscope.tables.arrays import NONE, Bools, Int32, Int64, climb

_PLACE = ("file", "line", "function", "exact")


class Found(Struct, frozen=True):
    """For each row that was asked for the index of its origin in `base.origins.places`, and the row of the span that
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
    tree = base.origins
    if not tree.any_frames or not len(rows):
        nothing, never = np.full(len(rows), NONE, np.int64), np.zeros(len(rows), bool)
        return Found(nothing, nothing, never, never)
    start, other, known = (
        np.full(len(rows), NONE) if one is None else np.where(one >= 0, one + span.first, NONE)
        for one in (rows, frame, forward)
    )
    first = tree.walk(start)
    found, below = _entries(tree.user, first.stop), first.below
    backward = first.backward >= 0
    if forward is not None:
        known = np.where(backward, known, NONE)
    elif backward.any():  # the forward operator of operators of the backward pass, or of the nearest slice around them
        ahead_of = span.forward
        holder = climb(span.parent, np.where(backward, first.backward - span.first, NONE), ahead_of >= 0)
        known = np.where(holder >= 0, ahead_of[holder] + span.first, NONE)
    ahead = np.zeros(len(rows), bool)
    for library in (False, True):
        # what no forward operator explains belongs to the call of backward()
        for begin in (known, start, other):
            rest = np.flatnonzero((found < 0) & (begin >= 0))
            again = tree.walk(begin[rest], library=library, boundary=False)
            hit = again.stop >= 0
            found[rest[hit]] = _entries(tree.library if library else tree.user, again.stop[hit])
            below[rest[hit]], ahead[rest[hit]] = again.below[hit], begin is known
    return Found(found, np.where(below >= 0, below - span.first, NONE), ahead, backward)


def place(base: Base, index: int, callee: str | None = None) -> tuple[Place, bool]:
    """The place, and whether its line is that of the call rather than of the definition.

    Args:
        callee: name of the slice that the code there calls; where the source is known it tells the exact line.
    """
    origin = _exact(base, base.origins.places[index], callee)
    return Place(origin.file, origin.line, origin.function), origin.exact


def place_sums(base: Base, span: Span, groups: Int64, rows: Int64, weights: Int64) -> pl.DataFrame:
    """(group, file, line, function, exact, weight, rows): weights summed by group and place, where one was found."""
    if not base.origins.places:
        groups, rows, weights = groups[:0], rows[:0], weights[:0]
    found = trace_back(base, span, rows)
    hit = found.place >= 0
    names = span.names
    callee = np.where(found.called >= 0, names.codes[found.called], NONE)[hit]
    sums = (
        pl.DataFrame({"group": groups[hit], "place": found.place[hit], "callee": callee, "weight": weights[hit]})
        .group_by("group", "place", "callee")
        .agg(pl.col("weight").sum(), rows=pl.len().cast(pl.Int64))
    )
    pairs = sums.select("place", "callee").unique()
    origins = [
        _exact(base, base.origins.places[index], names.values[code] if code >= 0 else None)
        for index, code in pairs.iter_rows()
    ]
    pairs = pairs.with_columns(
        pl.Series("file", [origin.file for origin in origins], pl.String),
        pl.Series("line", [origin.line for origin in origins], pl.Int64),
        pl.Series("function", [origin.function for origin in origins], pl.String),
        pl.Series("exact", [origin.exact for origin in origins], pl.Boolean),
    )
    return sums.join(pairs, on=["place", "callee"]).select("group", *_PLACE, "weight", "rows")


def heaviest(sums: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Of `place_sums`, with columns `keys` in place of or beside `group`: each key's place of most weight, and it."""
    return _by_weight(sums, keys).unique(keys, keep="first", maintain_order=True).select(*keys, *_PLACE, "weight")


def _by_weight(sums: pl.DataFrame, keys: Sequence[str] = ()) -> pl.DataFrame:
    """`place_sums` of several spans added up, the most weight first."""
    if sums.is_empty():
        return sums
    total = sums.group_by(*keys, *_PLACE).agg(pl.col("weight").sum(), pl.col("rows").sum())
    return total.sort("weight", "rows", *_PLACE, descending=[True, True, *(False for _ in _PLACE)])


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


def _exact(base: Base, origin: Origin, callee: str | None) -> Origin:
    """The origin with the line that makes the call, where its source tells which one it is."""
    if origin.exact or origin.guess:
        return origin
    called = called_by_name(callee)
    if called is not None:
        line = base.lines.only_line(origin.file, origin.function, origin.line, called)
        if line is not None:
            return origin._replace(line=line, exact=True)
    first = base.lines.definition(origin.file, origin.function, origin.line)
    return origin if first is None else origin._replace(line=first)


def _entries(places: Int32, rows: Int64) -> Int64:
    return np.where(rows >= 0, places[np.maximum(rows, 0)], NONE).astype(np.int64)
