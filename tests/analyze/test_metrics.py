"""What is found of a run's series by themselves, and beside what happened in the same steps; a real run with a NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.analyze import analyze
from stepscope.analyze.context import Context
from stepscope.analyze.happenings import Happenings
from stepscope.analyze.metrics import levels, spikes
from stepscope.model.metrics import MetricFacts
from stepscope.tables.arrays import Floats
from tests.builders import MS, T0, full_steps, make_tables, step_rows
from tests.integration.harness import PYTHON, record

COUNT = 200
AT = 120
STEP = 10 * MS
SOURCES = {"train/loss": "backward", "train/grad_norm": "clipping", "train/scale": "scaler", "train/lr/0": "optimizer"}
NOISE = np.random.default_rng(0).standard_normal(COUNT)


def facts_of(**tables: Any) -> MetricFacts:
    found = analyze(make_tables(**tables)).metrics
    assert found is not None
    return found


def values_of(name: str, values: Mapping[int, float], process: str = "rank-0") -> list[dict[str, Any]]:
    """Rows of a series by step; a pass makes the loss before the norm, and the scale last."""
    after = (1 + list(SOURCES).index(name)) * MS
    source, rank = SOURCES[name], int(process[-1])
    return [
        {"name": name, "source": source, "step": step, "time_ns": T0 + step * STEP + after, "value": value}
        | {"rank": rank, "process": process}
        for step, value in values.items()
    ]


def loss(**at: float) -> list[dict[str, Any]]:
    """A healthy loss, but for the values of these steps."""
    values = {step: 1 + 0.02 * float(NOISE[step]) for step in range(COUNT)}
    return values_of("train/loss", values | {int(step[1:]): value for step, value in at.items()})


def slower(factor: float = 1.4) -> list[dict[str, Any]]:
    walls = np.where(np.arange(COUNT) < AT, 1.0, factor) * (1 + 0.02 * NOISE) * STEP
    return full_steps([{"wall_ns": int(wall)} for wall in walls])


def in_step(number: int, rows: list[dict[str, Any]]) -> int:
    return int(rows[number]["start_ns"]) + MS


# ------------------------------------------------------------------------------------------------ levels, spikes


def test_a_level_is_told_with_what_happened_in_the_same_steps() -> None:
    steps = slower()
    time_ns = in_step(AT, steps)
    facts = facts_of(
        steps=steps,
        compiles=[
            {"kind": "recompile", "step": AT, "time_ns": time_ns, "file": "/home/user/project/model.py", "line": 88}
        ],
        journal=[
            {"kind": "save", "time_ns": time_ns, "duration_ns": 2 * MS, "step": AT, "file": "/p/train.py", "line": 7},
            {"kind": "gc", "time_ns": time_ns, "duration_ns": 4 * MS, "generation": 2, "step": AT},
            {"kind": "gc", "time_ns": in_step(40, steps), "duration_ns": 4 * MS, "generation": 2, "step": 40},
            {"kind": "save", "time_ns": in_step(60, steps), "duration_ns": 2 * MS, "step": 60},
        ],
    )
    (change,) = facts.changes
    assert (change.name, change.step) == ("perf/step_ms", AT)
    assert change.change == pytest.approx(0.4, abs=0.02)
    assert change.sentence == (
        f"Step time changes by +40% from step {AT} on (10.04 ms -> 14.02 ms); in the same steps: "
        "recompilation at model.py:88, garbage collection (4 ms), checkpoint at train.py:7 (2 ms)"
    )
    assert [one.place.line for one in change.happenings if one.place is not None] == [88, 7]
    assert facts.spikes == ()


def test_what_happens_all_the_time_is_not_told_and_neither_is_a_cause_where_nothing_is_known() -> None:
    steps = slower()
    collections = [
        {"kind": "gc", "time_ns": in_step(step, steps), "duration_ns": 4 * MS, "step": step}
        for step in range(0, COUNT, 5)
    ]
    (change,) = facts_of(steps=steps, journal=collections).changes
    assert change.happenings == ()
    assert change.sentence.endswith("; no other event was recorded in these steps")


def test_epochs_evaluations_batches_windows_and_the_machine() -> None:
    steps = slower()
    for row in steps[AT:]:
        row |= {"epoch": 1, "samples": 16}
    steps[AT - 1] |= {"in_window": True}
    edge = int(steps[AT]["start_ns"])
    evaluation = {"kind": "eval", "step": COUNT, "start_ns": edge - MS, "wall_ns": MS // 2}
    system = [
        row
        for second in range(-9, 10)
        for row in (
            {"metric": "busy_cores", "value": 1.0 if second < 0 else 3.5},
            {"metric": "cpu_pct", "value": 100.0, "pid": 100},
            {"metric": "gpu_clock_reasons", "value": 0.0 if second < 0 else 64.0, "device": "gpu:0"},
        )
        if row.update(time_ns=edge + second * 1_000 * MS + 1) is None
    ]
    window = {"kind": "window", "time_ns": edge - 2 * MS, "start_ns": edge - 2 * MS, "first_step": AT - 1, "steps": 1}
    made = {"kind": "site", "what": "Adam", "arguments": {"lr": "0.1"}, "file": "/p/train.py", "line": 5}
    journal = [window, *({**made, "time_ns": at_ns} for at_ns in (int(steps[0]["start_ns"]) - MS, edge - MS))]
    (change,) = facts_of(steps=[*steps, evaluation], system=system, journal=journal).changes
    assert {one.kind: one.text for one in change.happenings} == {
        "window": f"stepscope's own profiler window (steps {AT - 1})",
        "evaluation": "evaluation (1 step)",
        "epoch": "epoch 1 begins",
        "optimizer": "a new optimizer (Adam) at train.py:5",
        "throttling": "clock of gpu:0 lowered (thermal slowdown by hardware)",
        "others": "other processes use 2.5 cores more",
        "batch": "batches of 8 -> 16 samples",
    }


def test_what_happened_once_is_told_of_any_stretch_around_it() -> None:
    """The step of a change is known to some steps only where the series is noisy, or read now and then."""
    steps = full_steps([{"wall_ns": STEP} for _ in range(COUNT)])
    start_ns = int(steps[AT]["start_ns"])
    window = {"kind": "window", "time_ns": start_ns, "duration_ns": 2 * STEP, "first_step": AT, "steps": 2}
    made = make_tables(steps=steps, journal=[window])
    near = Happenings(made, Context(made).labelled, "rank-0").near(AT + 1, before=COUNT // 4)
    assert [(one.kind, one.step) for one in near] == [("window", AT)]


def test_steps_of_windows_and_of_monitors_are_no_change_of_step_time() -> None:
    steps = slower(1.0)
    watched = range(100, 130)
    for row in steps[40:70]:
        row |= {"in_window": True, "wall_ns": 3 * STEP}
    for row in steps[100:130]:
        row |= {"wall_ns": 3 * STEP}
    monitored = [{"kind": "monitor", "step": step, "time_ns": in_step(step, steps)} for step in watched]
    assert facts_of(steps=steps, journal=monitored).changes == ()
    assert len(facts_of(steps=steps).changes) == 2


def test_a_spike_is_told_with_the_rate_that_jumped_before_it() -> None:
    rates = values_of("train/lr/0", {0: 1e-3, AT - 1: 1e-1})
    facts = facts_of(steps=step_rows(COUNT), metrics=[*loss(**{f"s{AT}": 5.0}), *rates])
    (spike,) = facts.spikes
    assert (spike.step, spike.steps, spike.value) == (AT, 1, 5.0)
    assert spike.sentence.startswith(f"Loss leaps to 5 in step {AT}, 4.99 times the usual 1.002; ")
    assert spike.sentence.endswith("; in the same steps: lr 0.001 -> 0.1")
    assert facts.changes == ()


def test_samples_per_second_are_told_only_where_the_time_of_a_step_does_not_say_it() -> None:
    assert {change.name for change in facts_of(steps=slower()).changes} == {"perf/step_ms"}
    steps = [{"samples": 8 if step < AT else 4} for step in range(COUNT)]
    (change,) = facts_of(steps=steps).changes
    assert (change.name, change.step, change.change) == ("perf/samples_per_s", AT, -0.5)


# ------------------------------------------------------------------------------------------------ not finite


@pytest.mark.parametrize(
    ("lost", "stage", "sure"),
    [
        ({"train/loss": 50, "train/grad_norm": 50}, "forward", True),
        ({"train/loss": 51, "train/grad_norm": 50}, "backward", True),
        ({"train/loss": 50}, "forward", False),
    ],
)
def test_where_it_shows_first(lost: dict[str, int], stage: str, sure: bool) -> None:
    rows = [
        row
        for name, first in lost.items()
        for row in values_of(name, {step: math.nan if step >= first else 1.0 for step in range(100)})
    ]
    found = facts_of(steps=step_rows(100), metrics=rows).non_finite
    assert found is not None
    assert (found.step, found.stage, found.sure) == (50, stage, sure)
    assert (found.losses, found.losses_lost) == (
        100 - (50 if sure and stage == "forward" else lost["train/loss"]),
        100 - lost["train/loss"],
    )


def test_what_a_scaler_caught_is_no_alarm() -> None:
    norms = values_of("train/grad_norm", {step: math.inf if step in (3, 40) else 1.0 for step in range(100)})
    skipped = [{"kind": "scaler_skip", "step": step, "time_ns": T0 + step * STEP + MS} for step in (3, 40)]
    scale = values_of("train/scale", {step: 2.0 ** (16 - (step > 3) - (step > 40)) for step in range(100)})
    facts = facts_of(steps=step_rows(100), metrics=[*norms, *scale], journal=skipped)
    assert facts.non_finite is None
    assert facts.scaling is not None
    assert (facts.scaling.skipped, facts.scaling.updates, facts.scaling.least) == (1, 80, 2.0**14)
    assert facts_of(steps=step_rows(100), metrics=norms).non_finite is not None


def test_each_rank_has_its_series_and_the_first_to_break_is_named() -> None:
    rows = [
        row
        for rank, first in ((0, 60), (1, 58))
        for row in values_of("train/loss", {s: math.inf if s >= first else 0.1 * s for s in range(100)}, f"rank-{rank}")
    ]
    steps = [{**row, "rank": rank, "process": f"rank-{rank}"} for rank in (0, 1) for row in step_rows(100)]
    facts = facts_of(steps=steps, metrics=rows)
    assert [(one.rank, one.points, one.not_finite) for one in facts.series] == [(0, 100, 40), (1, 100, 42)]
    assert [(one.first, one.last, one.lowest, one.last_step) for one in facts.series][1] == (0.0, 5.7, 0.0, 99)
    assert facts.non_finite is not None
    assert (facts.non_finite.rank, facts.non_finite.step, facts.non_finite.value) == (1, 58, "inf")


# ------------------------------------------------------------------------------------------------ a real run

SCRIPT = """
import torch
from plain_sgd import PlainSGD
torch.manual_seed(0)
data = torch.randn(320, 4)
data[4 * 51 + 1] = float("nan")
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4)
model = torch.nn.Linear(4, 1)
optimizer = PlainSGD(model.parameters(), lr=1e-3)
for number, (batch,) in enumerate(loader):
    loss = model(batch).pow(2).mean()
    loss.backward()
    if number % 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.thorough
