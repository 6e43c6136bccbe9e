"""What a run was started with to be compared: the knobs and what became of them, the seed, the loss of every step.

All of it is input of unknown origin: entries that make no sense are passed over and counted, lengths are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from stepscope.engine.journal import event_data
from stepscope.model.comparison import AppliedKnob, TrialFacts
from stepscope.read.text import integer, number, string
from stepscope.tables.schema import Tables

MAX_KNOBS = 1_000  # reports of one run
MAX_TEXT = 400  # characters of a name, a value or a reason
MAX_LOSSES = 50_000  # values of one rank: ten times what is recorded
SILENT = "no process of the run said what became of it"
SILENT_RANK = "this rank never said what became of it"
_WORDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class _Skipped(Struct):
    count: int = 0


def facts(tables: Tables) -> TrialFacts | None:
    """None of a run without knobs, seed and losses."""
    skipped = _Skipped()
    wanted, seed = _wanted(tables, skipped)
    knobs = _applied(tables, wanted, skipped)
    rank, losses = _losses(tables, skipped)
    told = [integer(data.get("value")) for _, data in event_data(tables, "seed")]
    seed = next((value for value in (seed, *told) if value is not None), None)
    if not (knobs or losses or skipped.count) and seed is None:
        return None
    return TrialFacts(knobs=knobs, losses=losses, seed=seed, losses_rank=rank, skipped=skipped.count)


def _wanted(tables: Tables, skipped: _Skipped) -> tuple[tuple[tuple[str, str], ...], int | None]:
    """(knobs, seed) as the manifests' options give them."""
    knobs: dict[str, str] = {}
    seed = None
    for manifest in tables.manifests:
        options = manifest.get("options")
        if not isinstance(options, dict):
            continue
        seed = integer(options.get("seed")) if seed is None else seed
        listed = options.get("knobs")
        for item in listed[:MAX_KNOBS] if isinstance(listed, list) else ():
            pair = [item.get("knob"), item.get("value")] if isinstance(item, dict) else item
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
                knobs.setdefault(pair[0][:MAX_TEXT], pair[1][:MAX_TEXT])
            else:
                skipped.count += 1
    return tuple(knobs.items()), seed


def _applied(tables: Tables, wanted: tuple[tuple[str, str], ...], skipped: _Skipped) -> tuple[AppliedKnob, ...]:
    """Reports in order of knobs as they were asked for, then of ranks; with one for each rank that said nothing."""
    found: dict[AppliedKnob, None] = {}
    for row, data in event_data(tables, "knob"):
        knob = _knob(row, data)
        if knob is None or len(found) >= MAX_KNOBS:
            skipped.count += 1
        else:
            found.setdefault(knob)
    names = {**dict(wanted), **{knob.knob: knob.value for knob in found}}
    ranks = sorted({rank.rank for rank in tables.ranks})
    told: list[AppliedKnob] = []
    for name, value in names.items():
        own = [knob for knob in found if knob.knob == name]
        missing: list[int | None] = [] if any(knob.rank is None for knob in own) else list(ranks)
        reports = [knob for knob in own if knob.rank not in missing]
        for rank in missing:
            of_rank = [knob for knob in own if knob.rank == rank]
            reports += of_rank or [AppliedKnob(name, value, applied=False, reason=SILENT_RANK, rank=rank)]
        if not own:
            reports = [AppliedKnob(name, value, applied=False, reason=SILENT)]
        told += reports
    return tuple(told)


def _knob(row: dict[str, Any], data: dict[str, Any]) -> AppliedKnob | None:
    name, value, applied = string(data.get("knob")), string(data.get("value")), data.get("applied")
    if not name or value is None or not isinstance(applied, bool):
        return None
    file, line = _text(data.get("file")), integer(data.get("line"))
    return AppliedKnob(
        knob=name[:MAX_TEXT],
        value=value[:MAX_TEXT],
        applied=applied,
        observed=_text(data.get("observed")),
        reason=_text(data.get("reason")),
        file=file,
        line=line if file is not None and line is not None and line > 0 else None,
        rank=row["rank"],
    )


def _text(value: Any) -> str | None:
    return value[:MAX_TEXT] if isinstance(value, str) and value else None


def _losses(tables: Tables, skipped: _Skipped) -> tuple[int | None, tuple[tuple[int, float], ...]]:
    """(rank, step and loss) of the first rank that has any; of a step's several backward passes the mean."""
    by_rank: dict[int, dict[int, list[float]]] = {}
    counts: dict[int, int] = {}
    for row, data in event_data(tables, "loss"):
        rank = row["rank"] if row["rank"] is not None else 0
        steps = by_rank.setdefault(rank, {})
        for step, value in _points(data, skipped):
            counts[rank] = counts.get(rank, 0) + 1
            if counts[rank] > MAX_LOSSES:
                skipped.count += 1
            else:
                steps.setdefault(step, []).append(value)
    for rank, steps in sorted(by_rank.items()):
        if steps:
            return rank, tuple((step, sum(values) / len(values)) for step, values in sorted(steps.items()))
    return None, ()


def _points(data: dict[str, Any], skipped: _Skipped) -> Iterator[tuple[int, float]]:
    steps, values = data.get("steps"), data.get("values")
    if not isinstance(steps, list) or not isinstance(values, list) or len(steps) != len(values):
        skipped.count += 1
        return
    for step, value in zip(steps, values, strict=True):
        at = integer(step)
        loss = _WORDS.get(value) if isinstance(value, str) else number(value)
        if at is None or at < 0 or loss is None:
            skipped.count += 1
        else:
            yield at, loss
