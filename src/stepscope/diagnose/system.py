"""What the interpreter and the machine take of the step: garbage collections, memory, profilers. Cores: `cores`."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.diagnose import pipeline
from stepscope.diagnose.common import (
    ALL,
    clip_share,
    finding_id,
    lowest,
    severity,
    shown,
    steps_confidence,
    steps_source,
    train_steps,
)
from stepscope.diagnose.thresholds import MEMORY_PRESSURE, PAUSES, PROFILER
from stepscope.model import Analysis, Evidence, Finding, Place, StepFacts
from stepscope.model.machine import MemoryPressureFacts, PauseFacts, ProfilerFacts

GC_RULE = "system.garbage_collection"
THREADS_RULE = "system.threads_beyond_cores"
THROTTLED_RULE = "system.cpu_throttled"
OTHERS_RULE = "system.other_processes"
CHILDREN_RULE = "system.children_hold_cores"
MEMORY_RULE = "system.swapping_or_faults"
PROFILER_RULE = "system.profiler_overhead"
LEARN_GC = "https://docs.python.org/3/library/gc.html#gc.freeze"
LEARN_PRESSURE = "https://docs.kernel.org/accounting/psi.html"
LEARN_PROFILER = "https://pytorch.org/docs/stable/profiler.html#torch.profiler.schedule"


def device_doubt(analysis: Analysis) -> tuple[list[str], str]:
    """(levels of confidence, caveat) of time lost on the host of an accelerator: queued work may hide it."""
    device = next((device for device in analysis.devices if device != "cpu"), None)
    if device is None:
        return [], ""
    return ["low"], f" The {device} may be working meanwhile: then the gain is smaller, down to nothing."


def reported_pauses(analysis: Analysis) -> PauseFacts | None:
    """The collections, where they are worth a finding."""
    train, machine = train_steps(analysis), analysis.machine
    pauses = machine.pauses if machine is not None else None
    if train is None or pauses is None or pauses.count < PAUSES.count:
        return None
    return pauses if pauses.ms_per_step >= PAUSES.floor * train.mean_ms else None


def asked_for(analysis: Analysis, pauses: PauseFacts) -> Place | None:
    """The line at which nearly all of the time struck: automatic collections strike anywhere.

    A line that only leads to the training that a library does is none: below it anything may have struck.
    """
    entries = {fact.entry for fact in analysis.python or () if fact.entry is not None}
    top = pauses.lines[0] if pauses.lines else None
    one = top is not None and top.ms_per_step >= PAUSES.one_line * pauses.ms_per_step
    return top.place if one and top is not None and replace(top.place, share=None) not in entries else None


def garbage_collection(analysis: Analysis) -> list[Finding]:
    """One finding when collections inside steps take more than the floor."""
    train, pauses = train_steps(analysis), reported_pauses(analysis)
    if train is None or pauses is None:
        return []
    share = clip_share(pauses.ms_per_step, train.mean_ms)
    line = asked_for(analysis, pauses)
    at = f", at {shown(line)}" if line is not None else ""
    doubt, words = device_doubt(analysis)
    if line is not None:
        fix = f"If {shown(line)} calls gc.collect(), take the call out or make it once per epoch; else "
    else:
        fix = "Let the collector look at less: "
    fix += (
        "gc.freeze() after set-up keeps what lives anyway out of every collection, gc.set_threshold with a larger "
        "first number makes them rarer; objects without reference cycles need no collector at all"
    )
    return [
        Finding(
            id=finding_id(GC_RULE, line),
            rule=GC_RULE,
            category="system",
            title=f"Python's garbage collector stops {pauses.steps_struck} of {pauses.steps} steps for up to "
            f"{pauses.longest_ms:.3g} ms, {share:.0%} of the mean step{at}",
            severity=severity(share),
            confidence=lowest([steps_confidence(train), *doubt]),
            cost_ms_per_step=pauses.ms_per_step,
            share=share,
            gain_ceiling=max(share, clip_share(pipeline.without_main(analysis, pauses.ms_per_step), train.mean_ms)),
            where=tuple(
                replace(each.place, share=min(1.0, each.ms_per_step / pauses.ms_per_step))
                for each in pauses.lines[: PAUSES.lines_shown]
            ),
            ranks=train.ranks,
            evidence=_gc_evidence(train, pauses),
            fix=fix,
            caveat=f"Where cycles are made, memory grows until they are collected: watch it after the change.{words}",
            learn=LEARN_GC,
            falsified_by="With the collector switched off inside steps (gc.disable) the mean step does not get shorter",
        )
    ]


def _gc_evidence(train: StepFacts, pauses: PauseFacts) -> tuple[Evidence, ...]:
    source = f"events.jsonl, {pauses.count} collections in {pauses.steps} steady steps"
    found = [
        Evidence("collections per step", round(pauses.ms_per_step, 3), "ms", source),
        Evidence("full collections", pauses.full, "collections", source),
        Evidence("longest collection", round(pauses.longest_ms, 3), "ms", source),
        Evidence("mean steady step", round(train.mean_ms, 3), "ms", steps_source(train)),
    ]
    if pauses.collected is not None:
        found.append(Evidence("objects they freed", pauses.collected, "objects", source))
    return tuple(found)


# ------------------------------------------------------------------------------------------- memory, profilers


def swapping_or_faults(analysis: Analysis) -> list[Finding]:
    """One finding when page faults read the disk in every step and the kernel says that time was lost to it."""
    train, machine = train_steps(analysis), analysis.machine
    facts = machine.memory if machine is not None else None
    if train is None or facts is None or facts.stalled_pct is None:
        return []
    cost = facts.stalled_pct / 100.0 * train.mean_ms
    if cost < MEMORY_PRESSURE.floor * train.mean_ms or facts.major_faults_per_step < MEMORY_PRESSURE.faults_per_step:
        return []
    share = clip_share(cost, train.mean_ms)
    doubt, words = device_doubt(analysis)
    others = " The figure is the machine's: what others lack is in it." if facts.stalled_of == "machine" else ""
    levels = [steps_confidence(train), "low" if facts.stalled_of == "machine" else "medium", *doubt]
    return [
        Finding(
            id=finding_id(MEMORY_RULE, None),
            rule=MEMORY_RULE,
            category="system",
            title=f"Memory is short: pages come back from the disk {facts.major_faults_per_step:.3g} times per step, "
            f"up to {share:.0%} of it",
            severity=severity(share),
            confidence=lowest(levels),
            cost_ms_per_step=cost,
            share=share,
            gain_ceiling=share,
            where=(),
            ranks=train.ranks,
            evidence=_memory_evidence(facts),
            fix="Need less memory (fewer loader workers, a data set that is not copied into each of them, smaller "
            "caches) or ask for more; swap does not replace it",
            caveat=f"The time counts whenever any task stood still, so it is an upper bound.{others}{words}",
            learn=LEARN_PRESSURE,
            falsified_by="With enough memory the mean step does not get shorter",
        )
    ]


def _memory_evidence(facts: MemoryPressureFacts) -> tuple[Evidence, ...]:
    source = f"system.jsonl, {facts.seconds:.0f} s"
    found = [
        Evidence("page faults that read a disk, per step", round(facts.major_faults_per_step, 3), "faults", source),
        Evidence("time something stood still for memory", round(facts.stalled_pct or 0.0, 2), "%", source),
    ]
    if facts.rss_bytes is not None:
        found.append(Evidence("resident memory of a rank", facts.rss_bytes, "bytes", source))
    return tuple(found)


def profiler_overhead(analysis: Analysis) -> list[Finding]:
    """One finding when the script's own profiler makes its steps so much longer that the whole run notices."""
    train, machine = train_steps(analysis), analysis.machine
    facts = machine.profiler if machine is not None else None
    if train is None or facts is None or facts.inside < PROFILER.steps:
        return []
    if facts.lost_ms_per_step < PROFILER.floor * facts.total_ms_per_step:
        return []
    share = clip_share(facts.lost_ms_per_step, facts.total_ms_per_step)
    enough = facts.inside >= PROFILER.steps_for_high and facts.outside >= PROFILER.steps_for_high
    return [
        Finding(
            id=finding_id(PROFILER_RULE, None),
            rule=PROFILER_RULE,
            category="system",
            title=f"The script's own profiler makes {facts.inside} of {facts.steps} steps "
            f"{facts.inside_ms / facts.outside_ms:.2g} times as long, {share:.0%} of all step time",
            severity=severity(share),
            confidence=lowest([steps_confidence(train), "high" if enough else "medium"]),
            cost_ms_per_step=facts.lost_ms_per_step,
            share=share,
            gain_ceiling=share,
            basis=ALL,
            step_ms=facts.total_ms_per_step,
            where=(),
            ranks=train.ranks,
            evidence=_profiler_evidence(facts),
            fix="Profile a few steps only (torch.profiler.schedule with wait, active and repeat=1), without "
            "with_stack, profile_memory and record_shapes where they are not needed; leave it out of production runs",
            caveat="What its exports take between steps is not in this figure.",
            learn=LEARN_PROFILER,
            falsified_by="Without the profiler the run does not get shorter",
        )
    ]


def _profiler_evidence(facts: ProfilerFacts) -> tuple[Evidence, ...]:
    return (
        Evidence(
            "mean step under the profiler", round(facts.inside_ms, 3), "ms", f"{facts.inside} steps, {facts.source}"
        ),
        Evidence("mean step outside", round(facts.outside_ms, 3), "ms", f"{facts.outside} steady steps"),
        Evidence("mean of all steps", round(facts.total_ms_per_step, 3), "ms", f"{facts.steps} steps"),
    )
