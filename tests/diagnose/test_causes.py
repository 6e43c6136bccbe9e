"""One loss that shows in several places is one cause: who explains whom, by place, rank, phase and resource."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.diagnose import RULES, diagnose, weigh
from stepscope.model import Analysis, Finding, LoopFacts, Place
from stepscope.model.machine import DriftFacts, MachineFacts
from stepscope.model.sampled import CallerLine, SampledViews
from tests.analyze.scenes import loader_tables, loop_tables, python_tables
from tests.builders import make_tables
from tests.records import replace

FILE = "/home/user/project/train.py"


def at(line: int, share: float | None = None, function: str = "train") -> Place:
    return Place(FILE, line, function, share)


def finding(rule: str, cost: float, *where: Place, **changes: Any) -> Finding:
    """A finding of a rule that exists, whatever else it says."""
    assert rule in {one.name for one in RULES}
    made = Finding(
        id=f"{rule}-{changes.pop('key', '0')}",
        rule=rule,
        category=rule.split(".")[0],
        title=rule,
        severity="warning",
        confidence="high",
        cost_ms_per_step=cost,
        share=0.1,
        gain_ceiling=0.1,
        where=where,
        evidence=(),
        fix="",
        falsified_by="",
        ranks=(0,),
    )
    return replace(made, **changes)


def scene(**changes: Any) -> Analysis:
    return replace(analyze(make_tables()), **changes)


def links(*findings: Finding, analysis: Analysis | None = None) -> dict[str, tuple[str, ...]]:
    """Rule -> rules that it explains."""
    found = weigh.explained(findings, analysis or scene())
    assert [replace(one, explains=()) for one in found] == [replace(one, explains=()) for one in findings]
    names = {one.id: one.rule for one in found}
    return {one.rule: tuple(names[name] for name in one.explains) for one in found if one.explains}


LOOP = LoopFacts("aten::add", 64.0, 5.0, 2.0, at(30), None, "window", loop_line=28, loop_end=33, exact_line=True)


def test_a_loop_explains_the_short_kernels_at_its_lines() -> None:
    loop = finding("host.per_item_loop", 8.0, at(30, 1.0), at(28))
    kernels = finding("launch.short_kernels", 6.0, at(32, 0.7), at(50, 0.3))
    assert links(loop, kernels, analysis=scene(loops=(LOOP,))) == {"host.per_item_loop": ("launch.short_kernels",)}


def test_kernels_that_mostly_come_from_elsewhere_are_a_loss_of_their_own() -> None:
    loop = finding("host.per_item_loop", 8.0, at(30, 1.0), at(28))
    kernels = finding("launch.short_kernels", 6.0, at(32, 0.4), at(50, 0.6))
    assert links(loop, kernels, analysis=scene(loops=(LOOP,))) == {}


def test_a_small_cause_does_not_explain_a_large_loss() -> None:
    line = finding("host.python_on_critical_path", 1.0, at(30, 1.0))
    gaps = finding("launch.short_kernels", 6.0, at(30, 1.0))
    assert links(gaps, line) == {}
    assert links(gaps, replace(line, cost_ms_per_step=3.0)) == {
        "host.python_on_critical_path": ("launch.short_kernels",)
    }


def test_other_lines_and_other_ranks_are_not_explained() -> None:
    line = finding("host.python_on_critical_path", 9.0, at(30, 1.0))
    assert links(line, finding("launch.short_kernels", 6.0, at(31, 1.0))) == {}
    assert links(line, finding("launch.short_kernels", 6.0, at(30, 1.0), ranks=(1,))) == {}


def test_what_runs_below_a_line_in_the_samples_is_that_lines() -> None:
    loop = finding("host.per_item_loop", 8.0, at(30, 1.0))
    waits = finding("sync.host_waits", 6.0, at(90, 1.0, "helper"))
    calls = SampledViews((), {}, (), None, None, {}, (CallerLine(at(30), at(90, None, "helper"), 40, 1.0),))
    assert links(loop, waits) == {}
    assert links(loop, waits, analysis=scene(sampled=calls)) == {"host.per_item_loop": ("sync.host_waits",)}


def test_of_two_findings_on_the_users_code_the_caller_is_the_cause() -> None:
    outer = finding("host.per_item_loop", 8.0, at(30, 1.0))
    inner = finding("host.python_on_critical_path", 6.0, at(90, 1.0, "helper"))
    calls = SampledViews((), {}, (), None, None, {}, (CallerLine(at(30), at(90, None, "helper"), 40, 1.0),))
    assert links(inner, outer, analysis=scene(sampled=calls)) == {
        "host.per_item_loop": ("host.python_on_critical_path",)
    }


def test_a_slow_loader_explains_the_rank_the_others_wait_for() -> None:
    """The loader's cost is the mean of all ranks, the straggler's what one of them takes longer."""
    loader = finding("input.loader_bound", 5.0, at(31, 0.9, "__getitem__"), at(75), ranks=(0, 1))
    late = finding("communication.straggler", 9.0, at(31, None, "__getitem__"), ranks=(1,))
    assert links(late, loader) == {"input.loader_bound": ("communication.straggler",)}


@pytest.mark.parametrize("rule", ["input.loader_bound", "host.per_item_loop"])
def test_collections_in_what_is_timed_as_a_whole(rule: str) -> None:
    whole = finding(rule, 9.0, at(30, 1.0))
    collector = finding("system.garbage_collection", 4.0, at(30, 0.8), at(60, 0.2))
    assert links(whole, collector) == {rule: ("system.garbage_collection",)}


@pytest.mark.parametrize("rule", ["system.garbage_collection", "sync.host_waits", "io.blocking_in_step"])
def test_what_python_leaves_out_is_a_loss_in_addition(rule: str) -> None:
    """Python of a line is counted without the collector, operators and files."""
    line = finding("host.python_on_critical_path", 9.0, at(30, 1.0))
    assert links(line, finding(rule, 6.0, at(30, 1.0))) == {}


def test_python_of_two_functions_is_two_losses() -> None:
    """Each sample is of the innermost function alone."""
    calls = SampledViews((), {}, (), None, None, {}, (CallerLine(at(30), at(90, None, "helper"), 40, 1.0),))
    outer = finding("host.python_on_critical_path", 9.0, at(30, 1.0), key="outer")
    inner = finding("host.python_on_critical_path", 8.0, at(90, 1.0, "helper"), key="inner")
    assert links(outer, inner, analysis=scene(sampled=calls)) == {}


def test_what_a_compiled_function_launches_is_the_compilers() -> None:
    limit = finding("compile.limit_hit", 9.0, at(18, None, "forward"))
    kernels = finding("launch.short_kernels", 6.0, at(40, 1.0, "Net.forward"))
    assert links(limit, kernels) == {"compile.limit_hit": ("launch.short_kernels",)}
    assert links(limit, finding("host.python_on_critical_path", 6.0, at(40, 1.0, "forward"))) == {}


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ({"data_wait": 6.0, "forward": 1.0}, {"input.loader_bound": ("host.step_drift",)}),
        ({"data_wait": 1.0, "forward": 6.0}, {}),
    ],
)
def test_growth_of_the_data_wait_is_the_loaders(phases: dict[str, float], expected: dict[str, Any]) -> None:
    drift = DriftFacts(100, 6, True, 10.0, 17.0, 3.0, (), phases, ())
    machine = MachineFacts(True, None, None, None, drift, None, None, None, ())
    loader, grows = finding("input.loader_bound", 8.0, at(75)), finding("host.step_drift", 3.0)
    assert links(loader, grows, analysis=scene(machine=machine)) == expected


@pytest.mark.parametrize(
    ("drift_ms", "expected"),
    [
        (5.0, {"host.step_drift": ("host.python_on_critical_path",)}),  # most of the line's cost is growth
        (2.0, {"host.python_on_critical_path": ("host.step_drift",)}),  # growth is the smaller part of it
    ],
)
def test_a_line_that_grows(drift_ms: float, expected: dict[str, Any]) -> None:
    line = finding("host.python_on_critical_path", 6.0, at(30, 1.0))
    drift = finding("host.step_drift", drift_ms, at(30), explains=(line.id,))
    assert links(line, drift) == expected


def test_small_collectives_are_what_is_exposed() -> None:
    exposed = finding("communication.exposed", 9.0)
    assert links(exposed, finding("communication.many_small_collectives", 7.0, at(40))) == {
        "communication.many_small_collectives": ("communication.exposed",)
    }
    late = finding("communication.straggler", 7.0, at(40), ranks=(1,))
    assert links(exposed, late) == {"communication.straggler": ("communication.exposed",)}


def test_more_threads_than_cores_use_up_the_quota() -> None:
    threads, quota = finding("system.threads_beyond_cores", 9.0), finding("system.cpu_throttled", 7.0)
    assert links(threads, quota) == {"system.threads_beyond_cores": ("system.cpu_throttled",)}


def test_a_chain_is_told_link_by_link() -> None:
    loop = finding("host.per_item_loop", 9.0, at(30, 1.0))
    waits = finding("sync.host_waits", 8.0, at(30, 1.0))
    late = finding("communication.straggler", 7.0, at(30))
    assert links(loop, waits, late) == {
        "host.per_item_loop": ("sync.host_waits",),
        "sync.host_waits": ("communication.straggler",),
    }


def test_links_to_findings_that_are_not_there_are_dropped() -> None:
    """As where the other rule is ignored by configuration."""
    drift = finding("host.step_drift", 5.0, at(30), explains=("host.python_on_critical_path-0",))
    assert links(drift) == {}


LOOPING = scene(loops=(LOOP,))
ANY = st.builds(
    lambda rule, key, cost, line, given: finding(
        rule, cost, at(line, 1.0), key=str(key), explains=tuple(f"{other}-{number}" for other, number in given)
    ),
    st.sampled_from([rule.name for rule in RULES]),
    st.integers(0, 2),
    st.floats(0.1, 10),
    st.integers(28, 31),
    st.lists(st.tuples(st.sampled_from([rule.name for rule in RULES]), st.integers(0, 2)), max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ANY, max_size=12, unique_by=lambda one: one.id))
def test_links_form_no_circle_and_do_not_depend_on_the_order(findings: list[Finding]) -> None:
    found = {one.id: one.explains for one in weigh.explained(findings, LOOPING)}
    assert all(set(names) <= set(found) for names in found.values())
    done: set[str] = set()
    while ready := [name for name, below in found.items() if name not in done and set(below) <= done]:
        done.update(ready)
    assert done == set(found)
    assert {one.id: one.explains for one in weigh.explained(findings[::-1], LOOPING)} == found


@pytest.mark.parametrize("tables", [loader_tables(), loop_tables(), python_tables()])
def test_explaining_changes_neither_order_nor_figures(tables: Any) -> None:
    found = diagnose(analyze(tables)).findings
    costs = [one.cost_ms_per_step for one in found]
    assert costs == sorted(costs, reverse=True)
    assert all(set(one.explains) <= {other.id for other in found} - {one.id} for one in found)