@pytest.mark.process
@pytest.mark.torch
def test_a_nan_in_a_batch_of_a_real_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = record(tmp_path / "run", [PYTHON, str(script)])
    view = done.report["views"]["metrics"]
    lost = view["non_finite"]
    line = SCRIPT.split("\n").index("    loss.backward()") + 1
    assert (lost["step"], lost["name"], lost["stage"], lost["sure"]) == (25, "train/loss", "forward", True)
    assert (lost["place"]["line"], lost["losses"], lost["losses_lost"]) == (line, 15, 15)
    risks = {risk["rule"]: risk for risk in done.report["risks"]}
    assert risks.keys() == {"training.loss_not_finite", "training.loss_not_divided", "training.clipping"}
    assert risks["training.loss_not_divided"]["where"][0]["line"] == line
    assert "Loss of step 25 is nan, the first value that is not finite: it shows first in the forward pass" in done.text


SERIES_COUNT = 1_000


def falling(random: np.random.Generator, count: int = SERIES_COUNT) -> Floats:
    """What a loss looks like without its noise: it decays, by an exponential or a power, slowly or fast, or is flat."""
    at = np.arange(count)
    shapes = (
        0.4 + 2 * np.exp(-at / (count / random.uniform(3, 30))),
        0.2 + 8 * (at + random.uniform(1, 20)) ** -random.uniform(0.3, 0.8),
        3 - 2.5 * at / count,
        np.full(count, 1.7),
    )
    return shapes[int(random.integers(len(shapes)))]


