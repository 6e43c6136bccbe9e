"""What the rules say of tables, and the figures of a finding."""

from __future__ import annotations

from typing import Any

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Diagnosis, Finding
from stepscope.tables.schema import Tables


def judged(tables: Tables, sources: dict[str, str] | None = None) -> Diagnosis:
    return diagnose(analyze(tables, sources))


def values(finding: Finding) -> dict[str, Any]:
    return {evidence.metric: evidence.value for evidence in finding.evidence}
