"""Operators on tensors in float64, and the conversions from and to it.

An operator of torch counts when one of its inputs is a tensor of float64 of some size: of small ones the call is the
cost, and Python's own numbers are no tensors. Functions of the user's and compiled graphs, which may take one such
input among others, count by the operators in them. A conversion is a copy between float64 and another type, with what
asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import polars as pl

from stepscope.analyze.redundant.training_steps import TrainingScene, lines, outermost, summed, weights_of
from stepscope.engine import intervals
from stepscope.engine.journal import json_list
from stepscope.model.device_losses import Doubles
from stepscope.tables.arrays import Bools, Int64

MIN_ELEMENTS = 1_024  # of an input: below it an operator's time is that of its call, whatever the type
HALF = 0.5  # of an operator's time is saved by half of the bytes and twice as many numbers to an instruction
PARTS = 5
_ENGINE = "autograd::engine::evaluate_function: "
_CONVERTS = frozenset({"aten::copy_", "aten::_to_copy", "aten::to", "aten::type_as"})
_CONVERTS_BACK = frozenset({"ToCopyBackward0", _ENGINE + "ToCopyBackward0"})


def doubles(scenes: Sequence[TrainingScene]) -> Doubles | None:
    """None where no operator has such an input."""
    parts = [(scene, *_rows(scene)) for scene in scenes if scene.has("types")]
    if not any(len(compute) + len(converting) for _, compute, converting in parts):
        return None
    compute_ms = summed([(scene, _computing(scene, rows, others)) for scene, rows, others in parts])
    conversion_ms = summed([(scene, scene.lost(scene.times(rows), rows)) for scene, _, rows in parts])
    weighed = [
        (
            scene,
            np.concatenate([rows, others]),
            np.concatenate([(weights_of(scene, rows) * HALF).astype(np.int64), weights_of(scene, others)]),
        )
        for scene, rows, others in parts
    ]
    steps = sum(len(scene) for scene in scenes)
    return Doubles(
        compute_ms_per_step=compute_ms,
        conversion_ms_per_step=conversion_ms,
        operators_per_step=sum(len(rows) for _, rows, _ in parts) / steps,
        conversions_per_step=sum(len(rows) for _, _, rows in parts) / steps,
        lines=lines(weighed, HALF * compute_ms + conversion_ms),
        parts=_parts(parts, compute_ms),
    )


def _rows(scene: TrainingScene) -> tuple[Int64, Int64]:
    """The outermost operators in float64 without conversions, and the outermost conversions."""
    flagged, copies = _flagged(scene)
    names = scene.span.names
    flagged &= names.starting("aten::")
    converts = names.where(_CONVERTS | _CONVERTS_BACK)
    conversion = copies & scene.operators & names.where(["aten::copy_"])
    at = np.flatnonzero(conversion)
    while len(at):  # what asked for the copy, and nothing else
        above = scene.span.parent[at]
        above = np.unique(above[above >= 0])
        at = above[converts[above] & ~conversion[above]]
        conversion[at] = True
    converting = outermost(scene, conversion)
    computing = outermost(scene, (flagged & scene.operators) | conversion)
    return computing[~conversion[computing]], converting


def _computing(scene: TrainingScene, rows: Int64, converting: Int64) -> intervals.Intervals:
    """When operators in float64 ran: on a device their kernels alone, since as many would be launched in float32."""
    if not len(scene.found):
        return intervals.subtract(scene.times(rows), scene.times(converting))
    return scene.exclusive(scene.launched_below(rows) & ~scene.launched_below(converting))


def _flagged(scene: TrainingScene) -> tuple[Bools, Bools]:
    """Rows with an input in float64 that is not small; and those of which another input has another type."""
    span = scene.span
    flagged, mixed = np.zeros(len(span), bool), np.zeros(len(span), bool)
    some = (
        pl.DataFrame({"types": span.series("types"), "shapes": span.series("shapes")})
        .with_row_index("row")
        .filter(pl.col("types").str.contains("double", literal=True))
    )
    for (types, shapes), group in some.group_by("types", "shapes"):
        kinds = _kinds(str(types), str(shapes))
        if "double" not in kinds:
            continue
        rows = group["row"].to_numpy()
        flagged[rows] = True
        mixed[rows] = len(kinds) > 1
    return flagged, mixed


def _kinds(types: str, shapes: str) -> set[str]:
    """The types of the tensors of some size among an operator's inputs, "double" for complex ones of them too."""
    found = set()
    for name, size in zip(json_list(types), json_list(shapes), strict=False):
        if not isinstance(name, str) or not isinstance(size, list) or not size:
            continue
        if all(isinstance(one, int) for one in size) and prod(size) >= MIN_ELEMENTS:
            found.add("double" if "double" in name else name)
    return found


def _parts(parts: Sequence[tuple[TrainingScene, Int64, Int64]], compute_ms: float) -> dict[str, float]:
    """ms per step of the operators that take most, in proportion to their recorded time."""
    sums: dict[str, int] = {}
    for scene, rows, _ in parts:
        weights = weights_of(scene, rows)
        codes = scene.span.names.codes[rows]
        for code in np.unique(codes).tolist():
            name = scene.span.names.values[code]
            sums[name] = sums.get(name, 0) + int(weights[codes == code].sum())
    whole = max(1, sum(sums.values()))
    top = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:PARTS]
    return {name: ns / whole * compute_ms for name, ns in top}
