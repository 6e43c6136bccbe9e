"""Profiled steps with device work, played again without one kind of loss: what each could gain at most.

docs/device_time.md says what depends on what in a replay.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from stepscope.model.views.device_losses import MATRIX

# What-ifs beside the kinds of loss of `device_losses`, which keep their names.
LOADER = "loader"  # the training thread's fetches take no time
COLLECTIVES = "collectives"  # kernels of collectives take no time
COMPILE = "compile"  # compiling takes no time


def matrix(rate: float) -> str:
    """The what-if in which products on ordinary cores run `rate` times as fast, and all other kernels twice."""
    return f"{MATRIX}/{rate:g}"


class WhatIf(Struct, frozen=True):
    """The interior steps without one loss. ns.

    `never_late_*`: with a host that prepares launches in no time as well, where the loss is work of the device; None
    where it is not.
    """

    kind: str
    mean_ns: float
    median_ns: float
    never_late_mean_ns: float | None
    never_late_median_ns: float | None


@dataclass(frozen=True)
class Replay:
    """The replay of one run's traces; `run` is that of `SpanRef`.

    `traces` were replayed; `left_out` were not, because the replay does not come out at what was recorded, or the trace
    is too large. Interior steps are all but a trace's first and last, or all where there are fewer than three.
    `recorded_*` are of the steps as cut by the overview, `unchanged_*` of their replay without any change,
    `never_late_*` of one with a host that prepares launches in no time. `residual` is how far recorded and unchanged
    steps lie apart, as a share of the recorded ones. For `unexplained_ns` of a mean step slices had all they need, no
    device did anything, and still they did not start.
    """

    run: str
    traces: tuple[str, ...]
    left_out: tuple[str, ...]
    steps: int
    recorded_mean_ns: float
    recorded_median_ns: float
    unchanged_mean_ns: float
    unchanged_median_ns: float
    never_late_mean_ns: float
    never_late_median_ns: float
    residual: float
    unexplained_ns: float
    what_ifs: tuple[WhatIf, ...]

    def of(self, kind: str) -> WhatIf | None:
        """The what-if of that kind, None where the traces hold nothing of it."""
        return next((one for one in self.what_ifs if one.kind == kind), None)
