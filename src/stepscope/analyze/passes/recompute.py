"""Forward operators that run again inside the backward pass: activation checkpointing.

The backward pass records no nodes, so an operator in it that has a sequence number and runs no node records for a
second backward pass. Checkpointing is told by its own functions or nodes, or by operators that backward formulas do not
call; what a gradient of gradients records (`create_graph`) is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import polars as pl

from stepscope.analyze.passes.training import TrainingScene, lines, outermost, summed, weights_of
from stepscope.analyze.sampled_time import SampledTime
from stepscope.engine import intervals
from stepscope.engine.intervals import Intervals
from stepscope.engine.samples import Samples, short
from stepscope.engine.tree import climb
from stepscope.model.device_losses import Recompute
from stepscope.tables.arrays import NONE, Bools, Int64

ENOUGH_SAMPLES = 50
_CHECKPOINT = re.compile(r"(^|/)torch/utils/checkpoint\.py\(")
_NODE = "CheckpointFunctionBackward"
# Called by layers, never by the formulas of a backward pass.
_LAYERS = re.compile(
    r"^aten::(linear|conv[123]d|conv_transpose[123]d|layer_norm|batch_norm|group_norm|rms_norm|embedding|"
    r"scaled_dot_product_attention|multi_head_attention_forward)$"
)


def facts(scenes: Sequence[TrainingScene], samples: Samples | None, time: SampledTime | None) -> Recompute | None:
    """None where nothing is computed again. `samples` and `time`: of the steady steps of the scenes' run."""
    parts = [(scene, *_found(scene)) for scene in scenes]
    if not any(len(rows) for _, rows, _ in parts):
        return None
    spans = [(scene, rows, holders, _times(scene, rows, holders)) for scene, rows, holders in parts]
    ms = summed([(scene, scene.lost(times, rows)) for scene, rows, _, times in spans])
    source, seen = ", ".join(scene.span.ref.label for scene, rows, _ in parts if len(rows)), 0
    if samples is not None and time is not None and not any(len(scene.found) for scene in scenes):
        again = time.share(_sampled(samples, time))
        seen = again.samples
        if seen >= ENOUGH_SAMPLES:
            ms, source = again.ms, f"sampled stacks, {seen} of {time.samples} samples in steps"
    steps = sum(len(scene) for scene in scenes)
    weighed = [(scene, _callers(scene, holders), weights_of(scene, rows)) for scene, rows, holders, _ in spans]
    return Recompute(
        ms_per_step=ms,
        operators_per_step=sum(len(rows) for _, rows, _ in parts) / steps,
        checkpoints_per_step=sum(len(np.unique(holders)) for _, _, holders in parts) / steps,
        lines=lines(weighed, ms),
        memory_share=max((share for scene in scenes if (share := _memory_share(scene)) is not None), default=None),
        samples=seen,
        source=source,
    )


def _found(scene: TrainingScene) -> tuple[Int64, Int64]:
    """The outermost operators that run again, and for each the innermost operator of the backward pass around it."""
    span, calls = scene.span, scene.calls
    numbered = scene.operators & ~calls.is_backward & (span.column("sequence") >= 0)
    inside = scene.in_backward >= 0
    rows = outermost(scene, numbered & inside)
    if not len(rows):
        return rows, rows
    holders = scene.in_backward[rows].astype(np.int64)
    names = span.names
    checkpoint = names.pick([_CHECKPOINT.search(name) is not None or _NODE in name for name in names.values])
    layers = names.pick([_LAYERS.search(name) is not None for name in names.values])
    told = climb(span.parent, rows, checkpoint)
    sure = (told >= 0) | np.isin(holders, holders[layers[rows]])
    return rows[sure], holders[sure]


def _times(scene: TrainingScene, rows: Int64, holders: Int64) -> Intervals:
    """From the first to the last operator that runs again for one node, without nodes that run between."""
    distinct, number = np.unique(holders, return_inverse=True)
    starts = np.full(len(distinct), np.iinfo(np.int64).max)
    ends = np.zeros(len(distinct), np.int64)
    np.minimum.at(starts, number, scene.span.start_ns[rows])
    np.maximum.at(ends, number, scene.span.ends(rows))
    nested = scene.calls.is_backward & scene.mine
    nested[distinct] = False
    inner = np.flatnonzero(nested)
    above = scene.span.parent[inner]
    around = np.where(above >= 0, scene.in_backward[np.maximum(above, 0)], NONE)
    inner = inner[np.isin(around, distinct)]
    return intervals.subtract(intervals.union(starts, ends), scene.times(inner))


def _callers(scene: TrainingScene, holders: Int64) -> Int64:
    """For each the slice of the forward pass that asked for the checkpoint, or the forward operator of its node."""
    span = scene.span
    forward = scene.calls.forward
    at = holders.copy()
    for _ in range(64):  # nodes in nodes; a broken tree ends here
        left = np.flatnonzero((at >= 0) & (forward[np.maximum(at, 0)] < 0))
        if not len(left):
            break
        above = span.parent[at[left]]
        at[left] = np.where(above >= 0, scene.in_backward[np.maximum(above, 0)], NONE)
    made = np.where(at >= 0, forward[np.maximum(at, 0)], NONE)
    names = span.names
    stop: Bools = names.pick([_CHECKPOINT.search(name) is not None for name in names.values])
    asked = climb(span.parent, made, stop)
    return np.where(asked >= 0, asked, made)


def _sampled(samples: Samples, time: SampledTime) -> pl.DataFrame:
    """Stacks of the backward pass below checkpointing that are not in a backward pass of its own, of `time.rows`."""
    own = time.rows.filter(pl.col("phase") == "backward").select("row")
    frames = samples.frames.join(own, on="row")
    file, name = pl.col("file"), short(pl.col("function"))
    again = file.str.contains(r"(^|/)torch/utils/checkpoint\.py$")
    engine = file.str.contains(r"(^|/)torch/autograd/(__init__|graph)\.py$") & name.is_in(
        ["backward", "_engine_run_backward"]
    )
    below = (
        frames.group_by("row")
        .agg(
            last=pl.col("position").filter(again).max(),
            engine=pl.col("position").filter(engine).max(),
        )
        .filter(pl.col("last").is_not_null() & (pl.col("last") > pl.col("engine").fill_null(NONE)))
    )
    return time.rows.join(below, on="row", how="semi")


def _memory_share(scene: TrainingScene) -> float | None:
    """The peak that the allocator held of a GPU's memory; None where the trace does not tell."""
    memory = scene.span.memory
    shares = []
    for number, gpu in scene.span.gpus.items():
        own = memory.filter(pl.col("device") == f"cuda:{number}")["reserved_bytes"].max()
        if isinstance(own, int) and gpu.memory_bytes:
            shares.append(own / gpu.memory_bytes)
    return max(shares, default=None)
