"""Operators that training does not need: forward work run again in the backward pass, gradients of the whole for parts,
and work in float64.

The backward pass records no nodes, so an operator in it that has a sequence number and runs no node records for a
second backward pass. Checkpointing is told by its own functions or nodes, or by operators that formulas of torch's own
nodes do not call; a Function of the script's, such as an adjoint method, may call a layer. What a gradient of gradients
records (`create_graph`) is none.

An operator of torch counts as float64 when one of its inputs is a tensor of that type of some size: of small ones the
call is the cost, and Python's own numbers are no tensors. Functions of the user's and compiled graphs, which may take
one such input among others, count by the operators in them. A conversion is a copy between float64 and another type,
with what asked for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import polars as pl

from stepscope.analyze.host.loops import explain
from stepscope.analyze.host.sampled_time import SampledTime
from stepscope.analyze.redundant.training_steps import (
    TrainingScene,
    lines,
    outermost,
    summed,
    summed_backward,
    weights_of,
)
from stepscope.engine import intervals
from stepscope.engine.attribution import heaviest_lines
from stepscope.engine.intervals import Intervals
from stepscope.engine.journal import first_sizes, json_list, sizes
from stepscope.engine.samples import Samples, bare, short
from stepscope.model import Place
from stepscope.model.device_losses import Doubles, Recompute, WideGradients
from stepscope.tables.arrays import NONE, Int64, climb, self_or_ancestor, unique

ENOUGH_SAMPLES = 50
_CHECKPOINT = re.compile(r"(^|/)torch/utils/checkpoint\.py\(")
_CHECKPOINT_NODE = "CheckpointFunctionBackward"
_OF_TORCH = re.compile(r"Backward\d+$")  # a Function of Python has no number: what its formula computes is its own
# Called by layers, never by the formulas of a backward pass.
_LAYERS = re.compile(
    r"^aten::(linear|conv[123]d|conv_transpose[123]d|layer_norm|batch_norm|group_norm|rms_norm|embedding|"
    r"scaled_dot_product_attention|multi_head_attention_forward)$"
)


def recompute(scenes: Sequence[TrainingScene], samples: Samples | None, time: SampledTime | None) -> Recompute | None:
    """None where nothing is computed again. `samples` and `time`: of the steady steps of the scenes' run."""
    parts = [(scene, *_again(scene)) for scene in scenes]
    if not any(len(rows) for _, rows, *_ in parts):
        return None
    ms = summed(scenes, [(scene, scene.lost(times, rows)) for scene, rows, _, times, _ in parts])
    source, seen = ", ".join(scene.span.ref.label for scene, rows, *_ in parts if len(rows)), 0
    if samples is not None and time is not None and not any(len(scene.found) for scene in scenes):
        again = time.share(_sampled(samples, time))
        seen = again.samples
        if seen >= ENOUGH_SAMPLES:
            ms, source = again.ms, f"sampled stacks, {seen} of {time.samples} samples in steps"
    steps = sum(len(scene) for scene in scenes)
    weighed = [(scene, callers, weights_of(scene, rows)) for scene, rows, _, _, callers in parts]
    shares = []  # the peak that the allocator held of each GPU's memory, where the trace tells
    for span, number, gpu in ((scene.span, *each) for scene in scenes for each in scene.span.gpus.items()):
        own = span.memory.filter(pl.col("device") == f"cuda:{number}")["reserved_bytes"].max()
        if isinstance(own, int) and gpu.memory_bytes:
            shares.append(own / gpu.memory_bytes)
    return Recompute(
        ms_per_step=ms,
        operators_per_step=sum(len(rows) for _, rows, *_ in parts) / steps,
        checkpoints_per_step=sum(nodes for _, _, nodes, *_ in parts) / steps,
        lines=lines(weighed, ms),
        memory_share=max(shares, default=None),
        samples=seen,
        source=source,
    )


