"""Operators that another form of the same computation would not run, told by the shapes of their inputs.

- `broadcast`: a pointwise operator makes a tensor many times as large as what it was given, only to be reduced again.
- `one_hot`: a product with one-hot rows picks rows of the other matrix.
- `dense_gradient`: the gradient of an embedding is a whole table, of which a batch touches few rows; so is its update.
- `decomposition`: of matrices, whose many dependent steps no batch hides.

What works on the large tensor, backward pass and update included, goes with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.redundant.training_steps import TrainingScene, lines, outermost, summed, weights_of
from stepscope.engine.journal import json_list, sizes
from stepscope.engine.slice_tree import self_or_ancestor
from stepscope.model.device_losses import WastedWork
from stepscope.tables.arrays import Bools, Int64, flags

MIN_ELEMENTS = 1 << 18  # of the large tensor: a MB in float32, as much as a core's own cache holds
MIN_RATIO = 16  # of it by the largest input: what broadcasts a bias or a mask makes nothing larger
UNTOUCHED = 4  # rows of the table by those of a batch
MAX_FACTS = 5
_POINTWISE = re.compile(r"^aten::(sub|add|mul|div|minimum|maximum|eq|ne|lt|le|gt|ge)_?$")
_REDUCES = re.compile(r"^aten::(sum|mean|amax|amin|max|min|any|all|norm|linalg_vector_norm|logsumexp|prod)$")
_PRODUCTS = ("aten::mm", "aten::matmul", "aten::addmm", "aten::linear", "aten::bmm")
_FILLS = ("aten::zero_", "aten::fill_")
_DENSE = "aten::embedding_dense_backward"
_LOOKS_UP = ("aten::embedding", "aten::index_select")
_DECOMPOSES = re.compile(
    r"^aten::(linalg_(svd|svdvals|qr|eig|eigh|eigvals|eigvalsh|inv|inv_ex|pinv|lstsq|matrix_exp)|svd|qr|inverse|pinverse)$"
    r"|^autograd::engine::evaluate_function: Linalg(Svd|Qr|Eig|Eigh|InvEx|Lstsq|MatrixExp)Backward\d*$"
)
_Shape = tuple[int, ...]
_Key = tuple[str, str, _Shape]  # kind, operator, the large tensor


def wasted(scenes: Sequence[TrainingScene]) -> tuple[WastedWork, ...]:
    """Costliest first."""
    groups: dict[_Key, list[tuple[TrainingScene, Int64, Int64]]] = {}
    for scene in scenes:
        for key, rows, makers in _of_scene(scene) if scene.has("shapes") else ():
            groups.setdefault(key, []).append((scene, rows, makers))
    steps, found = sum(len(scene) for scene in scenes), []
    for (kind, operator, shape), parts in groups.items():
        ms = summed(scenes, [(scene, scene.lost(scene.times(rows), rows)) for scene, rows, _ in parts])
        weighed = [(scene, makers, weights_of(scene, makers)) for scene, _, makers in parts]
        calls = sum(len(makers) for *_, makers in parts) / steps
        found.append(WastedWork(kind, operator, shape, calls, ms, lines(weighed, ms)))
    return tuple(sorted(found, key=lambda one: (-one.ms_per_step, one.kind, one.shape))[:MAX_FACTS])


class _Operators(Struct, frozen=True):
    """The operators of a scene's steps: `dims` of the inputs of row `rows[n]`, named `names[n]`."""

    scene: TrainingScene
    rows: Int64
    names: list[str]
    dims: list[tuple[_Shape, ...]]

    def where(self, chosen: Sequence[bool]) -> Int64:
        found: Int64 = self.rows[np.array(chosen, bool)]
        return found

    def with_shape(self, *shapes: _Shape) -> Bools:
        """Whether one of the inputs has one of these shapes, by row of the scene."""
        return flags(len(self.scene.span), self.where([any(one in shapes for one in dims) for dims in self.dims]))

    def filled_below(self, rows: Int64) -> dict[int, _Shape]:
        """Of each of these rows the tensor that is filled below it."""
        holder = self_or_ancestor(self.scene.span.parent, flags(len(self.scene.span), rows))
        return {
            int(holder[row]): dims[0]
            for row, name, dims in zip(self.rows.tolist(), self.names, self.dims, strict=True)
            if name in _FILLS and holder[row] >= 0 and dims
        }


