"""Compilation in an example and in a script with a planted cause for each: told with its line, and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import EXAMPLES, PYTHON, SCRIPTS, Recorded, line_of, record

pytestmark = [pytest.mark.process, pytest.mark.torch]

GRAPH = EXAMPLES / "dynamic_graph" / "train.py"
CAUSES = SCRIPTS / "compile_causes.py"
TRAINED, LIMIT = 20, 8  # steps of the first epoch, and versions of a function


def example(out: Path, *arguments: str, python: str = PYTHON) -> Recorded:
    """The example as its README starts it, with a backend that compiles in milliseconds, and with checks."""
    line = [python, "examples/dynamic_graph/train.py", "--backend", "eager", "--epochs", "3", *arguments]
    options = ["--json", f"{out}.json", "--fail-on", "recompile,graph-break"]
    return record(out, line, options=options, cwd=EXAMPLES.parent)


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return example(tmp_path_factory.mktemp("growing") / "run")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return example(tmp_path_factory.mktemp("fixed") / "run", "--fixed")


@pytest.fixture(scope="module")
def causes(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("causes") / "run", [PYTHON, str(CAUSES)])


def compile_findings(recorded: Recorded) -> list[dict[str, Any]]:
    return [found for found in recorded.findings if found["rule"].startswith(("compile.", "transfer."))]


def view(recorded: Recorded) -> dict[str, Any]:
    found: dict[str, Any] = recorded.report["views"]["compilers"]
    return found


def steps_of(recorded: Recorded, kind: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [each for each in view(recorded)["steps"] if each["kind"] == kind]
    assert len(rows) == 1, view(recorded)["steps"]
    return rows[0]


def test_the_limit_is_the_one_finding_and_names_the_line(growing: Recorded) -> None:
    assert json.loads(Path(f"{growing.folder}.json").read_text()) == growing.report
    found = compile_findings(growing)
    assert [each["rule"] for each in found] == ["compile.limit_hit"]
    assert next(each for each in growing.findings if each["category"] != "system")["id"] == found[0]["id"]
    place = found[0]["where"][0]
    assert Path(place["file"]).resolve() == GRAPH
    assert place["line"] == line_of(GRAPH, "compiled_evaluate(report, model, batch, labels)")
    assert f"Since step {TRAINED + LIMIT}" in found[0]["title"]
    assert "report.labels.size(0)" in found[0]["title"]
    assert "evaluate_into" in found[0]["title"]


def test_fail_on_recompile(growing: Recorded, fixed: Recorded) -> None:
    assert growing.status == 1, growing.text
    assert "check failed: recompile" in growing.text
    assert "check passed: graph-break" in growing.text
    assert fixed.status == 0, fixed.text
    assert "check failed" not in fixed.text


def test_with_the_cure_the_report_is_clean(fixed: Recorded) -> None:
    assert compile_findings(fixed) == []
    facts = view(fixed)["backends"]
    assert [(each["backend"], each["recompiles"], each["limit_hits"]) for each in facts] == [("torch.compile", 0, 0)]
    assert (steps_of(fixed, "train")["compiles"], steps_of(fixed, "eval")["compiles"]) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "cause", "subject", "line"),
    [
        ("recompile", "float_argument", "scale", "# a changing float"),
        ("recompile", "int_attribute", "self.calls", "# a counter"),
        ("recompile", "tensor_read", None, "# a value read from a tensor"),
        ("graph_break", "item", None, "# a value read from a tensor"),
        ("graph_break", "print", None, "# printed in compiled code"),
        ("limit_hit", "int_attribute", "self.calls", "# a counter"),
    ],
)
def test_each_cause_has_its_own_line(causes: Recorded, kind: str, cause: str, subject: str | None, line: str) -> None:
    assert causes.status == 0, causes.text
    rows = [each for each in view(causes)["causes"] if (each["kind"], each["cause"]) == (kind, cause)]
    assert len(rows) == 1, [(each["kind"], each["cause"], each["text"]) for each in view(causes)["causes"]]
    assert Path(rows[0]["place"]["file"]).resolve() == CAUSES
    assert rows[0]["place"]["line"] == line_of(CAUSES, line)
    assert subject is None or rows[0]["subject"] == subject


def test_after_the_limit_the_counter_is_blamed(causes: Recorded) -> None:
    limits = [each for each in compile_findings(causes) if each["rule"] == "compile.limit_hit"]
    assert len(limits) == 1, causes.findings
    assert limits[0]["where"][0]["line"] == line_of(CAUSES, "# a counter")
    assert "Since step 8" in limits[0]["title"]
    assert "self.calls" in limits[0]["title"]
    assert "eagerly" in limits[0]["title"]
    assert "allow_unspec_int_on_nn_module" in limits[0]["fix"]
