"""Where a loss is when a framework trains: the user's line, or the framework's, and never the line that calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.diagnose.gains import PIPELINE
from stepscope.diagnose.needless_work import DOUBLES, PASSES, RECOMPUTE, told_places
from stepscope.model import CATEGORIES, Analysis, Finding, LoopFacts, Place, device_losses
from stepscope.model.trace import GpuProperties
from stepscope.tables.schema import Tables
from tests.analyze.scenes import LOOP_SOURCE, TORCH, TRAIN, Trace, loop_tables, stack, steps_with_window
from tests.builders import MS, make_tables, rank_info, step_rows
from tests.records import blank, replace

PYTHON = "host.python_on_critical_path"
SITE = "/venv/lib/python3.11/site-packages"
ENTRY = f"<module> ({TRAIN}:16)"
EPOCH = f"Trainer._run_epoch ({SITE}/transformers/trainer.py:1909)"
TRAINING_STEP = f"Trainer.training_step ({SITE}/transformers/trainer.py:2118)"
MODULE = f"Module._call_impl ({TORCH}/nn/modules/module.py:1789)"
BACKWARD = f"Tensor.backward ({TORCH}/_tensor.py:623)"
BASE = [ENTRY, EPOCH]
LOG = f"Trainer.log ({SITE}/transformers/trainer.py"
WORK: list[dict[str, Any]] = [
    stack([*BASE, TRAINING_STEP, MODULE, f"linear ({TORCH}/nn/functional.py:1)"], 80, phase="forward"),
    stack([*BASE, TRAINING_STEP, BACKWARD], 100, phase="backward"),
    stack([*BASE, f"Optimizer.step ({TORCH}/optim/sgd.py:5)"], 20, phase="optimizer"),
]


def window_of(function: str, operators: float) -> list[dict[str, Any]]:
    """Slices of two window steps in which `function` of the framework takes 40 ms, a share of it in an operator."""
    trace = Trace()
    for row in steps_with_window():
        if row["in_window"]:
            trace.add("train.py(1): <module>", row["start_ns"], 190 * MS, step=row["step"])
            trace.add("transformers/trainer.py(1900): _run_epoch", row["start_ns"], 180 * MS, step=row["step"])
            trace.add(f"transformers/{function}", row["start_ns"], 40 * MS, step=row["step"])
            share = round(40 * operators * MS)
            trace.add("<built-in method mul of Tensor object at 0x7f>", row["start_ns"], share, step=row["step"])
            trace.add("aten::mul", row["start_ns"], share, step=row["step"], category="cpu_op")
    return trace.rows


def tables(stacks: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]] = (), **more: Any) -> Tables:
    return make_tables(steps=steps_with_window(), stacks=[*WORK, *stacks], events=list(events), **more)


def findings(made: Tables, rule: str = PYTHON) -> list[Finding]:
    return [finding for finding in diagnose(analyze(made)).findings if finding.rule == rule]


def test_operators_that_a_framework_calls_are_not_pythons() -> None:
    """C has no frame: `x * y` in a library's function shows the library's line."""
    leaf = stack([*BASE, f"Trainer.clip ({SITE}/transformers/trainer.py:300)"], 100)
    assert findings(tables([leaf], window_of("trainer.py(290): clip", operators=0.95))) == []
    assert findings(tables([leaf])) == []  # no window saw it: nobody knows


def test_a_frameworks_own_python_is_told_at_its_line_and_the_users_line_is_the_entry() -> None:
    stacks = [
        stack([*BASE, f"{LOG}:300)", "dumps (/usr/lib/python3.11/json.py:7)"], 20),
        stack([*BASE, f"{LOG}:301)"], 40),
    ]
    (finding,) = findings(tables(stacks, window_of("trainer.py(290): log", 0.0)))
    assert [(place.file, place.line) for place in finding.where] == [
        ("transformers/trainer.py", 301),
        ("transformers/trainer.py", 300),
        (TRAIN, 16),
    ]
    assert "log (trainer.py:301)" in finding.title
    assert "reached from train.py:16" in finding.title
    assert "train.py:16 only leads there" in finding.fix


def test_fetching_a_batch_through_a_framework_blames_no_line() -> None:
    fetch = [ENTRY, f"DataLoaderShard.__iter__ ({SITE}/accelerate/data_loader.py:598)"]
    stacks = [
        stack([*fetch, f"_BaseDataLoaderIter.__next__ ({TORCH}/utils/data/dataloader.py:733)"], 50, phase="data_wait"),
        stack([*fetch, f"send_to_device ({SITE}/accelerate/operations.py:140)"], 60),
    ]
    assert findings(tables(stacks)) == []


def test_what_no_window_saw_of_a_call_that_could_be_spared_counts_with_low_confidence_and_is_never_critical() -> None:
    metric = f"compute ({SITE}/somemetrics/f1.py:9)"
    stacks = [stack([*BASE, f"Mine.on_step_end ({TRAIN}:8)", f"measure ({TRAIN}:4)", metric], 200)]
    (finding,) = findings(tables(stacks))
    assert finding.where[0].line == 4
    assert finding.share > 0.4
    assert (finding.confidence, finding.severity) == ("low", "warning")
    assert any(evidence.metric == "of it not told from torch operators" for evidence in finding.evidence)


def test_python_in_a_loop_that_costs_much_less_is_told_by_itself() -> None:
    """Two operators an iteration and a sort of Python's: the loop's finding counts the operators alone."""
    analysis = analyze(loop_tables(), {TRAIN: LOOP_SOURCE})
    assert analysis.loops is not None
    assert analysis.python is not None
    assert PYTHON not in {finding.rule for finding in diagnose(analysis).findings}
    loop = replace(analysis.loops[0], ms_per_step=6.0, backward_ms_per_step=None)
    line = replace(analysis.python[0], ms_per_step=30.0, samples=60, inside_loop=loop.place)
    found = diagnose(replace(analysis, loops=(loop,), python=(line,))).findings
    assert [finding.rule for finding in found] == [PYTHON, "host.per_item_loop"]


def saves(at: dict[str, Any]) -> list[dict[str, Any]]:
    rows = steps_with_window()
    return [{"kind": "save", "time_ns": row["start_ns"], "duration_ns": 20 * MS, "path": "c.pt", **at} for row in rows]


def test_a_checkpoint_of_the_frameworks_is_told_at_its_line_and_once() -> None:
    """The recorder times the save and knows the user's line alone; the samples know whose function it is."""
    save = [f"_save_checkpoint ({SITE}/transformers/trainer.py:2300)", f"save ({TORCH}/serialization.py:980)"]
    journal = saves({"file": TRAIN, "line": 16, "function": "<module>"})
    (finding,) = findings(tables([stack([*BASE, *save], 50)], journal=journal), "io.blocking_in_step")
    assert [(place.file, place.line) for place in finding.where] == [("transformers/trainer.py", 2300), (TRAIN, 16)]
    assert finding.share == 0.2
    assert "reached from train.py:16" in finding.title
    assert "at train.py:16" not in finding.fix


