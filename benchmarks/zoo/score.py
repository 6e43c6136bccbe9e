"""What a report is worth for a script of the zoo: right category, right line, a ceiling that holds, no false alarm.

Pure: a report (the JSON document of `stepscope run`) and mean step times in, a `Score` out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from estimates import estimate
from planted import Planted
from table import Entry

ALARM = 0.10  # share of the step from which a finding on a clean script is a false alarm
HEALTHY = "compute"  # what a clean script spends its time on


@dataclass(frozen=True)
class Gain:
    """What the twin saves, as a fraction of the planted form's mean step: the median of the rounds and an interval.

    With fewer than six rounds there is no sign interval; then the range of the rounds stands for it.
    """

    median: float
    low: float
    high: float
    rounds: int
    planted_ms: float


@dataclass(frozen=True)
class First:
    """What a report says first."""

    rule: str
    category: str
    share: float
    place: str


@dataclass(frozen=True)
class Score:
    """`None` where a question does not arise. `ceiling` is that of the first finding that has the category right."""

    first: First | None
    category: bool | None = None
    line: bool | None = None
    ceiling: float | None = None
    ceiling_holds: bool | None = None
    excess_points: float | None = None
    alarms: tuple[First, ...] = ()


def gain(rounds: Sequence[tuple[float, float]]) -> Gain:
    """Of (planted, fixed) mean step times, one pair per round, at least one."""
    saved = [1 - fixed / planted for planted, fixed in rounds]
    known = estimate(saved)
    low = min(saved) if known.low is None else known.low
    high = max(saved) if known.high is None else known.high
    planted_ms = sorted(planted for planted, _ in rounds)[len(rounds) // 2]
    return Gain(known.median, low, high, len(saved), planted_ms)


def score(entry: Entry, report: Mapping[str, Any], planted: Planted | None, measured: Gain | None) -> Score:
    """Judge a report. `planted` and `measured` are None for clean scripts."""
    findings = sorted(report["findings"], key=lambda finding: -finding["cost_ms_per_step"])
    first = _first(findings[0]) if findings else None
    if entry.expected is None or planted is None:
        loud = [_first(finding) for finding in findings if finding["share"] > ALARM]
        return Score(first, alarms=tuple(alarm for alarm in loud if alarm.category != HEALTHY))
    named = findings[0]["where"] if findings else []
    line = any(planted.is_named_by(place["file"], place["line"], place.get("function")) for place in named)
    right = [finding for finding in findings if finding["category"] in entry.expected]
    ceiling = right[0]["gain_ceiling"] if right else None
    return Score(
        first,
        category=first is not None and first.category in entry.expected,
        line=line,
        ceiling=ceiling,
        ceiling_holds=None if ceiling is None or measured is None else ceiling >= measured.low,
        excess_points=None if ceiling is None or measured is None else (ceiling - measured.median) * 100,
    )


def _first(finding: Mapping[str, Any]) -> First:
    where = finding["where"]
    place = f"{where[0]['file'].rsplit('/', 1)[-1]}:{where[0]['line']}" if where else ""
    return First(finding["rule"], finding["category"], finding["share"], place)
