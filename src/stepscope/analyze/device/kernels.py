"""Device work that could be less: products that leave tensor cores unused, attention written out, layouts, pointwise.

Only time counts in which nothing else ran on any device of the trace.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from math import ceil

import numpy as np
import polars as pl

from stepscope.analyze.device.trace_loss import TraceLoss, host_rows
from stepscope.analyze.views import kernels as kernel_names
from stepscope.engine import intervals
from stepscope.engine.device_work import KERNEL
from stepscope.engine.intervals import Intervals
from stepscope.engine.journal import json_list, sizes
from stepscope.engine.scene import Scene
from stepscope.model.trace import OTHER_MAKERS
from stepscope.tables.arrays import NONE, Bools, flags, has_ancestor, unique

FIRST_TENSOR_CORES = 7  # major compute capability of Volta
# Kernels between the two products of an attention that is written out: scale, mask, softmax, dropout, and conversions
# between types around the softmax. Backward has as many.
REACH = 10
# Products and convolutions on ordinary cores, by the names that cuBLAS, cuDNN, CUTLASS and MIOpen give them. Double
# precision is left out: what needs it cannot be had in 16 bits.
_PRODUCT = re.compile(
    r"gemm|gemv|conv|wgrad|dgrad|fprop|winograd|splitk|fft|_cgemm|Cijk_|implicit|flip_filter|_engine|simt|gcgemm", re.I
)
_DOUBLE = re.compile(r"(?<!w)dgemm|_d884|d161616|<double|double,|f64|_ddd_", re.I)
_CONVERSION = re.compile(r"nchwToNhwc|nhwcToNchw|nchw_?to_?nhwc|nhwc_?to_?nchw|nchwToFold|nhwcAddPadding", re.I)
_POINTWISE = re.compile(
    r"elementwise_kernel|CatArrayBatchedCopy|direct_copy_kernel|fused_dropout|where_kernel|launch_clamp|"
    r"vectorized_layer_norm|elementwise_kernel_manual_unroll"
)
_FUSED = re.compile(r"^triton_")
_PRODUCT_OPERATORS = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::_scaled_mm"})
_SOFTMAX = frozenset({"aten::_softmax", "aten::_softmax_backward_data", "aten::_masked_softmax"})
_TF32 = re.compile(r"tf32", re.I)
_CONVOLUTION = re.compile(r"conv", re.I)
_FORWARD_CONVOLUTION = frozenset({"aten::conv1d", "aten::conv2d", "aten::conv3d"})
_CONTIGUOUS = frozenset({"aten::contiguous"})
_COPIED = re.compile(r"copy|elementwise", re.I)
_OPTIMIZER = r"^Optimizer\.(step|zero_grad)#"


class Kernels:
    """Kernels of one trace, in order of their start."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.span = scene, scene.span
        found = scene.found
        kernels = np.flatnonzero(found.kind == KERNEL)
        kernels = kernels[scene.step_of(found.start_ns[kernels]) >= 0]
        self.slices = kernels[np.argsort(found.start_ns[kernels], kind="stable")]
        self.rows = found.rows[self.slices]
        self.lengths = (found.end_ns - found.start_ns)[self.slices]
        self.launch = found.launch[self.slices]
        self.operator = found.operator[self.slices]  # that launched each, -1 for none
        span, names = self.span, self.span.names
        self._on_tensor_cores = names.pick(kernel_names.uses_tensor_cores(names.values))[self.rows].astype(bool)
        # below an operator that could use tensor cores; below convolutions, forward and backward
        self._below_product = self._below(names.pick(kernel_names.eligible(names.values)) & span.is_operator)
        self._below_convolution = self._below(names.matching(_CONVOLUTION.search) & span.is_operator)
        # cuDNN's own conversions, and copies of an operand whose layout is not the convolution's
        copied = self._below(names.where(_CONTIGUOUS) & span.is_operator) & self._flags(_COPIED)
        self._conversions = (self._flags(_CONVERSION) & self._below_product) | (copied & self._below_convolution)

    def _flags(self, pattern: re.Pattern[str]) -> Bools:
        return self.span.names.matching(pattern.search)[self.rows].astype(bool)

    def _below(self, wanted: Bools) -> Bools:
        """Kernels below one of the operators `wanted`, a flag for each row of the span."""
        return has_ancestor(self.span.parent, self.operator, wanted)

    def _alone(self, chosen: Bools) -> Intervals:
        """When some kernels ran, and none of the others nor a copy."""
        return self.scene.exclusive(flags(len(self.scene.found), self.slices[chosen]))

    def _loss(self, chosen: Bools, details: dict[str, float]) -> TraceLoss:
        """A loss of some kernels, as far as they run alone."""
        origin = np.where(self.launch >= 0, self.launch, self.operator)[chosen]
        return TraceLoss(self.scene, self._alone(chosen), origin, self.lengths[chosen], self.rows[chosen], details)

    def products(self) -> TraceLoss:
        """Products and convolutions on ordinary cores, where the device has others as far as the trace tells."""
        having = [number for number, gpu in self.span.gpus.items() if has_tensor_cores(gpu.name, gpu.capability)]
        able = np.isin(self.scene.found.device[self.slices], np.asarray(having, np.int64))
        ordinary = able & self._below_product & ~self._on_tensor_cores & self._flags(_PRODUCT)
        ordinary &= ~self._flags(_DOUBLE) & ~self._flags(_CONVERSION)
        convolutions = ordinary & self._below_convolution
        details = {
            "tensor_core_ns": self._total(self._on_tensor_cores & able),
            "tf32_ns": self._total(self._flags(_TF32) & able),
            "convolutions_ns": self._total(convolutions),
            "products_ns": self._total(ordinary & ~convolutions),
        }
        return self._loss(ordinary, details)

    def _total(self, chosen: Bools) -> float:
        return float(self.lengths[chosen].sum())

    def attention(self) -> TraceLoss:
        """Kernels between two batched products with a softmax among them, in the order of one thread's launches.

        `products_ns` is the time of these products, which a fused kernel computes as well.
        """
        span, launch = self.span, self.launch
        track = np.where(launch >= 0, span.tracks.codes[np.maximum(launch, 0)], NONE)
        linked, rows = self.operator >= 0, np.maximum(self.operator, 0)
        product = linked & span.names.where(_PRODUCT_OPERATORS)[rows]
        softmax = linked & span.names.where(_SOFTMAX)[rows]
        chosen, products = np.zeros(len(self.rows), bool), np.zeros(len(self.rows), bool)
        found_softmax = 0
        for one in unique(track[softmax & (track >= 0)]).tolist():
            own = np.flatnonzero(track == one)
            own = own[np.argsort(span.start_ns[launch[own]], kind="stable")]
            for middle in np.flatnonzero(softmax[own]).tolist():
                before = np.flatnonzero(product[own[max(0, middle - REACH) : middle]])
                behind = np.flatnonzero(product[own[middle + 1 : middle + 1 + REACH]])
                if len(before) and len(behind):
                    first = max(0, middle - REACH) + int(before[-1])
                    last = middle + 1 + int(behind[0])
                    chosen[own[first + 1 : last]] = True
                    products[own[[first, last]]] = True
                    found_softmax += 1
        details = {"softmax_calls": float(found_softmax), "products_ns": self._total(products)}
        return self._loss(chosen & ~products, details)

    def layout(self) -> TraceLoss:
        """Conversions between memory layouts around convolutions; `first_ns`: at the first convolution of each step."""
        span, chosen = self.span, self._conversions
        outer = np.flatnonzero(span.names.where(_FORWARD_CONVOLUTION) & span.is_operator)
        step = self.scene.step_of(span.start_ns[outer])
        outer, step = outer[step >= 0], step[step >= 0]
        order = np.argsort(span.start_ns[outer], kind="stable")
        first = flags(len(span), outer[order][np.unique(step[order], return_index=True)[1]])
        details = {"first_ns": self._total(self._below(first) & chosen), "convolutions": float(len(outer))}
        return self._loss(chosen, {**details, "conversions_ns": self._total(chosen)})

    def pointwise(self) -> TraceLoss:
        """Runs of pointwise kernels that follow each other on a stream: all but the longest of each run.

        One kernel in place of a run reads and writes about as much as its longest. Those of the optimizer and sums of
        gradients are left out: they work on different tensors.
        """
        span = self.span
        optimizing = self.scene.launched_during(span.times(host_rows(span, _OPTIMIZER)))[self.slices]
        chosen = self._flags(_POINTWISE) & ~self._flags(_FUSED) & ~optimizing & ~self._conversions
        chosen &= ~self._below(span.names.containing("AccumulateGrad"))
        stream = span.column("stream", self.rows)
        rows = pl.DataFrame({"stream": stream, "chosen": chosen, "ns": self.lengths})
        rows = rows.with_columns(run=pl.col("chosen").rle_id().over("stream"))
        run, place = ("stream", "run"), pl.int_range(pl.len())
        found = rows.select(
            lost=pl.col("chosen") & (place.over(run) != pl.col("ns").arg_max().over(run)),
            runs=pl.col("chosen") & (pl.len().over(run) > 1),
        )
        lost, runs = (found[name].to_numpy() for name in ("lost", "runs"))
        return self._loss(lost, {"runs_kernels": float(runs.sum()), "runs_ns": self._total(runs)})

    def tiles(self) -> TraceLoss:
        """Of products in 16 bits on tensor cores the time that goes into filling up tiles, where nothing else runs.

        Parts are named by sizes. `unaligned_ns` is the time of kernels made for rows that begin at any element.
        """
        span, found = self.span, self.scene.found
        products = span.names.where(frozenset(_PRODUCTS)) & span.is_operator
        own = (self.operator >= 0) & self._on_tensor_cores & products[np.maximum(self.operator, 0)]
        slices, operators = self.slices[own], self.operator[own]
        alone = intervals.covered(self._alone(own), found.start_ns[slices], found.end_ns[slices])
        texts = span.events.select("shapes", "types")[operators].rows() if len(operators) else []
        names = [span.names.values[code] for code in span.names.codes[found.rows[slices]].tolist()]
        products_of = [
            _sizes(_PRODUCTS[span.names.values[code]], shapes, types)
            for code, (shapes, types) in zip(span.names.codes[operators].tolist(), texts, strict=True)
        ]
        wasted = np.asarray([waste(size, name) if size else 0.0 for size, name in zip(products_of, names, strict=True)])
        weights = np.round(alone * wasted).astype(np.int64)
        kept = weights > 0
        per_step = np.zeros(len(self.scene), np.int64)
        np.add.at(per_step, self.scene.step_of(found.start_ns[slices])[kept], weights[kept])
        unaligned = np.asarray([_UNALIGNED.search(name) is not None for name in names], bool)
        details = {
            "kernels_ns": float(alone[kept].sum()),
            "unaligned_ns": float(alone[unaligned & kept].sum()),
            "products_ns": self._total(own),
        }
        both = zip(products_of, kept.tolist(), strict=True)
        labels = [" x ".join(map(str, size)) for size, keep in both if keep and size]
        rows = np.where(self.launch >= 0, self.launch, self.operator)[own][kept]
        return TraceLoss(
            self.scene, intervals.EMPTY, rows, weights[kept], operators[kept], details, tuple(labels), per_step
        )


