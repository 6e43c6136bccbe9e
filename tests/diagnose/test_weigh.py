"""One loss that shows in several places is one cause: who explains whom, by place, rank, phase and resource."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.diagnose import RULES, diagnose, weigh
from stepscope.diagnose.rule import based
from stepscope.diagnose.weigh import SILENCE
from stepscope.model import (
    Analysis,
    Diagnosis,
    Finding,
    LoopFacts,
    Place,
    ReadingFacts,
    Report,
    Unexplained,
    WindowFacts,
)
from stepscope.model.machine import DriftFacts, MachineFacts, RanksFacts, RankWork
from stepscope.model.sampled import CallerLine, RankLines, SampledViews
from stepscope.report import document, sentences
from stepscope.report.document import build
from stepscope.tables.schema import Tables
from tests.analyze.scenes import TORCH, TRAIN, loader_tables, loop_tables, stack
from tests.analyze.test_machine import pool_tables
from tests.builders import MS, T0, make_tables, step_rows
from tests.diagnose import compiler_views
from tests.diagnose.compiler_views import storm, view
from tests.diagnose.judged import only
from tests.diagnose.test_machine import process, started
from tests.diagnose.test_machine import tables as with_children
from tests.records import replace, some
from tests.report import fabricate

FILE = "/home/user/project/train.py"


def at(line: int, share: float | None = None, function: str = "train") -> Place:
    return Place(FILE, line, function, share)


def finding(rule: str, cost: float, *where: Place, **changes: Any) -> Finding:
    """A finding of a rule that exists, whatever else it says."""
    assert rule in {one.name for one in RULES}
    known: dict[str, Any] = {"rule": rule, "category": rule.split(".")[0], "title": rule, "severity": "warning"}
    known |= {"confidence": "high", "fix": "", "falsified_by": "", "evidence": (), "ranks": (0,), "share": 0.1}
    known |= {"id": f"{rule}-{changes.pop('key', '0')}", "gain_ceiling": 0.1, "where": where}
    return Finding(**{**known, "cost_ms_per_step": cost, **changes})


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


LEVELS = ("low", "medium", "high")


@pytest.mark.parametrize(("waits", "level"), [(580, "high"), (440, "medium")])
def test_a_sampled_wait_far_from_the_measured_one_is_said(waits: int, level: str) -> None:
    """Of a run that waits 60 % of its steps, of whose samples so many stand in the wait."""
    analysis = analyze(loader_tables())
    stacks = replace(some(analysis.stacks), by_phase={"data_wait": waits, "forward": 1000 - waits})
    found = only(replace(analysis, stacks=stacks), "input.loader_bound")
    assert found.confidence == level
    assert len(found.disagreements) == (level == "medium")
    for said in found.disagreements:
        assert (said.value, said.other, said.unit) == (pytest.approx(0.6), pytest.approx(0.44), "fraction")
        assert "steps.jsonl" in said.source
        assert "1,000 samples" in said.other_source


def window(ratio: float | None) -> WindowFacts:
    return WindowFacts(0, "trace-0", "stepscope", 4, False, "", None, None, None, ratio)


def stepped(**changes: Any) -> Analysis:
    return replace(analyze(loader_tables()), **changes)


def weighed(analysis: Analysis, *findings: Finding) -> tuple[Finding, ...]:
    return weigh.weighed(findings, analysis)


@pytest.mark.parametrize(("ratio", "said"), [(1.3, 0), (None, 0), (2.4, 1)])
def test_a_window_whose_steps_are_slowed(ratio: float | None, said: int) -> None:
    shares = finding("launch.short_kernels", 5.0, at(30), confidence="medium")
    other = finding("io.blocking_in_step", 5.0, at(30))
    found, untouched = weighed(stepped(windows=(window(ratio),)), shares, other)
    assert len(found.disagreements) == said
    assert found.confidence == LEVELS[1 - said]
    assert untouched is other


def ranks(waited_ms: float) -> RanksFacts:
    work = tuple(RankWork(rank, 40.0, 20.0, 20.0, {"forward": 20.0}, 8.0) for rank in (0, 1))
    return RanksFacts(work, 30, ("backward",), "DDP", 1, 10.0, 9.0, waited_ms, 1.0, {"forward": 10.0})


@pytest.mark.parametrize(("waited_ms", "said"), [(9.5, 0), (5.5, 1), (15.0, 1)])
def test_ranks_that_wait_for_another_time_than_one_takes_longer(waited_ms: float, said: int) -> None:
    """The rule lowers its own confidence for it, so it is only shown."""
    late = finding("communication.straggler", 8.0, at(30), confidence="medium")
    (found,) = weighed(scene(ranks=ranks(waited_ms)), late)
    assert len(found.disagreements) == said
    assert found.confidence == "medium"


def test_several_disagreements_lower_confidence_once() -> None:
    lines = RankLines("ms per step", (0, 1), (), 0, None, (1,), None, "", "stacks.jsonl")
    sampled = SampledViews((), {}, (), None, lines, {})
    late = finding("communication.straggler", 5.0, at(30))
    weak = finding("sync.host_waits", 5.0, at(30), confidence="low")
    late, weak = weighed(stepped(ranks=ranks(15.0), sampled=sampled, windows=(window(3.0),)), late, weak)
    assert [said.unit for said in late.disagreements] == ["ms", ""]
    assert (late.disagreements[1].value, late.disagreements[1].other) == (1, 0)
    assert (late.confidence, weak.confidence) == ("medium", "low")


SOUND = ReadingFacts(1, 10_000, 0, 0, 0, 0, 500, 0.999, {"correlation": 0.999}, 0.0, 0.001, 0.0)


def first(rule: str, tables: Any, **reading: Any) -> Finding:
    return only(replace(analyze(tables), reading=replace(SOUND, **reading)), rule)


@pytest.mark.parametrize(
    ("reading", "levels", "said"),
    [
        ({}, 0, ""),
        ({"lost": 50}, 0, ""),
        ({"link_rate": None}, 0, ""),
        ({"lost": 500}, 1, "5% of the trace's events could not be read."),
        ({"link_rate": 0.62}, 1, "Only 62% of the device time could be linked to operators."),
        ({"link_rate": 0.62, "lost": 500}, 2, "5% of the trace's"),
    ],
)
def test_a_loop_seen_in_a_poor_trace(reading: dict[str, Any], levels: int, said: str) -> None:
    sound = first("host.per_item_loop", loop_tables())
    found = first("host.per_item_loop", loop_tables(), **reading)

    assert found.confidence == LEVELS[max(0, LEVELS.index(sound.confidence) - levels)]
    assert found.caveat.startswith(said)
    assert found.caveat.endswith(sound.caveat)
    assert (found.caveat == sound.caveat) is (levels == 0)


def test_what_stands_on_the_journal_keeps_its_confidence() -> None:
    sound = first("input.loader_bound", loader_tables())
    assert first("input.loader_bound", loader_tables(), lost=9_000, link_rate=0.1) == sound


@pytest.mark.parametrize(
    ("source", "reading", "lowered"),
    [
        ("trace: Torch-Compiled Region", {"lost": 500}, True),
        ("trace: Torch-Compiled Region", {"link_rate": 0.5}, False),  # device time is no part of compile spans
        ("CompilationMetrics", {"lost": 500}, False),
    ],
)
def test_compile_spans_of_a_poor_trace(source: str, reading: dict[str, Any], lowered: bool) -> None:
    about = compiler_views.facts(recompiles=None, graph_breaks=None, source=source, compile_ms=1_990.0)
    made = view(
        about=about, of_steps=(compiler_views.steps(40, 20_000.0),), storms=(storm(late_ms=1_500.0, late_share=0.08),)
    )
    (sound,), (found,) = (
        diagnose(replace(compiler_views.analysis(made), reading=replace(SOUND, **more))).findings
        for more in ({}, reading)
    )
    assert (sound.confidence, found.confidence) == ("medium", "low" if lowered else "medium")
    assert (found.caveat == sound.caveat) is not lowered


EVENT = {"kind": "exit", "reason": "atexit"}  # of a run that the agent recorded
CLOSED = {"kind": "window", "trace": "trace-0.json", "stop_duration_ns": 5_000 * MS, "export_duration_ns": 3_000 * MS}


def busy(**more: Any) -> Tables:
    """A healthy run: the main thread has a core nearly all the time, and its samples stand in operators."""
    values: dict[str, Any] = {"main": 0.97, "delay": 0.02, "pool": 0.9, "pool_delay": 0.0, "threads": 2, **more}
    times = {"start_ns": T0, "end_ns": T0 + 40_000 * MS}
    stacks = [stack([f"<module> ({TRAIN}:9)", f"relu ({TORCH}/nn/functional.py:1)"], 800, **times)]
    return pool_tables(**{"journal": [EVENT], "stacks": stacks, **values})


def of(tables: Tables) -> Unexplained:
    found = diagnose(analyze(tables)).unexplained
    assert found is not None
    assert found.share == pytest.approx(min(1.0, sum(part.share for part in found.parts)))
    assert found.large == (found.share >= SILENCE.unexplained)
    return found


def report(tables: Tables) -> Report:
    analysis = analyze(tables)
    return build(analysis, replace(diagnose(analysis), findings=(), abstained=()))


def test_a_healthy_run_may_be_called_so() -> None:
    assert (of(busy()).large, of(busy()).unseen) == (False, ())
    assert (sentences.healthy(report(busy())) or "").startswith("Nothing worth fixing above 5")


@pytest.mark.parametrize(
    ("run", "what", "share"),
    [
        ({"main": 0.35, "delay": 0.6, "pool": 0.3}, "waiting for a processor core", 0.6),  # no finding tells who had it
        ({"main": 0.4, "delay": 0.0, "pool": 0.1}, "asleep", 0.6 - 0.1),  # for a tenth another thread computed
        # and for some it waited for a window of ours to be written, of the 38 s between the readings
        ({"main": 0.4, "delay": 0.0, "pool": 0.1, "journal": [EVENT, CLOSED]}, "asleep", 0.5 - 8 / 38),
        # a thread of the script holds the interpreter's lock: torch has no work for the main one in another
        ({"main": 0.3, "delay": 0.0, "pool": 0.7, "threads": 1}, "asleep", 0.7),
        ({"main": 0.3, "delay": 0.0, "pool": 0.7, "threads": 2}, "asleep", 0.7 - 0.3),
    ],
)
def test_waiting_that_nobody_explains(run: dict[str, Any], what: str, share: float) -> None:
    found = of(busy(**run))
    assert found.large
    assert found.parts[0].what.startswith(what)
    assert found.parts[0].share == pytest.approx(share)
    assert f"other threads of the process used {run['pool']:.1f}" in found.parts[0].what
    assert sentences.healthy(report(busy(**run))) is None


def test_what_a_finding_tells_is_explained() -> None:
    waiting = {"main": 0.25, "delay": 0.6, "pool": 0.25}
    with_finding = with_children([process(51)], 1.5, [EVENT, started(51, 7)])
    left = next(part.share for part in of(with_finding).parts if part.what.startswith("waiting"))
    assert left == pytest.approx(of(busy(**waiting)).parts[0].share - 0.6 * 1.5 / 1.75)


def test_sleep_while_the_main_thread_loads_is_told_with_the_loading() -> None:
    steps = step_rows(400, data_wait_ms=80, forward_ms=20, backward_ms=0, optimizer_ms=0, other_ms=0)
    loader = {"kind": "loader", "id": 1, "epoch": 0, "num_workers": 0, "batch_size": 8, "time_ns": T0}
    asleep = busy(main=0.2, delay=0.0, pool=0.0, steps=steps, journal=[EVENT, loader])
    assert [one.rule for one in diagnose(analyze(asleep)).findings] == ["input.loader_bound"]
    found = of(asleep)
    assert found.parts[0].what.startswith("asleep")
    assert found.parts[0].share == pytest.approx(0.2)  # at most what lies outside of the loading
    unfed = busy(main=0.2, delay=0.0, pool=0.0, journal=[EVENT])
    assert of(unfed).parts[0].share == pytest.approx(0.8)


def test_sleep_for_the_other_threads_of_an_operator_is_explained() -> None:
    assert not of(busy(main=0.5, delay=0.0, pool=0.5)).large


def test_without_telemetry_silence_is_no_verdict() -> None:
    tables = make_tables(steps=step_rows(60, other_ms=0.1), journal=[EVENT])
    assert not of(tables).large
    assert "whether the main thread had a core" in of(tables).unseen[0]
    said = sentences.unexplained(report(tables)) or ""
    assert said.startswith("No loss above 5")
    assert "not all could be seen" in said
    assert sentences.healthy(report(tables)) is None


def test_without_stacks_and_windows_what_lies_outside_the_passes_is_unexplained() -> None:
    rows = step_rows(60, forward_ms=1, other_ms=20)
    found = of(make_tables(steps=rows, journal=[EVENT]))
    assert found.large
    assert "outside the passes" in found.parts[0].what


def test_beside_findings_a_large_share_is_said_and_what_was_not_seen_is_left_to_not_judged() -> None:
    rows = ({"cost_ms_per_step": 1.0},)
    large = replace(report(busy(main=0.35, delay=0.6, pool=0.3)), findings=rows)
    assert (sentences.unexplained(large) or "").startswith("No finding explains")
    unseen = replace(report(make_tables(steps=step_rows(60, other_ms=0.1), journal=[EVENT])), findings=rows)
    assert sentences.unexplained(unseen) is None


@pytest.fixture
def analysis(tmp_path: Path) -> Analysis:
    return fabricate.analysis(tmp_path)


def _finding(tmp_path: Path, **changes: Any) -> Any:
    return fabricate.finding(str(tmp_path / "train.py"), **changes)


def test_a_cost_above_the_step_names_the_step_it_is_of(analysis: Analysis, tmp_path: Path) -> None:
    found = based(_finding(tmp_path, cost_ms_per_step=776.0, share=0.5, basis="all", step_ms=1552.0), analysis)
    row = {"cost_ms_per_step": 776.0, "share": 0.5, "basis": found.basis, "step_ms": found.step_ms}
    assert sentences.cost(row) == "776 ms of 1,552 ms a step, 50 %"
    assert "all steps" in (sentences.basis(row) or "")


@pytest.mark.parametrize(("counted", "overlaps"), [(1.16, True), (0.9, False)])
def test_findings_of_more_than_the_step_say_so(analysis: Analysis, counted: float, overlaps: bool) -> None:
    report = document.build(analysis, Diagnosis((), (), counted_share=counted))
    said = sentences.overlap(report)
    assert (said is not None) == overlaps
    if overlaps:
        assert "116 %" in (said or "")
