"""What needless work costs: host time without a device, on one only what nothing hides; and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.model.device_losses import ExtraCall, PassesFacts, PassFacts
from stepscope.tables.schema import Tables
from tests.analyze.traces import Nested
from tests.builders import MS, T0, make_tables, step_rows
from tests.records import replace, some

USER = "/home/user/project/train.py"
DOUBLE = {"types": '["double","double"]', "shapes": "[[64,64],[64,64]]"}


class Steps(Nested):
    """Steps of `length`, each with a training call of `Net_0` from 0 to 100 and its backward pass from 100 to 200."""

    def __init__(self, count: int = 4, length: float = 1000) -> None:
        super().__init__()
        self.length = length
        self.spans = [(number * length, length) for number in range(count)]
        self.mains: list[int] = []
        for number, (at, _) in enumerate(self.spans):
            main = self.add("python_function", f"{USER}(3): train", at, length)
            self.mains.append(main)
            call = self.module("Net_0", at, 100, main, python_module=0)
            forward = self.operator("aten::linear", at + 10, 80, call, sequence=number * 100)
            back = self.backward("AddmmBackward0", at + 100, 100, forward, main, sequence=number * 100)
            self.forward, self.back = forward, back

    def extra(self, step: int, start: float, length: float, nodes: int = 3, scored: bool = True) -> int:
        """A call of `Net_0` that no backward pass reads, made by a function of the user's; the row of the call."""
        at = self.spans[step][0] + start
        around = self.add("python_function", f"{USER}(30): accuracy", at, length + 20, parent=self.mains[step])
        call = self.module("Net_0", at, length, around, python_module=0)
        for number in range(nodes + 1 if nodes else 1):
            numbered: dict[str, Any] = {"sequence": step * 100 + 50 + number} if nodes else {}
            self.operator("aten::linear", at + number, 1, call, **numbered)
        if scored:
            self.operator("aten::item", at + length + 5, 5, around)
        return call

    def work(self, step: int, start: float, length: float, below: int, stream: int = 7) -> None:
        """A kernel launched below a slice."""
        self.launch("gemm", self.spans[step][0] + start, length, below)
        self.events[-1]["stream"] = stream
        self.events[-1]["track"] = f"0/{stream}"
        if self.links[-1]["launch"] is not None:
            self.events[self.links[-1]["launch"]]["start_ns"] = self.events[below]["start_ns"]


MODULE = "_wrapped_call_impl (/venv/lib/python3.11/site-packages/torch/nn/modules/module.py:9)"


def passes(tables: Tables) -> PassesFacts:
    return some(analyze(tables).passes)


def facts(made: Steps) -> PassFacts:
    (found,) = passes(made.tables(made.spans)).runs
    return found


def call_of(made: Steps) -> ExtraCall:
    (found,) = facts(made).extra_calls
    return found


def validated(count: int = 4, **more: Any) -> Steps:
    made = Steps(count)
    for step in range(count):
        made.extra(step, 300, 200, **more)
    return made


def test_on_a_device_the_kernels_of_the_call_count_where_they_run_alone() -> None:
    made = Steps(4)
    for step in range(4):
        made.work(step, 0, 990, made.forward, stream=20)  # hides everything
        made.work(step, 300, 150, made.extra(step, 300, 200))
    assert call_of(made).ms_per_step == 0
    alone = Steps(4)
    for step in range(4):
        alone.work(step, 0, 100, alone.forward)
        alone.work(step, 700, 150, alone.extra(step, 300, 200))
    # its kernels, and the host's time in which the device idles
    assert call_of(alone).ms_per_step == pytest.approx(0.35)


@pytest.mark.parametrize(("name", "calls"), [("aten::multinomial", 0), ("aten::argmax", 0), ("aten::bernoulli_", 1)])
def test_a_call_whose_result_is_chosen_from_makes_what_is_trained_on(name: str, calls: int) -> None:
    """As generated text is, and an action; dropout draws as well, and makes nothing."""
    made = Steps(4)
    for step, (at, _) in enumerate(made.spans):
        made.extra(step, 300, 200)
        made.operator(name, at + 502, 1, made.mains[step])
    assert len(facts(made).extra_calls) == calls


def test_float64_takes_its_operators_and_full_conversions() -> None:
    made = Steps(4)
    for step in range(4):
        at = step * 1000.0
        main = made.mains[step]
        to = made.operator("aten::to", at + 300, 50, main)
        made.operator(
            "aten::copy_", at + 310, 30, to, types='["double","float"]', shapes="[[64,64],[64,64]]", forward_thread=None
        )
        mm = made.operator("aten::mm", at + 400, 200, main, **DOUBLE)
        made.operator("aten::resolve_conj", at + 410, 10, mm, **DOUBLE)
        made.operator("aten::mul", at + 700, 100, main, types='["double","float"]', shapes="[[],[64,64]]")
        made.operator("CompiledFunction", at + 850, 100, main, **DOUBLE)
    doubles = some(facts(made).doubles)
    assert doubles.compute_ms_per_step == pytest.approx(0.2)
    assert doubles.conversion_ms_per_step == pytest.approx(0.05)
    assert (doubles.operators_per_step, doubles.conversions_per_step) == (1, 1)
    assert doubles.lines[0].ms_per_step == pytest.approx(0.15)


