"""Runs training scripts with and without the recorder, and reads back what it wrote."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.record.agent import processes
from tests.record.agent.processes import Outcome

SCRIPTS = Path(__file__).parent / "window_scripts"
# Windows in cycles of seven steps, and time for all of them: tests are short.
CYCLES = {"mode": "schedule", "wait": 2, "warmup": 1, "active": 4, "repeat": 0, "time_share": 1e6}


def run_script(folder: Path, name: str, *arguments: str, recorded: bool = True, **settings: Any) -> Outcome:
    """Runs a script of `window_scripts`; recorded into `folder`/run, `settings` being the agent's."""
    quiet = {"KINETO_LOG_LEVEL": "99"}
    return processes.run_script(folder, SCRIPTS / name, *arguments, recorded=recorded, environment=quiet, **settings)


def read_events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of rank 0, of the given kinds only when some are given."""
    lines = (run / "rank-0" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if not kinds or event["kind"] in kinds]


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The step journal of rank 0, a dictionary per step."""
    header, *rows = map(json.loads, (run / "rank-0" / "steps.jsonl").read_text().splitlines())
    return [dict(zip(header["columns"], row, strict=True)) for row in rows]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace; now and then torch 2.13 leaves a quote in a name as it is, and that event is left out."""
    text = path.read_text()
    with contextlib.suppress(ValueError):
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
        return events
    events = []
    for entry in text.split("\n  {\n")[1:]:
        with contextlib.suppress(ValueError):
            events.append(json.loads("{" + entry[: entry.rindex("}") + 1]))
    return events


@contextlib.contextmanager
def recorded(run: Path, *, faults: str | None = None, max_steps: int | None = None, **window: Any) -> Iterator[Any]:
    """Records this very process into `run` for the length of the block; yields the agent."""
    pytest.importorskip("torch")
    from stepscope.record.agent import core
    from stepscope.record.agent.config import Config, WindowConfig

    host = run / "host-test"
    host.mkdir(parents=True)
    config = Config(run=str(run), host_dir=str(host), window=WindowConfig(**window), max_steps=max_steps, faults=faults)
    agent = core.start(config)
    assert agent is not None
    try:
        yield agent
    finally:
        probe: Any = agent.probes.get("user_profiler")
        core.stop("end of test")
        probe.uninstall()  # a probe that has failed is not asked any more


def train(steps: int, *, backward: bool = True, at: Any = None) -> None:
    """Steps of a tiny model, each ended by the script's own mark; `at(index)` is called inside each."""
    import torch

    from stepscope.record.agent import core, marks

    agent = core.current()
    if agent is not None and agent.steps.current_step() is None:
        marks.step()  # what came before the first mark is no step
    model = torch.nn.Linear(8, 2)
    for index in range(steps):
        if at is not None:
            at(index)
        loss = model(torch.ones(4, 8)).sum()
        if backward:
            loss.backward()
        marks.step()
