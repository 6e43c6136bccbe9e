"""What the training thread does besides torch: whose line it is when a framework trains, calls as wholes, and work that
training does not need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest

from stepscope.analyze import analyze
from stepscope.diagnose.gains import PIPELINE
from stepscope.diagnose.needless_work import DOUBLES, PASSES, RECOMPUTE, told_places
from stepscope.model import CATEGORIES, Analysis, Finding, LoopFacts, Place
from stepscope.model.device_losses import (
    Doubles,
    ExtraCall,
    ModelCopy,
    PassesFacts,
    PassFacts,
    PassLine,
    Recompute,
    WastedWork,
    WideGradients,
)
from stepscope.model.metrics import CurveSummary
from stepscope.model.trace import GpuProperties
from stepscope.tables.schema import Tables
from tests.analyze.scenes import LOOP_SOURCE, TORCH, TRAIN, Trace, loop_tables, stack, steps_with_window
from tests.analyze.test_main_thread import DESCRIBE, MAIN, TRAINING, main
from tests.analyze.test_main_thread import tables as call_tables
from tests.builders import MS, T0, make_tables, rank_info, step_rows
from tests.diagnose.judged import judged, needs, only, told, values
from tests.records import blank, replace, some

PYTHON, IO, LOOP = "host.python_on_critical_path", "io.blocking_in_step", "host.per_item_loop"
BETWEEN = "host.evaluation_between_steps"
SITE = "/venv/lib/python3.11/site-packages"
ENTRY = f"<module> ({TRAIN}:16)"
BASE = [ENTRY, f"Trainer._run_epoch ({SITE}/transformers/trainer.py:1909)"]
TRAINING_STEP = f"Trainer.training_step ({SITE}/transformers/trainer.py:2118)"
MODULE = f"Module._call_impl ({TORCH}/nn/modules/module.py:1789)"
BACKWARD = f"Tensor.backward ({TORCH}/_tensor.py:623)"
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


def lines_of(finding: Finding) -> list[tuple[str, int | None]]:
    return [(place.file, place.line) for place in finding.where]


def test_operators_that_a_framework_calls_are_not_pythons() -> None:
    """C has no frame: `x * y` in a library's function shows the library's line."""
    leaf = stack([*BASE, f"Trainer.clip ({SITE}/transformers/trainer.py:300)"], 100)
    assert told(tables([leaf], window_of("trainer.py(290): clip", operators=0.95)), PYTHON) is None
    assert told(tables([leaf]), PYTHON) is None  # no window saw it: nobody knows


def test_a_frameworks_own_python_is_told_at_its_line_and_the_users_line_is_the_entry() -> None:
    stacks = [
        stack([*BASE, f"{LOG}:300)", "dumps (/usr/lib/python3.11/json.py:7)"], 20),
        stack([*BASE, f"{LOG}:301)"], 40),
    ]
    finding = only(tables(stacks, window_of("trainer.py(290): log", 0.0)), PYTHON)
    assert lines_of(finding) == [("transformers/trainer.py", 301), ("transformers/trainer.py", 300), (TRAIN, 16)]
    assert "log (trainer.py:301)" in finding.title
    assert "reached from train.py:16" in finding.title
    assert "train.py:16 only leads there" in finding.fix


def test_fetching_a_batch_through_a_framework_blames_no_line() -> None:
    fetch = [ENTRY, f"DataLoaderShard.__iter__ ({SITE}/accelerate/data_loader.py:598)"]
    stacks = [
        stack([*fetch, f"_BaseDataLoaderIter.__next__ ({TORCH}/utils/data/dataloader.py:733)"], 50, phase="data_wait"),
        stack([*fetch, f"send_to_device ({SITE}/accelerate/operations.py:140)"], 60),
    ]
    assert told(tables(stacks), PYTHON) is None


def test_what_no_window_saw_of_a_call_that_could_be_spared_counts_with_low_confidence_and_is_never_critical() -> None:
    metric = f"compute ({SITE}/somemetrics/f1.py:9)"
    finding = only(
        tables([stack([*BASE, f"Mine.on_step_end ({TRAIN}:8)", f"measure ({TRAIN}:4)", metric], 200)]), PYTHON
    )
    assert finding.where[0].line == 4
    assert finding.share > 0.4
    assert (finding.confidence, finding.severity) == ("low", "warning")
    assert any(evidence.metric == "of it not told from torch operators" for evidence in finding.evidence)


def test_python_in_a_loop_that_costs_much_less_is_told_by_itself() -> None:
    """Two operators an iteration and a sort of Python's: the loop's finding counts the operators alone."""
    analysis = analyze(loop_tables(), {TRAIN: LOOP_SOURCE})
    assert told(analysis, PYTHON) is None
    loop = replace(some(analysis.loops)[0], ms_per_step=6.0, backward_ms_per_step=None)
    line = replace(some(analysis.python)[0], ms_per_step=30.0, samples=60, inside_loop=loop.place)
    found = judged(replace(analysis, loops=(loop,), python=(line,))).findings
    assert [finding.rule for finding in found] == [PYTHON, LOOP]


@pytest.mark.parametrize(("fraction", "rule"), [(1.0, PYTHON), (0.6, LOOP)])
def test_a_loop_that_mostly_calls_plain_python_is_pythons(fraction: float, rule: str) -> None:
    analysis = analyze(loop_tables(), {TRAIN: LOOP_SOURCE})
    loop = replace(some(analysis.loops)[0], ms_per_step=40.0, backward_ms_per_step=None)
    simulated = {"place": Place(TRAIN, 30, "obs"), "call": Place(TRAIN, 40, "advance"), "python_fraction": fraction}
    line = replace(some(analysis.python)[0], ms_per_step=30.0, samples=60, inside_loop=loop.place, **simulated)
    assert [one.rule for one in judged(replace(analysis, loops=(loop,), python=(line,))).findings] == [rule]


def test_a_checkpoint_of_the_frameworks_is_told_at_its_line_and_once() -> None:
    """The recorder times the save and knows the user's line alone; the samples know whose function it is."""
    save = [f"_save_checkpoint ({SITE}/transformers/trainer.py:2300)", f"save ({TORCH}/serialization.py:980)"]
    known = {"kind": "save", "path": "c.pt", "duration_ns": 20 * MS, "file": TRAIN, "line": 16, "function": "<module>"}
    journal = [{**known, "time_ns": row["start_ns"]} for row in steps_with_window()]
    finding = only(tables([stack([*BASE, *save], 50)], journal=journal), IO)
    assert lines_of(finding) == [("transformers/trainer.py", 2300), (TRAIN, 16)]
    assert finding.share == 0.2
    assert "reached from train.py:16" in finding.title
    assert "at train.py:16" not in finding.fix
    stacks = [stack([*BASE, save[0], end], 50) for end in (save[1], f"save_file ({SITE}/safetensors/torch.py:352)")]
    both = tables(stacks, journal=journal)
    assert only(both, IO).share > 0.3
    assert told(both, PYTHON) is None


