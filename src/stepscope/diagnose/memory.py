"""Memory: what retries of the allocator and page faults cost, and the risks of a full, fragmented or growing one.

Growth is told with the lines whose allocations outlive their step; page faults are memory of the host that is mapped,
faulted in and given back in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose import device_idle
from stepscope.diagnose.common import (
    clip_share,
    finding_id,
    lowest,
    severity,
    shown,
    steps_confidence,
    steps_source,
    train_steps,
)
from stepscope.diagnose.device_idle import ALLOCATOR_RULE
from stepscope.diagnose.thresholds import MEMORY, PAGE_FAULTS
from stepscope.model import Analysis, Evidence, Finding, Place, Risk, Try
from stepscope.model.machine import PageFaultFacts
from stepscope.model.memory import MemoryGrowth, MemoryLimit, MemoryPeak, RetryFacts

RETRIES_RULE = "memory.allocator_retries"
NEAR_RULE = "memory.near_limit"
FRAGMENTED_RULE = "memory.fragmentation"
LEARN = device_idle.LEARN_ALLOCATOR
EXPANDABLE = Try("allocator.conf", "expandable_segments:True")
# Losses that a full or fragmented device is behind.
_ALLOCATOR_LOSSES = (RETRIES_RULE, device_idle.ALLOCATOR_RULE)
_LESS = (
    "hold less of it at the peak: smaller batches with gradient accumulation, activation checkpointing, mixed "
    "precision, gradients set to None"
)


def allocator_retries(analysis: Analysis) -> list[Finding]:
    """One finding when steady steps with retries near them are longer than those without, by more than the floor."""
    losses, train = analysis.memory_losses, train_steps(analysis)
    retries = losses.retries if losses is not None else None
    if train is None or retries is None or not retries.lost_ms_per_step or device_idle.allocator_in_steps(analysis):
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


GROWTH_RULE = "memory.growth"
LEARN_GROWTH = "https://docs.pytorch.org/docs/stable/notes/faq.html"
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
        id=finding_id(GROWTH_RULE, where[0] if where else Place(one.device, None)),
        rule=GROWTH_RULE,
        category="memory",
        title=f"Memory {of} grows by {gib(one.bytes_per_step)} in every step{left}{at}",
        severity="critical" if soon else "warning",
        confidence=_growth_confidence(one),
        where=where,
        ranks=ranks,
        evidence=_growth_evidence(one),
        fix=_growth_fix(one, where),
        caveat="A cache that fills while the first epoch runs looks the same, and ends with the epoch."
        + (" A trace shows a few steps: whether the growth goes on is not seen." if one.traced else ""),
        learn=LEARN_GROWTH,
        falsified_by="In a run twice as long, memory does not grow further",
        explains=tuple(finding.id for finding in findings if finding.rule in _BEHIND[one.device == HOST]),
    )


def _growth_confidence(one: MemoryGrowth) -> str:
    if one.traced:
        return "medium" if one.steps >= MEMORY.traced_steps else "low"
    return "high" if one.points >= MEMORY.readings_for_high else "medium"


def _places(one: MemoryGrowth) -> tuple[Place, ...]:
    total = max(sum(line.bytes_per_step for line in one.lines), one.bytes_per_step, 1.0)
    return tuple(replace(line.place, share=line.bytes_per_step / total) for line in one.lines[: MEMORY.lines_shown])


def _growth_fix(one: MemoryGrowth, where: tuple[Place, ...]) -> str:
    advice = (
        "Let go of what a step made when it ends: append loss.item() or loss.detach() to lists and running sums, not "
        "the loss with its graph; move kept outputs off the device or reduce them; empty lists and caches"
    )
    if where:
        return f"{advice}. Look for what keeps the tensors that {shown(where[0])} makes"
    if one.device == HOST:
        return f"{advice}. To have the lines named, record again with --window-memory"
    return f"{advice}. To have the lines named, record again with --window-memory, or with a snapshot of the allocator"


def _growth_evidence(one: MemoryGrowth) -> tuple[Evidence, ...]:
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


FAULTS_RULE = "memory.page_faults"
LEARN_FAULTS = "https://man7.org/linux/man-pages/man3/mallopt.3.html"
KEEP, KEEP_ALL = Try("host.allocator", "keep"), Try("host.allocator", "keep_all")
HUGE = Try("host.allocator", "huge_pages")
LARGEST_THRESHOLD_BYTES = 33_554_432  # that glibc takes; see docs/knobs.md
_TRIM = "MALLOC_TRIM_THRESHOLD_=4294967296"
_BELOW, _WHATEVER = f"MALLOC_MMAP_THRESHOLD_={LARGEST_THRESHOLD_BYTES} {_TRIM}", f"MALLOC_MMAP_MAX_=0 {_TRIM}"
_OTHERS = ("jemalloc", "tcmalloc", "mimalloc")


def page_faults(analysis: Analysis) -> list[Finding]:
    """One finding when the faults of steady steps, at what one costs on this machine, take more than the floor."""
    train = train_steps(analysis)
    facts = analysis.machine.page_faults if analysis.machine is not None else None
    if train is None or facts is None or facts.cost_ms_per_step is None or facts.at_most_ms_per_step is None:
        return []
    share = clip_share(facts.cost_ms_per_step, train.mean_ms)
    if share < PAGE_FAULTS.floor or facts.minor_per_step < PAGE_FAULTS.faults_per_step:
        return []
    fix, tries = _faults_fix(facts)
    megabytes = facts.minor_per_step * (1.0 - (facts.kept_share or 0.0)) * facts.page_bytes / 1e6
    return [
        Finding(
            id=finding_id(FAULTS_RULE, None),
            rule=FAULTS_RULE,
            category="memory",
            title=f"{facts.minor_per_step:,.0f} page faults per step take {facts.cost_ms_per_step:.3g} ms: "
            f"{megabytes:,.0f} MB are given back and mapped anew in every step, {share:.0%} of it",
            severity=severity(share),
            confidence=lowest(["medium", steps_confidence(train)]),
            cost_ms_per_step=facts.cost_ms_per_step,
            share=share,
            gain_ceiling=max(share, clip_share(facts.at_most_ms_per_step, train.mean_ms)),
            where=(),
            ranks=train.ranks,
            evidence=_faults_evidence(facts, steps_source(train)),
            fix=fix,
            caveat="The process keeps the peak of its memory until it ends. A fault was timed after the run, on a "
            "machine that may have been less busy; the ceiling counts all faults one after another.",
            learn=LEARN_FAULTS,
            try_=tries,
            falsified_by="With the allocator told to keep memory, minor_faults of the steps fall and the mean step "
            "does not get shorter",
        )
    ]


def _faults_fix(facts: PageFaultFacts) -> tuple[str, tuple[Try, ...]]:
    """What to set, and the knobs that test it: of the allocator in use, as far as it is not set already."""
    other = next((name for name in _OTHERS if name in (facts.preloaded or "")), None)
    tries = [Try("host.allocator", library) for library in facts.installed]
    huge = [HUGE] if facts.huge_pages in ("madvise", "always") and "THP_MEM_ALLOC_ENABLE" not in facts.settings else []
    if other is not None:
        decay = {"jemalloc": "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1", "tcmalloc": "TCMALLOC_RELEASE_RATE=0"}
        words = f"{other} gives memory back; start the command with {decay.get(other, 'its purging off')}"
        return words, tuple(huge)
    if facts.libc is None or not facts.libc.startswith("glibc"):
        return "Load an allocator that keeps freed memory, such as jemalloc, by LD_PRELOAD", tuple(tries)
    kept = "MALLOC_MMAP_THRESHOLD_" in facts.settings or facts.settings.get("MALLOC_MMAP_MAX_") == "0"
    if kept and "MALLOC_TRIM_THRESHOLD_" in facts.settings:
        words = "glibc keeps freed memory already: write results into tensors that are kept (out=, in-place operators)"
        return words + ("; or ask for huge pages, of which one fault maps 2 MiB" if huge else ""), (*tries, *huge)
    above = facts.largest_bytes is not None and facts.largest_bytes > LARGEST_THRESHOLD_BYTES
    first, second = (KEEP_ALL, KEEP) if above else (KEEP, KEEP_ALL)
    words = f"Have glibc keep freed memory: start the command with {_WHATEVER if above else _BELOW} in its environment"
    if above:
        size = (facts.largest_bytes or 0) / (1 << 20)
        words += f" (a tensor of {size:.0f} MiB was seen, above the largest threshold that glibc takes, 32 MiB)"
    else:
        words += f"; where tensors are larger than 32 MiB, with {_WHATEVER}"
    if facts.installed:
        words += f"; or load {' or '.join(facts.installed)} by LD_PRELOAD"
    return words, (first, second, *tries, *huge)


def _faults_evidence(facts: PageFaultFacts, source: str) -> tuple[Evidence, ...]:
    measured = "manifest.json, measured on this machine after the run"
    found = [
        Evidence("page faults per step", round(facts.minor_per_step, 1), "faults", f"{source}, {facts.steps} steps"),
        Evidence("a fault of one thread alone", facts.ns_alone or 0.0, "ns", measured),
        Evidence(f"a fault, with {facts.threads} threads at once", facts.ns_beside or 0.0, "ns", measured),
        Evidence("a page given back", facts.ns_returned or 0.0, "ns", measured),
    ]
    if facts.main_share is not None:
        found.append(
            Evidence("faults of the training thread itself", round(facts.main_share, 4), "share", "system.jsonl")
        )
    settings = " ".join(f"{name}={value}" for name, value in facts.settings.items())
    allocator = " ".join(part for part in (facts.preloaded or facts.libc or "unknown", settings) if part)
    found.append(Evidence("allocator", allocator, "", "manifest.json"))
    if facts.huge_pages is not None:
        found.append(Evidence("transparent huge pages", facts.huge_pages, "", "manifest.json"))
    return tuple(found)
