"""What a run was started with to be compared: the knobs and what became of them, the seed.

All of it is input of unknown origin: entries that make no sense are passed over and counted, lengths are bounded.
"""

from __future__ import annotations

from typing import Any

from stepscope.analyze.machine.readings import manifest_objects
from stepscope.engine.journal import event_data
from stepscope.model.comparison import AppliedKnob, TrialFacts
from stepscope.read.text import integer, string
from stepscope.tables.schema import Tables

MAX_KNOBS = 1_000  # reports of one run
MAX_TEXT = 400  # characters of a name, a value or a reason
SILENT = "no process of the run said what became of it"
SILENT_RANK = "this rank never said what became of it"


def facts(tables: Tables) -> TrialFacts | None:
    """None of a run without knobs and seed."""
    skipped: list[Any] = []  # entries that were passed over
    wanted, seed = _wanted(tables, skipped)
    knobs = _applied(tables, wanted, skipped)
    told = [integer(data.get("value")) for _, data in event_data(tables, "seed")]
    seed = next((value for value in (seed, *told) if value is not None), None)
    if not (knobs or skipped) and seed is None:
        return None
    return TrialFacts(knobs=knobs, seed=seed, skipped=len(skipped))


def _wanted(tables: Tables, skipped: list[Any]) -> tuple[dict[str, str], int | None]:
    """(knobs, seed) as the manifests' options give them."""
    knobs: dict[str, str] = {}
    seed = None
    for options in manifest_objects(tables, "options"):
        seed = integer(options.get("seed")) if seed is None else seed
        listed = options.get("knobs")
        for item in listed[:MAX_KNOBS] if isinstance(listed, list) else ():
            pair = [item.get("knob"), item.get("value")] if isinstance(item, dict) else item
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
                knobs.setdefault(pair[0][:MAX_TEXT], pair[1][:MAX_TEXT])
            else:
                skipped.append(item)
    return knobs, seed


def _applied(tables: Tables, wanted: dict[str, str], skipped: list[Any]) -> tuple[AppliedKnob, ...]:
    """Reports in order of knobs as they were asked for, then of ranks; with one for each rank that said nothing."""
    found: dict[AppliedKnob, None] = {}
    for row, data in event_data(tables, "knob"):
        knob, value, applied = string(data.get("knob")), string(data.get("value")), data.get("applied")
        if not knob or value is None or not isinstance(applied, bool) or len(found) >= MAX_KNOBS:
            skipped.append(row)
            continue
        texts = (string(data.get(name)) for name in ("observed", "reason", "file"))
        observed, reason, file = (text[:MAX_TEXT] if text else None for text in texts)
        line = integer(data.get("line"))
        line = line if file is not None and line is not None and line > 0 else None
        report = AppliedKnob(
            knob[:MAX_TEXT],
            value[:MAX_TEXT],
            applied,
            observed=observed,
            reason=reason,
            file=file,
            line=line,
            rank=row["rank"],
        )
        found.setdefault(report)
    told: list[AppliedKnob] = []
    for name, value in {**wanted, **{report.knob: report.value for report in found}}.items():
        own = [report for report in found if report.knob == name]
        if not own:
            told.append(AppliedKnob(name, value, applied=False, reason=SILENT))
            continue
        ranks = set() if any(report.rank is None for report in own) else {rank.rank for rank in tables.ranks}
        told += [report for report in own if report.rank not in ranks]
        for rank in sorted(ranks):
            silent = AppliedKnob(name, value, applied=False, reason=SILENT_RANK, rank=rank)
            told += [report for report in own if report.rank == rank] or [silent]
    return tuple(told)
