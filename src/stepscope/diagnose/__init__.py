"""Facts to findings: every rule of `rules.RULES` judges the analysis, or abstains by name.

What the rules say is then weighed: by the quality of the traces, by what other sources tell of the same figures, and by
which finding explains which. `thresholds.REPORT_FLOOR` is the share of the step below which nothing is worth a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from stepscope.diagnose.common import ALL, based
from stepscope.diagnose.in_script import in_framework
from stepscope.diagnose.risks import RISKS, assess
from stepscope.diagnose.rules import RULES, Need
from stepscope.diagnose.thresholds import REPORT_FLOOR
from stepscope.diagnose.weigh import explained, linked, tempered, unexplained, weighed
from stepscope.errors import UsageError
from stepscope.model import Abstention, Analysis, Diagnosis, Finding, Ignored

__all__ = ["REPORT_FLOOR", "RISKS", "RULES", "diagnose"]

_NOTHING: Mapping[str, str] = MappingProxyType({})


def diagnose(analysis: Analysis, *, ignored: Mapping[str, str] = _NOTHING) -> Diagnosis:
    """Findings in order of cost, the rules that lacked inputs, and those the user switched off.

    Args:
        ignored: names of rules not to judge, each with the user's reason.

    Raises:
        UsageError: `ignored` names a rule that does not exist.
    """
    known = [*(rule.name for rule in RULES), *(rule.name for rule in RISKS)]
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
            found = rule.judge(analysis)
            for finding in found:
                worded = in_framework(_entered(linked(tempered(finding, rule, analysis)), analysis), analysis)
                findings.setdefault(finding.id, worded)
            missing = [] if found else _missing(rule.helps, analysis)
        if missing:
            needs = " and ".join(need.name for need in missing)
            abstained.append(Abstention(rule.name, needs, quiet=any(need.quiet for need in missing)))
    ordered = sorted(findings.values(), key=lambda finding: (-finding.cost_ms_per_step, finding.id))
    known_causes = explained(weighed(ordered, analysis), analysis)
    ordered = [based(_no_louder_than_sure(finding), analysis) for finding in known_causes]
    risks, without_inputs = assess(analysis, ordered, ignored)
    risks = tuple(in_framework(risk, analysis) for risk in risks)
    switched_off = tuple(Ignored(name, ignored[name]) for name in known if name in ignored)
    below = {name for finding in ordered for name in finding.explains}
    counted = sum(finding.share for finding in ordered if finding.id not in below and finding.basis != ALL)
    return Diagnosis(
        tuple(ordered), (*abstained, *without_inputs), switched_off, risks, unexplained(analysis, ordered), counted
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


def _missing(needs: Iterable[Need], analysis: Analysis) -> list[Need]:
    return [need for need in needs if not need.present(analysis)]
