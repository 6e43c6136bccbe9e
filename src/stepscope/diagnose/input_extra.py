"""The loader's rhythm: waits that come in waves, and workers started anew for every epoch."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.diagnose.common import (
    ALL,
    clip_share,
    finding_id,
    lowest,
    severity,
    steps_confidence,
    steps_source,
    train_steps,
)
from stepscope.diagnose.in_script import of_loader
from stepscope.diagnose.input import LEARN, in_waves, waiting
from stepscope.diagnose.system import device_doubt
from stepscope.diagnose.thresholds import EPOCHS
from stepscope.model import Analysis, Evidence, Finding, StepFacts, Try
from stepscope.model.machine import EpochFacts, WaveFacts

WAVES_RULE = "input.prefetch_waves"
FIRST_RULE = "input.first_batch"


def prefetch_waves(analysis: Analysis) -> list[Finding]:
    """The finding of the loader in other words, where one step of as many as there are workers holds the wait."""
    train, machine = train_steps(analysis), analysis.machine
    if train is None or machine is None or machine.waves is None or not in_waves(analysis):
        return []
    waves = machine.waves
    return [
        replace(
            finding,
            id=finding_id(WAVES_RULE, finding.where[0] if finding.where else None),
            rule=WAVES_RULE,
            title=f"One step in {waves.period} waits {waves.wave_wait_ms:.3g} ms for data: {waves.period} workers make "
            f"batches in step and cannot keep up, {finding.share:.0%} of the mean step",
            evidence=(*_wave_evidence(train, waves), *finding.evidence),
            caveat="The median step hides this loss, the mean shows it. More prefetching does not help while the "
            f"workers are busy all the time. {finding.caveat}",
        )
        for finding in waiting(analysis)
    ]


def first_batch(analysis: Analysis) -> list[Finding]:
    """One finding per loader whose workers are started for every epoch, at more than the floor of all step time."""
    train, machine = train_steps(analysis), analysis.machine
    if train is None or machine is None:
        return []
    return [
        _epoch_finding(analysis, train, fact)
        for fact in machine.epochs or ()
        if not fact.persistent and fact.lost_ms_per_step >= EPOCHS.floor * fact.total_ms_per_step
    ]


def _wave_evidence(train: StepFacts, waves: WaveFacts) -> tuple[Evidence, ...]:
    source = f"{steps_source(train)}, {waves.waves} waves"
    return (
        Evidence(f"data wait in one step of {waves.period}", round(waves.wave_wait_ms, 3), "ms", source),
        Evidence("data wait in the others", round(waves.other_wait_ms, 3), "ms", source),
        Evidence("part of the wait that lies in waves", round(waves.share, 4), "fraction", source),
        Evidence(f"distances between waves that are {waves.period} steps", round(waves.regular, 4), "fraction", source),
    )


def _epoch_finding(analysis: Analysis, train: StepFacts, fact: EpochFacts) -> Finding:
    share = clip_share(fact.lost_ms_per_step, fact.total_ms_per_step)
    workers = f"{fact.num_workers} workers" if fact.num_workers != 1 else "its worker"
    doubt, words = device_doubt(analysis)
    return Finding(
        id=finding_id(FIRST_RULE, fact.site),
        rule=FIRST_RULE,
        category="input",
        title=f"The {'training' if fact.kind == 'train' else 'evaluation'} loader starts {workers} anew for every "
        f"epoch, {share:.0%} of all step time",
        severity=severity(share),
        confidence=lowest(["high" if fact.restarts >= 3 else "medium", steps_confidence(train), *doubt]),
        cost_ms_per_step=fact.lost_ms_per_step,
        share=share,
        basis=ALL,
        step_ms=fact.total_ms_per_step,
        gain_ceiling=max(share, clip_share(fact.at_most_ms_per_step, fact.total_ms_per_step)),
        where=(fact.site,) if fact.site is not None else (),
        ranks=train.ranks,
        evidence=_epoch_evidence(train, fact),
        fix="Keep the workers between epochs: " + of_loader(fact.site, analysis.settings, persistent_workers=True),
        caveat=f"Workers that stay keep their memory between epochs, and their copy of the data set: what the script "
        f"changes in it later does not reach them. Longer epochs make the loss smaller.{words}",
        learn=LEARN,
        try_=(Try("loader.persistent_workers", "true"),),
        falsified_by="With persistent_workers=True an epoch does not get shorter",
    )


def _epoch_evidence(train: StepFacts, fact: EpochFacts) -> tuple[Evidence, ...]:
    source = f"events.jsonl, {fact.restarts} iterators after the first"
    found = [
        Evidence("making an iterator, median", round(fact.make_ms, 3), "ms", source),
        Evidence("iterators made during training", fact.restarts, "iterators", "events.jsonl"),
        Evidence("wait for an epoch's first batch, median", round(fact.first_wait_ms, 3), "ms", steps_source(train)),
        Evidence("wait for the other batches, median", round(fact.usual_wait_ms, 3), "ms", steps_source(train)),
    ]
    at_most = Evidence(
        "with ending the old workers and the slower first steps, at most",
        round(fact.at_most_ms_per_step, 3),
        "ms",
        f"{steps_source(train)}, per training step",
    )
    found.append(at_most)
    if fact.batch_ms is not None:
        found.append(
            Evidence("work for one batch, left out", round(fact.batch_ms, 3), "ms", "worker samples times step time")
        )
    else:
        found.append(
            Evidence("counted of each epoch", "making the iterator", "", "the work for one batch is not known")
        )
    return tuple(found)
