"""Ceilings from replays: what the profiled steps save when they are played again without a loss.

Of what makes device work shorter there are two replays: with the host as recorded, and with one that is never late,
because a profiler slows the host and not the device. The larger saving bounds the gain.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from stepscope.diagnose.thresholds import REPLAY
from stepscope.model import Analysis, Evidence
from stepscope.model.device_losses import (
    ALLOCATOR,
    ATTENTION,
    COLLECTIVES,
    COMPILE,
    COMPILED,
    COPY_IN,
    DATA_PARALLEL,
    DEVICE_COPY,
    HOST,
    LAUNCH,
    LAYOUT,
    LINALG,
    LOADER,
    MATRIX,
    OPTIMIZER,
    POINTWISE,
    SYNC,
    ZERO_GRAD,
    Replay,
    WhatIf,
)

BY_SUBTRACTION = "The ceiling is by subtraction: these steps could not be replayed without the loss."
_WITHOUT = {
    LOADER: "without the loader",
    COMPILE: "without compiling",
    COLLECTIVES: "without collectives",
    SYNC: "without these waits",
    COPY_IN: "without copies from the host",
    ALLOCATOR: "without calls of the allocator",
    LAUNCH: "without these gaps",
    COMPILED: "without these gaps",
    HOST: "without this host work",
    OPTIMIZER: "with a fused optimizer",
    ZERO_GRAD: "without setting gradients to zero",
    LINALG: "without this linear algebra",
    DATA_PARALLEL: "without DataParallel's copies",
    MATRIX: "in 16 bits at the peak rate",
    ATTENTION: "without these kernels",
    LAYOUT: "without these conversions",
    POINTWISE: "without these kernels",
    DEVICE_COPY: "without these copies",
}


class Gain(Struct, frozen=True):
    """What a replay saves: `share` of the recorded step at most, `as_recorded` with the host as it was.

    `unexplained`: the share of the step in which the device idles although something was launched.
    """

    share: float
    as_recorded: float
    unexplained: float
    work: bool
    evidence: tuple[Evidence, ...]

    def caveat(self, cost_share: float) -> str:
        """Where the recorded host would hide what work costs, and where a replay knows too little to bound anything."""
        found = []
        if self.work and self.as_recorded < cost_share - REPLAY.close:
            found.append(
                f"The recorded host was late as well: with it {self.as_recorded:.0%} of the step would be saved. A "
                "profiler slows the host, so cost and ceiling are those of one that is never late."
            )
        if self.unexplained >= REPLAY.unexplained:
            found.append(
                f"For {self.unexplained:.0%} of the step the device idles with work launched and nothing in the trace "
                "says why: if it goes with this loss, more can be gained than the ceiling says."
            )
        return " ".join(found)


def replayed(analysis: Analysis, run: str, kind: str, *, use_median: bool = False) -> Gain | None:
    """What the steps of a run's traces save without a loss; None where there is no such replay.

    `use_median`: the median step's, for losses of few steps.
    """
    replay = next((one for one in analysis.replays if one.run == run), None)
    without = replay.of(kind) if replay is not None else None
    if replay is None or without is None:
        return None
    before, after = _lengths(replay, without, use_median=use_median)
    if before <= 0:
        return None
    never_late = _never_late(replay, without, use_median=use_median)
    as_recorded = max(0.0, before - after)
    at_most = max(as_recorded, never_late[0] - never_late[1]) if never_late is not None else as_recorded
    return Gain(
        share=min(1.0, at_most / before),
        as_recorded=min(1.0, as_recorded / before),
        unexplained=replay.unexplained_ns / replay.recorded_mean_ns,
        work=never_late is not None,
        evidence=tuple(_evidence(replay, kind, (before, after), never_late, use_median=use_median)),
    )


def _lengths(replay: Replay, without: WhatIf, *, use_median: bool) -> tuple[float, float]:
    """The step as it was and without the loss. ns."""
    if use_median:
        return replay.unchanged_median_ns, without.median_ns
    return replay.unchanged_mean_ns, without.mean_ns


def _never_late(replay: Replay, without: WhatIf, *, use_median: bool) -> tuple[float, float] | None:
    """The same with a host that is never late; None where the loss is no work."""
    if without.never_late_mean_ns is None or without.never_late_median_ns is None:
        return None
    if use_median:
        return replay.never_late_median_ns, without.never_late_median_ns
    return replay.never_late_mean_ns, without.never_late_mean_ns


def _evidence(
    replay: Replay,
    kind: str,
    recorded: tuple[float, float],
    never_late: tuple[float, float] | None,
    *,
    use_median: bool,
) -> Iterator[Evidence]:
    words = _WITHOUT.get(kind.partition("/")[0], "without it")
    traces = f"trace {replay.traces[0]}" if len(replay.traces) == 1 else f"{len(replay.traces)} traces"
    which = f"{'median' if use_median else 'mean'} of {replay.steps} step{'s' if replay.steps != 1 else ''}"
    before, after = recorded
    yield Evidence(f"replayed step {words}", round(after / 1e6, 3), "ms", f"replay of {traces}, {which}")
    yield Evidence("the same steps as recorded", round(before / 1e6, 3), "ms", f"{traces}, {which}")
    if never_late is not None and never_late[0] - never_late[1] > before - after:
        source = f"replay of {traces}, a host that is never late"
        yield Evidence(f"the same {words}, the host never late", round(never_late[1] / 1e6, 3), "ms", source)
        yield Evidence("the same with all work, the host never late", round(never_late[0] / 1e6, 3), "ms", source)