def test_a_call_with_its_comprehension_and_libraries_is_one_finding() -> None:
    finding = only(call_tables([*TRAINING, *DESCRIBE]), PYTHON)
    assert "describe (train.py:22)" in finding.title
    # 60 samples in json; whose are the lines on top without a callee, no window says
    assert finding.cost_ms_per_step == pytest.approx(50 * 60 / 250)
    # its lists, its operators and what chance may add to 150 samples of 250
    assert finding.gain_ceiling == pytest.approx(0.3 + 1.96 * 0.5 * (0.6 * 0.4 / 250) ** 0.5, abs=0.004)


def test_a_window_with_slow_writes_is_not_believed_against_the_steady_steps() -> None:
    """The window saw 80 ms of fsync per step; of the steady steps' samples a fifth stands there."""
    steps = step_rows(40, data_wait_ms=0, forward_ms=40, backward_ms=40, optimizer_ms=10, other_ms=10)
    trace = Trace()
    for row in steps[10:12]:
        row["in_window"] = True
        trace.add("train.py(1): log", row["start_ns"], 90 * MS, step=row["step"])
        trace.add("<built-in function fsync>", row["start_ns"] + MS, 80 * MS, step=row["step"])
    stacks = [*TRAINING, stack([MAIN, main(50), f"log ({TRAIN}:2)"], 50)]
    made = make_tables(steps=steps, events=trace.rows, stacks=stacks)
    finding = only(made, IO, {TRAIN: "def log(handle):\n    os.fsync(handle)\n"})
    assert finding.cost_ms_per_step == pytest.approx(50 * 50 / 150)