def has_tensor_cores(name: str | None, capability: str | None) -> bool:
    """NVIDIA from Volta on. AMD's traces give a number of the same form that means something else, and the GTX 16
    series is Turing without them."""
    major = (capability or "").partition(".")[0]
    without = any(maker in (name or "") for maker in (*OTHER_MAKERS, "GTX 16"))
    return major.isdigit() and int(major) >= FIRST_TENSOR_CORES and not without


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
_loaded = lru_cache(maxsize=8192)(json_list)
_SYNC_BATCH_NORM = frozenset({"SyncBatchNorm", "aten::batch_norm_gather_stats_with_counts"})


@lru_cache(maxsize=4096)
def _sizes(first: int, shapes: str | None, types: str | None) -> tuple[int, int, int] | None:
    """Rows, columns and depth of a product in 16 bits; None for another type, or where they were not recorded."""
    dims, kinds = _loaded(shapes), _loaded(types)
    if len(dims) < first + 2 or len(kinds) < first + 2 or any(kind not in _HALVES for kind in kinds[first : first + 2]):
        return None
    one, other = sizes(dims[first]) or (), sizes(dims[first + 1]) or ()
    if not (len(one) == len(other) >= 2 and one[-1] == other[-2]):
        return None
    found = one[-2], other[-1], one[-1]
    return found if min(found) > 0 else None


