"""What devices lose time to in profiled steps: idle time by its cause, and work that could be less.

`idle` takes idle time apart: `operations` own what happens in them, then come waits, `copies`, and at last `launches`.
`busy` and `shapes` look at kernels. `pieces` holds what one trace contributes, and sums up the traces of a run; `lost`
makes the pieces of one trace, each once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct

from stepscope.analyze.device import idle_time, kernels, launches
from stepscope.analyze.device.idle_time import Idle
from stepscope.analyze.device.kernels import Kernels
from stepscope.analyze.device.launches import Launches
from stepscope.analyze.device.trace_loss import TraceLoss, run_loss
from stepscope.engine import intervals
from stepscope.engine.device_work import FILL, KERNEL
from stepscope.engine.scene import Scene
from stepscope.engine.scene import scenes as all_scenes
from stepscope.engine.spans import Base
from stepscope.model.device_losses import (
    ALLOCATOR,
    COPY_IN,
    DATA_PARALLEL,
    DEVICE_COPY,
    LINALG,
    SYNC,
    TILES,
    DeviceLosses,
)
from stepscope.model.trace import GpuProperties
from stepscope.tables.arrays import Bools


def device_losses(traces: Sequence[TraceLosses]) -> tuple[DeviceLosses, ...]:
    """One for each run that has a step with device work, by the runs' names."""
    runs: dict[str, list[TraceLosses]] = {}
    for one in traces:
        runs.setdefault(one.scene.span.ref.run, []).append(one)
    return tuple(_of_run(run, runs[run]) for run in sorted(runs))


def _of_run(run: str, traces: list[TraceLosses]) -> DeviceLosses:
    pieces: dict[str, list[TraceLoss]] = {}
    scenes = [one.scene for one in traces]
    compute_ns = wall_ns = 0
    for one in traces:
        scene = one.scene
        for kind, piece in (*_idle(one), *one.working.items()):
            pieces.setdefault(kind, []).append(piece)
        pieces.setdefault(TILES, []).append(kernels.tiles(scene))
        starts, ends = scene.starts, scene.ends
        compute_ns += int(intervals.covered(scene.found.covered(KERNEL, FILL), starts, ends).sum())
        wall_ns += int((ends - starts).sum())
    steps = sum(len(scene.windows) for scene in scenes)
    lengths = np.concatenate([one.kernels.ends - one.kernels.starts for one in traces])
    alone = np.concatenate([_launched_alone(one.kernels) for one in traces])
    typical = lengths[alone] if alone.any() else lengths
    found = (run_loss(kind, parts) for kind, parts in pieces.items())
    return DeviceLosses(
        run=run,
        traces=tuple(scene.span.ref.label for scene in scenes),
        ranks=tuple(sorted({scene.span.ref.rank for scene in scenes})),
        steps=steps,
        has_steps=all(scene.windows.has_steps for scene in scenes),
        step_ns=wall_ns / steps,
        compute_ns_per_step=compute_ns / steps,
        kernels_per_step=len(lengths) / steps,
        median_kernel_ns=float(np.median(typical)) if len(typical) else None,
        filling_share=kernels.filling(scenes),
        batch_size=kernels.batch_size(scenes),
        has_shapes=any(scene.span.series("shapes").is_not_null().any() for scene in scenes),
        sync_batch_norms_per_step=sum(map(kernels.sync_batch_norms, scenes)) / steps,
        gpus=tuple(_gpus(scenes)),
        losses=tuple(loss for loss in found if loss is not None),
    )


def _launched_alone(kernels: Kernels) -> Bools:
    """Kernels with a launch of their own; those of a CUDA graph share one."""
    launch = kernels.scene.found.launch[kernels.slices]
    _, number, count = np.unique(launch, return_inverse=True, return_counts=True)
    alone: Bools = (count[number] == 1) | (launch < 0)
    return alone


def _idle(lost: TraceLosses) -> Iterator[tuple[str, TraceLoss]]:
    """Every loss of idle time, and the copies and operations around it."""
    yield SYNC, lost.idle.synchronizing()
    yield COPY_IN, idle_time.from_host(lost.idle)
    yield ALLOCATOR, lost.idle.allocating()
    yield from lost.launching.items()
    yield DEVICE_COPY, lost.copied
    yield LINALG, lost.linear_algebra
    yield DATA_PARALLEL, lost.data_parallel


def _gpus(scenes: list[Scene]) -> Iterator[GpuProperties]:
    """The devices that worked, each kind once in the order of their numbers."""
    seen = set()
    for scene in scenes:
        working = set(np.unique(scene.found.device).tolist())
        for number, gpu in sorted(scene.span.gpus.items()):
            if number in working and gpu not in seen:
                seen.add(gpu)
                yield gpu


def device_scenes(base: Base) -> Iterator[Scene]:
    """Traces whose steps hold device work."""
    for scene in all_scenes(base):
        if len(scene.found) and len(scene) and (scene.ends > scene.starts).any():
            yield scene


class TraceLosses(Struct, frozen=True, dict=True):
    """The losses of a trace whose steps hold device work."""

    scene: Scene

    @cached_property
    def idle(self) -> Idle:
        return Idle(self.scene)

    @cached_property
    def launching(self) -> dict[str, TraceLoss]:
        """By kind, as the others."""
        return dict(launches.launch_losses(Launches(self.idle)))

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels(self.scene)

    @cached_property
    def working(self) -> dict[str, TraceLoss]:
        return kernels.kernel_losses(self.kernels)

    @cached_property
    def copied(self) -> TraceLoss:
        return idle_time.on_devices(self.idle)

    @cached_property
    def linear_algebra(self) -> TraceLoss:
        return self.idle.operations.linear_algebra(self.idle.before_operations)

    @cached_property
    def data_parallel(self) -> TraceLoss:
        return self.idle.operations.data_parallel(self.idle.before_operations)
