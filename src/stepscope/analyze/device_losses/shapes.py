"""What shapes tell of kernels: products whose sizes do not fit the tiles, the batch, and how full a device is."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import ceil

import numpy as np

from stepscope.analyze.device_losses.pieces import Piece
from stepscope.analyze.views import kernels
from stepscope.engine import intervals
from stepscope.engine.device_work import KERNEL
from stepscope.engine.scene import Scene
from stepscope.engine.tree import below
from stepscope.tables.arrays import Int64

MULTIPLE = 8  # of elements in 16 bits: 16 bytes, which cuBLAS wants rows to begin at for its best kernels
AGREE = 0.6  # of the layers whose inputs have the same first dimension; others flatten or swap dimensions
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}  # where the first factor stands
_HALVES = ("c10::Half", "c10::BFloat16")
# The tile of a kernel's name, behind the words that come before it: tilesize64x64x64, gemm_bf16_256x128_32x3,
# h1688gemm_128x128, nvjet_tst_144x128_64x6.
_TILE = re.compile(r"(?<![\dx])(\d{2,3})x(\d{2,3})(?!\d)")
_UNALIGNED = re.compile(r"align[124](?!\d)")
# Layers by where the batch stands among their inputs.
_LAYERS = {f"aten::{name}": 0 for name in ("conv1d", "conv2d", "conv3d", "linear", "layer_norm", "batch_norm")} | {
    "aten::embedding": 1
}
_SYNC_BATCH_NORM = frozenset({"SyncBatchNorm", "aten::batch_norm_gather_stats_with_counts"})


def tiles(scene: Scene) -> Piece:
    """Of products in 16 bits on tensor cores the time that goes into filling up tiles, where nothing else runs.

    Parts are named by sizes. `unaligned_ns` is the time of kernels made for rows that begin at any element.
    """
    span, found = scene.span, scene.found
    slices, operators = _product_kernels(scene)
    lengths = (found.end_ns - found.start_ns)[slices]
    mine = np.zeros(len(found), bool)
    mine[slices] = True
    alone = intervals.covered(scene.exclusive(mine), found.start_ns[slices], found.end_ns[slices])
    texts = span.events.select("shapes", "types")[operators].rows() if len(operators) else []
    names = [span.names.values[code] for code in span.names.codes[found.rows[slices]].tolist()]
    sizes = [
        _sizes(_PRODUCTS[span.names.values[code]], shapes, types)
        for code, (shapes, types) in zip(span.names.codes[operators].tolist(), texts, strict=True)
    ]
    wasted = np.asarray([waste(size, name) if size else 0.0 for size, name in zip(sizes, names, strict=True)])
    weights = np.round(alone * wasted).astype(np.int64)
    kept = weights > 0
    per_step = np.zeros(len(scene.windows), np.int64)
    np.add.at(per_step, scene.step_of(found.start_ns[slices])[kept], weights[kept])
    unaligned = np.asarray([_UNALIGNED.search(name) is not None for name in names], bool)
    details = {
        "kernels_ns": float(alone[kept].sum()),
        "unaligned_ns": float(alone[unaligned & kept].sum()),
        "products_ns": float(lengths.sum()),
    }
    labels = tuple(" x ".join(map(str, size)) for size, keep in zip(sizes, kept.tolist(), strict=True) if keep and size)
    rows = found.launch[slices][kept]
    rows = np.where(rows >= 0, rows, operators[kept])
    return Piece(scene, per_step, rows, weights[kept], operators[kept], details, labels)


def _product_kernels(scene: Scene) -> tuple[Int64, Int64]:
    """Kernels on tensor cores that products launched themselves, and the rows of these operators."""
    span, found = scene.span, scene.found
    slices = np.flatnonzero((found.kind == KERNEL) & (scene.step_of(found.start_ns) >= 0))
    used = span.names.pick(kernels.uses_tensor_cores(span.names.values))
    products = span.names.where(frozenset(_PRODUCTS)) & span.is_operator
    above = found.operator[slices]
    chosen = (above >= 0) & used[found.rows[slices]] & products[np.maximum(above, 0)]
    return slices[chosen], above[chosen]


@lru_cache(maxsize=4096)
def _sizes(first: int, shapes: str | None, types: str | None) -> tuple[int, int, int] | None:
    """Rows, columns and depth of a product in 16 bits; None for another type, or where they were not recorded."""
    dims, kinds = _loaded(shapes), _loaded(types)
    if len(dims) < first + 2 or len(kinds) < first + 2 or any(kind not in _HALVES for kind in kinds[first : first + 2]):
        return None
    one, other = _shape(dims[first]), _shape(dims[first + 1])
    if not (len(one) == len(other) >= 2 and one[-1] == other[-2]):
        return None
    sizes = one[-2], other[-1], one[-1]
    return sizes if min(sizes) > 0 else None


def waste(size: tuple[int, int, int], kernel: str) -> float:
    """The part of a kernel's products that only fill it up: to multiples of 8, or to the tile in its name.

    Which side of the tile stands for rows is not told, so the better of both counts.
    """
    rows, columns, depth = size
    padded = 1 - (rows * columns * depth) / (_up(rows, MULTIPLE) * _up(columns, MULTIPLE) * _up(depth, MULTIPLE))
    match = _TILE.search(kernel[:4000])
    if match is None:
        return padded
    one, other = int(match[1]), int(match[2])
    if not one or not other:
        return padded
    filled = min(_up(rows, one) * _up(columns, other), _up(rows, other) * _up(columns, one))
    return max(padded, 1 - rows * columns / filled)


def _up(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple


def filling(scenes: list[Scene]) -> float | None:
    """Of the kernels' time what is in kernels with a block for every multiprocessor; None where writers do not tell."""
    full = total = 0.0
    for scene in scenes:
        found = scene.found
        slices = np.flatnonzero((found.kind == KERNEL) & (scene.step_of(found.start_ns) >= 0))
        blocks = scene.span.series("blocks_per_sm").gather(found.rows[slices])
        known = blocks.is_not_null().to_numpy()
        lengths = (found.end_ns - found.start_ns)[slices]
        total += float(lengths[known].sum())
        full += float(lengths[known & (blocks.fill_null(0.0).to_numpy() >= 1)].sum())
    return full / total if total else None


