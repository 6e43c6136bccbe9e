"""Facts to findings: every rule of `rules.RULES` judges the analysis, or abstains by name.

`thresholds.REPORT_FLOOR` is the share of the step below which nothing is worth a finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from stepscope.diagnose.quality import tempered
from stepscope.diagnose.rules import RULES
from stepscope.diagnose.thresholds import REPORT_FLOOR
from stepscope.errors import UsageError
from stepscope.model import Abstention, Analysis, Diagnosis, Finding, Ignored

__all__ = ["REPORT_FLOOR", "RULES", "diagnose"]

_NOTHING: Mapping[str, str] = MappingProxyType({})


def diagnose(analysis: Analysis, *, ignored: Mapping[str, str] = _NOTHING) -> Diagnosis:
    """Findings in order of cost, the rules that lacked inputs, and those the user switched off.

    Args:
        ignored: names of rules not to judge, each with the user's reason.

    Raises:
        UsageError: `ignored` names a rule that does not exist.
    """
    unknown = sorted(set(ignored) - {rule.name for rule in RULES})
    if unknown:
        names = ", ".join(rule.name for rule in RULES)
        raise UsageError(f"no rule is called {unknown[0]}; ignore one of: {names}")
    findings: dict[str, Finding] = {}
    abstained: list[Abstention] = []
    for rule in RULES:
        if rule.name in ignored:
            continue
        missing = [need for need in rule.needs if not need.present(analysis)]
        if missing:
            needs = " and ".join(need.name for need in missing)
            abstained.append(Abstention(rule.name, needs, quiet=any(need.quiet for need in missing)))
            continue
        for finding in rule.judge(analysis):
            findings.setdefault(finding.id, tempered(finding, analysis) if rule.traced(analysis) else finding)
    ordered = sorted(findings.values(), key=lambda finding: (-finding.cost_ms_per_step, finding.id))
    switched_off = tuple(Ignored(rule.name, ignored[rule.name]) for rule in RULES if rule.name in ignored)
    return Diagnosis(tuple(ordered), tuple(abstained), switched_off)
