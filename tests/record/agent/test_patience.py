"""Short steps are cut several at a time, unless somebody needs each of them; real torch, the agent in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.record.agent import marks  # noqa: E402 - after the check for torch
from stepscope.record.agent.step_queue import STEP_LIMIT  # noqa: E402

from .window_harness import read_events, read_steps, recorded  # noqa: E402

pytestmark = pytest.mark.torch
STEPS = 4 * STEP_LIMIT


def in_region() -> None:
    with marks.region("augment"):
        pass


def run_loop(tmp_path: Path, inside: Callable[[], None], every_step: bool | None = None, **config: Any) -> list[int]:
    """Trains a single weight; returns the steps a listener heard of."""
    heard: list[int] = []
    with recorded(tmp_path, mode="off", **config) as agent:
        agent.add_step_listener(
            lambda row, _now: heard.append(row.step) if row is not None else None,
            "test",
            None if every_step is None else lambda: every_step,
        )
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        data = torch.utils.data.TensorDataset(torch.zeros(STEPS, 1))
        for _ in torch.utils.data.DataLoader(data):
            inside()
            weight.sum().backward()
            optimizer.step()
    rows = read_steps(tmp_path)
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row, following in itertools.pairwise(rows):
        assert row["start_ns"] + row["wall_ns"] <= following["start_ns"]
    assert read_events(tmp_path, "probe_error") == []
    return heard


@pytest.mark.parametrize("every_step", [None, False])
def test_listeners_hear_of_the_last_of_steps_cut_together(tmp_path: Path, every_step: bool | None) -> None:
    heard = run_loop(tmp_path, lambda: marks.mark("here"), every_step)
    assert heard == sorted(set(heard))
    assert STEPS // STEP_LIMIT <= len(heard) < STEPS
    assert [event["step"] for event in read_events(tmp_path, "mark")] == list(range(STEPS))  # events know their step


def test_steps_that_somebody_needs_are_cut_one_by_one(tmp_path: Path) -> None:
    for number, (inside, every_step, config) in enumerate(
        [(lambda: None, True, {}), (in_region, None, {}), (lambda: None, None, {"max_steps": 7})]
    ):
        run = tmp_path / str(number)
        run.mkdir()
        assert run_loop(run, inside, every_step, **config) == list(range(STEPS))
    assert [event["step"] for event in read_events(tmp_path / "1", "region")] == list(range(STEPS))
    (limit,) = [event for event in read_events(run, "exit") if event["reason"] == "max_steps"]
    assert limit["step"] is None
    assert '"steps":7' in (run / "host-test" / "max-steps").read_text()
