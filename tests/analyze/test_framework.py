"""Which framework trained, and what is said where its own count of steps is another than ours."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.model import FrameworkFacts, Note
from tests.builders import make_tables, step_rows
from tests.records import some

EVENT: dict[str, Any] = {
    "kind": "framework",
    "name": "HF Trainer",
    "package": "transformers",
    "version": "5.23.0",
    "supported": True,
    "checked": ["5.23"],
    "seams": ["train: Trainer.train"],
    "missing": [],
    "counter": "state.global_step",
    "counts": "updates",
    "trainer": "trl.trainer.sft_trainer.SFTTrainer",
    "on_top": [{"name": "trl", "version": "1.16.0"}, {"name": "peft", "version": None}, "odd"],
}


def analyzed(numbers: list[int | None], event: dict[str, Any] | None = None, **columns: Any) -> tuple[Any, list[Note]]:
    rows = step_rows(len(numbers), kind="train", **columns)
    steps = [{**row, "framework_step": number} for row, number in zip(rows, numbers, strict=True)]
    found = analyze(make_tables(steps=steps, journal=[{**EVENT, **(event or {})}]))
    return found.run.framework, [note for note in found.quality.notes if note.source == "steps.jsonl"]


def test_what_was_recognised() -> None:
    framework, notes = analyzed([1, 2, 3, 4])
    assert framework == FrameworkFacts(
        name="HF Trainer",
        package="transformers",
        version="5.23.0",
        supported=True,
        checked=("5.23",),
        seams=("train: Trainer.train",),
        missing=(),
        counter="state.global_step",
        counts="updates",
        trainer="trl.trainer.sft_trainer.SFTTrainer",
        on_top=("trl 1.16.0", "peft"),
        cut_by="optimizer",
        steps_counted=4,
        steps_cut=4,
    )
    assert notes == []


@pytest.mark.parametrize(
    ("numbers", "columns", "event", "level", "said"),
    [
        ([1, 2, 2, 3], {}, {}, "warning", "HF Trainer counted 3 updates (state.global_step), we saw 4 train steps"),
        (
            [1, 3, 5],
            {},
            {},
            "warning",
            "counted 6 updates (state.global_step), we saw 3 train steps; they part at step 0",
        ),
        ([2, 4], {"fetches": 1}, {"counts": "batches"}, "warning", "counted 4 batches"),
        ([2, 4, 6], {}, {"counts": "optimizer steps"}, "info", "counted 6 optimizer steps"),
    ],
)
def test_where_the_counts_differ_both_are_said(
    numbers: list[int | None], columns: dict[str, Any], event: dict[str, Any], level: str, said: str
) -> None:
    _, (note,) = analyzed(numbers, event, **columns)
    assert note.level == level
    assert said in note.text


@pytest.mark.parametrize(
    ("numbers", "columns", "event"),
    [
        ([57, 58, 59], {}, {}),  # resumed
        ([1, 2, 3, 1, 2], {}, {}),  # trained twice
        ([None, None, 1, 2], {}, {}),  # a loop of the script's own before it
        ([2, 4, 6], {"fetches": 2}, {"counts": "batches"}),  # accumulation where batches are counted
        ([None, None], {}, {}),  # nothing to compare
    ],
)
def test_where_they_agree_nothing_is_said(
    numbers: list[int | None], columns: dict[str, Any], event: dict[str, Any]
) -> None:
    assert analyzed(numbers, event, **columns)[1] == []


def test_a_broken_event_is_no_reason_to_fail() -> None:
    odd: list[dict[str, Any]] = [
        {"kind": "framework", "data": "{not json"},
        {"kind": "framework", "name": 7, "checked": "5", "on_top": None, "seams": [1]},
    ]
    found = some(analyze(make_tables(steps=step_rows(4), journal=odd)).run.framework)
    assert (found.name, found.version, found.checked, found.seams, found.supported) == ("?", None, (), (), False)
