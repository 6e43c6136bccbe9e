"""The loader in traces: what it costs is the time the device idles for it, by the views' exclusive parts.

The ceiling is what the steps save when they are played again without the loader. Where a trace holds no device, the
loader's time on the training thread is both: nothing runs beside it.
"""

from __future__ import annotations

import math

from msgspec import Struct

from stepscope.diagnose.common import clip_share, finding_id, severity, shown
from stepscope.diagnose.replayed import BY_SUBTRACTION, Gain, replayed
from stepscope.diagnose.thresholds import TRACED_LOADER
from stepscope.model import Analysis, Evidence, Finding, Place, Try
from stepscope.model.device_losses import LOADER
from stepscope.model.machine import TraceLoader
from stepscope.model.views import DEVICE, Overview


class _Wait(Struct, frozen=True):
    """The loader in the profiled steps of one run. ms per step."""

    overviews: tuple[Overview, ...]
    steps: int
    mean_ms: float
    lost_ms: float
    device: bool


def profiled(analysis: Analysis, run: str | None = None) -> list[Overview]:
    """Overviews whose steps are marked; of one run where it is named."""
    spans = analysis.views.spans if analysis.views is not None else ()
    found = [span.overview for span in spans if span.overview is not None and span.overview.has_steps]
    return [one for one in found if run is None or one.span.run == run]


def idle_share(analysis: Analysis) -> float | None:
    """The share of profiled steps in which a device idles for the loader; None without a trace of a device."""
    wait = _wait([one for one in profiled(analysis) if one.basis == DEVICE])
    return wait.lost_ms / wait.mean_ms if wait is not None else None


def loader_gain(analysis: Analysis, run: str = "") -> Gain | None:
    """What profiled steps with device work save without the loader; None where none were replayed."""
    return replayed(analysis, run, LOADER)


def traced_loader_bound(analysis: Analysis, rule: str, learn: str) -> list[Finding]:
    """One finding for each run of traces whose loader takes more of the mean profiled step than the floor."""
    machine = analysis.machine
    loaders = machine.trace_loaders if machine is not None else ()
    found = []
    for loader in loaders:
        wait = _wait(profiled(analysis, loader.run))
        if wait is not None and wait.lost_ms >= TRACED_LOADER.floor * wait.mean_ms:
            gain = loader_gain(analysis, loader.run) if wait.device else None
            found.append(_finding(wait, loader, gain, rule, learn, several=len(loaders) > 1))
    return found


def _wait(overviews: list[Overview]) -> _Wait | None:
    with_device = [one for one in overviews if one.basis == DEVICE]
    chosen = with_device or overviews
    steps = [step for one in chosen for step in one.steps]
    wall_ns = sum(step.wall_ns for step in steps)
    if not wall_ns:
        return None
    part = "idle_data" if with_device else "host_data"
    lost_ns = sum(step.parts_ns.get(part, 0) for step in steps)
    count = len(steps)
    return _Wait(tuple(chosen), count, wall_ns / count / 1e6, lost_ns / count / 1e6, bool(with_device))


def _finding(wait: _Wait, loader: TraceLoader, gain: Gain | None, rule: str, learn: str, *, several: bool) -> Finding:
    share = clip_share(wait.lost_ms, wait.mean_ms)
    place = loader.call or (loader.entries[0] if loader.entries else None)
    wanted = _workers(wait, loader)
    key = Place(loader.run, None, rule) if several or place is None else place
    return Finding(
        id=finding_id(rule, key),
        rule=rule,
        category="input",
        title=_title(wait, loader, several=several),
        severity=severity(share),
        confidence=_confidence(wait),
        cost_ms_per_step=wait.lost_ms,
        share=share,
        gain_ceiling=max(share, gain.share) if gain is not None else share,
        where=(*loader.entries, *((loader.call,) if loader.call is not None else ())),
        ranks=tuple(sorted({one.span.rank for one in wait.overviews})),
        evidence=(*_evidence(wait, loader), *(gain.evidence if gain is not None else ())),
        fix=_fix(loader, wanted),
        caveat=_caveat(wait, gain),
        learn=learn,
        try_=(Try("loader.num_workers", str(wanted)), Try("loader.persistent_workers", "true")) if wanted else (),
        falsified_by="With the same batch handed out again and again instead of loaded, the mean step does not get "
        "shorter",
    )


def _title(wait: _Wait, loader: TraceLoader, *, several: bool) -> str:
    who = {
        "none": "The training process loads every batch itself",
        "some": "The loader's workers do not keep up",
        None: "The step waits for its batch",
    }[loader.workers]
    what = "the device idles for it" if wait.device else "that takes"
    of = f" of {loader.run}" if several and loader.run else ""
    return f"{who}: {what} {wait.lost_ms:.3g} of {wait.mean_ms:.3g} ms of the step{of}"


def _workers(wait: _Wait, loader: TraceLoader) -> int | None:
    """How many keep up, by the time of a fetch and of the rest of the step, and one more for jitter.

    None where there are some already, or nothing else takes time.
    """
    rest_ms = wait.mean_ms - wait.lost_ms
    if loader.workers != "none" or rest_ms <= 0:
        return None
    return math.ceil(loader.fetch_ms * loader.fetches / wait.steps / rest_ms) + 1


def _fix(loader: TraceLoader, wanted: int | None) -> str:
    hot = loader.entries[0] if loader.entries else None
    shorter = f"; then shorten the work at {shown(hot)}" if hot is not None else ""
    if wanted is not None:
        return (
            f"Load in worker processes: num_workers={wanted} keeps up by these times, with persistent_workers=True in "
            f"the DataLoader{shorter}"
        )
    if loader.workers == "some":
        return (
            "Raise num_workers as far as there are cores, and shorten the work per item; `stepscope run` samples the "
            "workers and names its lines"
        )
    return f"Load in worker processes that are far enough ahead (num_workers, prefetch_factor){shorter}"


def _confidence(wait: _Wait) -> str:
    if wait.steps >= TRACED_LOADER.steps_for_high:
        return "high"
    return "medium" if wait.steps >= TRACED_LOADER.steps_for_medium else "low"


def _evidence(wait: _Wait, loader: TraceLoader) -> tuple[Evidence, ...]:
    what = "device idle while the host loads" if wait.device else "loading on the training thread"
    part = "idle_data" if wait.device else "host_data"
    found = [
        Evidence(f"{what}, per step", round(wait.lost_ms, 3), "ms", f"{part} of {_profiled(wait.steps)}"),
        Evidence("mean profiled step", round(wait.mean_ms, 3), "ms", _profiled(wait.steps)),
        Evidence("one fetch of the loader", round(loader.fetch_ms, 3), "ms", f"{loader.fetches} ranges of the loader"),
    ]
    if len(wait.overviews) > 1:
        for one in wait.overviews:
            lost = one.parts[part].mean_ns / 1e6
            found.append(Evidence(f"{what}, {one.span.label}", round(lost, 3), "ms", one.span.trace))
    if loader.workers is not None:
        words = "0" if loader.workers == "none" else "at least 1"
        found.append(Evidence("num_workers", words, "processes", "the iterator's name in the trace"))
    return tuple(found)


def _caveat(wait: _Wait, gain: Gain | None) -> str:
    text = "A profiler slows the host more than the device, so the share without one may be smaller. "
    if wait.device:
        text += (
            "Device work that is queued while a batch is made is not counted; what else waits behind it may take over. "
        )
        text += BY_SUBTRACTION if gain is None else ""
    return text.strip()


def _profiled(steps: int) -> str:
    return f"{steps} profiled step{'s' * (steps != 1)}"
