"""Monitors: their figures are those of a hand computation, they keep to their budget, and change nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.read.run_folder import read_moments
from stepscope.record.agent.watch import Schedule
from tests.record.knobs.recorded import recorded

from .fake_agent import row
from .processes import SOURCE, Outcome, run_script

torch = pytest.mark.torch
MS = 1_000_000
ALWAYS = 100.0  # a share of the time that no monitor exceeds
MANY = 1_000_000  # with any limit of steps, each is heard of when it ends


def values(run: Path) -> dict[int, dict[str, float]]:
    """What was watched: step -> name -> value."""
    table = stepscope.open_run(run).tables.metrics
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for step, name, value in table.filter(table["source"] == "watch").select("step", "name", "value").rows():
        found[step][name.removeprefix("watch/")] = value
    return found


@torch
@pytest.mark.process
def test_figures_are_those_of_a_hand_computation(tmp_path: Path) -> None:
    done = run_script(tmp_path, "watch_figures.py", watch=ALWAYS, max_steps=MANY)
    assert done.events("probe_error") == []
    truth, found = json.loads(done.stdout), values(done.run)
    monitors = {event["step"]: event["measured"] for event in done.events("monitor")}
    assert set(found) == set(monitors)
    assert {truth[step]["which"] for step in found} == set(range(1, 8)), "all but the first, which warms up"
    for step, own in found.items():
        told = truth[step]
        part = f"parts.{told['which']}"
        for kind in ("grad_norm", "weight_norm", "update_norm"):
            for name, size in told[kind].items():
                # Of an update, the difference of rounded weights is the less exact side.
                close = pytest.approx(size, rel=1e-6 if kind != "update_norm" else 1e-4)
                assert own[f"{kind}/{part}.{name}"] == close, (step, kind, name)
            block = math.hypot(*told[kind].values())
            assert own[f"{kind}_block/{part}"] == pytest.approx(block, rel=1e-4)
        ratio = told["update_norm"]["first.weight"] / told["weight_norm"]["first.weight"]
        assert own[f"update_ratio/{part}.first.weight"] == pytest.approx(ratio, rel=1e-4)
        if "activations" in monitors[step]:
            assert own[f"zeros/{part}.relu"] == pytest.approx(told["zeros"], rel=1e-9)
            assert own[f"largest/{part}.relu"] == pytest.approx(told["largest"], rel=1e-8)
            assert own[f"mean_square/{part}.relu"] == pytest.approx(told["mean_square"], rel=1e-6)
            assert own[f"not_finite/{part}.relu"] == 0
    with_activations = sum("activations" in measured for measured in monitors.values())
    assert math.ceil((len(monitors) - 1) / 10) <= with_activations <= len(monitors) / 2  # as they cost


@torch
@pytest.mark.process
def test_what_cannot_be_measured_is_missing_and_what_is_not_finite_is_a_value(tmp_path: Path) -> None:
    done = run_script(tmp_path, "watch_edges.py", watch=ALWAYS, max_steps=MANY)
    assert (done.status, done.events("probe_error")) == (0, [])
    (first, own), (second, later) = sorted(values(done.run).items())
    assert first < 60 < second
    parameters = {name.split("/")[1] for name in own if name.startswith("grad_norm/")}
    assert parameters == {"blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "end.weight"}
    assert {name for name in own if name.startswith("grad_norm_block/")} == {
        "grad_norm_block/blocks.1",
        "grad_norm_block/end",
    }
    assert own["update_norm/end.weight"] > 0
    assert math.isnan(later["grad_norm/end.weight"])
    assert (later["not_finite/end"], later["not_finite/blocks.1"]) == (8 * 5 * 50, 8 * 5 * 16)
    said = [why for event in done.events("watch") for why in event["not_measured"]]
    assert said == ["gradients that are sparse, complex or on devices of other kinds"]


def ran(folder: Path, *arguments: str, **config: Any) -> Outcome:
    folder.mkdir()
    done = run_script(folder, "watch_harmless.py", *arguments, **config)
    assert done.status == 0, done.stderr
    return done


@torch
@pytest.mark.process
def test_it_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    plain = ran(tmp_path / "plain", recorded=False)
    watched = ran(tmp_path / "watched", watch=ALWAYS, max_steps=MANY)
    faulty = ran(tmp_path / "faulty", watch=ALWAYS, faults="watch")
    assert watched.stdout == plain.stdout == faulty.stdout
    assert {event["step"] // 120 for event in watched.events("monitor")} >= {1, 2}
    assert {kind for event in watched.events("monitor") for kind in event["measured"]} == {"norms", "activations"}
    assert [event["probe"] for event in faulty.events("probe_error")] == ["watch"]


@torch
@pytest.mark.process
def test_compiled_code_is_compiled_as_often_and_has_no_activations(tmp_path: Path) -> None:
    plain = ran(tmp_path / "plain", "--compiled", recorded=False)
    watched = ran(tmp_path / "watched", "--compiled", watch=ALWAYS, max_steps=MANY)
    assert watched.stdout == plain.stdout
    names = {name for found in values(watched.run).values() for name in found}
    assert {"grad_norm/0.weight", "update_ratio/2.bias"} <= names
    assert not any(name.startswith("zeros/") for name in names)
    said = [why for event in watched.events("watch") for why in event["not_measured"]]
    assert [why for why in said if why.startswith("activations: code is compiled")]


@pytest.mark.parametrize(("cost_ms", "every"), [(0.01, 16), (0.3, 64), (50.0, 8192)])
def test_monitors_are_as_far_apart_as_they_cost(cost_ms: float, every: int) -> None:
    schedule, now, step, taken = Schedule(0.01), 0, 0, []
    while step < 60_000:
        due = schedule.due(step)
        wall = MS + (0 if due is None else int(cost_ms * MS))
        schedule.passed(row(step, now, wall), now + wall, usual=due is None)
        if due is not None:
            taken.append(step)
            schedule.charge(step, schedule.excess_ns(row(step, now, wall)), due)
        now += wall
        step += 1
    assert taken[0] >= 50
    assert schedule.spent_ns <= 0.0101 * now
    assert schedule.every == max(every, 64), "60,000 steps: none closer than a thousandth of them"
    assert all(later - earlier >= min(every, 16) for earlier, later in pairwise(taken))


def test_values_of_a_moment_are_read_by_the_names_told_before() -> None:
    first = {"source": "watch", "time_ns": 10**18, "set": 0, "names": ["a", "b"], "values": [1.5, "nan"]}
    second = {"source": "watch", "time_ns": 10**18 + 5, "set": 0, "values": ["inf", 2]}
    wrong: list[dict[str, object]] = [{"set": 7}, {"values": [1]}, {"values": [1, "x"]}, {"time_ns": "x"}]
    bad: list[dict[str, object]] = [{}, *({**second, **fields} for fields in wrong)]
    read = list(read_moments([{"together": moment} for moment in (first, *bad, second)]))
    assert read.count(None) == len(bad)
    one, other = (series for series in read if series is not None)
    assert (one.name, one.times_ns.tolist(), one.values.tolist()) == ("a", [10**18, 10**18 + 5], [1.5, math.inf])
    assert (other.name, str(other.values.tolist())) == ("b", "[nan, 2.0]")


CODE = """
import time, torch, stepscope
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with stepscope.profile(out="run", watch=True) as prof:
    for _ in range(64):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        prof.step()
"""


@torch
@pytest.mark.process
def test_from_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{os.environ['PYTHONPATH']}"}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True)
    run = stepscope.open_run(tmp_path / "run")
    assert {"watch/grad_norm/weight", "watch/grad_norm_block/model"} <= set(run.tables.metrics["name"])
    facts = run.analysis.steps[0]
    assert facts.excluded["monitor"] == 1
    assert any("carried monitors" in note.text for note in run.tables.quality.notes)


@torch
@pytest.mark.process
def test_the_option_asks_for_it_and_a_short_run_says_why_there_is_nothing(tmp_path: Path) -> None:
    done = recorded(tmp_path, CODE.replace("range(64)", "range(6)"), options=("--watch",))
    assert done.manifest()["options"]["watch"] == 0.01
    (event,) = done.events("watch")
    assert (event["final"], event["steps"]) == (True, 0)
    assert event["not_measured"] == ["the run had too few steps, or was too short, for a monitor"]
