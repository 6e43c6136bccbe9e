"""File I/O that the training thread waits for inside a step."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.diagnose import pipeline
from stepscope.diagnose.common import (
    bare,
    clip_share,
    finding_id,
    lowest,
    sampled_confidence,
    severity,
    shown,
    stacks_source,
    steps_confidence,
    train_steps,
)
from stepscope.diagnose.thresholds import IO
from stepscope.model import Analysis, Evidence, Finding, IoFacts, StepFacts

RULE = "io.blocking_in_step"
LEARN = "https://pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html"
_SAVES = ("torch.save", "save", "save_checkpoint", "save_pretrained", "save_file")
_READS = ("read", "readline", "readlines", "readinto", "read_text", "read_bytes", "loadtxt", "read_csv", "read_parquet")


def blocking_in_step(analysis: Analysis) -> list[Finding]:
    """One finding per line whose I/O inside training steps costs more than the floor."""
    train = train_steps(analysis)
    if train is None:
        return []
    facts: dict[tuple[str, object], list[IoFacts]] = {}
    for fact in analysis.io or ():
        facts.setdefault(_scope(fact), []).append(fact)
    found = []
    for group in facts.values():
        cost = sum(fact.ms_per_step for fact in group)
        enough = any(fact.measured for fact in group) or sum(fact.count for fact in group) >= IO.samples
        if enough and cost >= IO.floor * train.mean_ms:
            found.append(_finding(analysis, train, sorted(group, key=lambda fact: -fact.ms_per_step), cost))
    return found


def _scope(fact: IoFacts) -> tuple[str, object]:
    """Lines of one call, else of one function, are one finding: open, write and close are one habit."""
    place = fact.call or fact.place
    return place.file, bare(place.function) if place.function else place.line


def _finding(analysis: Analysis, train: StepFacts, facts: list[IoFacts], cost: float) -> Finding:
    top = facts[0]
    cost = min(cost, train.mean_ms)
    share = clip_share(cost, train.mean_ms)
    measured = "high" if top.measured else sampled_confidence(sum(fact.count for fact in facts))
    return Finding(
        id=finding_id(RULE, top.place),
        rule=RULE,
        category="io",
        title=f"Every step waits for file I/O: {top.operation} ({shown(top.place)}) takes {share:.0%} of the step"
        + (f", reached from {shown(top.entry)}" if top.entry is not None else ""),
        severity=severity(share),
        confidence=lowest([steps_confidence(train), measured]),
        cost_ms_per_step=cost,
        share=share,
        gain_ceiling=clip_share(max(cost, _ceiling(analysis, facts, cost)), train.mean_ms),
        where=(
            *(replace(fact.place, share=fact.ms_per_step / cost if cost else None) for fact in facts),
            *([top.entry] if top.entry is not None else []),
        ),
        ranks=train.ranks,
        evidence=_evidence(analysis, facts),
        fix=_fix(top),
        caveat="What is written later or in the background is lost when the process dies before it is written.",
        learn=LEARN if top.operation in _SAVES else "",
        falsified_by=f"With the {top.operation} at {shown(top.place)} left out, the mean step does not get shorter",
    )


def _ceiling(analysis: Analysis, facts: list[IoFacts], cost: float) -> float:
    """ms: with the whole call where I/O is a notable part of it; what it computes to write goes as well."""
    top = facts[0]
    most = cost
    if top.call_ms_per_step and cost >= IO.of_call * top.call_ms_per_step:
        most = max(most, top.call_at_most_ms_per_step or 0.0)
    return pipeline.without_main(analysis, most)


def _fix(top: IoFacts) -> str:
    place = shown(top.place)
    if top.entry is not None:
        return (
            f"{shown(top.entry)} only leads there. Let the library do {top.operation} every N steps only: its options "
            "for checkpoints, loggers and progress say how often"
        )
    if top.operation in _SAVES:
        return (
            f"Save less often at {place} (every N steps or minutes), or copy the tensors and write them in a "
            "background thread (torch.distributed.checkpoint.async_save does both)"
        )
    if top.operation in _READS or top.operation == "open":
        return f"Read at {place} before training, or in the DataLoader's workers"
    return (
        f"Collect what {place} writes and write it every N steps without flushing each time, or in a background thread"
    )


def _evidence(analysis: Analysis, facts: list[IoFacts]) -> tuple[Evidence, ...]:
    found = []
    for fact in facts:
        source = fact.source if fact.measured else f"{stacks_source(analysis)}, {fact.source}"
        found.append(
            Evidence(f"{fact.operation} at {shown(fact.place)} per step", round(fact.ms_per_step, 3), "ms", source)
        )
        if fact.calls_per_step is not None:
            found.append(
                Evidence(f"calls of {fact.operation} per step", round(fact.calls_per_step, 3), "calls", fact.source)
            )
    return tuple(found)
