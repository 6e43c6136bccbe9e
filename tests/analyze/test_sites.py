"""What a run was set up with: lines of loaders, the framework and its count of steps, knobs and the seed."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from stepscope.analyze import analyze, sites
from stepscope.analyze.sites import MAX_TEXT, SILENT, SILENT_RANK
from stepscope.model import Analysis, FrameworkFacts, Note
from stepscope.model.comparison import APPLIED, PARTLY, REFUSED, AppliedKnob, TrialFacts, standing
from stepscope.tables.schema import SCHEMAS, Tables
from tests.builders import MS, T0, make_tables, rank_info, step_rows
from tests.records import some

SCRIPT = "/home/me/train.py"
ARGUMENTS = "transformers.TrainingArguments"


def site(line: int, *, what: str = "DataLoader", via: str | None = None, **fields: Any) -> dict[str, Any]:
    found = {"kind": "site", "what": what, "file": SCRIPT, "line": line, "function": "main", "time_ns": T0 - 9 * MS}
    return {**found, **({"via": via} if via is not None else {}), **fields}


def iterated(loader: int, data: int) -> dict[str, Any]:
    return {"kind": "loader", "id": loader, "dataset": data, "num_workers": 0, "batch_size": 8, "time_ns": T0 - MS}


def analyzed(*journal: dict[str, Any]) -> Analysis:
    """40 steps of 100 ms."""
    steps = step_rows(40, data_wait_ms=60, forward_ms=40, backward_ms=0, optimizer_ms=0, other_ms=0)
    return analyze(make_tables(steps=steps, journal=journal))


def line(found: Analysis) -> int | None:
    assert found.loader is not None
    return found.loader.site.line if found.loader.site is not None else None


def test_the_loader_is_told_by_its_number_and_not_by_its_arguments() -> None:
    alike = {"arguments": {"batch_size": "8"}}
    held_out, own = site(10, id=1, dataset=2, **alike), site(20, id=3, dataset=4, **alike)
    assert line(analyzed(held_out, own, iterated(3, 4))) == 20


def test_the_users_own_construction_stands_for_the_one_that_a_framework_made_of_it() -> None:
    own, others = site(20, id=1, dataset=2), site(21, id=3, dataset=4)
    shard = site(30, id=5, dataset=2, via="accelerate/accelerator.py")
    assert line(analyzed(own, others, shard, iterated(5, 2))) == 20


def test_two_of_the_users_over_one_data_set_are_not_chosen_between() -> None:
    shard = site(30, id=5, dataset=2, via="accelerate/accelerator.py")
    assert line(analyzed(site(20, id=1, dataset=2), site(21, id=3, dataset=2), shard, iterated(5, 2))) is None


@pytest.mark.parametrize(
    ("name", "package", "framework", "line"),
    [("Accelerate", "accelerate", "accelerate", None), ("HF Trainer", "transformers", "transformers", 12)],
)
def test_the_framework_that_was_seen_training_is_spoken_of(
    name: str, package: str, framework: str, line: int | None
) -> None:
    told = site(12, what=ARGUMENTS)  # made in any case, and perhaps read by a loop of the user's own
    seen = {"kind": "framework", "name": name, "package": package, "version": "1.0", "time_ns": T0}
    found = some(analyzed(told, site(20, id=1, dataset=2), iterated(1, 2), seen).settings)
    assert found.framework == framework
    assert (found.place.line if found.place is not None else None) == line


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


def with_framework(
    numbers: list[int | None], event: dict[str, Any] | None = None, **columns: Any
) -> tuple[Any, list[Note]]:
    rows = step_rows(len(numbers), kind="train", **columns)
    steps = [{**row, "framework_step": number} for row, number in zip(rows, numbers, strict=True)]
    found = analyze(make_tables(steps=steps, journal=[{**EVENT, **(event or {})}]))
    return found.run.framework, [note for note in found.quality.notes if note.source == "steps.jsonl"]


def test_what_was_recognised() -> None:
    framework, notes = with_framework([1, 2, 3, 4])
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
    _, (note,) = with_framework(numbers, event, **columns)
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
    assert with_framework(numbers, event, **columns)[1] == []


def test_a_broken_event_is_no_reason_to_fail() -> None:
    odd: list[dict[str, Any]] = [
        {"kind": "framework", "data": "{not json"},
        {"kind": "framework", "name": 7, "checked": "5", "on_top": None, "seams": [1]},
    ]
    found = some(analyze(make_tables(steps=step_rows(4), journal=odd)).run.framework)
    assert (found.name, found.version, found.checked, found.seams, found.supported) == ("?", None, (), (), False)


TRAIN, VALID = "/home/user/project/train.py", "/home/user/project/valid.py"


def knob(name: str = "loader.num_workers", value: str = "2", applied: Any = True, **fields: Any) -> dict[str, Any]:
    return {"kind": "knob", "knob": name, "value": value, "applied": applied, **fields}


def manifest(**options: Any) -> dict[str, Any]:
    return {"options": options}


def facts(journal: list[dict[str, Any]], **tables: Any) -> TrialFacts:
    return some(sites.trial(make_tables(journal=journal, **tables)))


def test_a_knob_with_its_place_and_what_was_seen() -> None:
    found = facts(
        [knob(observed="2", file=TRAIN, line=77), knob("amp.dtype", "bf16", False, reason="no autocast was met")],
        manifests=[manifest(knobs=[["amp.dtype", "bf16"], ["loader.num_workers", "2"], ["a"], 3, ["b", "1"]], seed=7)],
    )

    assert found.knobs == (
        AppliedKnob("amp.dtype", "bf16", False, reason="no autocast was met", rank=0),
        AppliedKnob("loader.num_workers", "2", True, observed="2", file=TRAIN, line=77, rank=0),
        AppliedKnob("b", "1", False, reason=SILENT),
    )
    assert (found.seed, found.skipped) == (7, 2)


def test_every_rank_has_to_speak() -> None:
    found = facts([knob(observed="2")], ranks=(rank_info(0), rank_info(1)))

    assert [(one.rank, one.applied, one.reason) for one in found.knobs] == [(0, True, None), (1, False, SILENT_RANK)]


@pytest.mark.parametrize(
    "event",
    [
        knob(""),
        {"kind": "knob"},
        knob(applied=1),
        knob(name={"a": 1}),  # type: ignore[arg-type]
    ],
)
def test_an_entry_that_makes_no_sense_is_counted(event: dict[str, Any]) -> None:
    found = facts([event])

    assert (found.knobs, found.skipped) == ((), 1)


def test_texts_and_lists_are_bounded() -> None:
    long = "x" * (MAX_TEXT + 100)
    found = facts([knob(long, long, reason=long, file=long)])

    assert {len(text or "") for one in found.knobs for text in (one.knob, one.value, one.reason, one.file)} == {
        MAX_TEXT
    }


def report(applied: bool = True, file: str | None = None, rank: int = 0) -> AppliedKnob:
    return AppliedKnob("k", "1", applied, file=file, rank=rank)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report(file=TRAIN)], APPLIED),
        ([report(), report(rank=1)], APPLIED),
        ([report(file=TRAIN), report(False, file=VALID)], PARTLY),
        ([report(False, file=VALID)], REFUSED),
        ([report(file=TRAIN), report(False)], REFUSED),  # it worked at first and failed later
        ([report(file=TRAIN), report(False, file=TRAIN, rank=1)], REFUSED),
        ([], REFUSED),
    ],
)
def test_what_became_of_a_knob(reports: list[AppliedKnob], expected: str) -> None:
    assert standing(reports) == expected
    assert standing(reports[::-1]) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
ANY = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("knob", "value", "applied", "observed", "reason", "file", "line", "seed"), JSON),
)


def with_journal(rows: list[tuple[str, str]]) -> Tables:
    """Tables whose journal holds these (kind, data) as they are."""
    tables = make_tables(manifests=[manifest(knobs=[["a", "1"]])])
    usual = {"rank": 0, "process": "rank-0", "time_ns": T0, "duration_ns": None, "step": None}
    full = [{**usual, "kind": kind, "data": data} for kind, data in rows]
    tables_values = {**asdict(tables), "journal": pl.DataFrame(full, schema=SCHEMAS["journal"])}
    return Tables(**tables_values)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["knob", "seed"]), ANY), max_size=6))
def test_anything_in_the_journal_is_taken_or_passed_over(events: list[tuple[str, dict[str, Any]]]) -> None:
    found = sites.trial(with_journal([(kind, json.dumps(data)) for kind, data in events]))

    assert found is not None
    assert all(isinstance(one.applied, bool) and len(one.knob) <= MAX_TEXT for one in found.knobs)
