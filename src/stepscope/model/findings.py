"""What the rules say of a run: findings with their evidence, and the rules that could not be judged."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Place(Struct, frozen=True):
    """A line of the user's code.

    line: Line in the file. Where only the function is known, the line it begins on.
    share: The place's part of what it is a place of: of the cost of a finding, of the time of an operator.
    """

    file: str
    line: int | None
    function: str | None = None
    share: float | None = None


class Evidence(Struct, frozen=True):
    """One measured figure. `source` names the file and the method it comes from."""

    metric: str
    value: Any
    unit: str
    source: str


class Try(Struct, frozen=True):
    """A knob an experiment may turn to test the finding."""

    knob: str
    value: str


class Disagreement(Struct, frozen=True):
    """Two sources that tell the same quantity, and not the same of it. Values have the same unit."""

    quantity: str
    unit: str
    value: Any
    source: str
    other: Any
    other_source: str


class Interval(Struct, frozen=True):
    """A prediction, as fractions of the mean steady step.

    low (share): Lower end of what the fix should gain of the mean step, by a model of cores and CPU time.
    high (share): Upper end of the same.
    """

    low: float
    high: float


class Statement(Struct, frozen=True):
    """What findings and risks have in common."""

    id: str
    rule: str
    category: str
    title: str
    severity: str
    confidence: str
    where: tuple[Place, ...]
    evidence: tuple[Evidence, ...]
    fix: str
    falsified_by: str
    ranks: tuple[int, ...] = ()
    caveat: str = ""
    learn: str = ""
    try_: tuple[Try, ...] = ()
    explains: tuple[str, ...] = ()


class Risk(Statement, frozen=True):
    """What may slow down or end a run later, without a cost that was measured: never ranked among findings.

    `explains` are ids of findings of the same run that it is behind.

    ranks: Ranks it was seen on.
    """


class Finding(Statement, frozen=True, kw_only=True):
    """One ranked statement of a loss. Without evidence and cost there is no finding.

    `share` is the cost by `step_ms`, the mean step of `basis`: "steady" steps, which the headline tells, "profiled"
    ones, or "all" of the run, those that compile included. `diagnose` fills both in where a rule does not.

    `explains` are ids of findings of the same run whose cost is mostly this one's, told where it shows: no loss in
    addition. `disagreements` have lowered `confidence`.

    cost_ms_per_step: What the loss costs in a mean step of its basis, measured as the rule says (docs/findings.md).
    share: The same by `step_ms`.
    step_ms: The mean step of `basis`: of steady steps as the headline has it, of profiled ones, or of all of the run.
    gain_ceiling (share): Upper bound of what the run could gain if this one loss vanished. Ceilings do not add up.
    ranks: Ranks it was seen on.
    """

    cost_ms_per_step: float
    share: float
    gain_ceiling: float
    expected_gain: Interval | None = None
    disagreements: tuple[Disagreement, ...] = ()
    basis: str = ""
    step_ms: float | None = None


class Abstention(Struct, frozen=True):
    """A rule that could not be judged, and the inputs it lacked.

    `quiet`: the run did not use what the rule is about, so that reports leave it out.
    """

    rule: str
    needs: str
    quiet: bool = False


class Ignored(Struct, frozen=True):
    """A rule the user switched off by configuration, with the reason given there."""

    rule: str
    reason: str


class UnexplainedPart(Struct, frozen=True):
    """A part of the mean training step that neither a finding nor known work accounts for.

    ms: Of the mean steady step; the parts exclude each other.
    share: The same by the mean step.
    """

    what: str
    ms: float
    share: float
    source: str


class Unexplained(Struct, frozen=True):
    """What of the mean training step nobody explained.

    `unseen` is what was not recorded at all, so that nothing can be said of it. "Nothing worth fixing" is only said
    where neither is: `large` is False and `unseen` empty.

    ms: Of the mean steady step: what no finding and no known work accounts for. The sum of its parts.
    share: The same by the mean step.
    """

    ms: float
    share: float
    parts: tuple[UnexplainedPart, ...]  # the largest first
    unseen: tuple[str, ...]
    large: bool


class Diagnosis(Struct, frozen=True):
    """What the rules said of a run, findings in order of cost.

    counted_share: Sum of the shares of findings of steady or profiled steps that no other explains. Above 1 they
        overlap.
    """

    findings: tuple[Finding, ...]
    abstained: tuple[Abstention, ...]
    ignored: tuple[Ignored, ...] = ()
    risks: tuple[Risk, ...] = ()  # the most urgent first
    unexplained: Unexplained | None = None  # None without training steps
    counted_share: float = 0.0
