"""Memory of the host that is mapped, faulted in and given back in every step."""

from __future__ import annotations

from stepscope.diagnose.common import clip_share, finding_id, lowest, severity, steps_confidence, steps_source
from stepscope.diagnose.common import train_steps as of_training
from stepscope.diagnose.thresholds import PAGE_FAULTS
from stepscope.model import Analysis, Evidence, Finding, Try
from stepscope.model.machine import PageFaultFacts

RULE = "memory.page_faults"
LEARN = "https://man7.org/linux/man-pages/man3/mallopt.3.html"
KEEP, KEEP_ALL = Try("host.allocator", "keep"), Try("host.allocator", "keep_all")
HUGE = Try("host.allocator", "huge_pages")
LARGEST_THRESHOLD_BYTES = 33_554_432  # that glibc takes; see docs/knobs.md
_TRIM = "MALLOC_TRIM_THRESHOLD_=4294967296"
_BELOW, _WHATEVER = f"MALLOC_MMAP_THRESHOLD_={LARGEST_THRESHOLD_BYTES} {_TRIM}", f"MALLOC_MMAP_MAX_=0 {_TRIM}"
_OTHERS = ("jemalloc", "tcmalloc", "mimalloc")


def page_faults(analysis: Analysis) -> list[Finding]:
    """One finding when the faults of steady steps, at what one costs on this machine, take more than the floor."""
    train = of_training(analysis)
    facts = analysis.machine.page_faults if analysis.machine is not None else None
    if train is None or facts is None or facts.cost_ms_per_step is None or facts.at_most_ms_per_step is None:
        return []
    share = clip_share(facts.cost_ms_per_step, train.mean_ms)
    if share < PAGE_FAULTS.floor or facts.minor_per_step < PAGE_FAULTS.faults_per_step:
        return []
    fix, tries = _fix(facts)
    megabytes = facts.minor_per_step * (1.0 - (facts.kept_share or 0.0)) * facts.page_bytes / 1e6
    return [
        Finding(
            id=finding_id(RULE, None),
            rule=RULE,
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
            evidence=_evidence(facts, steps_source(train)),
            fix=fix,
            caveat="The process keeps the peak of its memory until it ends. A fault was timed after the run, on a "
            "machine that may have been less busy; the ceiling counts all faults one after another.",
            learn=LEARN,
            try_=tries,
            falsified_by="With the allocator told to keep memory, minor_faults of the steps fall and the mean step "
            "does not get shorter",
        )
    ]


def _fix(facts: PageFaultFacts) -> tuple[str, tuple[Try, ...]]:
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


def _evidence(facts: PageFaultFacts, source: str) -> tuple[Evidence, ...]:
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
