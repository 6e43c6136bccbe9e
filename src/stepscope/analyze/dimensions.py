"""Which tensor dimension a number of calls equals: "256 = dim 1 of (8, 256)"; or which two neighbours give it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import polars as pl

from stepscope.engine.user_code import parse_json

MAX_SHAPES = 5_000  # distinct texts looked at; a step rarely has hundreds
MAX_RANK = 16


def explain(count: int, shapes: pl.Series) -> str | None:
    """The simplest recorded shape that has `count` (or `count + 1`, a loop that leaves one out) as a dimension.

    `shapes` holds JSON texts of "Input Dims": a list with one list of integers per tensor argument. Of several shapes
    the one with the fewest dimensions (but more than one) wins, then the most frequent: a slice `x[:, t]` is cut from
    the shape that the loop walks along. Where none has it, two neighbouring dimensions may: `x[b, t]` in two loops.
    """
    seen: dict[tuple[int, ...], int] = {}
    texts = shapes.drop_nulls().value_counts(sort=True).head(MAX_SHAPES)
    for text, times in texts.rows():
        for shape in _shapes(text):
            seen[shape] = seen.get(shape, 0) + int(times)
    for wanted, suffix in ((count, ""), (count + 1, " without one")):
        best = _simplest({shape: times for shape, times in seen.items() if wanted in shape})
        if best is not None:
            return f"{count} = dim {best.index(wanted)} of {_text(best)}{suffix}"
    best = _simplest({shape: times for shape, times in seen.items() if _neighbours(shape, count) is not None})
    if best is None:
        return None
    first = _neighbours(best, count)
    return f"{count} = dims {first} * {(first or 0) + 1} of {_text(best)}"


def _simplest(shapes: Mapping[tuple[int, ...], int]) -> tuple[int, ...] | None:
    """Of shapes and how often each was seen."""
    return min(shapes, key=lambda shape: (len(shape) < 2, len(shape), -shapes[shape], shape), default=None)


def _neighbours(shape: tuple[int, ...], count: int) -> int | None:
    """The first of two dimensions that make `count` together: a loop in a loop. Dimensions of 1 are no loop."""
    pairs = enumerate(itertools.pairwise(shape))
    return next((at for at, (one, other) in pairs if one > 1 < other and one * other == count), None)


def _text(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"


def _shapes(text: str) -> list[tuple[int, ...]]:
    value = parse_json(text)
    found: list[tuple[int, ...]] = []
    for item in value if isinstance(value, list) else []:
        if not isinstance(item, list) or not item or len(item) > MAX_RANK:
            continue
        if all(isinstance(size, int) for size in item):
            found.append(tuple(item))
        else:  # a list of tensors, as in cat or stack
            found.extend(tuple(s) for s in item if isinstance(s, list) and s and all(isinstance(n, int) for n in s))
    return found
