"""Knobs and seed of a run, from events that may hold anything."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from stepscope.analyze import trial
from stepscope.analyze.trial import MAX_TEXT, SILENT, SILENT_RANK
from stepscope.model.comparison import APPLIED, PARTLY, REFUSED, AppliedKnob, TrialFacts, standing
from stepscope.tables.schema import SCHEMAS, Tables
from tests.builders import T0, make_tables, rank_info
from tests.records import some

TRAIN, VALID = "/home/user/project/train.py", "/home/user/project/valid.py"


def knob(name: str = "loader.num_workers", value: str = "2", applied: Any = True, **fields: Any) -> dict[str, Any]:
    return {"kind": "knob", "knob": name, "value": value, "applied": applied, **fields}


def manifest(**options: Any) -> dict[str, Any]:
    return {"options": options}


def facts(journal: list[dict[str, Any]], **tables: Any) -> TrialFacts:
    return some(trial.facts(make_tables(journal=journal, **tables)))


def test_a_run_without_any_of_it_has_no_trial() -> None:
    assert trial.facts(make_tables(journal=[{"kind": "gc", "generation": 2}], manifests=[manifest(knobs=[])])) is None


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
    found = trial.facts(with_journal([(kind, json.dumps(data)) for kind, data in events]))

    assert found is not None
    assert all(isinstance(one.applied, bool) and len(one.knob) <= MAX_TEXT for one in found.knobs)