def _again(scene: TrainingScene) -> tuple[Int64, int, Intervals, Int64]:
    """The outermost operators that run again, for how many nodes, when, and what asked for each.

    They run from the first to the last of a node, without nodes that run between. What asked is the slice of the
    forward pass that called the checkpoint, or the forward operator of the node.
    """
    span, names, is_backward = scene.span, scene.span.names, scene.calls.is_backward
    numbered = scene.operators & ~is_backward & (span.column("sequence") >= 0)
    rows = outermost(scene, numbered & (scene.in_backward >= 0))
    # for each the innermost operator of the backward pass around it
    holders = scene.in_backward[rows].astype(np.int64)
    is_checkpoint = names.matching(_CHECKPOINT.search)
    told = climb(span.parent, rows, is_checkpoint | names.containing(_CHECKPOINT_NODE))
    layers = np.isin(holders, holders[names.matching(_LAYERS.search)[rows]])
    sure = (told >= 0) | (layers & names.matching(_OF_TORCH.search)[holders])
    rows, holders = rows[sure], holders[sure]
    distinct, number = np.unique(holders, return_inverse=True)
    starts, ends = np.full(len(distinct), np.iinfo(np.int64).max), np.zeros(len(distinct), np.int64)
    np.minimum.at(starts, number, span.start_ns[rows])
    np.maximum.at(ends, number, span.ends(rows))
    nested = is_backward & scene.mine
    nested[distinct] = False
    inner = np.flatnonzero(nested)
    around = np.append(scene.in_backward, NONE)  # the last for no row
    inner = inner[np.isin(around[span.parent[inner]], distinct)]
    times = intervals.subtract(intervals.union(starts, ends), scene.times(inner))
    forward, at = scene.calls.forward, holders.copy()
    for _ in range(64):  # nodes in nodes; a broken tree ends here
        left = np.flatnonzero((at >= 0) & (forward[np.maximum(at, 0)] < 0))
        if not len(left):
            break
        at[left] = around[span.parent[at[left]]]
    made = np.where(at >= 0, forward[np.maximum(at, 0)], NONE)
    asked = climb(span.parent, made, is_checkpoint)
    return rows, len(distinct), times, np.where(asked >= 0, asked, made)


def _sampled(samples: Samples, time: SampledTime) -> pl.DataFrame:
    """Stacks of the backward pass below checkpointing that are not in a backward pass of its own, of `time.rows`."""
    own = time.rows.filter(pl.col("phase") == "backward").select("row")
    file, at, name = pl.col("file"), pl.col("position"), short(pl.col("function"))
    again = file.str.contains(r"(^|/)torch/utils/checkpoint\.py$")
    engine = file.str.contains(r"(^|/)torch/autograd/(__init__|graph)\.py$") & name.is_in(
        ["backward", "_engine_run_backward"]
    )
    frames = samples.frames.join(own, on="row").group_by("row")
    below = frames.agg(last=at.filter(again).max(), engine=at.filter(engine).max())
    below = below.filter(pl.col("last") > pl.col("engine").fill_null(NONE))
    return time.rows.join(below, on="row", how="semi")


MIN_CALLS = 8  # per step of one kind: fewer add up to no more than a few passes over the tensor
MIN_RATIO = 4  # elements filled by elements of the gradient that came in
MAX_FACTS = 10
_ENGINE = "autograd::engine::evaluate_function: "
_NODE = re.compile(  # of operators that take a part of a tensor
    r"^autograd::engine::evaluate_function: (Select|Slice|Index|IndexSelect|Gather|Take|TakeAlongDim|MaskedSelect|"
    r"Diagonal|AsStrided|Embedding|Unbind|Split\w*|UnsafeSplit\w*|UnsafeChunk|Narrow)Backward\d*$"
)
_FILLS = ("aten::zero_", "aten::fill_")
_BYTES = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2}
_BYTES |= {"c10::complex<float>": 8, "c10::complex<double>": 16}
_Key = tuple[str, str | None, tuple[int, ...], tuple[int, ...], str]  # node, forward, shape, part, dtype
_Nodes = tuple[TrainingScene, Int64, Int64]


