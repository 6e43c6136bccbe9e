"""What the rules say of tables or of facts, and the figures of a finding."""

from __future__ import annotations

from typing import Any

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Analysis, Diagnosis, Finding
from stepscope.tables.schema import Tables
from tests.records import some

Given = Tables | Analysis | Diagnosis


def judged(given: Given, sources: dict[str, str] | None = None) -> Diagnosis:
    if isinstance(given, Diagnosis):
        return given
    return diagnose(analyze(given, sources) if isinstance(given, Tables) else given)


def told(given: Given, rule: str, sources: dict[str, str] | None = None) -> Finding | None:
    """The one finding of a rule, or None."""
    found = [finding for finding in judged(given, sources).findings if finding.rule == rule]
    assert len(found) <= 1
    return found[0] if found else None


def only(given: Given, rule: str, sources: dict[str, str] | None = None) -> Finding:
    """The one finding of a rule, whole and with sources."""
    finding = some(told(given, rule, sources))
    assert all(evidence.source for evidence in finding.evidence)
    assert 0 < finding.share <= finding.gain_ceiling + 1e-9 <= 1 + 1e-9
    assert all((finding.evidence, finding.fix, finding.caveat, finding.falsified_by))
    return finding


def needs(given: Given) -> dict[str, tuple[str, bool]]:
    """(what it lacks, whether nobody wants to read of it) of each rule that was not judged."""
    return {one.rule: (one.needs, one.quiet) for one in judged(given).abstained}


def values(finding: Finding) -> dict[str, Any]:
    return {evidence.metric: evidence.value for evidence in finding.evidence}
