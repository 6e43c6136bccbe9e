"""What devices lose time to in profiled steps: idle time by its cause, and work that could be less.

`idle_time` takes idle time apart: whole operations own what happens in them, then come waits and copies; what is left
is the host preparing `launches`. `kernels` looks at the work itself. Each gives a `TraceLoss` for a kind of loss in one
trace; here those of a run are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from stepscope.analyze.device import idle_time, kernels
from stepscope.analyze.device.idle_time import Idle
from stepscope.analyze.device.kernels import Kernels
from stepscope.analyze.device.trace_loss import TraceLoss, run_loss
from stepscope.engine import intervals
from stepscope.engine.device_work import FILL, KERNEL
from stepscope.engine.scene import Scene, scenes
from stepscope.engine.spans import Base
from stepscope.model import device_losses as kinds
from stepscope.model.device_losses import DeviceLosses


class TraceLosses:
    """The losses of a trace whose steps hold device work."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.idle, self.kernels = scene, Idle(scene), Kernels(scene)

    @cached_property
    def by_kind(self) -> dict[str, TraceLoss]:
        """Every loss, in the order in which losses are told."""
        idle, busy = self.idle, self.kernels
        return {
            kinds.SYNC: idle.synchronizing(),
            kinds.COPY_IN: idle_time.from_host(idle),
            kinds.MADE: idle_time.made_on_host(idle),
            kinds.ALLOCATOR: idle.allocating(),
            **idle_time.launch_losses(idle),
            kinds.DEVICE_COPY: idle_time.on_devices(idle),
            kinds.LINALG: idle.operations.linear_algebra(),
            kinds.DATA_PARALLEL: idle.operations.data_parallel(),
            kinds.MATRIX: busy.products(),
            kinds.ATTENTION: busy.attention(),
            kinds.LAYOUT: busy.layout(),
            kinds.POINTWISE: busy.pointwise(),
            kinds.TILES: busy.tiles(),
        }


def trace_losses(base: Base) -> tuple[TraceLosses, ...]:
    """Of traces whose steps hold device work, and all of it."""
    found = (one for one in scenes(base) if len(one.found) and (one.ends > one.starts).any() and one.whole)
    return tuple(TraceLosses(scene) for scene in found)


def by_run(traces: Sequence[TraceLosses]) -> list[tuple[str, list[TraceLosses]]]:
    """(run, its traces), by the runs' names."""
    runs: dict[str, list[TraceLosses]] = {}
    for one in traces:
        runs.setdefault(one.scene.span.ref.run, []).append(one)
    return sorted(runs.items(), key=lambda run: run[0])


def device_losses(traces: Sequence[TraceLosses]) -> tuple[DeviceLosses, ...]:
    """One for each run that has a step with device work, by the runs' names."""
    made = []
    for run, own in by_run(traces):
        scenes, busy = [one.scene for one in own], [one.kernels for one in own]
        steps = sum(map(len, scenes))
        computing = (intervals.covered(one.found.covered(KERNEL, FILL), one.starts, one.ends).sum() for one in scenes)
        lengths = np.concatenate([one.lengths for one in busy])
        # of kernels with a launch of their own; those of a CUDA graph share one
        launches = [np.unique(one.launch, return_inverse=True, return_counts=True) for one in busy]
        shared = np.concatenate([(count[number] > 1) & (row[number] >= 0) for row, number, count in launches])
        typical = lengths if shared.all() else lengths[~shared]
        found = (run_loss(kind, [one.by_kind[kind] for one in own]) for kind in own[0].by_kind)
        gpus = dict.fromkeys(
            gpu
            for scene in scenes
            for number, gpu in sorted(scene.span.gpus.items())
            if (scene.found.device == number).any()
        )
        one = DeviceLosses(
            run=run,
            traces=tuple(scene.span.ref.label for scene in scenes),
            ranks=tuple(sorted({scene.span.ref.rank for scene in scenes})),
            steps=steps,
            has_steps=all(scene.windows.has_steps for scene in scenes),
            step_ns=sum(int((scene.ends - scene.starts).sum()) for scene in scenes) / steps,
            compute_ns_per_step=sum(map(int, computing)) / steps,
            kernels_per_step=len(lengths) / steps,
            median_kernel_ns=float(np.median(typical)) if len(typical) else None,
            filling_share=kernels.filling(busy),
            batch_size=kernels.batch_size(scenes),
            has_shapes=any(scene.has("shapes") for scene in scenes),
            sync_batch_norms_per_step=sum(map(kernels.sync_batch_norms, scenes)) / steps,
            gpus=tuple(gpus),
            losses=tuple(loss for loss in found if loss is not None),
        )
        made.append(one)
    return tuple(made)