OURS = {
    *("host.evaluation_in_step", "host.model_copied_in_step", "compute.double_precision"),
    *("compute.recompute", "memory.short_lived_gradients"),
}
STEP_MS = 10.0  # of `step_rows`
LINE = device_losses.PassLine(Place(TRAIN, 12, "forward"), 1.0, True)
CALL = device_losses.ExtraCall(
    module="Net_0",
    place=Place(TRAIN, 20, "accuracy"),
    exact=True,
    calls_per_step=1,
    steps_share=1.0,
    ms_per_step=3.0,
    around_ms_per_step=3.5,
    at_most_ms_per_step=3.5,
    around=Place(TRAIN, 18, "accuracy"),
    nodes_per_step=6,
    samples=60,
    source="sampled stacks, 60 of 200 samples in steps",
)
COPY = device_losses.ModelCopy(
    "copy.deepcopy", Place(TRAIN, 30, "train"), 2.0, 2.5, 40, "sampled stacks, 40 of 200 samples in steps"
)
TWICE = device_losses.Doubles(4.0, 1.0, 10, 4, (LINE,), {"aten::mm": 3.5, "aten::linear": 0.5})
AGAIN = device_losses.Recompute(2.0, 8, 2, (LINE,), None, 40, "sampled stacks, 40 of 200 samples in steps")
WIDE = device_losses.WideGradients(
    node="SelectBackward0",
    forward="aten::select",
    place=Place(TRAIN, 59, "looped_loss"),
    exact=True,
    calls_per_step=256,
    bytes_per_call=4 << 20,
    shape=(8, 256, 512),
    part=(8, 512),
    dtype="float",
    dimension="256 = dim 1 of (8, 256, 512)",
    ms_per_step=4.0,
    at_most_ms_per_step=5.0,
)
_NOTHING: dict[str, Any] = {
    "run": "",
    "traces": ("rank-0/span1",),
    "ranks": (0,),
    "steps": 3,
    "step_ms": STEP_MS,
    "on_device": False,
}
_NOTHING |= dict.fromkeys(("gpus", "extra_calls", "wide_gradients", "copies"), ())
_NOTHING |= dict.fromkeys(("has_steps", "modules", "types", "shapes", "numbered", "functions"), True)
NOTHING = blank(device_losses.PassFacts, **_NOTHING)


