"""docs/compilers.md names what there is: every cause, every rule on compilers, and numbers that exist."""

from __future__ import annotations

import re
from pathlib import Path

from stepscope.analyze.compilers import prepared
from stepscope.diagnose.rules import RULES
from stepscope.tables.compile_reasons import CAUSES
from tests.test_docs import thresholds

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "compilers.md").read_text()


def first_cells(heading: str) -> set[str]:
    """The names in the first column of the first table below `heading`."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}


def test_every_cause_is_explained() -> None:
    assert first_cells("Causes and what to do") == set(CAUSES)


def test_every_rule_on_compilers_is_listed() -> None:
    others = ("transfer.device_to_host", "compute.execution_slow")  # what torch_xla's own rules ask besides
    rules = {rule.name for rule in RULES if rule.name.startswith("compile.") or rule.name in others}
    assert rules.issuperset(others)
    assert first_cells("What the rules ask") == rules


def test_the_numbers_it_names_exist() -> None:
    section = PAGE.partition("## What the rules ask\n")[2].partition("\n## ")[0]
    dotted = re.findall(r"`([A-Z]+)\.([a-z_]+)`", section)
    plain = re.findall(r"`([A-Z]+_[A-Z_]+)`", section)
    assert len(dotted) > 5
    assert [f"{owner}.{name}" for owner, name in dotted if not hasattr(thresholds().get(owner), name)] == []
    assert [name for name in plain if not hasattr(prepared, name)] == []


def test_warnings_and_rules_go_by_the_same_bounds() -> None:
    """They stand twice: the rules' numbers are loaded by `--help`, which must not load the analyses."""
    assert thresholds()["COMPILE"].slow_ms == prepared.SLOW_COMPILE_NS / 1e6
    assert thresholds()["EXECUTION"].slow_ms == prepared.SLOW_EXECUTE_NS / 1e6
