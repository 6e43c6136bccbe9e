"""Copies of the model, or of its state, inside training steps: by sampled stacks, or by the functions of a trace.

Time counts below the functions of Python and torch that copy a model; the line is the user's innermost one above. What
`copy.deepcopy` copies can be anything; it counts where tensors are copied below it. What `torch.save` calls is file
output, and copying by a loop of the user's own is a loop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.host.sampled_time import SampledTime
from stepscope.analyze.redundant.training_steps import TrainingScene, outermost, summed
from stepscope.engine.attribution import place, trace_back
from stepscope.engine.intervals import EMPTY
from stepscope.engine.samples import Samples, short
from stepscope.engine.slice_tree import self_or_ancestor
from stepscope.model import Place
from stepscope.model.device_losses import ModelCopy
from stepscope.tables.arrays import Int64, climb

MAX_FACTS = 10
_DEEPCOPY = "copy.deepcopy"
_CALLS = (  # (end of the file's name, function, what the report calls it)
    (r"(^|/)copy\.py$", "deepcopy", _DEEPCOPY),
    (r"(^|/)torch/nn/modules/module\.py$", "state_dict", "Module.state_dict"),
    (r"(^|/)torch/nn/modules/module\.py$", "load_state_dict", "Module.load_state_dict"),
    (r"(^|/)torch/optim/optimizer\.py$", "state_dict", "Optimizer.state_dict"),
    (r"(^|/)torch/optim/optimizer\.py$", "load_state_dict", "Optimizer.load_state_dict"),
    (r"(^|/)torch/optim/swa_utils\.py$", "update_parameters", "AveragedModel.update_parameters"),
)
_TENSOR_COPY = pl.col("file").str.contains(r"(^|/)torch/(_tensor|nn/parameter)\.py$") & (
    short(pl.col("function")) == "__deepcopy__"
)
_SAVING = re.compile(r"(^|/)torch/serialization\.py\(")
_TENSOR_COPIES = ("aten::clone", "aten::copy_", "aten::_foreach_lerp_", "aten::_foreach_copy_", "aten::lerp_")
_SAVES = pl.col("file").str.contains(r"(^|/)torch/serialization\.py$")


def sampled_copies(samples: Samples | None, timed: SampledTime | None) -> tuple[ModelCopy, ...] | None:
    """None without stacks of steady steps; costliest first."""
    if samples is None or timed is None:
        return None
    everything = timed.rows.filter(pl.col("phase") != "data_wait")
    frames = samples.frames.join(everything.select("row", "samples"), on="row")
    call = pl.lit(None, pl.String)
    for file, function, name in _CALLS:
        here = pl.col("file").str.contains(file) & (short(pl.col("function")) == function)
        call = pl.when(here).then(pl.lit(name)).otherwise(call)
    copying = frames.with_columns(call=call).filter(pl.col("call").is_not_null() & pl.col("user_file").is_null())
    copying = copying.sort("row", "position").unique("row", keep="first", maintain_order=True)
    saving = frames.filter(_SAVES)["row"].unique()
    tensors = frames.filter(_TENSOR_COPY)["row"].unique()
    users = frames.filter(pl.col("user_file").is_not_null()).select(
        "row", "user_file", user_line="line", user_function="function", at="position"
    )
    own = (
        copying.filter(~pl.col("row").is_in(saving.implode()))
        .select("row", "samples", "call", "position")
        .join(users, on="row")
        .filter(pl.col("at") < pl.col("position"))
        .sort("row", "at")
        .unique("row", keep="last", maintain_order=True)
        .with_columns(tensors=pl.col("row").is_in(tensors.implode()))
        .group_by("call", "user_file", "user_line", "user_function")
        .agg(n=pl.col("samples").sum(), rows=pl.col("row"), tensors=pl.col("tensors").any())
        .filter(pl.col("tensors") | (pl.col("call") != _DEEPCOPY))
        .sort("n", "user_file", "user_line", "call", descending=[True, False, False, False])
        .head(MAX_FACTS)
    )
    return tuple(_sampled(timed, row) for row in own.iter_rows(named=True))


def _sampled(timed: SampledTime, row: dict[str, Any]) -> ModelCopy:
    """The journal times the parts of a step; samples, which see too little of busy Python, only divide them."""
    share = timed.share_of(row["rows"])
    return ModelCopy(
        call=row["call"],
        place=Place(row["user_file"], row["user_line"], row["user_function"]),
        ms_per_step=share.ms,
        at_most_ms_per_step=share.at_most_ms,
        samples=row["n"],
        source=f"sampled stacks, {row['n']} of {timed.samples} samples in steps",
    )


def traced_copies(scenes: Sequence[TrainingScene]) -> tuple[ModelCopy, ...]:
    """The same by the Python functions of traces, costliest first."""
    groups: dict[tuple[str, Place], list[tuple[TrainingScene, Int64]]] = {}
    for scene in scenes:
        for key, rows in _of_scene(scene):
            groups.setdefault(key, []).append((scene, rows))
    found = []
    for (call, where), parts in groups.items():
        own = [(scene, scene.lost(scene.times(rows), rows)) for scene, rows in parts]
        silent = [(scene, EMPTY) for scene in scenes if all(one is not scene for one, _ in parts)]
        source = ", ".join(scene.span.ref.label for scene, _ in parts)
        ms = summed([*own, *silent])
        found.append(ModelCopy(call, where, ms, ms, 0, source))
    found.sort(key=lambda one: (-one.ms_per_step, one.place.file, one.place.line or 0, one.call))
    return tuple(found[:MAX_FACTS])


def _of_scene(scene: TrainingScene) -> list[tuple[tuple[str, Place], Int64]]:
    """(call, the user's line above it) and the outermost such calls of one trace."""
    span, names = scene.span, scene.span.names
    called = [_called(name) for name in names.values]
    rows = outermost(scene, names.pick([name is not None for name in called]) & span.is_function & scene.mine)
    saving = names.matching(_SAVING.search)
    rows = rows[climb(span.parent, rows, saving) < 0]
    if not len(rows):
        return []
    marked = np.zeros(len(span), bool)
    marked[rows] = True
    copying = np.flatnonzero(names.where(_TENSOR_COPIES) & scene.operators)
    rows = np.intersect1d(rows, self_or_ancestor(span.parent, marked)[copying])
    index = trace_back(scene.base, span, rows).place
    groups: dict[tuple[str, Place], list[int]] = {}
    for row, number in zip(rows.tolist(), index.tolist(), strict=True):
        if number >= 0:
            call = called[names.codes[row]] or ""
            where, _ = place(scene.base, number, names.values[names.codes[row]])
            groups.setdefault((call, where), []).append(row)
    return [(key, np.array(own, np.int64)) for key, own in groups.items()]


def _called(name: str) -> str | None:
    """What the report calls a function of a trace that copies a model; None for all others."""
    head, _, function = name.partition("): ")
    file = head.rpartition("(")[0]
    return next((call for ending, own, call in _CALLS if function == own and re.search(ending, file)), None)
