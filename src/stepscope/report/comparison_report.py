"""A comparison as JSON and CSV; outcomes also as the candidates of `experiment.json`.

Dataclasses become dictionaries, lists get an upper bound, and a verdict's word stands beside its candidate: what the
keys mean is said in `stepscope.model.comparison`, field by field. `dashboard/pages/compare.py` lays it out.
"""

from __future__ import annotations

import os
from typing import Any

from stepscope.comparison.verdicts import percent
from stepscope.model.comparison import Change, Comparison, Measure, Outcome, SideFacts
from stepscope.report import words
from stepscope.report.escape import plain_mapping, plain_rows, plain_value
from stepscope.report.source import SourceReader
from stepscope.report.table import csv_bytes

# Upper bounds of lists, so that a document of many runs stays small.
MAX_PAIRS = 200
MAX_CHANGES = 2_000
MAX_LOSSES = 500  # of one run: as many as a chart of that width can draw
MAX_ROWS = 200  # of any other list
MEAN = "mean_ms"
GONE = "gone"

CSV_COLUMNS = ("kind", "name", "status", "baseline", "candidate", "difference", "unit", "file", "line")


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """One candidate. `verdict` is the word; `effect` is that of the mean step time, candidate over baseline, None where
    it is not known; `effects` holds all figures, `headline` names what is compared, `decided_by` the figure that the
    verdict rests on."""
    effect = outcome.effects.get(MEAN)
    return {
        "knobs": plain_rows(outcome.knobs, MAX_ROWS),
        "verdict": outcome.verdict.word,
        "text": plain_value(outcome.verdict.text),
        "resolution": plain_value(outcome.verdict.resolution),
        "pairs_needed": outcome.verdict.pairs_needed,
        "headline": outcome.headline,
        "decided_by": outcome.verdict.figure or outcome.headline,
        "effect": plain_mapping(effect) if effect is not None else None,
        "pairs": effect.pairs if effect is not None else 0,
        "effects": plain_mapping(outcome.effects),
        "phases": plain_rows(outcome.phases, MAX_ROWS),
        "flags": plain_rows(outcome.flags, MAX_ROWS),
        "equivalence": plain_value(outcome.equivalence),
        "energy": plain_value(outcome.energy),
        "runs": [
            {"baseline": measure_document(one), "candidate": measure_document(other)}
            for one, other in outcome.pairs[:MAX_PAIRS]
        ],
        "left_out": [measure_document(measure) for measure in outcome.left_out[:MAX_PAIRS]],
    }


def measure_document(measure: Measure) -> dict[str, Any]:
    """One run, with at most `MAX_LOSSES` losses, evenly chosen."""
    row = plain_mapping(measure)
    losses = row["losses"]
    if len(losses) > MAX_LOSSES:
        row["losses"] = [losses[place * len(losses) // MAX_LOSSES] for place in range(MAX_LOSSES)]
    return row


def comparison_document(comparison: Comparison, *, source: bool = True) -> dict[str, Any]:
    """The whole of `compare --json`, which the terminal and the page show. `source=False` quotes no line of source."""
    changes = plain_rows(comparison.changes, MAX_CHANGES)
    if source:
        _quote(changes, comparison)
    return {
        "schema": comparison.schema,
        "baseline": _side(comparison.baseline),
        "candidate": _side(comparison.candidate),
        "candidates": [outcome_document(comparison.outcome)] if comparison.outcome is not None else [],
        "changes": changes,
        "absent": plain_mapping(comparison.absent),
        "notes": plain_value(comparison.notes[:MAX_ROWS]),
    }


def to_csv(changes: tuple[Change, ...]) -> bytes:
    """The changes as UTF-8 CSV: a line of column names, then a line for each; a missing value is an empty field."""
    rows = [[getattr(change, column) for column in CSV_COLUMNS] for change in changes]
    return csv_bytes([CSV_COLUMNS, *rows])


def _quote(rows: list[dict[str, Any]], comparison: Comparison) -> None:
    """Give each row that names a line of the user's code its text, as `code`, where the file is as it was."""
    sides = (comparison.baseline, comparison.candidate)
    readers = []
    for side in sides:
        starts = [measure.started_ns for measure in side.measures if measure.started_ns is not None]
        readers.append(SourceReader(side.source_files, recorded_ns=min(starts, default=None)))
    for row in rows:
        if row["file"] is not None and row["line"] is not None:
            at = 0 if row["status"] == GONE else 1
            files = (os.path.join(root, row["file"]) for root in sides[at].roots)
            found = filter(None, (readers[at].context(file, row["line"], around=0) for file in files))
            quoted = next(found, None)
            known = quoted is not None and not quoted["changed_since"]
            row["code"] = (str(quoted["lines"][0]).strip() or None) if quoted and known else None


def _side(side: SideFacts) -> dict[str, Any]:
    row = {key: value for key, value in plain_mapping(side).items() if key != "source_files"}
    row["measures"] = [measure_document(measure) for measure in side.measures[:MAX_PAIRS]]
    return row


def signed_percent(ratio: float | None) -> str:
    """A ratio as what it adds: +3.1 %, -28 %."""
    return words.MISSING if ratio is None else f"{percent(ratio - 1, sign=True)} %"
