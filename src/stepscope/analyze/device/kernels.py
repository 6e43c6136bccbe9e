"""Device work that could be less: products that leave tensor cores unused, attention written out, layouts, pointwise.

Only time counts in which nothing else ran on any device of the trace.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property, lru_cache
from math import ceil

import numpy as np

from stepscope.analyze.device.trace_loss import TraceLoss, host_rows, trace_loss
from stepscope.analyze.views import kernels
from stepscope.engine import intervals
from stepscope.engine.device_work import KERNEL
from stepscope.engine.journal import json_list
from stepscope.engine.scene import Scene
from stepscope.engine.slice_tree import has_ancestor
from stepscope.model.device_losses import ATTENTION, LAYOUT, MATRIX, POINTWISE
from stepscope.tables.arrays import NONE, Bools, Int64

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
        self.scene = scene
        found = scene.found
        kernels = np.flatnonzero(found.kind == KERNEL)
        kernels = kernels[scene.step_of(found.start_ns[kernels]) >= 0]
        self.slices = kernels[np.argsort(found.start_ns[kernels], kind="stable")]
        self.rows = found.rows[self.slices]
        self.starts, self.ends = found.start_ns[self.slices], found.end_ns[self.slices]

    @property
    def _operator(self) -> Int64:
        """The row of the operator that launched each kernel, -1 for none."""
        return self.scene.found.operator[self.slices]

    def _flags(self, pattern: re.Pattern[str]) -> Bools:
        flags: Bools = self.scene.span.names.matching(pattern.search)[self.rows]
        return flags

    def _piece(self, chosen: Bools, details: dict[str, float] | None = None) -> TraceLoss:
        """A loss of some kernels: the time in which none of the others, nor a copy, ran."""
        found = self.scene.found
        mine = np.zeros(len(found), bool)
        mine[self.slices[chosen]] = True
        own = self.scene.exclusive(mine)
        launch = found.launch[self.slices[chosen]]
        origin = np.where(launch >= 0, launch, self._operator[chosen])
        lengths = self.ends[chosen] - self.starts[chosen]
        return trace_loss(self.scene, own, origin, lengths, self.rows[chosen], details)

    # ---------------------------------------------------------------------------------------------- products

    @cached_property
    def _able(self) -> Bools:
        """Kernels on a device that has tensor cores, as far as the trace tells."""
        gpus = self.scene.span.gpus
        devices = self.scene.found.device[self.slices]
        able = [number for number, gpu in gpus.items() if has_tensor_cores(gpu.name, gpu.capability)]
        flags: Bools = np.isin(devices, np.asarray(able, np.int64))
        return flags

    @cached_property
    def _below_product(self) -> Bools:
        """Kernels below an operator that could use tensor cores."""
        span = self.scene.span
        return self._below(span.names.pick(kernels.eligible(span.names.values)) & span.is_operator)

    def _below(self, wanted: Bools) -> Bools:
        """Kernels below one of the operators `wanted`, a flag for each row of the span."""
        return has_ancestor(self.scene.span.parent, self._operator, wanted)

    def products(self) -> TraceLoss:
        """Products and convolutions on ordinary cores, where the device has others."""
        span = self.scene.span
        used = span.names.pick(kernels.uses_tensor_cores(span.names.values))[self.rows]
        ordinary = self._able & self._below_product & ~used & self._flags(_PRODUCT) & ~self._flags(_DOUBLE)
        ordinary &= ~self._flags(_CONVERSION)
        lengths = self.ends - self.starts
        convolutions = ordinary & self._below_convolution
        return self._piece(
            ordinary,
            details={
                "tensor_core_ns": float(lengths[used & self._able].sum()),
                "tf32_ns": float(lengths[self._flags(_TF32) & self._able].sum()),
                "convolutions_ns": float(lengths[convolutions].sum()),
                "products_ns": float(lengths[ordinary & ~convolutions].sum()),
            },
        )

    # --------------------------------------------------------------------------------------------- attention

    def attention(self) -> TraceLoss:
        """Kernels between two batched products with a softmax among them, in the order of one thread's launches.

        `products_ns` is the time of these products, which a fused kernel computes as well.
        """
        span, found = self.scene.span, self.scene.found
        chosen = np.zeros(len(self.rows), bool)
        launch = found.launch[self.slices]
        track = np.where(launch >= 0, span.tracks.codes[np.maximum(launch, 0)], NONE)
        linked, rows = self._operator >= 0, np.maximum(self._operator, 0)
        product = linked & span.names.where(_PRODUCT_OPERATORS)[rows]
        softmax = linked & span.names.where(_SOFTMAX)[rows]
        products = np.zeros(len(self.rows), bool)
        found_softmax = 0
        for one in np.unique(track[softmax & (track >= 0)]).tolist():
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
        lengths = self.ends - self.starts
        details = {"softmax_calls": float(found_softmax), "products_ns": float(lengths[products].sum())}
        return self._piece(chosen & ~products, details=details)

    # ------------------------------------------------------------------------------------- layout, pointwise

    @cached_property
    def _below_convolution(self) -> Bools:
        return self._below(self._convolutions)

    @cached_property
    def _convolutions(self) -> Bools:
        """Rows of convolutions, forward and backward."""
        span = self.scene.span
        return span.names.matching(_CONVOLUTION.search) & span.is_operator

    @cached_property
    def _conversions(self) -> Bools:
        """cuDNN's own, and copies of an operand whose layout is not the convolution's."""
        span = self.scene.span
        copied = self._below(span.names.where(_CONTIGUOUS) & span.is_operator) & self._flags(_COPIED)
        return (self._flags(_CONVERSION) & self._below_product) | (copied & self._below_convolution)

    def layout(self) -> TraceLoss:
        """Conversions between memory layouts around convolutions; `first_ns`: at the first convolution of each step."""
        scene, span = self.scene, self.scene.span
        outer = np.flatnonzero(span.names.where(_FORWARD_CONVOLUTION) & span.is_operator)
        step = scene.step_of(span.start_ns[outer])
        outer, step = outer[step >= 0], step[step >= 0]
        order = np.argsort(span.start_ns[outer], kind="stable")
        first = np.zeros(len(span), bool)
        first[outer[order][np.unique(step[order], return_index=True)[1]]] = True
        chosen, lengths = self._conversions, self.ends - self.starts
        inside = self._below(first) & chosen
        details = {"first_ns": float(lengths[inside].sum()), "convolutions": float(len(outer))}
        details["conversions_ns"] = float(lengths[chosen].sum())
        return self._piece(chosen, details)

    def pointwise(self) -> TraceLoss:
        """Runs of pointwise kernels that follow each other on a stream: all but the longest of each run.

        One kernel in place of a run reads and writes about as much as its longest. Those of the optimizer and sums of
        gradients are left out: they work on different tensors.
        """
        span = self.scene.span
        sums = span.names.containing("AccumulateGrad")
        flags = self._flags(_POINTWISE) & ~self._flags(_FUSED) & ~self._in_optimizer & ~self._below(sums)
        flags &= ~self._conversions
        stream = span.column("stream", self.rows)
        lost, runs = np.zeros(len(self.rows), bool), np.zeros(len(self.rows), bool)
        for one in np.unique(stream).tolist():
            own = np.flatnonzero(stream == one)
            lost[own], runs[own] = _runs(flags[own], (self.ends - self.starts)[own])
        lengths = self.ends - self.starts
        return self._piece(lost, details={"runs_kernels": float(runs.sum()), "runs_ns": float(lengths[runs].sum())})

    @cached_property
    def _in_optimizer(self) -> Bools:
        span = self.scene.span
        return self.scene.launched_during(span.times(host_rows(span, _OPTIMIZER)))[self.slices]


def has_tensor_cores(name: str | None, capability: str | None) -> bool:
    """NVIDIA from Volta on. AMD's traces give a number of the same form that means something else."""
    major = (capability or "").partition(".")[0]
    if not major.isdigit() or "AMD" in (name or "") or "Radeon" in (name or "") or "Instinct" in (name or ""):
        return False
    # the GTX 16 series is Turing without them
    return int(major) >= FIRST_TENSOR_CORES and "GTX 16" not in (name or "")


def _runs(flags: Bools, lengths: Int64) -> tuple[Bools, Bools]:
    """In each run of several flagged values all but its longest; and all of them."""
    lost, runs = flags.copy(), flags.copy()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        lost[first + int(lengths[first:last].argmax())] = False
        runs[first:last] = last - first > 1
    return lost, runs


def kernel_losses(busy: Kernels) -> dict[str, TraceLoss]:
    """Every loss of work."""
    return {
        MATRIX: busy.products(),
        ATTENTION: busy.attention(),
        LAYOUT: busy.layout(),
        POINTWISE: busy.pointwise(),
    }


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


def tiles(scene: Scene) -> TraceLoss:
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
    return TraceLoss(scene, per_step, rows, weights[kept], operators[kept], details, labels)


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
    return int((outer[rows] | ~has_ancestor(span.parent, span.parent[rows], outer)).sum())


def _shape(value: object) -> list[int]:
    """The sizes of a tensor; none where it is something else."""
    sizes = value if isinstance(value, list) else []
    return sizes if all(type(size) is int and size >= 0 for size in sizes) else []
