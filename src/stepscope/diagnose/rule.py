"""A rule: the facts it needs, what it claims of a loss, and the one way from a claim to a finding.

A rule is a function in its category's file, under `@rule(name, *needs)`: it yields one `Claim` for each loss that is
worth a word, in the figures of the step that the loss is of. Ids, shares, severity and confidence are made here. The
numbers that a rule decides by stand beside it, in `Thresholds`, each with its reason; those here hold for all rules.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from stepscope.model import SEVERITIES, Analysis, Evidence, Finding, Interval, Place, Risk, StepFacts, Try
from stepscope.model.counted import things
from stepscope.model.views import Overview

Fact = TypeVar("Fact")
Known = Evidence | None  # a figure, None where it is not known: claims leave it out

# Below this share of the step no finding is made: runs of the same script on one machine differ by a few percent, so
# no experiment could confirm a smaller gain. A healthy run is one without a finding above it.
REPORT_FLOOR = 0.05


class Thresholds:
    """Numbers that rules decide by, each with its reason. Shares are fractions of the mean steady step."""


class SEVERITY(Thresholds):
    """Shares from which a finding is called a warning or critical, whatever its rule."""

    warning: float = 0.10  # where other trainers' diagnosers begin to warn about their phases
    critical: float = 0.25  # a quarter of the training time: worth stopping a running job for


class CONFIDENCE(Thresholds):
    """How much evidence a sampled share needs. n samples give a share of 10 % a standard error of 0.3 / sqrt(n)."""

    few_samples: int = 30  # +- 5 points: enough to rank, not to quote
    many_samples: int = 100  # +- 3 points


class CAUSES(Thresholds):
    part: float = 0.5  # of the other's cost that lies in the cause's code, and that the cause's cost could hold: most


class KindOfCopy(Struct, frozen=True):
    """How copies were made: the detail that holds their time, and what to say. `{}`: ms per step, and the line."""

    detail: str
    evidence: str
    title: str
    fix: str
    tries: tuple[Try, ...] = ()


class Advice(Struct, frozen=True):
    """What rules say by what they see, in `advice.json`: `words` by rule or cause, `{}` in them the line."""

    words: dict[str, dict[str, str]]
    copies: tuple[KindOfCopy, ...]


ADVICE = msgspec.json.decode(Path(__file__).with_name("advice.json").read_bytes(), type=Advice)


def advice(of: str, key: str, other: str = "") -> str:
    """What `advice.json` has of a key, else `other`, else what it has of none."""
    words = ADVICE.words[of]
    return words.get(key) or other or words.get("", "")


STEADY, PROFILED, ALL = "steady", "profiled", "all"  # which steps a share is of
_SAME_STEP = 1e-3  # two means that differ by less, as rounding does, are of one step
_LEVELS = ("low", "medium", "high")


class Need(Struct, Generic[Fact], frozen=True):
    """An input of rules: how the report calls it, and the fact, which is None or empty where an analysis lacks it.

    `quiet`: the run did not use what the rule is about. Then nothing is missing and nobody wants to read of it.
    `traced`: whether what is said by it stands on traces.
    """

    name: str
    find: Callable[[Analysis], Fact | None]
    quiet: bool = False
    traced: Callable[[Analysis], bool] = lambda _analysis: False

    def present(self, analysis: Analysis) -> bool:
        return bool(self.find(analysis))

    def of(self, analysis: Analysis) -> Fact:
        found = self.find(analysis)
        assert found is not None, self.name
        return found


class Claim(Struct, frozen=True, kw_only=True):
    """What a rule says of one loss. Times are ms of the step that `step_ms` is the mean of.

    `steps` are the steady steps that a loss is of: their mean, ranks and number hold where no others are given.
    `ceiling_ms` is what can be gained at most, never less than the cost but for `kept_ms`, which stays. `levels` and
    `worst` bound confidence and severity. The id comes from `key`, a place or a text of its own, else from the first of
    `where`.
    """

    title: str
    cost_ms: float
    evidence: Iterable[Known]
    fix: str
    falsified_by: str
    steps: StepFacts | None = None
    step_ms: float | None = None
    ceiling_ms: float = 0.0
    kept_ms: float = 0.0
    expected_gain: Interval | None = None
    where: tuple[Place, ...] = ()
    key: Place | str | UnsetType | None = UNSET
    ranks: tuple[int, ...] | None = None
    levels: Iterable[str] = ()
    worst: str = "critical"
    caveat: str = ""
    learn: str = ""  # where to read on of this case; else the rule's
    tries: tuple[Try, ...] = ()
    explains: tuple[str, ...] = ()
    basis: str = ""
    floor: float = REPORT_FLOOR  # below this share of the step it is not worth a word

    @property
    def mean_ms(self) -> float:
        mean_ms = self.steps.mean_ms if self.step_ms is None and self.steps is not None else self.step_ms
        assert mean_ms is not None, f"a claim says which step it is of: {self.title}"
        return mean_ms

    @property
    def share(self) -> float:
        return clip_share(self.cost_ms, self.mean_ms)


class Rule(Struct, frozen=True):
    """`judge` is only asked when every need is present.

    Without one of `helps` the rule sees a part only: where it then finds nothing, it abstains by name as well.
    """

    name: str
    needs: tuple[Need[Any], ...]
    judge: Callable[[Analysis], Iterable[Claim]]
    helps: tuple[Need[Any], ...] = ()
    learn: str = ""

    @property
    def category(self) -> str:
        return self.name.partition(".")[0]

    def traced(self, analysis: Analysis) -> bool:
        return any(need.traced(analysis) for need in self.needs)

    def id_of(self, claim: Claim) -> str:
        key = claim.key
        if isinstance(key, str):
            return f"{self.name}-{key}"
        return finding_id(self.name, next(iter(claim.where), None) if isinstance(key, UnsetType) else key)

    def findings(self, analysis: Analysis) -> list[Finding]:
        return [self._finding(claim) for claim in self.judge(analysis)]

    def _finding(self, claim: Claim) -> Finding:
        share, step_ms, levels, ranks = claim.share, claim.mean_ms, [*claim.levels], claim.ranks or ()
        if claim.steps is not None:
            levels.append("low" if claim.steps.low_confidence else "high")
            ranks = claim.steps.ranks if claim.ranks is None else ranks
        worst = "critical" if share >= SEVERITY.critical else "warning" if share >= SEVERITY.warning else "info"
        return Finding(
            id=self.id_of(claim),
            rule=self.name,
            category=self.category,
            title=claim.title,
            severity=max(worst, claim.worst, key=SEVERITIES.index),
            confidence=lowest(levels),
            cost_ms_per_step=min(claim.cost_ms, step_ms),
            share=share,
            gain_ceiling=max(share, clip_share(claim.ceiling_ms, step_ms)) - clip_share(claim.kept_ms, step_ms),
            where=claim.where,
            evidence=tuple(one for one in claim.evidence if one is not None),
            fix=claim.fix,
            falsified_by=claim.falsified_by,
            expected_gain=claim.expected_gain,
            ranks=ranks,
            caveat=claim.caveat,
            learn=claim.learn or self.learn,
            try_=claim.tries,
            explains=claim.explains,
            basis=claim.basis,
            step_ms=step_ms,
        )


class RiskRule(Struct, frozen=True):
    """What may slow down or end a run later, and costs nothing that could be measured yet: no finding, and no rank.

    `judge` is only asked when every need is present, with the findings of the same run.
    """

    name: str
    needs: tuple[Need[Any], ...]
    judge: Callable[[Analysis, Sequence[Finding]], Iterable[Risk]]

    def risk(self, key: Place | str, **said: Any) -> Risk:
        """What it says; the id, by a place or a text, is stable over runs of the same code."""
        place, where = (key, (key,)) if isinstance(key, Place) else (Place(key, None), ())
        said["evidence"] = tuple(one for one in said["evidence"] if one is not None)
        usual = {"severity": "warning", "confidence": "high", "where": where}
        category = self.name.partition(".")[0]
        return Risk(id=finding_id(self.name, place), rule=self.name, category=category, **{**usual, **said})


def risk_rule(
    name: str, *needs: Need[Any]
) -> Callable[[Callable[[Analysis, Sequence[Finding]], Iterable[Risk]]], RiskRule]:
    """Make a function the judge of a rule on risks."""
    return lambda judge: RiskRule(name, needs, judge)


def rule(
    name: str, *needs: Need[Any], helps: tuple[Need[Any], ...] = (), learn: str = ""
) -> Callable[[Callable[[Analysis], Iterable[Claim]]], Rule]:
    """Make a function the judge of a rule, but for claims that cost too little to be worth a word.

    `learn`: where to read on.
    """

    def worth_a_word(judge: Callable[[Analysis], Iterable[Claim]]) -> Rule:
        def claims(analysis: Analysis) -> list[Claim]:
            return [claim for claim in judge(analysis) if claim.share >= claim.floor]

        return Rule(name, needs, claims, helps, learn)

    return worth_a_word


def always(_analysis: Analysis) -> bool:
    """Of needs that traces alone meet."""
    return True


def train_steps(analysis: Analysis) -> StepFacts | None:
    return next((fact for fact in analysis.steps if fact.kind == "train" and fact.count and fact.mean_ms > 0), None)


def overviews(analysis: Analysis) -> list[Overview]:
    spans = analysis.views.spans if analysis.views is not None else ()
    return [span.overview for span in spans if span.overview is not None]


STEPS = Need("training steps", train_steps)


def accelerator(analysis: Analysis) -> str | None:
    """The device that the run trains on; None on the CPU."""
    return next((device for device in analysis.devices if device != "cpu"), None)


ON_DEVICE = Need("training on a device", lambda a: bool(a.device_losses) or accelerator(a) is not None, quiet=True)


def based(finding: Finding, analysis: Analysis) -> Finding:
    """With the kind of step that its share is of, an expectation within what can be gained at most, and no louder than
    sure: of low confidence it is never critical, as nobody should change a script first for what may not be so.
    """
    train, step_ms, expected = train_steps(analysis), finding.step_ms, finding.expected_gain
    basis = finding.basis or PROFILED
    if finding.basis in ("", ALL) and train is not None and step_ms is not None:
        basis = STEADY if math.isclose(step_ms, train.mean_ms, rel_tol=_SAME_STEP) else basis
    if expected is not None:
        expected = Interval(min(expected.low, finding.gain_ceiling), min(expected.high, finding.gain_ceiling))
    quiet = finding.confidence == "low" and finding.severity == "critical"
    severity = "warning" if quiet else finding.severity
    return replace(finding, basis=basis, expected_gain=expected, severity=severity)


def finding_id(rule: str, place: Place | None) -> str:
    """Stable over runs of the same code: the rule and the place, without machine-made numbers."""
    text = f"{place.file}|{place.function}|{place.line}" if place else ""
    return f"{rule}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def sampled_confidence(samples: int) -> str:
    if samples >= CONFIDENCE.many_samples:
        return "high"
    return "medium" if samples >= CONFIDENCE.few_samples else "low"


def traced_confidence(steps: int, for_high: int, most: str = "high") -> str:
    """By the number of profiled steps, 0 where the trace names none; `most` where there are enough."""
    if not steps:
        return "low"
    return most if steps >= for_high else "medium"


def lowest(levels: Iterable[str]) -> str:
    """The weakest link; "high" where nothing weakens."""
    return min(levels, key=_LEVELS.index, default="high")


def lower(level: str, by: int = 1) -> str:
    """A level so many lower, "low" at least."""
    return _LEVELS[max(0, _LEVELS.index(level) - by)]


def clip_share(cost_ms: float, mean_ms: float) -> float:
    """`cost_ms` as a fraction of the step, within 0 and 1."""
    return max(0.0, min(1.0, cost_ms / mean_ms)) if mean_ms > 0 else 0.0


def shown(place: Place) -> str:
    """`train.py:59`, as a title names it."""
    name = posixpath.basename(place.file)
    return f"{name}:{place.line}" if place.line is not None else name


def at(*where: Place | None) -> str:
    """` (train.py:29)` of the first place, or nothing."""
    return f" ({shown(where[0])})" if where and where[0] is not None else ""


def at_place(place: Place | None) -> str:
    """` at train.py:29`, or nothing."""
    return f" at {shown(place)}" if place is not None else ""


def bare(function: str | None) -> str:
    """The last part of a qualified name."""
    return (function or "?").rsplit(".", 1)[-1]


def spot(place: Place) -> tuple[str, int | None]:
    """Its file and line, whatever function and share."""
    return place.file, place.line


def distinct(places: Iterable[Place]) -> tuple[Place, ...]:
    """Each line once, in the order of their first."""
    found: dict[tuple[str, int | None], Place] = {}
    for place in places:
        found.setdefault(spot(place), place)
    return tuple(found.values())


def steps_source(train: StepFacts) -> str:
    if len(train.ranks) == 1:
        return f"rank-{train.ranks[0]}/steps.jsonl"
    return f"steps.jsonl of {things(len(train.ranks), 'rank')}"


def stacks_source(analysis: Analysis) -> str:
    stacks = analysis.stacks
    return f"stacks.jsonl ({stacks.source} at {stacks.rate_hz:.0f} Hz)" if stacks else "stacks.jsonl"


def traces_source(traces: Sequence[str]) -> str:
    return f"trace {traces[0]}" if len(traces) == 1 else f"{len(traces)} traces"


def figure(metric: str, value: float | None, unit: str, source: str, digits: int = 4) -> Known:
    return None if value is None else Evidence(metric, round(value, digits), unit, source)


def figures(source: str, *rows: tuple[str, float | None, str, int]) -> Iterator[Known]:
    """Figures of one source, each with its unit and digits."""
    return (figure(metric, value, unit, source, digits) for metric, value, unit, digits in rows)


def ms(metric: str, value: float | None, source: str) -> Known:
    return figure(metric, value, "ms", source, 3)


def device_doubt(analysis: Analysis) -> tuple[tuple[str, ...], str]:
    """(levels of confidence, caveat) of time lost on the host of an accelerator: queued work may hide it."""
    device = accelerator(analysis)
    if device is None:
        return (), ""
    return ("low",), f" The {device} may be working meanwhile: then the gain is smaller, down to nothing."