def test_one_call_over_all_items_is_predicted_with_an_interval() -> None:
    finding = only(loop_tables(), LOOP, {TRAIN: LOOP_SOURCE})
    gain = some(finding.expected_gain)
    assert gain.low == pytest.approx((40 - 256 * 0.09) / 100)  # in the window 256 items ran operators of 5, 5 and 80 us
    assert gain.high == pytest.approx(0.72 * 255 / 256)
    assert gain.high <= finding.gain_ceiling


@pytest.mark.parametrize(
    ("body", "carried"),
    [
        ("h, c = self.lstm(\n            x[t], (h, c))", "c"),
        ("self.h = cross_entropy(\n            x[t], self.h.detach())", "self.h"),
        ("x[:, t] = cross_entropy(\n            x[:, t - 1])", "x"),
        ("x[t] = cross_entropy(\n            x[t])", None),
        ("total += cross_entropy(\n            x[t], y[t])", None),
        ("out = cross_entropy(\n            item)\n        item = out", "item"),
        ("t = cross_entropy(\n            t)", None),
        (
            "action = cross_entropy(\n            state)\n        with off():\n            state, r = env.step(action)",
            "state",
        ),
        ("word = cross_entropy(\n            torch.tensor(words))\n        words.append(int(word))", "words"),
        ("out = cross_entropy(\n            x[t])\n        outs.append(out)", None),
    ],
)
def test_calls_that_take_what_the_one_before_gave_cannot_be_one_call(body: str, carried: str | None) -> None:
    source = LOOP_SOURCE.replace("total = total + F.cross_entropy(\n            logits[:, t], targets[:, t])", body)
    finding = only(loop_tables(), LOOP, {TRAIN: source})
    assert (finding.expected_gain is None, finding.confidence == "low") == (carried is not None,) * 2
    assert ("Replace the loop" in finding.fix) == (carried is None)
    assert f"`{carried}`" in finding.fix or carried is None
    assert values(finding).get("taken from the iteration before") == carried


@pytest.mark.parametrize("phases", [(), ("backward", "optimizer"), ("optimizer",)])
def test_the_training_loop_is_no_loop_over_items(phases: tuple[str, ...]) -> None:
    """Between two updates it may act in an environment many times; its text or its samples have both parts of one."""
    source, made = LOOP_SOURCE, loop_tables()
    if phases:
        of_loop = [MAIN, main(11), f"token_loss ({TRAIN}:7)", f"step ({TORCH}/optim/optimizer.py:500)"]
        made = loop_tables(samples=[stack(of_loop, 20, phase=phase) for phase in phases])
    else:
        source = source.replace("    return total", "        total.backward()\n        adam.step()\n    return total")
    analysis = analyze(made, {TRAIN: source})
    assert [loop.callee for loop in some(analysis.loops)] == ["cross_entropy"] * (len(phases) == 1)


def test_a_loop_without_gradients_leaves_nothing_to_the_backward_pass() -> None:
    """Its operators all carry the number that the next one with a gradient gets, as that one's node does."""
    made = loop_tables()
    numbers = pl.when(pl.col("name").str.starts_with("aten::")).then(1).otherwise("sequence")
    made = replace(made, events=made.events.with_columns(sequence=numbers.cast(pl.Int64)))
    assert [loop.backward_ms_per_step for loop in some(analyze(made).loops)] == [None]


@pytest.mark.parametrize(("ends_ms", "also", "told_as"), [(20, "", [6]), (140, "", []), (20, "one.backward();", [])])
def test_a_loop_over_few_tensors_is_told_behind_the_backward_pass_alone(
    ends_ms: int, also: str, told_as: list[int]
) -> None:
    """Six items are layers anywhere else, and a training loop goes on one after the other."""
    trace, steps = Trace(), steps_with_window()
    for row in (row for row in steps if row["in_window"]):
        at, step = row["start_ns"], row["step"]
        trace.add("train.py(3): update", at, 200 * MS, step=step)
        trace.add("autograd::engine::evaluate_function: A", at + ends_ms * MS, MS, step=step, category="cpu_op")
        for item in range(6):
            trace.add("aten::mul_", at + (30 + 10 * item) * MS, 9 * MS, step=step, category="cpu_op")
    source = f"\n\ndef update(parameters):\n    for one in parameters:\n        {also} one.mul_(0.9)\n"
    analysis = analyze(make_tables(steps=steps, events=trace.rows), {TRAIN: source})
    assert [loop.loop_line for loop in some(analysis.loops)] == [4 for _ in told_as]
    assert [loop.calls_per_step for loop in some(analysis.loops)] == told_as


