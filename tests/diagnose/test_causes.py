"""One loss that shows in several places is one cause: who explains whom, by place, rank, phase and resource."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.diagnose import RULES, weigh
from stepscope.model import Analysis, Finding, LoopFacts, Place
from stepscope.model.machine import DriftFacts, MachineFacts
from stepscope.model.sampled import CallerLine, SampledViews
from tests.builders import make_tables
from tests.records import replace

FILE = "/home/user/project/train.py"


def at(line: int, share: float | None = None, function: str = "train") -> Place:
    return Place(FILE, line, function, share)


def finding(rule: str, cost: float, *where: Place, **changes: Any) -> Finding:
    """A finding of a rule that exists, whatever else it says."""
    assert rule in {one.name for one in RULES}
    known: dict[str, Any] = {
        "id": f"{rule}-{changes.pop('key', '0')}",
        "rule": rule,
        "category": rule.split(".")[0],
        "title": rule,
    }
    known |= {"severity": "warning", "confidence": "high", "fix": "", "falsified_by": "", "evidence": ()}
    return replace(
        Finding(**known, cost_ms_per_step=cost, share=0.1, gain_ceiling=0.1, where=where, ranks=(0,)), **changes
    )


def scene(**changes: Any) -> Analysis:
    return replace(analyze(make_tables()), **changes)


def links(*findings: Finding, analysis: Analysis | None = None) -> dict[str, tuple[str, ...]]:
    """Rule -> rules that it explains."""
    found = weigh.explained(findings, analysis or scene())
    assert [replace(one, explains=()) for one in found] == [replace(one, explains=()) for one in findings]
    names = {one.id: one.rule for one in found}
    return {one.rule: tuple(names[name] for name in one.explains) for one in found if one.explains}


LOOP = LoopFacts("aten::add", 64.0, 5.0, 2.0, at(30), None, "window", loop_line=28, loop_end=33, exact_line=True)


LOOP_FOUND = finding("host.per_item_loop", 8.0, at(30, 1.0), at(28))
PYTHON_LINE = finding("host.python_on_critical_path", 9.0, at(30, 1.0))
LOADER = finding("input.loader_bound", 9.0, at(30, 1.0), ranks=(0, 1))


@pytest.mark.parametrize(
    ("cause", "symptom", "explained"),
    [
        (LOOP_FOUND, finding("launch.short_kernels", 6.0, at(32, 0.7), at(50, 0.3)), True),
        (LOOP_FOUND, finding("launch.short_kernels", 6.0, at(32, 0.4), at(50, 0.6)), False),  # most come from elsewhere
        (PYTHON_LINE, finding("launch.short_kernels", 6.0, at(30, 1.0)), True),
        (replace(PYTHON_LINE, cost_ms_per_step=1.0), finding("launch.short_kernels", 6.0, at(30, 1.0)), False),
        (PYTHON_LINE, finding("launch.short_kernels", 6.0, at(51, 1.0)), False),
        (PYTHON_LINE, finding("launch.short_kernels", 6.0, at(30, 1.0), ranks=(1,)), False),
        # the loader's cost is the mean of all ranks, the straggler's what one of them takes longer
        (LOADER, finding("communication.straggler", 16.0, at(30), ranks=(1,)), True),
        # what is timed as a whole holds collections; Python of a line is counted without them, operators and files
        (LOADER, finding("system.garbage_collection", 5.0, at(30, 0.8), at(60, 0.2)), True),
        (LOOP_FOUND, finding("system.garbage_collection", 5.0, at(30, 0.8), at(60, 0.2)), True),
        (PYTHON_LINE, finding("system.garbage_collection", 6.0, at(30, 1.0)), False),
        (PYTHON_LINE, finding("sync.host_waits", 6.0, at(30, 1.0)), False),
        (PYTHON_LINE, finding("io.blocking_in_step", 6.0, at(30, 1.0)), False),
        (finding("communication.many_small_collectives", 7.0, at(40)), finding("communication.exposed", 9.0), True),
        (finding("communication.straggler", 7.0, at(40), ranks=(1,)), finding("communication.exposed", 9.0), True),
        (finding("system.threads_beyond_cores", 9.0), finding("system.cpu_throttled", 7.0), True),
        # what a compiled function launches is the compiler's
        (
            finding("compile.limit_hit", 9.0, at(18, None, "forward")),
            finding("launch.short_kernels", 6.0, at(40, 1.0, "Net.forward")),
            True,
        ),
        (
            finding("compile.limit_hit", 9.0, at(18, None, "forward")),
            finding("host.python_on_critical_path", 6.0, at(40, 1.0, "forward")),
            False,
        ),
    ],
)
def test_one_loss_explains_another(cause: Finding, symptom: Finding, explained: bool) -> None:
    expected = {cause.rule: (symptom.rule,)} if explained else {}
    assert links(symptom, cause, analysis=scene(loops=(LOOP,))) == expected


@pytest.mark.parametrize("rule", ["sync.host_waits", "host.python_on_critical_path"])
def test_what_runs_below_a_line_in_the_samples_is_that_lines(rule: str) -> None:
    """Of two findings on the user's code, too: the caller is the cause."""
    loop, below = finding("host.per_item_loop", 8.0, at(30, 1.0)), finding(rule, 6.0, at(90, 1.0, "helper"))
    calls = SampledViews((), {}, (), None, None, {}, (CallerLine(at(30), at(90, None, "helper"), 40, 1.0),))
    assert links(below, loop) == {}
    assert links(below, loop, analysis=scene(sampled=calls)) == {"host.per_item_loop": (rule,)}


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ({"data_wait": 6.0, "forward": 1.0}, {"input.loader_bound": ("host.step_drift",)}),
        ({"data_wait": 1.0, "forward": 6.0}, {}),
    ],
)
def test_growth_of_the_data_wait_is_the_loaders(phases: dict[str, float], expected: dict[str, Any]) -> None:
    drift = DriftFacts(100, 6, True, 10.0, 17.0, 3.0, (), phases, ())
    machine = MachineFacts(drift=drift)
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