def batch_size(scenes: list[Scene]) -> int | None:
    """The first dimension that most inputs of layers share."""
    firsts: Counter[int] = Counter()
    for scene in scenes:
        firsts.update(_firsts(scene))
    if not firsts:
        return None
    size, times = min(firsts.items(), key=lambda item: (-item[1], item[0]))
    return size if times >= AGREE * firsts.total() else None


def _firsts(scene: Scene) -> Iterator[int]:
    """First dimensions of inputs with three dimensions and more, and of indices of embeddings."""
    span = scene.span
    layers = span.names.where(frozenset(_LAYERS)) & span.is_operator
    rows = np.flatnonzero(layers & (scene.step_of(span.start_ns) >= 0))
    texts = span.series("shapes").gather(rows).to_list()
    for code, text in zip(span.names.codes[rows].tolist(), texts, strict=True):
        first = _LAYERS[span.names.values[code]]
        dims = _loaded(text)
        shape = _shape(dims[first]) if len(dims) > first else []
        if len(shape) >= 3 - first:
            yield shape[0]


def sync_batch_norms(scene: Scene) -> int:
    """How often a SyncBatchNorm layer ran forward in the steps."""
    span = scene.span
    rows = np.flatnonzero(span.names.where(_SYNC_BATCH_NORM) & span.is_operator)
    rows = rows[scene.step_of(span.start_ns[rows]) >= 0]
    outer = span.names.where(frozenset({"SyncBatchNorm"}))
    return int((outer[rows] | ~below(span.parent, span.parent[rows], outer)).sum())


@lru_cache(maxsize=8192)
def _loaded(text: str | None) -> list[object]:
    try:
        value = json.loads(text or "[]")
    except ValueError:
        return []
    return value if isinstance(value, list) else []


def _shape(value: object) -> list[int]:
    """The sizes of a tensor; none where it is something else."""
    sizes = value if isinstance(value, list) else []
    return sizes if all(type(size) is int and size >= 0 for size in sizes) else []
