"""Every rule fires on its loss, keeps quiet on a healthy run, and abstains by name where an input is missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepscope.diagnose
from stepscope.analyze import analyze
from stepscope.diagnose import REPORT_FLOOR, RISKS, RULES, diagnose
from stepscope.errors import UsageError
from stepscope.model import CATEGORIES, SEVERITIES, Finding
from stepscope.record.agent.knobs import check
from stepscope.schema import Knob
from stepscope.tables.schema import Tables
from tests.analyze import scenes
from tests.builders import MS, PID, T0, make_tables, rank_info, step_rows
from tests.diagnose.judged import judged, values
from tests.records import replace

FOLDER = Path(stepscope.diagnose.__file__).parent
# What stands for a part of a `Try` that is computed: all it can be, or numbers at both ends.
COMPUTED = {
    "knob": ("fused", "foreach"),
    "library": ("jemalloc", "tcmalloc"),
    "str(fits)": ("1", "64"),
    "str(wanted)": ("1", "16"),
    "str(loader.suggested_workers)": ("1", "64"),
}


def only(tables: Tables, rule: str, sources: dict[str, str] | None = None) -> Finding:
    findings = judged(tables, sources).findings
    assert [finding.rule for finding in findings] == [rule]
    return findings[0]


def test_the_rules_have_unique_names_and_known_categories() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.category in CATEGORIES and rule.name.startswith(rule.category) for rule in RULES)


def test_the_training_process_loads_itself() -> None:
    finding = only(scenes.loader_tables(), "input.loader_bound")
    assert finding.cost_ms_per_step == pytest.approx(60)
    assert finding.share == pytest.approx(0.6)
    assert finding.gain_ceiling == pytest.approx(0.6, abs=0.005)
    assert finding.severity == "critical"
    first = finding.where[0]
    assert (first.file, first.line, first.function) == (scenes.TRAIN, 12, "augment")
    assert {place.line for place in finding.where} == {30, 31, 12, 75}
    assert "num_workers=3" in finding.fix
    assert "train.py:75" in finding.fix
    assert (finding.try_[0].knob, finding.try_[0].value) == ("loader.num_workers", "3")
    assert finding.expected_gain is None  # on four cores that the computation may keep busy nothing is sure


@pytest.mark.parametrize(
    ("scene", "title", "fix"),
    [
        ({"workers": 2, "busy": 95, "affinity": 2}, "no core is left", "train.py:12"),
        ({"workers": 4, "busy": 20, "affinity": 8}, "parked", "keep more in reserve"),
    ],
)
def test_workers_that_more_of_them_would_not_help(scene: dict[str, Any], title: str, fix: str) -> None:
    finding = only(scenes.loader_tables(**scene), "input.loader_bound")
    assert title in finding.title
    assert fix in finding.fix
    assert "loader.num_workers" not in {each.knob for each in finding.try_}


def test_workers_with_nothing_to_do_are_spared() -> None:
    """They make a batch in 8 ms, and the step waits 60 ms for it to be handed over."""
    finding = only(scenes.loader_tables(workers=4, busy=2, affinity=8), "input.loader_bound")
    assert "num_workers=0 in the DataLoader at train.py:75" in finding.fix
    assert [(each.knob, each.value) for each in finding.try_] == [("loader.num_workers", "0")]


@pytest.mark.parametrize(("of_the_time", "found"), [(0.1, 1), (0.6, 0)])
def test_parked_workers_are_not_waited_for_where_a_core_is(of_the_time: float, found: int) -> None:
    """Of 100 ms the step waits 60 for a batch, and the main thread as long for a core: it wakes up for each batch."""
    system = [
        {"metric": name, "time_ns": T0 + second * 1000 * MS, "value": value, "pid": PID}
        for second in range(10)
        for name, value in (("run_delay_ns", of_the_time * second * 1000 * MS), ("cpu_pct", 40.0))
    ]
    tables = scenes.loader_tables(workers=4, busy=20, affinity=8, count=120, system=system)
    assert [finding.rule for finding in judged(tables).findings].count("input.loader_bound") == found


def test_the_token_loop() -> None:
    finding = only(scenes.loop_tables(), "host.per_item_loop", {scenes.TRAIN: scenes.LOOP_SOURCE})
    assert "256 times per step" in finding.title
    assert "256 = dim 1 of (8, 256)" in finding.title
    assert [(place.file, place.line) for place in finding.where] == [
        (scenes.TRAIN, scenes.CALL_LINE),
        (scenes.TRAIN, scenes.LOOP_LINE),
    ]
    assert finding.cost_ms_per_step == pytest.approx(40 + 32)
    figures = values(finding)
    assert figures["calls of cross_entropy per step"] == 256
    assert figures["loop per step, backward"] == pytest.approx(32)
    assert "flatten" in finding.fix


def test_python_beside_a_gpu_is_a_weak_finding() -> None:
    finding = only(scenes.python_tables(ranks=[rank_info(device="cuda")]), "host.python_on_critical_path")
    assert finding.confidence == "low"
    assert "cuda" in finding.caveat


def test_a_main_thread_that_sleeps_is_said_to_wait() -> None:
    tables = scenes.python_tables(leaf="wait (/usr/lib/python3.11/threading.py:324)")
    first = pl.int_range(pl.len()) == 0
    tables = replace(tables, stacks=tables.stacks.with_columns(waiting=pl.col("waiting") | first))
    assert "waits" in only(tables, "host.python_on_critical_path").title


def test_without_a_window_python_at_lines_that_call_no_library_is_not_judged() -> None:
    """A sampler shows `x @ w` and arithmetic in Python alike; so the rule does not say that there is nothing."""
    stacks = [scenes.stack([f"<module> ({scenes.TRAIN}:90)", f"clean ({scenes.TRAIN}:20)"], 50)]
    diagnosis = judged(make_tables(steps=step_rows(400), stacks=stacks))
    assert diagnosis.findings == ()
    needs = {abstention.rule: abstention.needs for abstention in diagnosis.abstained}
    assert "window" in needs["host.python_on_critical_path"]


def test_lines_of_one_function_are_one_finding() -> None:
    stacks = [scenes.stack([f"log ({scenes.TRAIN}:{line})"], 20, phase="other") for line in (1, 2)]
    stacks.append(scenes.stack([f"main ({scenes.TRAIN}:9)", f"relu ({scenes.TORCH}/nn/functional.py:1)"], 60))
    tables = make_tables(steps=scenes.steps_with_window(window=()), stacks=stacks)
    finding = only(tables, "io.blocking_in_step", {scenes.TRAIN: "f.write(x)\nf.flush()\n"})
    assert finding.cost_ms_per_step == pytest.approx(40)
    assert {place.line for place in finding.where} == {1, 2}


def test_nothing_recorded_is_no_error() -> None:
    diagnosis = judged(make_tables())
    assert diagnosis.findings == ()
    names = {*(rule.name for rule in RULES), *(rule.name for rule in RISKS)}
    assert {abstention.rule for abstention in diagnosis.abstained} == names
    assert all("training steps" in abstention.needs or abstention.quiet for abstention in diagnosis.abstained)


def test_findings_come_in_order_of_cost() -> None:
    tables = scenes.loader_tables()
    save = {"kind": "save", "duration_ns": 20 * MS, "file": scenes.TRAIN, "line": 9, "function": "keep"}
    journal = tables.journal.to_dicts()
    journal += [{**save, "time_ns": row["start_ns"] + MS} for row in tables.steps.to_dicts()]
    findings = judged(replace(tables, journal=make_tables(journal=journal).journal)).findings
    assert [finding.rule for finding in findings] == ["input.loader_bound", "io.blocking_in_step"]


def test_ignored_rules_are_named_with_their_reason() -> None:
    diagnosis = diagnose(analyze(scenes.loader_tables()), ignored={"input.loader_bound": "the disk is replaced in May"})
    assert diagnosis.findings == ()
    assert [(each.rule, each.reason) for each in diagnosis.ignored] == [
        ("input.loader_bound", "the disk is replaced in May")
    ]


def test_ignoring_an_unknown_rule_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"input\.loader_bound"):
        diagnose(analyze(make_tables()), ignored={"input.typo": "x"})


def test_a_run_with_windows_only_is_judged_with_low_confidence() -> None:
    tables = scenes.loop_tables(stacks=False)
    inside = [row for row in tables.steps.to_dicts() if row["in_window"]]
    finding = only(make_tables(steps=inside, events=tables.events.to_dicts()), "host.per_item_loop")
    assert finding.confidence == "low"


@settings(max_examples=25, deadline=None)
@given(
    wait=st.floats(0, 500),
    compute=st.floats(0.1, 500),
    workers=st.integers(0, 4),
    busy=st.integers(1, 99),
    affinity=st.integers(1, 64),
    count=st.integers(1, 30),
)
def test_every_finding_keeps_the_schema(
    wait: float, compute: float, workers: int, busy: int, affinity: int, count: int
) -> None:
    tables = scenes.loader_tables(
        wait_ms=wait, compute_ms=compute, workers=workers, busy=busy, affinity=affinity, count=count
    )
    analysis = analyze(tables)
    for finding in diagnose(analysis).findings:
        check_schema(finding, analysis.steps[0].mean_ms)
        assert finding.share >= REPORT_FLOOR


def check_schema(finding: Finding, mean_ms: float) -> None:
    assert 0 <= finding.share <= finding.gain_ceiling + 1e-9 <= 1 + 1e-9
    assert finding.share == pytest.approx(finding.cost_ms_per_step / mean_ms)
    assert finding.severity in SEVERITIES
    assert finding.confidence in ("high", "medium", "low")
    assert finding.category in CATEGORIES
    assert finding.evidence
    assert all(evidence.source for evidence in finding.evidence)
    assert finding.fix
    assert finding.falsified_by
    assert all(place.share is None or 0 <= place.share <= 1 + 1e-9 for place in finding.where)
    if finding.expected_gain is not None:
        assert 0 <= finding.expected_gain.low <= finding.expected_gain.high <= finding.gain_ceiling + 1e-9


def texts(node: ast.expr) -> Iterator[str]:
    """All that an argument of `Try` can be."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        found = [""]
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            found = [start + end for start in found for end in texts(inner)]
        yield from found
    else:
        yield from COMPUTED[ast.unparse(node)]  # a new one: say what it can be


def proposals() -> list[tuple[str, str]]:
    found = set()
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Try":
                knob, value = node.args
                found |= {(name, text) for name in texts(knob) for text in texts(value)}
    return sorted(found)


def test_what_findings_propose_to_try_is_a_knob_that_takes_the_value() -> None:
    for knob, value in proposals():
        check(Knob(knob, value))


def test_all_families_of_proposed_knobs_are_found() -> None:
    assert {knob.partition(".")[0] for knob, _ in proposals()} >= {"loader", "optimizer", "compile", "amp", "torch"}
