"""Memory: what calls and retries of the allocator and page faults cost, and the risks of a full or growing one.

Growth is told with the lines whose allocations outlive their step; page faults are memory of the host that is mapped,
faulted in and given back in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from stepscope.diagnose.device import ProfiledLoss, loss_rule, made_for_copies
from stepscope.diagnose.needless_work import UPDATED, growing, unfused_optimizer
from stepscope.diagnose.rule import (
    CAUSES,
    ON_DEVICE,
    REPORT_FLOOR,
    STEPS,
    Claim,
    Known,
    Need,
    Thresholds,
    at,
    clip_share,
    figure,
    ms,
    risk_rule,
    rule,
    shown,
    steps_source,
)
from stepscope.model import Analysis, Evidence, Finding, Place, Risk, Try
from stepscope.model.counted import short, things
from stepscope.model.device_losses import ALLOCATOR
from stepscope.model.machine import PageFaultFacts
from stepscope.model.memory import MemoryGrowth, MemoryLimit, MemoryPeak


class MEMORY(Thresholds):
    """When memory costs, or may end a run. How growth is told from noise stands in `analyze/memory_losses`."""

    near: float = 0.92  # of the limit, in tensors at the peak; TraceML warns there
    full: float = 0.97  # TraceML calls it critical
    fragmented: float = 2.0  # held by what tensors took, both at their peaks; TraceML's
    held: float = 0.8  # of the limit: a process far below it may hold what it likes; chosen, untuned
    grown_bytes: int = 64 << 20  # of the host: one arena of glibc's allocator, which may fill for reasons of its own
    grown_device_bytes: int = 16 << 20  # torch counts exactly; a smaller sum may be one new shape; chosen, untuned
    confirmed_bytes: int = 1 << 30  # where no limit is known; TraceML's to call growth confirmed
    traced_bytes: int = 1 << 20  # per step, seen in a trace alone: as much in a thousand steps
    horizon_s: float = 86_400  # few jobs run longer than some days, and a slower growth than full in one is no haste
    soon_s: float = 3_600
    readings_for_high: int = 30
    traced_steps: int = 6  # levels that rise six times in a row do so by chance once in 720 traces
    lines_shown: int = 3


class PAGE_FAULTS(Thresholds):
    faults_per_step: float = 256.0  # 1 MiB of pages: fewer are Python's and torch's own small change; chosen, untuned


NAMED_STEPS = Need("steps named in the trace", lambda a: any(one.has_steps for one in a.device_losses))
READINGS = Need(
    "readings of the device's memory in the journal",
    lambda a: a.memory_losses is not None and a.memory_losses.device_readings,
)
FAULTS = Need("page faults of steady steps", lambda a: a.machine.page_faults)
FAULT_COST = Need(
    "what a page fault costs on the machine, measured when the run ended",
    lambda a: a.machine.page_faults is not None and a.machine.page_faults.cost_ms_per_step is not None,
)
GROWTH_SEEN = Need(
    "ten readings of memory between training steps, or a trace with allocations over three of them",
    lambda a: a.memory_losses is not None and (a.memory_losses.logged or a.memory_losses.traced),
)
PEAKS = Need(
    "readings of the device's memory in the journal, or a trace or snapshot that tells its peak",
    lambda a: a.memory_losses.peaks if a.memory_losses is not None else (),
)
DEVICE = Need("training on a device", lambda a: ON_DEVICE.present(a) or PEAKS.present(a), quiet=True)
LEARN = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
EXPANDABLE = Try("allocator.conf", "expandable_segments:True")
_LESS = (
    "hold less of it at the peak: smaller batches with gradient accumulation, activation checkpointing, mixed "
    "precision, gradients set to None"
)


@loss_rule("memory.allocator_in_steps", ALLOCATOR, NAMED_STEPS, learn=LEARN)
def allocator_in_steps(seen: ProfiledLoss) -> Iterator[Claim]:
    if not seen.losses.has_steps:
        return
    emptied_ns = seen.detail("emptied_ns")
    emptied = emptied_ns >= CAUSES.part * seen.loss.ns_per_step
    sizes = [gpu.memory_bytes for gpu in seen.losses.gpus if gpu.memory_bytes]
    room = f" of its {min(sizes) / 2**30:.0f} GiB" if sizes else ""
    retried = " Freeing inside steps means it gave blocks back to fit a new one: it is at its limit"
    calls = " and ".join(seen.names(2)) or "calls of the allocator"
    yield seen.claim(
        title=f"torch.cuda.empty_cache() in the steps leaves the device idle for {seen.cost_ms:.1f} ms per step: "
        f"what it gives back the next step gets anew, by {calls}{seen.at}"
        if emptied
        else f"{calls} inside the steps leave the device idle for {seen.cost_ms:.1f} ms per step: the caching "
        f"allocator does not find a block{seen.at}",
        evidence=(
            seen.ms("device idle in calls of the allocator", seen.loss.ns_per_step),
            seen.ms("of it in what empty_cache() frees, and in getting memory later", emptied_ns or None),
            seen.figure("such calls per step", round(seen.loss.calls_per_step, 2), "calls"),
            *seen.parts("idle time in {}"),
        ),
        fix=f"Leave torch.cuda.empty_cache() out of the loop{seen.at}: blocks that tensors free are used again without "
        "it. Where another phase needs other sizes, call it once between the phases"
        if emptied
        else f"Leave the allocator more room{room}: a smaller peak, inputs of few different sizes (pad to buckets), "
        "no torch.cuda.empty_cache() in the loop, and PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        f"{retried if seen.detail('freed_ns') > 0 else ''}",
        caveat="Where other processes share the device, they get less of its memory."
        if emptied
        else "The first steps of a process always get memory this way: later ones should not.",
        falsified_by="Without empty_cache() as many such calls run inside the steps, or the mean step does not get "
        "shorter"
        if emptied
        else "With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True as many such calls run inside the steps, or the "
        "mean step does not get shorter",
        tries=() if emptied else (EXPANDABLE,),
    )


@rule("memory.allocator_retries", STEPS, ON_DEVICE, READINGS, learn=LEARN)
def allocator_retries(analysis: Analysis) -> Iterator[Claim]:
    losses, train = analysis.memory_losses, STEPS.of(analysis)
    retries = losses.retries if losses is not None else None
    if retries is None or not retries.lost_ms_per_step or allocator_in_steps.findings(analysis):
        return  # a trace that holds the allocator's calls tells the same loss more exactly
    struck = retries.steps_struck / retries.steps
    ceiling = ((retries.struck_ms or 0.0) - (retries.usual_ms or 0.0)) * struck
    source = "events.jsonl and steps.jsonl"
    yield Claim(
        title=f"{retries.device} runs full: its allocator gave its cache back and tried again {retries.retries} "
        f"times in {retries.steps} steps, which are longer there",
        steps=train,
        cost_ms=clip_share(retries.lost_ms_per_step, retries.total_ms_per_step) * train.mean_ms,
        ceiling_ms=clip_share(ceiling, retries.total_ms_per_step) * train.mean_ms,
        levels=("medium",),
        where=at_peak(analysis, retries.device),
        key=None,
        ranks=() if retries.rank is None else (retries.rank,),
        evidence=(
            Evidence("retries of the allocator", retries.retries, "retries", "events.jsonl, between steady steps"),
            ms("mean step near a retry", retries.struck_ms or 0.0, source),
            ms("median step without", retries.usual_ms or 0.0, source),
            figure("steps near a retry", struck, "share", source),
        ),
        fix=f"Leave the allocator room on {retries.device}: {_LESS}; inputs of few different sizes (pad to "
        "buckets); and PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        caveat="Retries are counted between readings a second or more apart: all steps between two readings count "
        "as struck. Inputs that are larger now and then make steps longer and need more memory, without a loss.",
        tries=(EXPANDABLE,),
        falsified_by="With a batch small enough for no retry, the time per sample is the same",
    )


_TRIM = "MALLOC_TRIM_THRESHOLD_=4294967296"
LARGEST_THRESHOLD_BYTES = 33_554_432  # that glibc takes; see docs/knobs.md
_BELOW, _WHATEVER = f"MALLOC_MMAP_THRESHOLD_={LARGEST_THRESHOLD_BYTES} {_TRIM}", f"MALLOC_MMAP_MAX_=0 {_TRIM}"
_OTHERS = {  # allocators other than glibc's: how they are told to keep memory
    "jemalloc": "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1",
    "tcmalloc": "TCMALLOC_RELEASE_RATE=0",
    "mimalloc": "its purging off",
}


@rule("memory.page_faults", STEPS, FAULTS, FAULT_COST, learn="https://man7.org/linux/man-pages/man3/mallopt.3.html")
def page_faults(analysis: Analysis) -> Iterator[Claim]:
    train, facts = STEPS.of(analysis), FAULTS.of(analysis)
    if facts.cost_ms_per_step is None or facts.at_most_ms_per_step is None:
        return
    share = clip_share(facts.cost_ms_per_step, train.mean_ms)
    if share < REPORT_FLOOR or facts.minor_per_step < PAGE_FAULTS.faults_per_step:
        return
    fix, tries = _faults_fix(facts)
    megabytes = facts.minor_per_step * (1.0 - (facts.kept_share or 0.0)) * facts.page_bytes / 1e6
    measured = "manifest.json, measured on this machine after the run"
    steps, threads = things(facts.steps, "step"), things(facts.threads, "thread")
    settings = " ".join(f"{name}={value}" for name, value in facts.settings.items())
    allocator = " ".join(part for part in (facts.preloaded or facts.libc or "unknown", settings) if part)
    huge = facts.huge_pages
    # where tensors of as many bytes are made to be copied, their pages are what is mapped
    faulted = facts.minor_per_step * facts.page_bytes
    makers = [one for one in made_for_copies(analysis) if one.detail("copied_bytes") >= CAUSES.part * faulted]
    where = makers[0].where if makers else ()
    # what an optimizer makes that is told goes with it
    parts = [run.made_by_updates or 0.0 for run in (analysis.passes.runs if analysis.passes is not None else ())]
    updating = max(parts, default=0.0) if UPDATED.present(analysis) and unfused_optimizer.findings(analysis) else 0.0
    if growing(analysis):  # as does what a tensor that grows takes
        parts = [run.made_by_growing or 0.0 for run in (analysis.passes.runs if analysis.passes is not None else ())]
        updating = min(1.0, updating + max(*parts, facts.risen_share))
    yield Claim(
        title=f"{facts.minor_per_step:,.0f} page faults per step take {short(facts.cost_ms_per_step)} ms: "
        f"{megabytes:,.0f} MB are given back and mapped anew in every step, {share:.0%} of it{at(*where)}",
        steps=train,
        where=where,
        key=None,
        cost_ms=facts.cost_ms_per_step * (1.0 - updating),
        ceiling_ms=facts.at_most_ms_per_step,
        levels=("medium",),
        evidence=(
            figure("page faults per step", facts.minor_per_step, "faults", f"{steps_source(train)}, {steps}", 1),
            Evidence("a fault of one thread alone", facts.ns_alone or 0.0, "ns", measured),
            Evidence(f"a fault, with {threads} at once", facts.ns_beside or 0.0, "ns", measured),
            Evidence("a page given back", facts.ns_returned or 0.0, "ns", measured),
            figure("faults of the training thread itself", facts.main_share, "share", "system.jsonl", 4),
            *(
                (figure("the optimizer's part, not in the cost", updating, "share", "profiler window", 4),)
                if updating
                else ()
            ),
            Evidence("allocator", allocator, "", "manifest.json"),
            *(() if huge is None else (Evidence("transparent huge pages", huge, "", "manifest.json"),)),
        ),
        fix=fix,
        caveat="The process keeps the peak of its memory until it ends. A fault was timed after the run, on a "
        "machine that may have been less busy; the ceiling counts all faults one after another.",
        tries=tries,
        falsified_by="With the allocator told to keep memory, minor_faults of the steps fall and the mean step "
        "does not get shorter",
    )


def _faults_fix(facts: PageFaultFacts) -> tuple[str, tuple[Try, ...]]:
    """What to set, and the knobs that test it: of the allocator in use, as far as it is not set already."""
    other = next((name for name in _OTHERS if name in (facts.preloaded or "")), None)
    tries = [Try("host.allocator", library) for library in facts.installed]
    huge = []
    if facts.huge_pages in ("madvise", "always") and "THP_MEM_ALLOC_ENABLE" not in facts.settings:
        huge.append(Try("host.allocator", "huge_pages"))
    if other is not None:
        return f"{other} gives memory back; start the command with {_OTHERS[other]}", tuple(huge)
    if facts.libc is None or not facts.libc.startswith("glibc"):
        return "Load an allocator that keeps freed memory, such as jemalloc, by LD_PRELOAD", tuple(tries)
    kept = "MALLOC_MMAP_THRESHOLD_" in facts.settings or facts.settings.get("MALLOC_MMAP_MAX_") == "0"
    if kept and "MALLOC_TRIM_THRESHOLD_" in facts.settings:
        words = "glibc keeps freed memory already: write results into tensors that are kept (out=, in-place operators)"
        return words + ("; or ask for huge pages, of which one fault maps 2 MiB" if huge else ""), (*tries, *huge)
    above = facts.largest_bytes is not None and facts.largest_bytes > LARGEST_THRESHOLD_BYTES
    words = f"Have glibc keep freed memory: start the command with {_WHATEVER if above else _BELOW} in its environment"
    if above:
        size = (facts.largest_bytes or 0) / (1 << 20)
        words += f" (a tensor of {size:.0f} MiB was seen, above the largest threshold that glibc takes, 32 MiB)"
    else:
        words += f"; where tensors are larger than 32 MiB, with {_WHATEVER}"
    if facts.installed:
        words += f"; or load {' or '.join(facts.installed)} by LD_PRELOAD"
    below, whatever = Try("host.allocator", "keep"), Try("host.allocator", "keep_all")
    return words, (*((whatever, below) if above else (below, whatever)), *tries, *huge)


def _peaks(analysis: Analysis) -> list[tuple[MemoryPeak, MemoryLimit, float]]:
    """(peak, its limit, the part of that which tensors took) where the limit is known."""
    known = [(one, one.limit) for one in PEAKS.of(analysis) if one.limit is not None and one.limit.bytes > 0]
    return [(peak, limit, peak.allocated_bytes / limit.bytes) for peak, limit in known]


def _confidence(peak: MemoryPeak) -> str:
    """A trace sees a few steps, and neither fraction nor others."""
    return "high" if peak.retries is not None else "medium"


@risk_rule("memory.near_limit", DEVICE, PEAKS)
def near_limit(analysis: Analysis, findings: Sequence[Finding]) -> Iterator[Risk]:
    """One risk: of the device that came nearest the limit that holds for its process, or ran out of memory."""
    near = [
        (bool(peak.retries or peak.out_of_memory), share, -(peak.rank or 0), peak, limit)
        for peak, limit, share in _peaks(analysis)
        if peak.retries or peak.out_of_memory or share >= MEMORY.near
    ]
    if not near:
        return
    _, share, _, peak, limit = max(near, key=lambda one: one[:3])
    held = f"{gib(peak.allocated_bytes)} of {gib(limit.bytes)}"
    tried = ", and its allocator had to give its cache back" if peak.retries else ""
    ran_out = ", and an allocation has failed for want of memory" if peak.out_of_memory else ""
    by, more_room = "of the device", ""
    if limit.reason == "fraction":
        by = f"that the fraction of {limit.fraction or 0:g} leaves to this process"
        more_room = f"; or raise the fraction of torch.cuda.set_per_process_memory_fraction{at(limit.place)}"
    elif limit.reason == "others":
        by = f"that others leave, who hold {gib(limit.others_bytes or 0)}"
        more_room = "; or end the other processes on the device (nvidia-smi lists them)"
    elif limit.reason == "slice":
        by, more_room = "of its slice of the GPU", "; or take a larger slice of the GPU"
    yield near_limit.risk(
        peak.device,
        learn=LEARN,
        title=f"{peak.device} is nearly full: tensors take {held} at the peak, all {by}{tried}{ran_out}",
        severity="critical" if share >= MEMORY.full or peak.out_of_memory else "warning",
        confidence=_confidence(peak),
        where=at_peak(analysis, peak.device),
        ranks=_ranks([one[3] for one in near]),
        evidence=tuple(_peak_evidence(peak, limit)),
        fix=f"To be safe, {_LESS}{more_room}",
        caveat="Costs no time as long as nothing more is needed: a longer sequence, an evaluation or another "
        "process may end the run with an out-of-memory error.",
        try_=(EXPANDABLE,) if peak.retries else (),
        falsified_by="A batch a tenth larger than the largest one runs without a retry of the allocator",
        explains=_allocator_losses(findings),
    )


@risk_rule("memory.fragmentation", DEVICE, PEAKS)
def fragmentation(analysis: Analysis, findings: Sequence[Finding]) -> Iterator[Risk]:
    """One risk when the allocator holds far more than tensors ever took, and that brings it to the limit."""
    explained = _allocator_losses(findings)
    found = [
        (held / max(1, peak.allocated_bytes), -(peak.rank or 0), held, peak, limit)
        for peak, limit, _ in _peaks(analysis)
        if (held := peak.reserved_bytes or 0) > MEMORY.fragmented * peak.allocated_bytes
        and (peak.retries or explained or held >= MEMORY.held * limit.bytes)
    ]
    if not found:
        return
    ratio, _, held, peak, limit = max(found, key=lambda one: one[:2])
    view = analysis.views.memory if analysis.views is not None else None
    gaps = tuple(
        Evidence("gaps that empty_cache() cannot give back", state.fragmented_bytes, "bytes", state.worker)
        for state in (view.states if view is not None else ())
        if state.device == peak.device and state.fragmented_bytes
    )
    yield fragmentation.risk(
        peak.device,
        learn=LEARN,
        title=f"Memory of {peak.device} is fragmented: {gib(held)} held, {ratio:.1f} times of what tensors took at "
        "their peak",
        confidence=_confidence(peak),
        where=at_peak(analysis, peak.device),
        ranks=_ranks([one[3] for one in found]),
        evidence=(*_peak_evidence(peak, limit), *gaps),
        fix="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; keep inputs to few different sizes (pad to "
        "buckets); allocate what lives long before the loop",
        caveat="Peaks of both are compared, whenever they were: an evaluation or cuDNN's search for algorithms may "
        "have held that much for a moment.",
        try_=(EXPANDABLE,),
        falsified_by="With expandable segments as much is held",
        explains=explained,
    )


def _ranks(found: Sequence[MemoryPeak | MemoryGrowth]) -> tuple[int, ...]:
    return tuple(sorted({one.rank for one in found if one.rank is not None}))


def _allocator_losses(findings: Sequence[Finding]) -> tuple[str, ...]:
    rules = (allocator_retries.name, allocator_in_steps.name)
    return tuple(finding.id for finding in findings if finding.rule in rules)


def _peak_evidence(peak: MemoryPeak, limit: MemoryLimit) -> Iterator[Known]:
    """Of the peak what is known and not nothing, of its limit what is not the limit itself."""
    for metric, value, unit in (
        ("tensors at the peak", peak.allocated_bytes, "bytes"),
        ("held by the allocator at most", peak.reserved_bytes, "bytes"),
        ("limit of this process", limit.bytes, "bytes"),
        ("retries of the allocator", peak.retries or None, "retries"),
        ("allocations that failed", peak.out_of_memory or None, "failures"),
        ("memory of the device", limit.total_bytes if limit.total_bytes != limit.bytes else None, "bytes"),
        ("in use by others and the driver", limit.others_bytes if limit.others_bytes != limit.bytes else None, "bytes"),
        ("fraction this process may use", limit.fraction if (limit.fraction or 1) < 1 else None, "share"),
    ):
        if value is not None:
            yield Evidence(metric, value, unit, peak.source)


def at_peak(analysis: Analysis, device: str) -> tuple[Place, ...]:
    """The lines whose allocations stood at the device's peak, where a trace or snapshot tells them."""
    view = analysis.views.memory if analysis.views is not None else None
    lines = [line for line in (view.lines if view is not None else ()) if line.device == device and line.at_peak_bytes]
    worker = (lines[0].worker, lines[0].span, lines[0].source) if lines else None
    own = [line for line in lines if (line.worker, line.span, line.source) == worker]
    total = sum(line.at_peak_bytes or 0 for line in own)
    return tuple(
        replace(line.place, share=(line.at_peak_bytes or 0) / total) for line in own if line.place is not None
    )[: MEMORY.lines_shown]


