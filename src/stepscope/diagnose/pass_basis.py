"""What the rules on needless work share: costs are ms of the mean step that the facts speak of."""

from __future__ import annotations

from msgspec import Struct

from stepscope.diagnose.common import clip_share, finding_id, lowest, severity, steps_confidence, train_steps
from stepscope.diagnose.thresholds import PASSES
from stepscope.model import Analysis, Evidence, Finding, Place
from stepscope.model.device_losses import PassFacts, PassLine


class Words(Struct, frozen=True):
    """What a rule says of a loss."""

    title: str
    fix: str
    caveat: str
    falsified_by: str
    learn: str


class Claim(Struct, frozen=True):
    """`cost_ms` and `ceiling_ms` are of the mean step; `levels` bound the confidence."""

    rule: str
    category: str
    cost_ms: float
    ceiling_ms: float
    where: tuple[Place, ...]
    evidence: tuple[Evidence, ...]
    words: Words
    levels: tuple[str, ...] = ()


def runs(analysis: Analysis) -> tuple[PassFacts, ...]:
    """Of each run with traces of training steps what they compute without need."""
    return analysis.passes.runs if analysis.passes is not None else ()


def finding(analysis: Analysis, run: PassFacts, claim: Claim) -> Finding:
    """The finding of a claim on the steps of a run."""
    share = clip_share(claim.cost_ms, run.step_ms)
    several = len(runs(analysis)) > 1 and bool(run.run)
    place = claim.where[0] if claim.where else None
    if several:  # what tells a finding from that of another run with the same code
        place = Place(f"{run.run}|{place.file if place else ''}", place.line if place else None, None)
    train = train_steps(analysis)
    steps = [steps_confidence(train)] if train is not None and analysis.windows else []
    return Finding(
        id=finding_id(claim.rule, place),
        rule=claim.rule,
        category=claim.category,
        title=claim.words.title + (f" of {run.run}" if several else ""),
        severity=severity(share),
        confidence=lowest([_confidence(run), *steps, *claim.levels]),
        cost_ms_per_step=share * run.step_ms,
        share=share,
        step_ms=run.step_ms,
        gain_ceiling=max(share, clip_share(claim.ceiling_ms, run.step_ms)),
        where=claim.where,
        ranks=run.ranks,
        evidence=claim.evidence,
        fix=claim.words.fix,
        caveat=claim.words.caveat,
        learn=claim.words.learn,
        falsified_by=claim.words.falsified_by,
    )


def worth(run: PassFacts, cost_ms: float) -> bool:
    """Whether a cost is worth a finding."""
    return cost_ms > 0 and cost_ms >= PASSES.floor * run.step_ms


def _confidence(run: PassFacts) -> str:
    if not run.has_steps:
        return "low"
    return "high" if run.steps >= PASSES.steps_for_high else "medium"


def places(lines: tuple[PassLine, ...], whole_ms: float) -> tuple[Place, ...]:
    """The lines of a loss with their part of it."""
    return tuple(
        Place(line.place.file, line.place.line, line.place.function, min(1.0, line.ms_per_step / whole_ms))
        for line in lines[: PASSES.lines_shown]
        if line.ms_per_step > 0 and whole_ms > 0
    )


def at(where: tuple[Place, ...]) -> str:
    """` (train.py:29)` of the first place, or nothing."""
    if not where:
        return ""
    name = where[0].file.rsplit("/", 1)[-1]
    return f" ({name}:{where[0].line})" if where[0].line is not None else f" ({name})"


def source(run: PassFacts) -> str:
    """Which traces the figures come from."""
    named = run.traces[0] if len(run.traces) == 1 else f"{len(run.traces)} traces"
    return (
        f"trace {named}, {run.steps} training step{'s' * (run.steps != 1)}"
        if run.has_steps
        else f"trace {named}, its whole length"
    )


def ms(metric: str, value: float, where: str) -> Evidence:
    """A time per step."""
    return Evidence(metric, round(value, 3), "ms", where)
