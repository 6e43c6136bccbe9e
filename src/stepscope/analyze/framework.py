"""The training framework of a run: what was recognised, and whether its own count of steps agrees with ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.engine.user_code import parse_json
from stepscope.model import FrameworkFacts, Note, StepFacts
from stepscope.tables.schema import Tables

BATCHES, OPTIMIZER_STEPS = "batches", "optimizer steps"  # what a framework may count that is no update


def facts(tables: Tables, train: StepFacts | None) -> FrameworkFacts | None:
    """The framework that trained first, on the first rank that tells of one; None where none was recognised."""
    written = tables.journal.filter(pl.col("kind") == "framework").sort("rank", "time_ns")
    events = [event for text in written["data"].to_list() if isinstance(event := parse_json(text), dict)]
    if not events:
        return None
    first = events[0]
    name, counts = _text(first, "name") or "?", _text(first, "counts")
    counted, cut, parted = _counts(tables, counts)
    return FrameworkFacts(
        name=name,
        package=_text(first, "package") or "",
        version=_text(first, "version"),
        supported=first.get("supported") is True,
        checked=_texts(first.get("checked")),
        seams=_texts(first.get("seams")),
        missing=_texts(first.get("missing")),
        counter=_text(first, "counter"),
        counts=counts,
        trainer=_text(first, "trainer") or "",
        on_top=tuple(
            f"{entry['name']} {entry.get('version') or ''}".strip()
            for entry in first.get("on_top") or ()
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        ),
        also=tuple(dict.fromkeys(other for event in events if (other := _text(event, "name")) not in (name, None))),
        cut_by=train.signal if train is not None else None,
        steps_counted=counted,
        steps_cut=cut,
        parted_at=parted,
    )


def notes(found: FrameworkFacts | None) -> tuple[Note, ...]:
    """What the reader has to know: the framework's count is another than ours."""
    if found is None or found.steps_counted is None or found.parted_at is None:
        return ()
    ours = f"{found.steps_cut:,} {'batches of train steps' if found.counts == BATCHES else 'train steps'}"
    text = f"{found.name} counted {found.steps_counted:,} {found.counts} ({found.counter}), we saw {ours}"
    if found.counts == OPTIMIZER_STEPS and found.steps_counted > (found.steps_cut or 0):
        return (Note("info", f"{text}: some of them take steps of several optimizers", "steps.jsonl"),)
    return (Note("warning", f"{text}; they part at step {found.parted_at}", "steps.jsonl"),)


def _counts(tables: Tables, counts: str | None) -> tuple[int | None, int | None, int | None]:
    """(steps by the framework's count, ours, the first step where they part), over all processes.

    Differences from step to step are compared: a training that was resumed begins where it was, and one that begins
    anew in the same process counts from 0 again.
    """
    steps = tables.steps.filter((pl.col("kind") == "train") & pl.col("framework_step").is_not_null())
    if steps.is_empty():
        return None, None, None
    theirs = pl.col("framework_step").diff().over("process")
    ours = pl.col("fetches").fill_null(0) if counts == BATCHES else pl.lit(1, dtype=pl.Int64)
    steps = steps.sort("process", "step").with_columns(theirs=theirs, ours=ours)
    # the first of a training has nothing before it to differ from: it is taken as the others are
    steps = steps.with_columns(theirs=pl.when(pl.col("theirs") < 0).then(None).otherwise(pl.col("theirs")))
    usual = steps["theirs"].median()
    first = pl.col("ours") if usual is None else pl.lit(round(float(usual)), dtype=pl.Int64)  # type: ignore[arg-type]
    steps = steps.with_columns(theirs=pl.col("theirs").fill_null(first))
    apart = steps.filter(pl.col("theirs") != pl.col("ours"))
    return int(steps["theirs"].sum()), int(steps["ours"].sum()), None if apart.is_empty() else int(apart["step"][0])


def _text(event: Mapping[str, Any], key: str) -> str | None:
    value = event.get(key)
    return value if isinstance(value, str) else None


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()
