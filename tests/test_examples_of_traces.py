"""docs/examples_of_traces.md says what is computed: the first finding of every trace it describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.analyze import shared_traces

PAGE = Path(__file__).resolve().parents[1] / "docs" / "examples_of_traces.md"
ENTRY = re.compile(r'^- \*\*Trace\*\*: `([^`]+)`\n- \*\*First\*\*: (?:none|(\S+): "(.+)")$', re.MULTILINE)


def entries() -> dict[str, tuple[str, str]]:
    """Trace -> rule and title of its first finding, both empty where there is none."""
    return {match[1]: (match[2] or "", match[3] or "") for match in ENTRY.finditer(PAGE.read_text())}


def test_every_section_is_an_entry_with_reasons() -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) == len(entries()) >= 5
    assert all(len(section.split("\n\n", 1)[1].split()) >= 20 for section in sections)


def test_traces_of_different_programs_have_different_first_findings() -> None:
    rules = [
        rule
        for trace, (rule, _) in entries().items()
        if trace.startswith(("hta/df_", "tracelens/b200", "tracelens/h100"))
    ]
    assert len(rules) == len(set(rules)) == 5
    assert "" not in rules


@shared_traces.needs_traces
@pytest.mark.parametrize("trace", entries())
def test_the_first_finding_is_the_one_described(trace: str) -> None:
    findings = shared_traces.run_of(trace).diagnosis.findings
    found = (findings[0].rule, findings[0].title) if findings else ("", "")
    assert found == entries()[trace]