def analysis(copies: tuple[device_losses.ModelCopy, ...] | None = (), device: str = "cpu", **facts: Any) -> Analysis:
    made = analyze(make_tables(steps=step_rows(50), ranks=[rank_info(device=device)]))
    return replace(made, passes=device_losses.PassesFacts((replace(NOTHING, **facts),), copies))


def pass_findings(given: Analysis) -> list[Finding]:
    return [one for one in diagnose(given).findings if one.rule in OURS]


def only(given: Analysis) -> Finding:
    (found,) = pass_findings(given)
    return found


LOSSES: dict[str, dict[str, Any]] = {
    "host.evaluation_in_step": {"extra_calls": (CALL,)},
    "host.model_copied_in_step": {"copies": (COPY,)},
    "compute.double_precision": {"doubles": TWICE},
    "compute.recompute": {"recompute": AGAIN},
    "memory.short_lived_gradients": {"wide_gradients": (WIDE,)},
}


@pytest.mark.parametrize("rule", sorted(LOSSES))
def test_each_speaks_of_its_loss_alone(rule: str) -> None:
    found = only(analysis(**LOSSES[rule]))
    assert found.rule == rule
    assert found.category in CATEGORIES
    assert 0 < found.share <= found.gain_ceiling <= 1
    assert found.cost_ms_per_step == pytest.approx(found.share * STEP_MS)
    assert found.evidence
    assert all(one.source for one in found.evidence)
    assert found.where
    assert found.fix
    assert found.caveat
    assert found.falsified_by
    assert found.learn.startswith("https://")
    assert found == only(analysis(**LOSSES[rule]))


@pytest.mark.parametrize(
    "small",
    [
        {"extra_calls": (replace(CALL, ms_per_step=0.4),)},
        {"extra_calls": (replace(CALL, steps_share=PASSES.recurring - 0.1),)},
        {"copies": (replace(COPY, ms_per_step=0.4),)},
        {"copies": (replace(COPY, samples=PASSES.samples - 1),)},
        {"doubles": replace(TWICE, compute_ms_per_step=0.5, conversion_ms_per_step=0.2)},
        {"recompute": replace(AGAIN, ms_per_step=0.4)},
        {"recompute": replace(AGAIN, memory_share=RECOMPUTE.full + 0.1)},
        {"wide_gradients": (replace(WIDE, ms_per_step=0.4),)},
    ],
)
def test_what_is_small_rare_or_needed_is_no_finding(small: dict[str, Any]) -> None:
    assert pass_findings(analysis(**small)) == []


