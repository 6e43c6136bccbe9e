"""Two sides laid against each other: figures by name, the structure of steps, and real traces."""

from __future__ import annotations

import pytest

from stepscope.analyze.views import trace_diff
from stepscope.analyze.views.trace_diff import DiffSide
from stepscope.engine.module_calls import MAX_LEVELS
from stepscope.model.views import Diff, DiffRow
from tests.analyze import shared_traces
from tests.analyze.traces import US, Nested, base_of, tables
from tests.builders import T0

TWO_STEPS = [(0.0, 1000.0), (1000.0, 1000.0)]


def side_of(trace: Nested, label: str, steps_us: list[tuple[float, float]] | None = None) -> DiffSide:
    return trace_diff.side(base_of(trace.tables(steps_us)), None, label)


def training(
    *,
    layers: tuple[str, ...] = ("Conv2d_0", "BatchNorm2d_0", "ReLU_0"),
    loader: str = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    loading_us: float = 300,
    kernel: str = "gemm_old",
    modules: bool = True,
    device: bool = True,
    steps: int = 2,
) -> Nested:
    """Steps of 1000 µs: loader, zero_grad, a net of layers of 50 µs, backward, optimizer."""
    trace = Nested()
    for start in range(0, steps * 1000, 1000):
        trace.annotation(loader, start, loading_us)
        trace.annotation("Optimizer.zero_grad#SGD.zero_grad", start + 310, 10)
        net = trace.module("Net_0", start + 330, 300) if modules else None
        made = []
        for number, name in enumerate(layers):
            at = start + 340 + 60 * number
            layer = trace.module(name, at, 50, net) if modules else None
            made.append(trace.operator("aten::layer", at, 40, layer))
            if device:
                trace.launch(kernel, at + 10, 20, made[-1])
        for number, forward in enumerate(reversed(made)):
            at = start + 650 + 30 * number
            back = trace.backward("Node", at, 25, forward, track="1/2")
            if device:
                trace.launch("back", at, 20, back)
        trace.annotation("Optimizer.step#SGD.step", start + 900, 50)
    return trace


def table(found: Diff, name: str) -> dict[str, DiffRow]:
    rows = {one.key: one for one in found.tables[name]}
    assert len(rows) == len(found.tables[name])
    return rows


def us(one: DiffRow) -> tuple[float | None, float | None, float]:
    values = [None if ns is None else ns / US for ns in (one.base_ns, one.other_ns)]
    return values[0], values[1], one.delta_ns / US


def outline(found: Diff) -> list[tuple[int, str]]:
    """The tree without kernels."""
    return [(one.level, one.key) for one in found.tables["tree"] if ", kernel " not in one.key]


def test_steps_are_matched_part_by_part_in_order() -> None:
    found = trace_diff.diff(
        side_of(training(), "a", TWO_STEPS),
        side_of(
            training(loader="enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", loading_us=100),
            "b",
            TWO_STEPS,
        ),
    )
    assert outline(found) == [
        (0, "ProfilerStep"),
        (1, "DataLoader _SingleProcessDataLoaderIter.__next__ | _MultiProcessingDataLoaderIter.__next__"),
        (1, "Optimizer zero_grad#SGD.zero_grad"),
        (1, "Module Net_0"),
        (2, "Module Conv2d_0"),
        (2, "Module BatchNorm2d_0"),
        (2, "Module ReLU_0"),
        (1, "Backward"),
        (2, "Backward Net_0"),
        (3, "Backward ReLU_0"),
        (3, "Backward BatchNorm2d_0"),
        (3, "Backward Conv2d_0"),
        (1, "Optimizer step#SGD.step"),
    ]
    rows = {one.key: one for one in found.tables["tree"]}
    loader = next(one for key, one in rows.items() if key.startswith("DataLoader"))
    assert us(loader) == (300, 100, -200)
    assert loader.ratio == pytest.approx(1 / 3)
    assert (loader.base_calls, loader.other_calls) == (1, 1)
    net, back = rows["Module Net_0"], rows["Backward"]
    assert us(net) == (300, 300, 0)
    assert (net.base_device_ns, net.other_device_ns, net.device_delta_ns) == (60 * US, 60 * US, 0)
    assert us(back) == (75, 75, 0)
    assert back.base_device_ns == 60 * US
    assert rows["Backward Conv2d_0"].base_calls is None
    assert us(rows["ProfilerStep"]) == (1000, 1000, 0)
    assert rows["ProfilerStep"].base_device_ns == 120 * US