@pytest.mark.parametrize("shapes", ['"?"', "[[64,64],", "[64,64]", '[["a"]]', "[[1e999]]", "null"])
def test_shapes_that_cannot_be_read_count_for_nothing(shapes: str) -> None:
    made = Steps(4)
    for step in range(4):
        made.operator("aten::mm", step * 1000 + 400, 200, made.mains[step], types='["double"]', shapes=shapes)
    assert facts(made).doubles is None


def test_recording_is_taken_off_where_the_journal_tells_the_steady_step() -> None:
    """A profiled step of 1 ms that takes 0.5 ms outside of windows: times shrink with it."""
    made = validated()
    profiled = made.tables(made.spans)
    steps = [dict(row) for row in profiled.steps.iter_rows(named=True)]
    last = steps[-1]["start_ns"] + steps[-1]["wall_ns"]
    steady = [
        {"step": 10 + number, "start_ns": last + number * MS // 2, "wall_ns": MS // 2, "in_window": False}
        for number in range(30)
    ]
    recorded = make_tables(steps=[*steps, *steady], journal=[{"kind": "site", "file": USER}])
    tables = replace(recorded, events=profiled.events, links=profiled.links, traces=profiled.traces)
    (found,) = passes(tables).runs
    assert found.step_ms == pytest.approx(0.5)
    assert 0.08 < found.extra_calls[0].ms_per_step < 0.12


STEADY_MS = {"data_wait_ms": 0, "forward_ms": 0.3, "backward_ms": 0.3, "optimizer_ms": 0, "other_ms": 0.4}


def sampled(made: Steps, stacks: dict[tuple[str, ...], int], *, phases: tuple[str, ...] = ()) -> ExtraCall:
    """The call found where steps outside of the window, as long as those in it, were sampled in these stacks.

    `phases`: of each of the stacks, the forward pass by default.
    """
    profiled = made.tables(made.spans)
    first = profiled.steps.height
    steps = [
        *profiled.steps.iter_rows(named=True),
        *step_rows(60, start_ns=T0 + 10 * MS, first_step=first, **STEADY_MS),
    ]
    rows = [
        {"frames": frames, "samples": count, "phase": phase, "start_ns": T0, "end_ns": T0 + 200 * MS}
        for (frames, count), phase in zip(stacks.items(), phases or ("forward",) * len(stacks), strict=True)
    ]
    journal = [{"kind": "site", "file": USER}]
    recorded = make_tables(steps=steps, stacks=rows, journal=journal)
    tables = replace(recorded, events=profiled.events, links=profiled.links, traces=profiled.traces)
    ((call,),) = (run.extra_calls for run in passes(tables).runs)
    return call


def in_line(*, after: bool) -> Steps:
    """A step whose function trains and validates, the validation in front of or behind the training."""
    made = Steps(4)
    for step, (at, _) in enumerate(made.spans):
        main = made.mains[step]
        made.add("python_function", "torch/_tensor.py(500): backward", at + 100, 100, parent=main)
        start = at + 300
        call = made.module("Net_0", start, 200, main, python_module=0)
        made.operator("aten::item", start + 205, 5, main)
        made.operator("aten::linear", start + 1, 1, call)
        if not after:  # everything else comes later
            for row in made.events:
                inside = at <= (row["start_ns"] - T0) / 1000 < at + 1000 and row is not made.events[main]
                if inside and row["start_ns"] < T0 + round((at + 250) * 1000):
                    row["start_ns"] += 600_000
    return made


@pytest.mark.parametrize(
    ("after", "backward", "line"),
    [(True, 11, 12), (True, 13, 10), (False, 13, 10), (False, 11, 12)],
)
def test_in_line_the_order_of_calls_tells_the_line(after: bool, backward: int, line: int) -> None:
    """A loop's text has the order of its calls, from some call on: the steps may begin anywhere in it."""
    back = "backward (/venv/lib/python3.11/site-packages/torch/_tensor.py:1)"
    call = sampled(
        in_line(after=after),
        {
            (f"train ({USER}:10)", MODULE): 40,
            (f"train ({USER}:12)", MODULE): 60,
            (f"train ({USER}:{backward})", back): 50,
        },
    )
    assert (call.place.line, call.exact) == (line, True)


def test_samples_of_a_function_that_trains_as_well_tell_nothing() -> None:
    made = validated()
    for step in range(4):  # the training call is made by another call of the same function
        at, main = made.spans[step][0], made.mains[step]
        around = made.add("python_function", f"{USER}(30): accuracy", at, 100, parent=main)
        training = next(
            row
            for row in made.events
            if row["name"] == "nn.Module: Net_0" and row["parent"] == main and row["start_ns"] == T0 + round(at * 1000)
        )
        training["parent"] = around
    call = sampled(made, {(f"accuracy ({USER}:33)", MODULE): 80, (f"train ({USER}:5)",): 20})
    assert call.samples == 0
    assert call.ms_per_step == pytest.approx(0.2)  # as profiled; the samples would say 80 %