def waste(size: tuple[int, int, int], kernel: str) -> float:
    """The part of a kernel's products that only fill it up: to multiples of 8, or to the tile in its name.

    Which side of the tile stands for rows is not told, so the better of both counts.
    """

    def up(length: int, multiple: int) -> int:
        return ceil(length / multiple) * multiple

    rows, columns, depth = size
    padded = 1 - (rows * columns * depth) / (up(rows, MULTIPLE) * up(columns, MULTIPLE) * up(depth, MULTIPLE))
    match = _TILE.search(kernel[:4000])
    one, other = (int(match[1]), int(match[2])) if match is not None else (0, 0)
    if not one or not other:
        return padded
    filled = min(up(rows, one) * up(columns, other), up(rows, other) * up(columns, one))
    return max(padded, 1 - rows * columns / filled)


def filling(traces: list[Kernels]) -> float | None:
    """Of the kernels' time what is in kernels with a block for every multiprocessor; None where writers do not tell."""
    full = total = 0.0
    for one in traces:
        blocks = one.span.series("blocks_per_sm").gather(one.rows)
        total += float(one.lengths[blocks.is_not_null().to_numpy()].sum())
        full += float(one.lengths[blocks.fill_null(0.0).to_numpy() >= 1].sum())
    return full / total if total else None