def gib(size: float) -> str:
    """`1.25 GiB` or `38 MiB`."""
    return f"{short(size / 2**30)} GiB" if size >= 2**30 else f"{short(size / 2**20)} MiB"


HOST = "cpu"
_SIZES = {"machine": "the machine's memory", "cgroup": "the memory limit of the cgroup"}
_BEHIND = {  # whether it is the host's: findings of the same run that growing memory is behind
    True: ("host.step_drift", "system.swapping_or_faults"),
    False: ("host.step_drift", allocator_retries.name, allocator_in_steps.name),
}


@risk_rule("memory.growth", GROWTH_SEEN)
def growth(analysis: Analysis, findings: Sequence[Finding]) -> Iterator[Risk]:
    """One risk for the host and one for the devices, each of the rank that is full first."""
    losses = analysis.memory_losses
    counted = [one for one in (losses.growth if losses is not None else ()) if _counts(one)]
    for on_host in (True, False):
        own = [one for one in counted if (one.device == HOST) is on_host]
        if own:
            worst = min(own, key=lambda one: (_time_left(one), -one.bytes_per_step, one.rank or 0))
            yield _growth_risk(worst, _ranks(own), findings)


def _time_left(one: MemoryGrowth) -> float:
    return one.seconds_left if one.seconds_left is not None else float("inf")


