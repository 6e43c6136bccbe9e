"""What devices lose time to in profiled steps: `idle` takes their idle time apart, `busy` looks at their work.

`pieces` holds what one trace contributes, and sums up the traces of a run. The rules on devices stand on these facts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope.analyze import intervals
from stepscope.analyze.device_losses import busy, idle
from stepscope.analyze.device_losses.busy import Busy
from stepscope.analyze.device_losses.idle import Idle
from stepscope.analyze.device_losses.pieces import Piece, Scene, joined
from stepscope.analyze.views.base import Base, Int64
from stepscope.analyze.views.host_activity import host_activity
from stepscope.analyze.views.step_windows import step_windows
from stepscope.analyze.views.work import FILL, KERNEL, work
from stepscope.model.views.device_losses import DeviceLosses
from stepscope.model.views.spans import GpuProperties

__all__ = ["facts"]


def facts(base: Base) -> tuple[DeviceLosses, ...]:
    """One for each run that has a step with device work, by the runs' names."""
    runs: dict[str, list[Scene]] = {}
    for scene in _scenes(base):
        runs.setdefault(scene.span.ref.run, []).append(scene)
    return tuple(_of_run(run, runs[run]) for run in sorted(runs))


def _of_run(run: str, scenes: list[Scene]) -> DeviceLosses:
    pieces: dict[str, list[Piece]] = {}
    kernels: list[Int64] = []
    compute_ns = wall_ns = 0
    for scene in scenes:
        host = host_activity(scene.span, scene.found)
        kernels_of = Busy(scene)
        for kind, piece in {**idle.pieces(Idle(scene, host)), **busy.pieces(kernels_of)}.items():
            pieces.setdefault(kind, []).append(piece)
        kernels.append(kernels_of.ends - kernels_of.starts)
        starts, ends = scene.windows.start_ns, scene.windows.end_ns
        compute_ns += int(intervals.covered(scene.found.covered(KERNEL, FILL), starts, ends).sum())
        wall_ns += int((ends - starts).sum())
    steps = sum(len(scene.windows) for scene in scenes)
    lengths = np.concatenate(kernels)
    found = (joined(kind, parts) for kind, parts in pieces.items())
    return DeviceLosses(
        run=run,
        traces=tuple(scene.span.ref.label for scene in scenes),
        ranks=tuple(sorted({scene.span.ref.rank for scene in scenes})),
        steps=steps,
        has_steps=all(scene.windows.has_steps for scene in scenes),
        step_ns=wall_ns / steps,
        compute_ns_per_step=compute_ns / steps,
        kernels_per_step=len(lengths) / steps,
        median_kernel_ns=float(np.median(lengths)) if len(lengths) else None,
        gpus=tuple(_gpus(scenes)),
        losses=tuple(loss for loss in found if loss is not None),
    )


def _gpus(scenes: list[Scene]) -> Iterator[GpuProperties]:
    """The devices that worked, each kind once in the order of their numbers."""
    seen = set()
    for scene in scenes:
        working = set(np.unique(scene.found.device).tolist())
        for number, gpu in sorted(scene.span.gpus.items()):
            if number in working and gpu not in seen:
                seen.add(gpu)
                yield gpu


def _scenes(base: Base) -> Iterator[Scene]:
    """Traces whose steps hold device work."""
    for span in base.spans:
        found = work(span)
        windows = step_windows(span, found)
        if len(found) and len(windows) and (windows.end_ns > windows.start_ns).any():
            yield Scene(base, span, found, windows)