def wide_gradients(scenes: Sequence[TrainingScene]) -> tuple[WideGradients, ...]:
    """Costliest first; those with fewer than `MIN_CALLS` per step are left out."""
    steps = sum(len(scene) for scene in scenes)
    groups: dict[_Key, list[_Nodes]] = {}
    for scene in scenes:
        for key, rows, forward in _of_scene(scene) if scene.has("shapes") else ():
            groups.setdefault(key, []).append((scene, rows, forward))
    found = []
    for key, parts in groups.items():
        calls = sum(len(rows) for _, rows, _ in parts) / steps
        if calls >= MIN_CALLS:
            found.append(_fact(key, parts, calls))
    found.sort(key=lambda one: (-one.ms_per_step, one.node, one.shape))
    return tuple(found[:MAX_FACTS])


def _fact(key: _Key, parts: Sequence[_Nodes], calls: float) -> WideGradients:
    node, forward, shape, part, dtype = key
    without_one = 1 - 1 / calls  # one such tensor is needed
    ms, most = summed_backward([(scene, scene.lost(scene.times(rows), rows)) for scene, rows, _ in parts])
    known = [(scene.span, rows[rows >= 0]) for scene, _, rows in parts]
    texts = [span.series("shapes").gather(rows) for span, rows in known]
    base = parts[0][0].base
    lines = heaviest_lines(((base, span, rows, np.ones(len(rows), np.int64)) for span, rows in known), 1)
    where, exact = (lines[0].place, lines[0].exact) if lines else (None, False)
    if where is not None and not exact:
        # the line of the loop that takes the parts, where the source has one: so many calls are made by no other
        function = bare(where.function)
        site = base.lines.call_site(where.file, function, where.line, forward or "", loop=True)
        if site is not None:
            where, exact = Place(where.file, site.line, where.function), True
    return WideGradients(
        node=node,
        forward=forward,
        place=where,
        exact=exact,
        calls_per_step=calls,
        bytes_per_call=prod(shape) * _BYTES.get(dtype, 0),
        shape=shape,
        part=part,
        dtype=dtype,
        dimension=explain(round(calls), pl.concat(texts)),
        ms_per_step=ms * without_one,
        at_most_ms_per_step=most * without_one,
    )


def _of_scene(scene: TrainingScene) -> Iterator[tuple[_Key, Int64, Int64]]:
    """Kinds and shapes of nodes, with their rows and those of their forward operators (-1 for none)."""
    span, names = scene.span, scene.span.names
    holder = self_or_ancestor(span.parent, names.matching(_NODE.match) & scene.mine).astype(np.int64)
    fills = np.flatnonzero(names.where(_FILLS) & scene.operators)
    fills = fills[holder[fills] >= 0]
    # the first of each node: others are a fill below a fill, or a second output
    fills = fills[np.sort(np.unique(holder[fills], return_index=True)[1])]
    nodes = holder[fills]
    forward = scene.calls.forward[nodes]
    # the shape of the first gradient that came into each node: that of the operator of its name right below it
    wanted = {_ENGINE + name: number for number, name in enumerate(names.values)}
    same = np.array([wanted.get(name, NONE) for name in names.values] + [NONE], np.int64)
    children = np.flatnonzero(np.isin(span.parent, nodes))
    own = children[same[names.codes[span.parent[children]]] == names.codes[children]]
    inputs = dict(zip(span.parent[own].tolist(), span.series("shapes").gather(own).to_list(), strict=True))
    groups: dict[_Key, list[int]] = {}
    texts = zip(span.series("shapes").gather(fills), span.series("types").gather(fills), strict=True)
    for number, (shapes, types) in enumerate(texts):
        shape, dtype, part = (
            first_sizes(shapes),
            str(next(iter(json_list(types)), "")),
            first_sizes(inputs.get(int(nodes[number]))),
        )
        if shape is None or part is None or dtype not in _BYTES or prod(shape) < MIN_RATIO * max(1, prod(part)):
            continue
        made = names.values[names.codes[forward[number]]] if forward[number] >= 0 else None
        name = names.values[names.codes[nodes[number]]].removeprefix(_ENGINE)
        groups.setdefault((name, made, shape, part, dtype), []).append(number)
    for key, numbers in groups.items():
        yield key, nodes[numbers], forward[numbers]


