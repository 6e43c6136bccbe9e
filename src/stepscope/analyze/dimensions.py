"""Which tensor dimension a number of calls equals: "256 = dim 1 of (8, 256)"."""

from __future__ import annotations

import polars as pl

from stepscope.analyze.places import parse_json

MAX_SHAPES = 5_000  # distinct texts looked at; a step rarely has hundreds
MAX_RANK = 16


def explain(count: int, shapes: pl.Series) -> str | None:
    """The simplest recorded shape that has `count` (or `count + 1`, a loop that leaves one out) as a dimension.

    `shapes` holds JSON texts of "Input Dims": a list with one list of integers per tensor argument. Of several shapes
    the one with the fewest dimensions (but more than one) wins, then the most frequent: a slice `x[:, t]` is cut from
    the shape that the loop walks along.
    """
    seen: dict[tuple[int, ...], int] = {}
    texts = shapes.drop_nulls().value_counts(sort=True).head(MAX_SHAPES)
    for text, times in texts.rows():
        for shape in _shapes(text):
            seen[shape] = seen.get(shape, 0) + int(times)
    for wanted, suffix in ((count, ""), (count + 1, " without one")):
        having = [shape for shape in seen if wanted in shape]
        if not having:
            continue
        best = min(having, key=lambda shape: (len(shape) < 2, len(shape), -seen[shape], shape))
        dims = ", ".join(str(size) for size in best) + ("," if len(best) == 1 else "")
        return f"{count} = dim {best.index(wanted)} of ({dims}){suffix}"
    return None


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