def _operators(scene: TrainingScene) -> _Operators:
    rows = np.flatnonzero(scene.operators)
    texts = scene.span.series("shapes").gather(rows)
    parsed = {
        text: tuple(known for one in json_list(text) if (known := sizes(one)) is not None)
        for text in texts.unique().to_list()
    }
    names = [scene.span.names.values[code] for code in scene.span.names.codes[rows].tolist()]
    return _Operators(scene, rows, names, [parsed[text] for text in texts.to_list()])


def _of_scene(scene: TrainingScene) -> Iterator[tuple[_Key, Int64, Int64]]:
    """By kind, operator and shape: all rows of the work, and those whose line made it."""
    every = _operators(scene)
    yield from _broadcasts(every)
    yield from _one_hots(every)
    yield from _dense_gradients(every)
    if len(scene.found):
        return  # on a device they are a loss of launches
    chosen = [_DECOMPOSES.match(name) is not None for name in every.names]
    rows = outermost(scene, flags(len(scene.span), every.where(chosen)))
    if len(rows):
        names = pl.Series([scene.span.names.values[code] for code in scene.span.names.codes[rows].tolist()])
        forward = rows[names.str.starts_with("aten::").to_numpy()]
        if len(forward):
            yield ("decomposition", scene.span.names.values[scene.span.names.codes[forward[0]]], ()), rows, forward


def _broadcasts(every: _Operators) -> Iterator[tuple[_Key, Int64, Int64]]:
    made: dict[tuple[str, _Shape], list[int]] = {}
    reduced, backward = set(), every.scene.in_backward
    for row, name, dims in zip(every.rows.tolist(), every.names, every.dims, strict=True):
        if dims and backward[row] < 0 and _REDUCES.match(name):
            reduced.add(dims[0])
        if len(dims) >= 2 and dims[0] and dims[1] and backward[row] < 0 and _POINTWISE.match(name):
            whole = _broadcast(dims[0], dims[1])
            if prod(whole) >= MIN_ELEMENTS and prod(whole) >= MIN_RATIO * max(prod(dims[0]), prod(dims[1])):
                made.setdefault((name, whole), []).append(row)
    for (name, whole), makers in made.items():
        if whole in reduced:
            own = np.array(makers, np.int64)
            rows = outermost(every.scene, every.with_shape(whole) | flags(len(every.scene.span), own))
            yield ("broadcast", name, whole), rows, own


def _broadcast(one: _Shape, other: _Shape) -> _Shape:
    """The shape of both together; () where they do not fit."""
    try:
        return tuple(int(size) for size in np.broadcast_shapes(one, other))
    except ValueError:
        return ()


def _one_hots(every: _Operators) -> Iterator[tuple[_Key, Int64, Int64]]:
    made = every.where([name == "aten::one_hot" for name in every.names])
    for shape in sorted(set(every.filled_below(made).values())):
        if len(shape) < 2 or prod(shape) < MIN_ELEMENTS:
            continue
        flat = (prod(shape[:-1]), shape[-1])
        work = every.with_shape(shape, flat, flat[::-1])
        makers = every.where(
            [
                name in _PRODUCTS and bool(dims) and dims[0] in (shape, flat) and every.scene.in_backward[row] < 0
                for row, name, dims in zip(every.rows.tolist(), every.names, every.dims, strict=True)
            ]
        )
        if len(makers):
            makers = outermost(every.scene, flags(len(work), makers))
            yield ("one_hot", "aten::one_hot", shape), outermost(every.scene, work | flags(len(work), made)), makers


def _dense_gradients(every: _Operators) -> Iterator[tuple[_Key, Int64, Int64]]:
    picked = {
        row: prod(dims[1])
        for row, name, dims in zip(every.rows.tolist(), every.names, every.dims, strict=True)
        if name == _DENSE and len(dims) >= 2
    }
    tables: dict[_Shape, int] = {}
    for row, shape in every.filled_below(np.array([*picked], np.int64)).items():
        tables[shape] = max(tables.get(shape, 0), picked[row])
    for shape, rows_of_batch in tables.items():
        # a table that is an output layer as well has a dense gradient anyway
        tied = any(
            name in _PRODUCTS and (shape in dims or shape[::-1] in dims)
            for name, dims in zip(every.names, every.dims, strict=True)
        )
        if tied or prod(shape) < MIN_ELEMENTS or shape[0] < UNTOUCHED * rows_of_batch:
            continue
        makers = every.where(
            [name == _LOOKS_UP[0] and shape in dims for name, dims in zip(every.names, every.dims, strict=True)]
        )
        work = every.with_shape(shape) & ~every.scene.span.names.where(_LOOKS_UP)
        dense = flags(len(work), np.array([*picked], np.int64))
        yield ("dense_gradient", _DENSE, shape), outermost(every.scene, work | dense), makers
