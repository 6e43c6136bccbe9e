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
from stepscope.diagnose.rule import ALL, REPORT_FLOOR, STEPS, Need, based
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

    def lacks(name: str, needs: Iterable[Need[Any]]) -> bool:
        missing = [need for need in needs if not need.present(analysis)]
        if missing:
            needed = " and ".join(need.name for need in ([STEPS] if STEPS in missing else missing))
            abstained.append(Abstention(name, needed, quiet=any(need.quiet for need in missing)))
        return bool(missing)

    for rule in RULES:
        if rule.name in ignored or lacks(rule.name, rule.needs):
            continue
        found = rule.findings(analysis)
        for finding in found:
            worded = in_framework(_entered(tempered(finding, rule, analysis), analysis), analysis)
            findings.setdefault(finding.id, worded)
        if not found:
            lacks(rule.name, rule.helps)
    ordered = sorted(findings.values(), key=lambda finding: (-finding.cost_ms_per_step, finding.id))
    ordered = [based(finding, analysis) for finding in explained(weighed(ordered, analysis), analysis)]
    risks: dict[str, Risk] = {}
    for risk_rule in RISKS:
        if risk_rule.name not in ignored and not lacks(risk_rule.name, risk_rule.needs):
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