def _counts(one: MemoryGrowth) -> bool:
    """Whether it is more than noise, and may end a job."""
    grown = one.late_bytes - one.early_bytes
    least = MEMORY.grown_bytes if one.device == HOST else MEMORY.grown_device_bytes
    if one.bytes_per_step < MEMORY.traced_bytes if one.traced else grown < least:
        return False
    if one.seconds_left is not None:
        return one.seconds_left <= MEMORY.horizon_s
    return one.traced or grown >= MEMORY.confirmed_bytes


def _growth_risk(one: MemoryGrowth, ranks: tuple[int, ...], findings: Sequence[Finding]) -> Risk:
    on_host = one.device == HOST
    total = max(sum(line.bytes_per_step for line in one.lines), one.bytes_per_step, 1.0)
    where = tuple(replace(line.place, share=line.bytes_per_step / total) for line in one.lines[: MEMORY.lines_shown])
    of = "of the process" if on_host else f"of {one.device}"
    outlives = f": {shown(where[0])} allocates what outlives its step" if where else ""
    left = f", and is full in {_duration(one.seconds_left)} at this rate" if one.seconds_left is not None else ""
    enough = one.steps >= MEMORY.traced_steps if one.traced else one.points >= MEMORY.readings_for_high
    levels = ("low", "medium") if one.traced else ("medium", "high")
    snapshot = "" if on_host else ", or with a snapshot of the allocator"
    to_find = f"To have the lines named, record again with --window-memory{snapshot}"
    if where:
        to_find = f"Look for what keeps the tensors that {shown(where[0])} makes"
    source = f"{one.source}, {one.points} {'steps' if one.traced else 'readings'} over {_duration(one.seconds)}"
    evidence = [
        Evidence("growth per step", round(one.bytes_per_step), "bytes", source),
        Evidence(f"grown over {things(one.steps, 'step')}", round(one.late_bytes - one.early_bytes), "bytes", source),
    ]
    if one.limit is not None:
        what = _SIZES.get(one.limit.reason, "limit of this process")
        evidence.append(Evidence(what, one.limit.bytes, "bytes", "manifest.json" if on_host else one.source))
    if one.steps_left is not None:
        evidence.append(Evidence("steps until it is full, at most", round(one.steps_left), "steps", source))
    for line in one.lines[: MEMORY.lines_shown]:
        by = f" by {line.operator}" if line.operator else ""
        metric = f"still there a step later, allocated at {shown(line.place)}{by}"
        evidence.append(Evidence(metric, round(line.bytes_per_step), "bytes", f"trace {one.lines_source}"))
    return growth.risk(
        where[0] if where else one.device,
        title=f"Memory {of} grows by {gib(one.bytes_per_step)} in every step{left}{outlives}",
        severity="critical" if _time_left(one) <= MEMORY.soon_s else "warning",
        confidence=levels[enough],
        where=where,
        ranks=ranks,
        evidence=tuple(evidence),
        fix="Let go of what a step made when it ends: append loss.item() or loss.detach() to lists and running sums, "
        "not the loss with its graph; move kept outputs off the device or reduce them; empty lists and caches. "
        f"{to_find}",
        caveat="A cache that fills while the first epoch runs looks the same, and ends with the epoch."
        + (" A trace shows a few steps: whether the growth goes on is not seen." if one.traced else ""),
        learn="https://docs.pytorch.org/docs/stable/notes/faq.html",
        falsified_by="In a run twice as long, memory does not grow further",
        explains=tuple(finding.id for finding in findings if finding.rule in _BEHIND[on_host]),
    )


def _duration(seconds: float) -> str:
    """`40 s`, `12 min`, `5.3 h`."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6_000 else f"{seconds / 3600:.2g} h"


RISKS = (growth, near_limit, fragmentation)