def healthy(random: np.random.Generator) -> Iterator[Floats]:
    """Losses with noise of several kinds, some heavy-tailed, some that remembers."""
    for number in range(300):
        count = int(random.choice([60, 200, 1_000]))
        base, scale = falling(random, count), random.uniform(0.005, 0.2)
        if number % 4 == 0:
            yield base * (1 + scale * random.standard_normal(count))
        elif number % 4 == 1:
            yield base * np.exp(3 * scale * random.standard_normal(count))
        elif number % 4 == 2:
            yield base * random.exponential(1, count)
        else:
            noise = random.standard_normal(count)
            for index in range(1, count):
                noise[index] = 0.9 * noise[index - 1] + np.sqrt(1 - 0.9**2) * noise[index]
            yield base * (1 + scale * noise)


def test_healthy_losses_give_no_alarm() -> None:
    alarms = [(spikes(values), levels(values)) for values in healthy(np.random.default_rng(1))]
    assert sum(bool(found or changed) for found, changed in alarms) <= 2


@pytest.mark.parametrize("lasts", [1, 3])
def test_planted_spikes_are_found_at_their_step(lasts: int) -> None:
    random = np.random.default_rng(lasts)
    for _ in range(60):
        values = falling(random) * (1 + 0.05 * random.standard_normal(SERIES_COUNT))
        at = int(random.integers(250, SERIES_COUNT - 10))  # before, the fall at the start is as wide
        values[at : at + lasts] *= 4
        found = [(leap.at, leap.lasts) for leap in spikes(values)]
        assert found == [(at, lasts)]
        assert levels(values) == []


