"""The risk of memory that grows with every step, with the lines whose allocations outlive their step."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from stepscope.diagnose.common import finding_id, shown
from stepscope.diagnose.memory import RETRIES_RULE, gib
from stepscope.diagnose.sync import ALLOCATOR_RULE
from stepscope.diagnose.thresholds import MEMORY
from stepscope.model import Analysis, Evidence, Finding, Place, Risk
from stepscope.model.memory import MemoryGrowth

RULE = "memory.growth"
LEARN = "https://docs.pytorch.org/docs/stable/notes/faq.html"
HOST = "cpu"
_SIZES = {"machine": "the machine's memory", "cgroup": "the memory limit of the cgroup"}
# Findings of the same run that growing memory is behind.
_DRIFT = "host.step_drift"
_BEHIND = {True: (_DRIFT, "system.swapping_or_faults"), False: (_DRIFT, RETRIES_RULE, ALLOCATOR_RULE)}


def growth(analysis: Analysis, findings: Sequence[Finding]) -> list[Risk]:
    """One risk for the host and one for the devices, each of the rank that is full first."""
    losses = analysis.memory_losses
    counted = [one for one in (losses.growth if losses is not None else ()) if _counts(one)]
    risks = []
    for on_host in (True, False):
        own = [one for one in counted if (one.device == HOST) is on_host]
        if own:
            worst = min(own, key=lambda one: (_time_left(one), -one.bytes_per_step, one.rank or 0))
            ranks = tuple(sorted({one.rank for one in own if one.rank is not None}))
            risks.append(_risk(worst, ranks, findings))
    return risks


def _time_left(one: MemoryGrowth) -> float:
    return one.seconds_left if one.seconds_left is not None else float("inf")


def _counts(one: MemoryGrowth) -> bool:
    """Whether it is more than noise, and may end a job."""
    if one.traced and one.bytes_per_step < MEMORY.traced_bytes:
        return False
    least = MEMORY.grown_bytes if one.device == HOST else MEMORY.grown_device_bytes
    if not one.traced and one.late_bytes - one.early_bytes < least:
        return False
    if one.seconds_left is not None:
        return one.seconds_left <= MEMORY.horizon_s
    return one.traced or one.late_bytes - one.early_bytes >= MEMORY.confirmed_bytes


def _risk(one: MemoryGrowth, ranks: tuple[int, ...], findings: Sequence[Finding]) -> Risk:
    where = _places(one)
    of = "of the process" if one.device == HOST else f"of {one.device}"
    at = f": {shown(where[0])} allocates what outlives its step" if where else ""
    left = f", and is full in {_duration(one.seconds_left)} at this rate" if one.seconds_left is not None else ""
    soon = one.seconds_left is not None and one.seconds_left <= MEMORY.soon_s
    return Risk(
        id=finding_id(RULE, where[0] if where else Place(one.device, None)),
        rule=RULE,
        category="memory",
        title=f"Memory {of} grows by {gib(one.bytes_per_step)} in every step{left}{at}",
        severity="critical" if soon else "warning",
        confidence=_confidence(one),
        where=where,
        ranks=ranks,
        evidence=_evidence(one),
        fix=_fix(one, where),
        caveat="A cache that fills while the first epoch runs looks the same, and ends with the epoch."
        + (" A trace shows a few steps: whether the growth goes on is not seen." if one.traced else ""),
        learn=LEARN,
        falsified_by="In a run twice as long, memory does not grow further",
        explains=tuple(finding.id for finding in findings if finding.rule in _BEHIND[one.device == HOST]),
    )


def _confidence(one: MemoryGrowth) -> str:
    if one.traced:
        return "medium" if one.steps >= MEMORY.traced_steps else "low"
    return "high" if one.points >= MEMORY.readings_for_high else "medium"


def _places(one: MemoryGrowth) -> tuple[Place, ...]:
    total = max(sum(line.bytes_per_step for line in one.lines), one.bytes_per_step, 1.0)
    return tuple(replace(line.place, share=line.bytes_per_step / total) for line in one.lines[: MEMORY.lines_shown])


def _fix(one: MemoryGrowth, where: tuple[Place, ...]) -> str:
    advice = (
        "Let go of what a step made when it ends: append loss.item() or loss.detach() to lists and running sums, not "
        "the loss with its graph; move kept outputs off the device or reduce them; empty lists and caches"
    )
    if where:
        return f"{advice}. Look for what keeps the tensors that {shown(where[0])} makes"
    if one.device == HOST:
        return f"{advice}. To have the lines named, record again with --window-memory"
    return f"{advice}. To have the lines named, record again with --window-memory, or with a snapshot of the allocator"


def _evidence(one: MemoryGrowth) -> tuple[Evidence, ...]:
    points = f"{one.points} {'steps' if one.traced else 'readings'}"
    source = f"{one.source}, {points} over {_duration(one.seconds)}"
    rows = [
        Evidence("growth per step", round(one.bytes_per_step), "bytes", source),
        Evidence(f"grown over {one.steps} steps", round(one.late_bytes - one.early_bytes), "bytes", source),
    ]
    if one.limit is not None:
        what = _SIZES.get(one.limit.reason, "limit of this process")
        rows.append(Evidence(what, one.limit.bytes, "bytes", "manifest.json" if one.device == HOST else one.source))
    if one.steps_left is not None:
        rows.append(Evidence("steps until it is full, at most", round(one.steps_left), "steps", source))
    for line in one.lines[: MEMORY.lines_shown]:
        metric = f"still there a step later, allocated at {shown(line.place)}" + (
            f" by {line.operator}" if line.operator else ""
        )
        rows.append(Evidence(metric, round(line.bytes_per_step), "bytes", f"trace {one.lines_source}"))
    return tuple(rows)


def _duration(seconds: float) -> str:
    """`40 s`, `12 min`, `5.3 h`."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6_000 else f"{seconds / 3600:.2g} h"
