"""What the rules on devices share: costs from exclusive times of profiled steps, ceilings, confidence, places, sources.

A ceiling is from `replayed`: what the steps save when they are played again without the loss, but at least its cost. A
loss is ns of the mean profiled step. In a recorded run its share is carried over to the steady step outside of
windows, which the profiler does not slow down. What one step alone lost, as the first of a recording often does, is no
loss per step: then the median counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose.common import clip_share, finding_id, lowest, severity, train_steps
from stepscope.diagnose.gains import BY_SUBTRACTION, Gain, replayed
from stepscope.diagnose.thresholds import DEVICE
from stepscope.model import Analysis, Evidence, Finding, Place, Try
from stepscope.model.device_losses import DeviceLosses, Loss

NAME_SHOWN = 60  # characters of a kernel
_FUNCTION = re.compile(r"(?:.*/)?([^/]{1,200})\((\d{1,9})\): (.{1,200})")
ONE_STEP = "The trace names no step: its whole length counts as one."


class Words(Struct, frozen=True):
    """What a rule says of a loss."""

    title: str
    fix: str
    caveat: str
    falsified_by: str
    learn: str = ""
    tries: tuple[Try, ...] = ()


class Claim(Struct, frozen=True):
    """`cost_ns` and `ceiling_ns` are of the mean profiled step; `most` bounds the confidence.

    `ceiling_ns` is by subtraction. What it is above the cost is more than the loss itself and comes on top of what a
    replay without the loss saves, unless `what_if` names a replay of all of it.
    """

    rule: str
    category: str
    loss: Loss
    cost_ns: float
    ceiling_ns: float
    words: Words
    evidence: tuple[Evidence, ...]
    most: str = "high"
    what_if: str | None = None


def lost_ns(losses: DeviceLosses, loss: Loss | None) -> float:
    """What a step loses as a rule: the mean, or the median where few steps make the mean; 0 without a loss."""
    if loss is None:
        return 0.0
    return loss.ns_per_step if _recurs(losses, loss) else loss.median_ns


def _recurs(losses: DeviceLosses, loss: Loss) -> bool:
    return losses.steps < DEVICE.steps_for_median or loss.median_ns >= DEVICE.recurring * loss.ns_per_step


def seen(analysis: Analysis, kind: str) -> Iterator[tuple[DeviceLosses, Loss, float]]:
    """Of each run the loss of a kind and what a step loses to it, where that is worth a finding."""
    for losses in analysis.device_losses:
        loss = losses.of(kind)
        cost = lost_ns(losses, loss)
        if loss is not None and cost > 0 and cost >= DEVICE.floor * losses.step_ns:
            yield losses, loss, cost


def finding(analysis: Analysis, losses: DeviceLosses, claim: Claim) -> Finding:
    """The finding of a claim."""
    step_ms = _step_ms(analysis, losses)
    share = clip_share(claim.cost_ns, losses.step_ns)
    where = places(claim.loss)
    gain = replayed(analysis, losses.run, claim.what_if or claim.loss.kind, use_median=not _recurs(losses, claim.loss))
    caveat = claim.words.caveat if losses.has_steps else f"{ONE_STEP} {claim.words.caveat}".strip()
    caveat = f"{caveat} {_replay_caveat(claim, gain, share)}".strip()
    source = trace_source(losses)
    of_step = Evidence("mean profiled step", round(losses.step_ns / 1e6, 3), "ms", f"{source}, {_steps(losses)}")
    return Finding(
        id=finding_id(claim.rule, _key(analysis, losses, where)),
        rule=claim.rule,
        category=claim.category,
        title=claim.words.title + (f" of {losses.run}" if _several(analysis) and losses.run else ""),
        severity=severity(share),
        confidence=lowest([_confidence(losses), claim.most]),
        cost_ms_per_step=share * step_ms,
        share=share,
        step_ms=step_ms,
        gain_ceiling=_ceiling(losses, claim, gain, share),
        where=where,
        ranks=losses.ranks,
        evidence=(of_step, *claim.evidence, *(gain.evidence if gain is not None else ())),
        fix=claim.words.fix,
        caveat=caveat,
        learn=claim.words.learn,
        try_=claim.words.tries,
        falsified_by=claim.words.falsified_by,
    )


def _ceiling(losses: DeviceLosses, claim: Claim, gain: Gain | None, share: float) -> float:
    """Never below the cost: of work a replay tells less where the host, slowed by the profiler, was late as well."""
    if gain is None:
        return max(share, clip_share(claim.ceiling_ns, losses.step_ns))
    beyond = 0.0 if claim.what_if is not None else clip_share(claim.ceiling_ns - claim.cost_ns, losses.step_ns)
    return min(1.0, max(share, gain.share) + beyond)


def _replay_caveat(claim: Claim, gain: Gain | None, share: float) -> str:
    if gain is None:
        return BY_SUBTRACTION if claim.ceiling_ns > 0 else ""
    return gain.caveat(share)


def _several(analysis: Analysis) -> bool:
    return len(analysis.device_losses) > 1


def _key(analysis: Analysis, losses: DeviceLosses, where: tuple[Place, ...]) -> Place | None:
    """What tells a finding from others of its rule: the place, or the run where there are several."""
    if _several(analysis):
        return Place(losses.run, None, None)
    return where[0] if where else None


def _step_ms(analysis: Analysis, losses: DeviceLosses) -> float:
    """The step a share is of: of a recorded run the steady one, of traces of others the profiled one."""
    train = train_steps(analysis)
    return train.mean_ms if train is not None and analysis.windows else losses.step_ns / 1e6


def _confidence(losses: DeviceLosses) -> str:
    if not losses.has_steps:
        return "low"
    return "high" if losses.steps >= DEVICE.steps_for_high else "medium"


def places(loss: Loss) -> tuple[Place, ...]:
    """The lines of a loss with their part of it."""
    return tuple(
        replace(line.place, share=min(1.0, line.ns_per_step / loss.ns_per_step))
        for line in loss.lines[: DEVICE.lines_shown]
        if line.ns_per_step > 0
    )


def first_at(loss: Loss) -> str:
    """` (train.py:29)` of the first line, or nothing."""
    where = places(loss)
    if not where:
        return ""
    name = where[0].file.rsplit("/", 1)[-1]
    return f" ({name}:{where[0].line})" if where[0].line is not None else f" ({name})"


def top_parts(loss: Loss, count: int = 3) -> list[str]:
    """Names of what takes most of a loss."""
    return [clipped(name) for name in list(loss.parts)[:count]]


def clipped(name: str) -> str:
    """A name short enough for a line; of a Python function with the end of its file."""
    match = _FUNCTION.fullmatch(name)
    if match is not None:
        name = f"{match[3]} ({match[1]}:{match[2]})"
    return name if len(name) <= NAME_SHOWN else f"{name[: NAME_SHOWN - 1]}…"


def ms(metric: str, ns: float, source: str) -> Evidence:
    """A time per step."""
    return Evidence(metric, round(ns / 1e6, 3), "ms", source)


def parts_evidence(loss: Loss, source: str, text: str = "{} per step", count: int = 3) -> Iterable[Evidence]:
    """What takes most of a loss, with its time."""
    for name, ns in list(loss.parts.items())[:count]:
        if ns > 0:
            yield ms(text.format(clipped(name)), ns, source)


def trace_source(losses: DeviceLosses) -> str:
    """Which traces the figures come from."""
    return f"trace {losses.traces[0]}" if len(losses.traces) == 1 else f"{len(losses.traces)} traces"


def _steps(losses: DeviceLosses) -> str:
    if not losses.has_steps:
        return "whole length"
    return f"{losses.steps} steps" if losses.steps != 1 else "1 step"