def test_planted_levels_are_found_at_their_step() -> None:
    random = np.random.default_rng(3)
    for number in range(60):
        values = 10 * (1 + 0.03 * random.standard_normal(SERIES_COUNT))
        slow = random.integers(0, SERIES_COUNT, 20)
        values[slow] *= 3  # as steps do that collect or save
        at = int(random.integers(40, SERIES_COUNT - 40))
        values[at - 2 : at + 2] = 10
        factor = (1.4, 0.7, 1.15)[number % 3]
        values[at:] *= factor
        (level,) = levels(values)
        assert abs(level.at - at) <= (0 if factor != 1.15 else 3)  # half of the noise's width: not known to the step
        assert level.after / level.before == pytest.approx(factor, rel=0.03)
    assert spikes(values) == []  # nor does a level that is high for good count as a spike


def test_what_is_not_finite_is_passed_over() -> None:
    values = 1 + 0.01 * np.random.default_rng(5).standard_normal(300)
    values[[100, 101, 250]] = np.nan, np.inf, -np.inf
    values[200] = 3
    assert [leap.at for leap in spikes(values)] == [200]
    assert levels(values) == []


@pytest.mark.parametrize("values", [[], [1.0], [np.nan] * 50, [0.0] * 500, [2.5] * 500])
def test_series_with_nothing_in_them(values: list[float]) -> None:
    assert spikes(np.array(values)) == []
    assert levels(np.array(values)) == []
