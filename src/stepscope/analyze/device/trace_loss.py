"""What one trace contributes to each kind of loss, and how the traces of a run are put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct, field

from stepscope.analyze.views.kernels import short_names
from stepscope.engine import attribution, intervals
from stepscope.engine.intervals import Intervals
from stepscope.engine.scene import Scene
from stepscope.engine.spans import Span
from stepscope.model.device_losses import ATTENTION, LAYOUT, MATRIX, POINTWISE, Loss, LossLine
from stepscope.tables.arrays import Int64

LINES = 5  # of each loss; more than a finding names
PARTS = 8
KERNELS = (MATRIX, ATTENTION, LAYOUT, POINTWISE)  # whose parts are kernels


class TraceLoss(Struct, frozen=True):
    """A loss in one trace: when it was lost, and what caused it, one value for each cause.

    `rows` are host slices from which the user's line is looked up, `weights` ns, and `named` rows whose names are told;
    -1 where there is none.
    """

    scene: Scene
    times: Intervals  # of the whole trace
    rows: Int64
    weights: Int64
    named: Int64
    details: dict[str, float] = field(default_factory=dict)  # sums over the trace; `run_loss` makes them per step
    labels: tuple[str, ...] | None = None  # texts to tell in place of the names of `named`, one for each row
    share_ns: Int64 | None = None  # ns of each step, where only a share of `times` is lost
    held: Int64 = field(default_factory=lambda: np.empty(0, np.int64))  # host calls that make other work wait for it

    @property
    def per_step_ns(self) -> Int64:
        """Of each step."""
        scene = self.scene
        return intervals.covered(self.times, scene.starts, scene.ends) if self.share_ns is None else self.share_ns


def host_rows(span: Span, pattern: str) -> Int64:
    """Slices of the host with such names."""
    rows = np.flatnonzero(span.names.like(pattern) & ~span.on_device)
    return rows[~span.categories.where(["gpu_user_annotation"])[rows]]


def run_loss(kind: str, pieces: Sequence[TraceLoss]) -> Loss | None:
    """One loss of all traces together; None where no step lost anything."""
    per_step = np.concatenate([one.per_step_ns for one in pieces])
    steps = len(per_step)
    if not per_step.sum():
        return None
    parts: Counter[str] = Counter()
    details: dict[str, float] = {}
    for one in pieces:
        names, known = one.scene.span.names, one.named >= 0
        told: Sequence[str] = one.labels or ()
        weights = one.weights
        if one.labels is None:
            codes, number = np.unique(names.codes[one.named[known]], return_inverse=True)
            told, weights = [names.values[code] for code in codes.tolist()], np.zeros(len(codes), np.int64)
            np.add.at(weights, number, one.weights[known])
        for name, weight in zip(told, weights.tolist(), strict=True):
            parts[name] += weight
        for name, value in one.details.items():
            details[name] = details.get(name, 0.0) + value
    ordered = sorted(parts.items(), key=lambda item: (-item[1], item[0]))[:PARTS]
    shown = [name for name, _ in ordered]
    shown = short_names(shown) if kind in KERNELS else shown
    lines = attribution.heaviest_lines(
        ((one.scene.base, one.scene.span, one.rows, one.weights) for one in pieces), LINES
    )
    held = [
        (one.scene.base, one.scene.span, one.held, np.zeros(len(one.held), np.int64)) for one in pieces if len(one.held)
    ]
    return Loss(
        kind=kind,
        ns_per_step=float(per_step.mean()),
        median_ns=float(np.median(per_step)),
        calls_per_step=sum(len(one.rows) for one in pieces) / steps,
        lines=tuple(LossLine(line.place, line.weight / steps, line.rows / steps, line.exact) for line in lines),
        parts={name: ns / steps for name, (_, ns) in zip(shown, ordered, strict=True)},
        details={name: value / steps for name, value in sorted(details.items())},
        held_at=next((line.place for line in attribution.heaviest_lines(held, 1) if line.exact), None),
    )