def batch_size(scenes: list[Scene]) -> int | None:
    """The first dimension that most inputs of layers share: of inputs with three dimensions and more, and of indices of
    embeddings."""
    firsts: Counter[int] = Counter()
    for scene in scenes:
        span = scene.span
        layers = span.names.where(frozenset(_LAYERS)) & span.is_operator
        rows = np.flatnonzero(layers & (scene.step_of(span.start_ns) >= 0))
        texts = span.series("shapes").gather(rows).to_list()
        for code, text in zip(span.names.codes[rows].tolist(), texts, strict=True):
            first, dims = _LAYERS[span.names.values[code]], _loaded(text)
            shape = (sizes(dims[first]) if len(dims) > first else None) or ()
            firsts.update(shape[:1] if len(shape) >= 3 - first else ())
    if not firsts:
        return None
    size, times = min(firsts.items(), key=lambda item: (-item[1], item[0]))
    return size if times >= AGREE * firsts.total() else None


def sync_batch_norms(scene: Scene) -> int:
    """How often a SyncBatchNorm layer ran forward in the steps."""
    span = scene.span
    rows = np.flatnonzero(span.names.where(_SYNC_BATCH_NORM) & span.is_operator)
    rows = rows[scene.step_of(span.start_ns[rows]) >= 0]
    outer = span.names.where(frozenset({"SyncBatchNorm"}))
    return int((outer[rows] | ~has_ancestor(span.parent, span.parent[rows], outer)).sum())