@pytest.mark.parametrize(
    ("missing", "rule"),
    [
        ("modules", "host.evaluation_in_step"),
        ("types", "compute.double_precision"),
        ("shapes", "memory.short_lived_gradients"),
        ("numbered", "compute.recompute"),
    ],
)
def test_a_trace_without_something_silences_one_rule(missing: str, rule: str) -> None:
    facts: dict[str, Any] = {missing: False}
    given = analysis(**facts)
    assert {one.rule for one in diagnose(given).abstained} & OURS == {rule}


def test_the_places_told_are_those_of_the_findings() -> None:
    given = analysis(extra_calls=(CALL, replace(CALL, place=Place(TRAIN, 90, "f"), ms_per_step=0.1)), copies=(COPY,))
    assert set(told_places(given)) == {CALL.place, Place(TRAIN, None, "accuracy"), COPY.place}
    assert told_places(analysis()) == ()
    assert told_places(replace(given, passes=None)) == ()


def test_behind_a_copy_the_rest_of_the_step_is_slower_than_without() -> None:
    """A copy of half the step: what it costs afterwards goes with it, as far as the rest has it."""
    given = analysis(copies=(replace(COPY, ms_per_step=5.0, at_most_ms_per_step=5.5),))
    (finding,) = [one for one in diagnose(given).findings if one.rule == "host.model_copied_in_step"]
    assert finding.gain_ceiling == pytest.approx(0.55 + PIPELINE.cold_copies * 0.45)


def test_copies_on_a_device_are_those_of_the_trace() -> None:
    """Samples tell the host's time, which a device may hide."""
    facts = {"on_device": True, "copies": (replace(COPY, ms_per_step=1.0, samples=0),)}
    made = analysis(device="cuda")
    (run,) = made.passes.runs if made.passes is not None else ()
    given = replace(made, passes=device_losses.PassesFacts((replace(run, **facts),), (COPY,)))  # type: ignore[arg-type]
    assert only(given).share == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "capability", "most"),
    [
        ("NVIDIA H100", "9.0", DOUBLES.most),
        ("NVIDIA GeForce RTX 4090", "8.9", DOUBLES.most_slow),
        ("AMD Instinct MI300X", "9.4", DOUBLES.most),
    ],
)
def test_gpus_with_few_units_for_float64_could_gain_nearly_all(name: str, capability: str, most: float) -> None:
    gpu = GpuProperties(0, name, None, capability, None, None, None)
    found = only(analysis(doubles=TWICE, on_device=True, gpus=(gpu,)))
    assert found.gain_ceiling == pytest.approx((1.0 + most * 4.0) / STEP_MS)
    assert found.cost_ms_per_step == pytest.approx(3.0)


def test_recompute_doubts_itself_where_memory_is_unknown() -> None:
    assert only(analysis(recompute=AGAIN)).confidence == "medium"
    known = only(analysis(recompute=replace(AGAIN, memory_share=0.3)))
    assert known.confidence == "high"
    assert any(one.value == 0.3 for one in known.evidence)


# (line that makes the loop's calls, its `for`, its last line); the gradients are of line 59, and cost 4 of 10 ms
@pytest.mark.parametrize(
    ("loop", "share"),
    [((59, 58, 59), 0.25), ((60, 58, 61), 0.25), ((59, None, None), 0.25), ((30, 29, 31), 0.4), ((60, 59, 61), 0.4)],
)
def test_gradients_cost_no_more_than_the_loop_around_them(
    loop: tuple[int, int | None, int | None], share: float
) -> None:
    line, first, last = loop
    own = LoopFacts("aten::add", 256.0, 0.5, 2.0, Place(TRAIN, line, "looped_loss"), None, "window")
    timed = replace(own, loop_line=first, loop_end=last, backward_ms_per_step=2.0)
    (found,) = (
        one
        for one in pass_findings(replace(analysis(wide_gradients=(WIDE,)), loops=(timed,)))
        if one.rule == "memory.short_lived_gradients"
    )
    assert found.share == pytest.approx(share)


@pytest.mark.parametrize(("facts", "level"), [({"has_steps": False}, "low"), ({"steps": 2}, "medium")])
def test_confidence_by_steps(facts: dict[str, Any], level: str) -> None:
    assert only(analysis(extra_calls=(CALL,), **facts)).confidence == level