@pytest.mark.parametrize(
    ("optimizer_ms", "arguments", "device", "share"),
    [
        (9, {"foreach": "None", "fused": "None"}, "cpu", 0.25),
        (3, {"foreach": "None", "fused": "None"}, "cpu", None),
        (9, {"momentum": "0", "fused": "False"}, "cpu", None),  # an operator for each parameter, as fused
        (9, {"fused": "True"}, "cpu", None),
        (9, {"lr": "0.1"}, "cpu", None),  # that it could be fused nobody knows
        (9, {"fused": "None"}, "cuda", None),
    ],
)
def test_an_optimizer_that_could_be_fused(
    optimizer_ms: float, arguments: dict[str, str], device: str, share: float | None
) -> None:
    site = {"kind": "site", "what": "AdamW", "arguments": arguments, "file": TRAIN, "line": 7}
    steps = step_rows(40, optimizer_ms=optimizer_ms)
    found = told(
        make_tables(steps=steps, journal=[site], ranks=[rank_info(device=device)]), "compute.unfused_optimizer"
    )
    assert (found and found.share) == (None if share is None else pytest.approx(share))
    assert found is None or (found.where[0].line, found.try_[0].knob) == (7, "optimizer.fused")


STEP_MS = 10.0  # of `step_rows`
LINE = PassLine(Place(TRAIN, 12, "forward"), 1.0, True)
CALL = ExtraCall(
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
COPY = ModelCopy("copy.deepcopy", Place(TRAIN, 30, "train"), 2.0, 2.5, 40, "sampled stacks, 40 of 200 samples in steps")
TWICE = Doubles(4.0, 1.0, 10, 4, (LINE,), {"aten::mm": 3.5, "aten::linear": 0.5})
AGAIN = Recompute(2.0, 8, 2, (LINE,), None, 40, "sampled stacks, 40 of 200 samples in steps")
WIDE = WideGradients(
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
_KNOWN: dict[str, Any] = {"run": "", "traces": ("rank-0/span1",), "ranks": (0,), "steps": 3, "step_ms": STEP_MS}
_KNOWN |= {"on_device": False, **dict.fromkeys(("gpus", "extra_calls", "wide_gradients", "wasted", "copies"), ())}
_KNOWN |= dict.fromkeys(("has_steps", "modules", "types", "shapes", "numbered", "functions"), True)
NOTHING = blank(PassFacts, **_KNOWN)
EVALUATION, COPIED, GRADIENTS = "host.evaluation_in_step", "host.model_copied_in_step", "memory.short_lived_gradients"
LOSSES: dict[str, dict[str, Any]] = {
    EVALUATION: {"extra_calls": (CALL,)},
    COPIED: {"copies": (COPY,)},
    "compute.double_precision": {"doubles": TWICE},
    "compute.recompute": {"recompute": AGAIN},
    GRADIENTS: {"wide_gradients": (WIDE,)},
}


def needless(copies: tuple[ModelCopy, ...] | None = (), device: str = "cpu", **facts: Any) -> Analysis:
    made = analyze(make_tables(steps=step_rows(50), ranks=[rank_info(device=device)]))
    return replace(made, passes=PassesFacts((replace(NOTHING, **facts),), copies))


def ours(given: Analysis) -> list[Finding]:
    return [one for one in judged(given).findings if one.rule in LOSSES]


@pytest.mark.parametrize(("rates", "said"), [((), False), (("0", "1"), True), (("0", "1.0"), False)])
def test_gradients_are_unused_where_one_optimizer_made_every_update(rates: tuple[str, ...], said: bool) -> None:
    """Another one may update what the traced steps leave alone; a trace by itself does not tell."""
    made = needless(wasted=(WastedWork("unused_gradient", "AccumulateGrad", (), 8.0, 20.0, ()),))
    series = tuple(blank(CurveSummary, name=f"train/lr/{rate}") for rate in rates)
    assert made.metrics is not None
    found = judged(replace(made, metrics=replace(made.metrics, series=series))).findings
    assert any(one.rule == "compute.wasted_operators" for one in found) is said


@pytest.mark.parametrize("rule", sorted(LOSSES))
def test_each_speaks_of_its_loss_alone(rule: str) -> None:
    found = only(needless(**LOSSES[rule]), rule)
    assert [one.rule for one in ours(needless(**LOSSES[rule]))] == [rule]
    assert found.category in CATEGORIES
    assert found.cost_ms_per_step == pytest.approx(found.share * STEP_MS)
    assert found.where
    assert found.learn.startswith("https://")


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
    assert ours(needless(**small)) == []


@pytest.mark.parametrize(
    ("missing", "rule"),
    [
        ("modules", EVALUATION),
        ("types", "compute.double_precision"),
        ("shapes", GRADIENTS),
        ("numbered", "compute.recompute"),
    ],
)
def test_a_trace_without_something_silences_one_rule(missing: str, rule: str) -> None:
    without: dict[str, Any] = {missing: False}
    assert needs(needless(**without)).keys() & LOSSES.keys() == {rule}


def test_the_places_told_are_those_of_the_findings() -> None:
    given = needless(extra_calls=(CALL, replace(CALL, place=Place(TRAIN, 90, "f"), ms_per_step=0.1)), copies=(COPY,))
    assert set(told_places(given)) == {CALL.place, Place(TRAIN, None, "accuracy"), COPY.place}
    assert told_places(needless()) == told_places(replace(given, passes=None)) == ()


def test_behind_a_copy_the_rest_of_the_step_is_slower_than_without() -> None:
    """A copy of half the step: what it costs afterwards goes with it, as far as the rest has it."""
    finding = only(needless(copies=(replace(COPY, ms_per_step=5.0, at_most_ms_per_step=5.5),)), COPIED)
    assert finding.gain_ceiling == pytest.approx(0.55 + PIPELINE.cold_copies * 0.45)


def test_copies_on_a_device_are_those_of_the_trace() -> None:
    """Samples tell the host's time, which a device may hide."""
    made = needless(device="cuda")
    run = replace(NOTHING, on_device=True, copies=(replace(COPY, ms_per_step=1.0, samples=0),))
    (finding,) = ours(replace(made, passes=PassesFacts((run,), (COPY,))))
    assert finding.share == pytest.approx(0.1)


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
    finding = only(needless(doubles=TWICE, on_device=True, gpus=(gpu,)), "compute.double_precision")
    assert finding.gain_ceiling == pytest.approx((1.0 + most * 4.0) / STEP_MS)
    assert finding.cost_ms_per_step == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("rule", "facts", "level"),
    [
        ("compute.recompute", {"recompute": AGAIN}, "medium"),  # where memory is unknown
        ("compute.recompute", {"recompute": replace(AGAIN, memory_share=0.3)}, "high"),
        (EVALUATION, {"extra_calls": (CALL,), "has_steps": False}, "low"),
        (EVALUATION, {"extra_calls": (CALL,), "steps": 2}, "medium"),
    ],
)
def test_confidence(rule: str, facts: dict[str, Any], level: str) -> None:
    assert only(needless(**facts), rule).confidence == level


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
    assert only(replace(needless(wide_gradients=(WIDE,)), loops=(timed,)), GRADIENTS).share == pytest.approx(share)


def evaluated(
    batches: int,
    *,
    loader: bool = True,
    below: Sequence[str] = (),
    beside: int = 0,
    scores: Sequence[str] = (),
    model: str = MODULE,
    waiting: int = 0,
) -> Tables:
    """Six epochs of ten steps, each with an evaluation of so many batches behind it, a batch 10 ms as a step.

    `beside`: so many ms of it after the first epoch's batches. `scores`: what follows each evaluation for 100 ms.
    `waiting`: so many ranks more, whose last step of an epoch lasts until the evaluation is over.
    """
    steps, seen, longer, others = [], [], 10 * bool(scores), []
    paths = ([f"main ({TRAIN}:10)", BACKWARD], [f"main ({TRAIN}:14)", f"evaluate ({TRAIN}:3)", model, *below])
    for epoch in range(6):
        begin = T0 + (epoch * (10 + batches + longer) * 10 + beside * (epoch > 0)) * MS
        kinds = ["train"] * 10 + ["eval"] * batches * loader
        own = step_rows(len(kinds), start_ns=begin, first_step=len(steps))
        steps += [row | {"kind": kind} for row, kind in zip(own, kinds, strict=True)]
        steps[-1]["wall_ns"] += 0 if loader else batches * 10 * MS
        for at in range(10 + batches + longer):
            times = {"start_ns": begin + at * 10 * MS, "end_ns": begin + (at + 1) * 10 * MS}
            seen.append(stack(scores if at >= 10 + batches else paths[at >= 10], 1, **times))
            seen += [stack(paths[0], 1, rank=rank, process=f"rank-{rank}", **times) for rank in range(1, waiting + 1)]
        for rank in range(1, waiting + 1):
            ends = step_rows(10, start_ns=begin, first_step=10 * epoch, rank=rank, process=f"rank-{rank}")
            ends[-1]["wall_ns"] += batches * 10 * MS
            others += ends
    region = {"kind": "region", "name": "evaluation", "time_ns": T0 + 100 * MS}
    took = {"duration_ns": (10 * batches + beside) * MS}
    return make_tables(
        steps=steps + others, stacks=seen, stretches=seen, journal=[region | took] if beside or not scores else []
    )


def test_evaluation_is_all_that_a_framework_calls_so_and_no_training_step() -> None:
    with_metrics, without = (only(evaluated(5, beside=ms), BETWEEN).cost_ms_per_step for ms in (30, 0))
    assert with_metrics - without == pytest.approx(30 / 60, rel=0.2)
    finding = only(evaluated(5, beside=30, scores=[f"main ({TRAIN}:10)", f"metrics ({TRAIN}:7)"]), BETWEEN)
    assert [place.line for place in finding.where] == [7, 14]
    logs = f"log ({SITE}/lightning/pytorch/loggers/csv_logs.py:9)"
    assert told(evaluated(20, below=[logs]), "host.logging") is None


@pytest.mark.parametrize(
    ("scores", "lines"),
    [
        ([f"main ({TRAIN}:14)", f"evaluate ({TRAIN}:5)", f"f1 ({TRAIN}:7)"], [7, 14]),
        ([f"main ({TRAIN}:15)", f"f1 ({TRAIN}:7)"], [7, 15, 14]),
        ([f"main ({TRAIN}:15)", f"save ({SITE}/torch/serialization.py:7)"], None),
        ([f"main ({TRAIN}:9)", f"__init__ ({SITE}/torch/utils/data/dataloader.py:1172)"], None),
    ],
    ids=["in it", "behind it", "files", "workers of the next epoch"],
)
def test_what_a_loop_of_the_users_own_makes_of_an_evaluation_is_evaluation(
    scores: list[str], lines: list[int] | None
) -> None:
    source = {TRAIN: "\n@torch.no_grad()\ndef evaluate(): return model(data)\n"}
    assert told(evaluated(2), BETWEEN, source) is None
    finding = told(evaluated(2, scores=scores), BETWEEN, source)
    assert (finding and [place.line for place in finding.where]) == lines
    assert finding is None or finding.cost_ms_per_step == pytest.approx((5 * 100 + 5 * 20) / 60)


def test_what_follows_an_evaluation_too_short_to_be_sampled_is_told() -> None:
    scores = [f"main ({TRAIN}:15)", f"f1 ({TRAIN}:7)"]
    finding = only(evaluated(2, scores=scores, model=f"copy ({TRAIN}:9)"), BETWEEN)
    assert [place.line for place in finding.where] == [7, 15]


def test_an_evaluation_whose_model_no_sample_meets_has_its_line() -> None:
    source = {TRAIN: "\n@torch.no_grad()\ndef evaluate(): return model(data)\n"}
    finding = only(evaluated(20, model=f"copy ({TRAIN}:9)"), BETWEEN, source)
    assert [place.line for place in finding.where] == [9, 14]


@pytest.mark.parametrize("waiting", [0, 2])
@pytest.mark.parametrize("loader", [True, False])
def test_evaluation_between_steps_costs_the_loop_its_share(loader: bool, waiting: int) -> None:
    source = {TRAIN: "\n@torch.no_grad()\ndef evaluate(): return model(data)\n"}
    finding = only(evaluated(20, loader=loader, waiting=waiting), BETWEEN, source)
    assert f"{5 if loader else 6} times, " in finding.title
    assert finding.where[0].line == 14
    assert (finding.cost_ms_per_step, finding.share) == (pytest.approx(20, rel=0.2), pytest.approx(2 / 3, abs=0.05))
    assert told(evaluated(1, loader=loader), BETWEEN, source) is None
    rollout = {TRAIN: source[TRAIN].replace("evaluate", "rollout")}
    assert (told(evaluated(20, loader=loader), BETWEEN, rollout) is None) is not loader