MIN_ELEMENTS = 1_024  # of an input: below it an operator's time is that of its call, whatever the type
HALF = 0.5  # of an operator's time is saved by half of the bytes and twice as many numbers to an instruction
PARTS = 5
_CONVERTS = frozenset({"aten::copy_", "aten::_to_copy", "aten::to", "aten::type_as"})
_CONVERTS_BACK = frozenset({"ToCopyBackward0", "autograd::engine::evaluate_function: " + "ToCopyBackward0"})


def doubles(scenes: Sequence[TrainingScene]) -> Doubles | None:
    """None where no operator has such an input."""
    scenes = [scene for scene in scenes if scene.has("types")]
    parts = [(scene, *_double_rows(scene)) for scene in scenes]
    if not any(len(compute) + len(converting) for _, compute, converting in parts):
        return None
    computing = []
    for scene, rows, others in parts:
        times = intervals.subtract(scene.times(rows), scene.times(others))
        if len(scene.found):  # on a device their kernels alone, since as many would be launched in float32
            times = scene.exclusive(scene.launched_below(rows) & ~scene.launched_below(others))
        computing.append((scene, times))
    compute_ms = summed(scenes, computing)
    conversion_ms = summed(scenes, [(scene, scene.lost(scene.times(rows), rows)) for scene, _, rows in parts])
    weighed = []
    sums: Counter[str] = Counter()
    for scene, rows, others in parts:
        weights, codes, names = weights_of(scene, rows), scene.span.names.codes[rows], scene.span.names.values
        own = (weights * HALF).astype(np.int64), weights_of(scene, others)
        weighed.append((scene, np.concatenate([rows, others]), np.concatenate(own)))
        sums.update({names[code]: int(weights[codes == code].sum()) for code in unique(codes).tolist()})
    top = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:PARTS]
    steps = sum(len(scene) for scene in scenes)
    return Doubles(
        compute_ms_per_step=compute_ms,
        conversion_ms_per_step=conversion_ms,
        operators_per_step=sum(len(rows) for _, rows, _ in parts) / steps,
        conversions_per_step=sum(len(rows) for _, _, rows in parts) / steps,
        lines=lines(weighed, HALF * compute_ms + conversion_ms),
        # the operators that take most, in proportion to their recorded time
        parts={name: ns / max(1, sums.total()) * compute_ms for name, ns in top},
    )


def _double_rows(scene: TrainingScene) -> tuple[Int64, Int64]:
    """The outermost operators in float64 without conversions, and the outermost conversions."""
    span, names = scene.span, scene.span.names
    # rows with an input in float64 that is not small; and those of which another input has another type
    flagged, copies = np.zeros(len(span), bool), np.zeros(len(span), bool)
    texts = pl.DataFrame({"types": span.series("types"), "shapes": span.series("shapes")}).with_row_index("row")
    some = texts.filter(pl.col("types").str.contains("double", literal=True))
    for (types, shapes), group in some.group_by("types", "shapes"):
        kinds = {
            "double" if "double" in name else name  # complex ones too
            for name, size in zip(json_list(str(types)), json_list(str(shapes)), strict=False)
            if isinstance(name, str) and (known := sizes(size)) and prod(known) >= MIN_ELEMENTS
        }
        if "double" in kinds:
            rows = group["row"].to_numpy()
            flagged[rows], copies[rows] = True, len(kinds) > 1
    flagged &= names.starting("aten::")
    converts = names.where(_CONVERTS | _CONVERTS_BACK)
    conversion = copies & scene.operators & names.where(["aten::copy_"])
    at = np.flatnonzero(conversion)
    while len(at):  # what asked for the copy, and nothing else
        above = scene.span.parent[at]
        above = unique(above[above >= 0])
        at = above[converts[above] & ~conversion[above]]
        conversion[at] = True
    converting = outermost(scene, conversion)
    computing = outermost(scene, (flagged & scene.operators) | conversion)
    return computing[~conversion[computing]], converting
