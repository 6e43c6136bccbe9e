"""Events of real frameworks, as `scripts/record_events.py` wrote them, are cut into the steps that really were."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.step_queue import QueuedCutter
from stepscope.record.agent.steps import StepCutter

LOOPS = Path(__file__).parents[2] / "data" / "loops"
# loop -> how many (kind, samples, fetches) it has; counted by the script that was recorded
STEPS: dict[str, dict[tuple[str, int | None, int], int]] = {
    "accelerate": {("train", 256, 4): 20, ("train", 128, 2): 2, ("eval", 64, 1): 20},
    "endless_loader": {("train", 64, 1): 40, ("eval", 64, 1): 24},
    "hf_accumulation": {("train", 32, 4): 28, ("train", 8, 1): 2, ("eval", 16, 1): 15},
    "ignite": {("train", 64, 1): 60, ("eval", 64, 1): 20},
    "keras": {("train", 64, 1): 60, ("eval", 64, 1): 20},
    "lightning_accumulation": {("train", 256, 4): 40, ("train", 128, 2): 2, ("eval", 64, 1): 22},
    "word_language_model": {("train", None, 0): 60},
}


def cut(name: str, cutter_class: type[StepCutter]) -> list[StepRow]:
    rows: list[StepRow] = []
    now = 0

    def emit(row: StepRow | None, _live: bool, _now_ns: int) -> None:
        if row is not None:
            rows.append(row)

    cutter = cutter_class(lambda: now, emit, *([rows.extend] if cutter_class is QueuedCutter else []))
    cutter.ask_use = lambda: True
    for event, *arguments in json.loads((LOOPS / f"{name}.json").read_text()):
        at = TIMES.get(event, len(arguments) - 1)
        if at is not None:
            now = arguments[at] = arguments[at] * 1_000
        getattr(cutter, event)(*arguments)
    return rows


# where an event's time stands, if not last
TIMES: dict[str, int | None] = {
    "loader_created": 2,
    "loader_length": None,
    "backward_start": 0,
    "module_forward": 0,
}


@pytest.mark.parametrize("cutter_class", [StepCutter, QueuedCutter])
@pytest.mark.parametrize("name", sorted(STEPS))
def test_a_real_loop_is_cut_into_its_steps(name: str, cutter_class: type[StepCutter]) -> None:
    rows = cut(name, cutter_class)
    assert Counter((row.kind, row.samples, row.fetches) for row in rows) == STEPS[name]
