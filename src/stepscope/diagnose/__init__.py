"""Facts to findings: every rule of `rules.RULES` judges the analysis, or abstains by name.

What the rules say is then weighed: by the quality of the traces, by what other sources tell of the same figures, and by
which finding explains which. `rule.REPORT_FLOOR` is the share of the step below which nothing is worth a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from stepscope.diagnose.in_script import in_framework
from stepscope.diagnose.rule import ALL, REPORT_FLOOR, Need, based
from stepscope.diagnose.rules import RISKS, RULES
from stepscope.diagnose.weigh import explained, tempered, unexplained, weighed
from stepscope.errors import UsageError
from stepscope.model import SEVERITIES, Abstention, Analysis, Diagnosis, Finding, Ignored, Risk

__all__ = ["REPORT_FLOOR", "RISKS", "RULES", "diagnose"]

_NOTHING: Mapping[str, str] = MappingProxyType({})


def diagnose(analysis: Analysis, *, ignored: Mapping[str, str] = _NOTHING) -> Diagnosis:
    """Findings in order of cost, risks by urgency, the rules that lacked inputs, and those the user switched off.

    Args:
        ignored: names of rules not to judge, each with the user's reason.

    Raises:
        UsageError: `ignored` names a rule that does not exist.
    """
    known = [*(rule.name for rule in RULES), *(risk.name for risk in RISKS)]
    unknown = sorted(set(ignored) - set(known))
    if unknown:
        names = ", ".join(known)
        raise UsageError(f"no rule is called {unknown[0]}; ignore one of: {names}")
    findings: dict[str, Finding] = {}
    abstained: list[Abstention] = []
    for rule in RULES:
        if rule.name in ignored:
            continue
        missing = _missing(rule.needs, analysis)
        if not missing:
            found = rule.findings(analysis)
            for finding in found:
                worded = in_framework(_entered(tempered(finding, rule, analysis), analysis), analysis)
                findings.setdefault(finding.id, worded)
            missing = [] if found else _missing(rule.helps, analysis)
        if missing:
            abstained.append(_abstention(rule.name, missing))
    ordered = sorted(findings.values(), key=lambda finding: (-finding.cost_ms_per_step, finding.id))
    known_causes = explained(weighed(ordered, analysis), analysis)
    ordered = [based(_no_louder_than_sure(finding), analysis) for finding in known_causes]
    risks: dict[str, Risk] = {}
    for risk_rule in RISKS:
        missing = _missing(risk_rule.needs, analysis)
        if risk_rule.name not in ignored and missing:
            abstained.append(_abstention(risk_rule.name, missing))
        elif risk_rule.name not in ignored:
            for risk in risk_rule.judge(analysis, ordered):
                risks.setdefault(risk.id, in_framework(risk, analysis))
    below = {name for finding in ordered for name in finding.explains}
    return Diagnosis(
        tuple(ordered),
        tuple(abstained),
        tuple(Ignored(name, ignored[name]) for name in known if name in ignored),
        tuple(sorted(risks.values(), key=lambda risk: SEVERITIES.index(risk.severity))),  # else in the order of rules
        unexplained(analysis, ordered),
        sum(finding.share for finding in ordered if finding.id not in below and finding.basis != ALL),
    )


def _entered(finding: Finding, analysis: Analysis) -> Finding:
    """The finding with the user's line that leads to the library's where its loss is, as samples saw it."""
    if not finding.where or any(place.file.startswith("/") for place in finding.where):
        return finding
    lines = sorted(analysis.python or (), key=lambda line: -line.ms_per_step)
    entry = next((line.entry for line in lines if line.entry is not None), None)
    return finding if entry is None else replace(finding, where=(*finding.where, entry))


def _no_louder_than_sure(finding: Finding) -> Finding:
    """A finding of low confidence is never critical: nobody should change a script first for what may not be so."""
    quiet = finding.confidence == "low" and finding.severity == "critical"
    return replace(finding, severity="warning") if quiet else finding


def _missing(needs: Iterable[Need[Any]], analysis: Analysis) -> list[Need[Any]]:
    return [need for need in needs if not need.present(analysis)]


def _abstention(name: str, missing: list[Need[Any]]) -> Abstention:
    return Abstention(name, " and ".join(need.name for need in missing), quiet=any(need.quiet for need in missing))
