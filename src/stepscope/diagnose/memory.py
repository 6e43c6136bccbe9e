"""Memory of devices: what retries of the allocator cost, and the risks of a full or fragmented device."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from stepscope.diagnose import sync
from stepscope.diagnose.common import clip_share, finding_id, lowest, severity, steps_confidence, train_steps
from stepscope.diagnose.thresholds import MEMORY
from stepscope.model import Analysis, Evidence, Finding, Place, Risk, Try
from stepscope.model.memory import MemoryLimit, MemoryPeak, RetryFacts

RETRIES_RULE = "memory.allocator_retries"
NEAR_RULE = "memory.near_limit"
FRAGMENTED_RULE = "memory.fragmentation"
LEARN = sync.LEARN_ALLOCATOR
EXPANDABLE = Try("allocator.conf", "expandable_segments:True")
# Losses that a full or fragmented device is behind.
_ALLOCATOR_LOSSES = (RETRIES_RULE, sync.ALLOCATOR_RULE)
_LESS = (
    "hold less of it at the peak: smaller batches with gradient accumulation, activation checkpointing, mixed "
    "precision, gradients set to None"
)


def allocator_retries(analysis: Analysis) -> list[Finding]:
    """One finding when steady steps with retries near them are longer than those without, by more than the floor."""
    losses, train = analysis.memory_losses, train_steps(analysis)
    retries = losses.retries if losses is not None else None
    if train is None or retries is None or not retries.lost_ms_per_step or sync.allocator_in_steps(analysis):
        return []  # a trace that holds the allocator's calls tells the same loss more exactly
    if retries.lost_ms_per_step < MEMORY.floor * retries.total_ms_per_step:
        return []
    share = clip_share(retries.lost_ms_per_step, retries.total_ms_per_step)
    struck = retries.steps_struck / retries.steps
    ceiling = ((retries.struck_ms or 0.0) - (retries.usual_ms or 0.0)) * struck
    where = at_peak(analysis, retries.device)
    return [
        Finding(
            id=finding_id(RETRIES_RULE, None),
            rule=RETRIES_RULE,
            category="memory",
            title=f"{retries.device} runs full: its allocator gave its cache back and tried again {retries.retries} "
            f"times in {retries.steps} steps, which are longer there",
            severity=severity(share),
            confidence=lowest(["medium", steps_confidence(train)]),
            cost_ms_per_step=share * train.mean_ms,
            share=share,
            gain_ceiling=max(share, clip_share(ceiling, retries.total_ms_per_step)),
            where=where,
            ranks=() if retries.rank is None else (retries.rank,),
            evidence=_retry_evidence(retries),
            fix=f"Leave the allocator room on {retries.device}: {_LESS}; inputs of few different sizes (pad to "
            "buckets); and PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            caveat="Retries are counted between readings a second or more apart: all steps between two readings count "
            "as struck. Inputs that are larger now and then make steps longer and need more memory, without a loss.",
            learn=LEARN,
            try_=(EXPANDABLE,),
            falsified_by="With a batch small enough for no retry, the time per sample is the same",
        )
    ]


def _retry_evidence(retries: RetryFacts) -> tuple[Evidence, ...]:
    source = "events.jsonl and steps.jsonl"
    return (
        Evidence("retries of the allocator", retries.retries, "retries", "events.jsonl, between steady steps"),
        Evidence("mean step near a retry", round(retries.struck_ms or 0.0, 3), "ms", source),
        Evidence("median step without", round(retries.usual_ms or 0.0, 3), "ms", source),
        Evidence("steps near a retry", round(retries.steps_struck / retries.steps, 4), "share", source),
    )


def near_limit(analysis: Analysis, findings: Sequence[Finding]) -> list[Risk]:
    """One risk: of the device that came nearest the limit that holds for its process, or ran out of memory."""
    near = [one for one in _peaks(analysis) if one.failed or one.share >= MEMORY.near]
    if not near:
        return []
    worst = max(near, key=lambda one: (one.failed, one.share, -(one.peak.rank or 0)))
    peak, limit = worst.peak, worst.limit
    held = f"{gib(peak.allocated_bytes)} of {gib(limit.bytes)}"
    tried = ", and its allocator had to give its cache back" if peak.retries else ""
    ran_out = ", and an allocation has failed for want of memory" if peak.out_of_memory else ""
    return [
        Risk(
            id=finding_id(NEAR_RULE, Place(peak.device, None)),
            rule=NEAR_RULE,
            category="memory",
            title=f"{peak.device} is nearly full: tensors take {held} at the peak, all {_of(limit)}{tried}{ran_out}",
            severity="critical" if worst.share >= MEMORY.full or peak.out_of_memory else "warning",
            confidence=_confidence(peak),
            where=at_peak(analysis, peak.device),
            ranks=_ranks(near),
            evidence=(*_peak_evidence(peak, limit), *_limit_evidence(peak, limit)),
            fix=f"To be safe, {_LESS}{_more_room(limit)}",
            caveat="Costs no time as long as nothing more is needed: a longer sequence, an evaluation or another "
            "process may end the run with an out-of-memory error.",
            learn=LEARN,
            try_=(EXPANDABLE,) if peak.retries else (),
            falsified_by="A batch a tenth larger than the largest one runs without a retry of the allocator",
            explains=_explained(findings),
        )
    ]


def fragmentation(analysis: Analysis, findings: Sequence[Finding]) -> list[Risk]:
    """One risk when the allocator holds far more than tensors ever took, and that brings it to the limit."""
    explained = _explained(findings)
    found = [
        one
        for one in _peaks(analysis)
        if one.peak.reserved_bytes is not None
        and one.peak.reserved_bytes > MEMORY.fragmented * one.peak.allocated_bytes
        and (one.peak.retries or explained or one.peak.reserved_bytes >= MEMORY.held * one.limit.bytes)
    ]
    if not found:
        return []
    worst = max(found, key=lambda one: (one.ratio, -(one.peak.rank or 0)))
    peak, limit = worst.peak, worst.limit
    return [
        Risk(
            id=finding_id(FRAGMENTED_RULE, Place(peak.device, None)),
            rule=FRAGMENTED_RULE,
            category="memory",
            title=f"Memory of {peak.device} is fragmented: {gib(peak.reserved_bytes or 0)} held, "
            f"{worst.ratio:.1f} times of what tensors took at their peak",
            severity="warning",
            confidence=_confidence(peak),
            where=at_peak(analysis, peak.device),
            ranks=_ranks(found),
            evidence=(*_peak_evidence(peak, limit), *_limit_evidence(peak, limit), *_fragments(analysis, peak.device)),
            fix="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; keep inputs to few different sizes (pad to "
            "buckets); allocate what lives long before the loop",
            caveat="Peaks of both are compared, whenever they were: an evaluation or cuDNN's search for algorithms may "
            "have held that much for a moment.",
            learn=LEARN,
            try_=(EXPANDABLE,),
            falsified_by="With expandable segments as much is held",
            explains=explained,
        )
    ]


class _Peak(Struct, frozen=True):
    """A peak whose limit is known."""

    peak: MemoryPeak
    limit: MemoryLimit

    @property
    def share(self) -> float:
        """Of the limit, what tensors took."""
        return self.peak.allocated_bytes / self.limit.bytes

    @property
    def ratio(self) -> float:
        return (self.peak.reserved_bytes or 0) / max(1, self.peak.allocated_bytes)

    @property
    def failed(self) -> bool:
        """The allocator met the limit."""
        return bool(self.peak.retries or self.peak.out_of_memory)


def _peaks(analysis: Analysis) -> list[_Peak]:
    peaks = analysis.memory_losses.peaks if analysis.memory_losses is not None else ()
    return [_Peak(one, one.limit) for one in peaks if one.limit is not None and one.limit.bytes > 0]


def _ranks(found: Sequence[_Peak]) -> tuple[int, ...]:
    return tuple(sorted({one.peak.rank for one in found if one.peak.rank is not None}))


def _explained(findings: Sequence[Finding]) -> tuple[str, ...]:
    return tuple(finding.id for finding in findings if finding.rule in _ALLOCATOR_LOSSES)


def _confidence(peak: MemoryPeak) -> str:
    """A trace sees a few steps, and neither fraction nor others."""
    return "high" if peak.retries is not None else "medium"


def _of(limit: MemoryLimit) -> str:
    """What sets the limit, in words."""
    if limit.reason == "fraction" and limit.fraction is not None:
        return f"that the fraction of {limit.fraction:g} leaves to this process"
    if limit.reason == "others" and limit.others_bytes is not None:
        return f"that others leave, who hold {gib(limit.others_bytes)}"
    return "of its slice of the GPU" if limit.reason == "slice" else "of the device"


def _more_room(limit: MemoryLimit) -> str:
    if limit.reason == "fraction":
        at = f" ({limit.place.file.rsplit('/', 1)[-1]}:{limit.place.line})" if limit.place is not None else ""
        return f"; or raise the fraction of torch.cuda.set_per_process_memory_fraction{at}"
    if limit.reason == "others":
        return "; or end the other processes on the device (nvidia-smi lists them)"
    return "; or take a larger slice of the GPU" if limit.reason == "slice" else ""


def _peak_evidence(peak: MemoryPeak, limit: MemoryLimit) -> tuple[Evidence, ...]:
    rows = [
        Evidence("tensors at the peak", peak.allocated_bytes, "bytes", peak.source),
        Evidence("held by the allocator at most", peak.reserved_bytes, "bytes", peak.source),
        Evidence("limit of this process", limit.bytes, "bytes", peak.source),
        Evidence("retries of the allocator", peak.retries, "retries", peak.source),
        Evidence("allocations that failed", peak.out_of_memory, "failures", peak.source),
    ]
    return tuple(row for row in rows if row.value is not None and (row.unit == "bytes" or row.value))


def _limit_evidence(peak: MemoryPeak, limit: MemoryLimit) -> tuple[Evidence, ...]:
    rows = [
        Evidence("memory of the device", limit.total_bytes, "bytes", peak.source),
        Evidence("in use by others and the driver", limit.others_bytes, "bytes", peak.source),
        Evidence(
            "fraction this process may use", limit.fraction if (limit.fraction or 1) < 1 else None, "share", peak.source
        ),
    ]
    return tuple(row for row in rows if row.value is not None and row.value != limit.bytes)


def _fragments(analysis: Analysis, device: str) -> tuple[Evidence, ...]:
    """What a snapshot of the allocator says of gaps between blocks in use."""
    view = analysis.views.memory if analysis.views is not None else None
    states = view.states if view is not None else ()
    return tuple(
        Evidence("gaps that empty_cache() cannot give back", state.fragmented_bytes, "bytes", state.worker)
        for state in states
        if state.device == device and state.fragmented_bytes
    )


def at_peak(analysis: Analysis, device: str) -> tuple[Place, ...]:
    """The lines whose allocations stood at the device's peak, where a trace or snapshot tells them."""
    view = analysis.views.memory if analysis.views is not None else None
    lines = [line for line in (view.lines if view is not None else ()) if line.device == device and line.at_peak_bytes]
    worker = (lines[0].worker, lines[0].span, lines[0].source) if lines else None
    own = [line for line in lines if (line.worker, line.span, line.source) == worker]
    total = sum(line.at_peak_bytes or 0 for line in own)
    return tuple(
        Place(line.place.file, line.place.line, line.place.function, (line.at_peak_bytes or 0) / total)
        for line in own
        if line.place is not None
    )[: MEMORY.lines_shown]


def gib(size: float) -> str:
    """`1.25 GiB` or `38 MiB`."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
