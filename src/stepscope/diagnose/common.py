"""What every rule does alike: ids, severity, confidence, names of places, the training step."""

from __future__ import annotations

import hashlib
import math
import posixpath
from collections.abc import Iterable

from msgspec.structs import replace

from stepscope.diagnose.thresholds import CONFIDENCE, SEVERITY
from stepscope.model import Analysis, Finding, Interval, Place, StepFacts

STEADY, PROFILED, ALL = "steady", "profiled", "all"  # which steps a share is of
_SAME_STEP = 1e-3  # two means that differ by less, as rounding does, are of one step
_LEVELS = ("low", "medium", "high")


def train_steps(analysis: Analysis) -> StepFacts | None:
    """The statistics of the training steps."""
    return next((fact for fact in analysis.steps if fact.kind == "train" and fact.count and fact.mean_ms > 0), None)


def based(finding: Finding, analysis: Analysis) -> Finding:
    """With the step that its share is of, and an expectation within what can be gained at most."""
    train = train_steps(analysis)
    step_ms = finding.step_ms
    if step_ms is None and 0.0 < finding.share < 1.0:
        step_ms = finding.cost_ms_per_step / finding.share
    elif step_ms is None:
        step_ms = train.mean_ms if train is not None else None
    same = train is not None and step_ms is not None and math.isclose(step_ms, train.mean_ms, rel_tol=_SAME_STEP)
    basis = finding.basis or (STEADY if same else PROFILED)
    if finding.basis == ALL and same:
        basis = STEADY
    expected = finding.expected_gain
    if expected is not None and expected.high > finding.gain_ceiling:
        expected = Interval(min(expected.low, finding.gain_ceiling), finding.gain_ceiling)
    return replace(finding, basis=basis, step_ms=step_ms, expected_gain=expected)


def finding_id(rule: str, place: Place | None) -> str:
    """Stable over runs of the same code: the rule and the place, without machine-made numbers."""
    text = f"{place.file}|{place.function}|{place.line}" if place else ""
    return f"{rule}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def severity(share: float) -> str:
    """By the share of the step."""
    if share >= SEVERITY.critical:
        return "critical"
    return "warning" if share >= SEVERITY.warning else "info"


def sampled_confidence(samples: int) -> str:
    """By the number of samples a share stands on."""
    if samples >= CONFIDENCE.many_samples:
        return "high"
    return "medium" if samples >= CONFIDENCE.few_samples else "low"


def lowest(levels: Iterable[str]) -> str:
    """The weakest link."""
    return min(levels, key=_LEVELS.index)


def lower(level: str, by: int = 1) -> str:
    """A level so many lower, "low" at least."""
    return _LEVELS[max(0, _LEVELS.index(level) - by)]


def steps_confidence(train: StepFacts) -> str:
    """By the number of steady steps."""
    return "low" if train.low_confidence else "high"


def clip_share(cost_ms: float, mean_ms: float) -> float:
    """`cost_ms` as a fraction of the step, within 0 and 1."""
    return max(0.0, min(1.0, cost_ms / mean_ms)) if mean_ms > 0 else 0.0


def shown(place: Place) -> str:
    """`train.py:59`, as a title names it."""
    name = posixpath.basename(place.file)
    return f"{name}:{place.line}" if place.line is not None else name


def bare(function: str | None) -> str:
    """The last part of a qualified name."""
    return (function or "?").rsplit(".", 1)[-1]


def steps_source(train: StepFacts) -> str:
    """Which journals a step figure comes from."""
    if len(train.ranks) == 1:
        return f"rank-{train.ranks[0]}/steps.jsonl"
    return f"steps.jsonl of {len(train.ranks)} ranks"


def stacks_source(analysis: Analysis) -> str:
    """Which stacks a sampled figure comes from."""
    stacks = analysis.stacks
    return f"stacks.jsonl ({stacks.source} at {stacks.rate_hz:.0f} Hz)" if stacks else "stacks.jsonl"