def test_without_steps_there_are_totals_and_a_word_about_it() -> None:
    with_steps = side_of(training(), "known", TWO_STEPS)
    without = side_of(training(steps=4), "unknown")
    found = trace_diff.diff(with_steps, without)
    assert not found.per_step
    assert any("unknown has no steps" in note for note in found.notes)
    assert us(table(found, "kernels")["gemm_old"]) == (120, 240, 120)
    assert us(table(found, "modules")["Net_0"])[:2] == (2 * 375, 4 * 375)
    rows = {one.key: one for one in found.tables["tree"]}
    assert us(rows["Module Net_0"])[:2] == (600, 1200)


def test_what_one_side_lacks_is_absent_with_a_reason() -> None:
    bare = side_of(training(modules=False, device=False), "bare", TWO_STEPS)
    found = trace_diff.diff(side_of(training(), "full", TWO_STEPS), bare)
    assert set(found.absent) == {"kernels", "modules"}
    assert found.absent["modules"].startswith("bare: no modules")
    assert found.absent["kernels"].startswith("bare: ")
    rows = {one.key: one for one in found.tables["tree"]}
    assert rows["ProfilerStep"].other_device_ns is None
    assert rows["ProfilerStep"].base_device_ns == 120 * US
    assert "Operators" in {one.key for one in trace_diff.diff(bare, bare).tables["tree"]}


def test_nothing_at_all_raises_nothing() -> None:
    nothing = side_of(Nested(), "nothing")
    for one, two in ((nothing, nothing), (nothing, side_of(training(), "full", TWO_STEPS))):
        found = trace_diff.diff(one, two)
        assert set(found.absent) >= {"operators", "kernels", "modules", "tree"}
        assert not set(found.absent) & set(found.tables)


def test_endless_recursion_is_compared_to_its_end() -> None:
    trace = Nested()
    parent: int | None = None
    for level in range(300):
        parent = trace.module("Tree_0", level, 1000 - 2 * level, parent)
    multiplied = trace.operator("aten::mul", 300, 1, parent)
    trace.launch("mul", 300, 7, multiplied)
    trace.launch("mul_back", 1100, 5, trace.backward("MulBackward0", 1100, 10, multiplied))
    one = side_of(trace, "deep")
    rows = trace_diff.diff(one, one).tables["tree"]
    assert max(row.level for row in rows) >= MAX_LEVELS
    assert rows[0].base_device_ns == 12 * US
    assert all(row.delta_ns == 0 for row in rows)


def test_traces_without_steps_beside_others_are_told() -> None:
    traces = [training(), Nested(trace="worker0.900000000.pt.trace.json")]
    traces[1].operator("aten::mm", 10_000, 10)
    made = tables(*traces, steps=[{"step": 0, "start_ns": T0, "wall_ns": 1000 * US, "in_window": True}])
    one = trace_diff.side(base_of(made), None, "mixed")
    found = trace_diff.diff(one, one)
    assert found.per_step
    assert any(note.startswith("mixed: 1 of its traces") for note in found.notes)


@shared_traces.needs_traces
def test_an_optimized_run_against_its_control() -> None:
    names = [f"hta/trace_diff/{name}/{name}.json.gz" for name in ("control", "test")]
    bases = [base_of(shared_traces.run_of(name).tables) for name in names]
    control, test = (trace_diff.side(base) for base in bases)
    found = trace_diff.diff(control, test)
    assert found.per_step
    operators = table(found, "operators")
    assert operators["CompiledFunction"].base_ns is None
    assert operators["aten::bmm"].other_ns is None
    back = trace_diff.diff(test, control)
    for name, rows in found.tables.items():
        if name != "tree":
            opposite = table(back, name)
            assert all(one.delta_ns == pytest.approx(-opposite[one.key].delta_ns) for one in rows)
