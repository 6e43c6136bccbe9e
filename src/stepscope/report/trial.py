"""The knobs of a run in a line: which were applied where, and which were not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from stepscope.model import Report
from stepscope.model.comparison import APPLIED, REFUSED, TrialFacts, standing
from stepscope.report import words
from stepscope.report.escape import plain
from stepscope.report.places import Shortener
from stepscope.report.values import plain_mapping, plain_value

MAX_KNOBS = 100  # reports in the document
MAX_LOSSES = 5_000  # as many as are recorded
SHOWN = 8  # knobs in the line
_VALUE = 60  # characters of a value
_REASON = 160

_Row = dict[str, Any]


def trial_document(trial: TrialFacts | None) -> _Row | None:
    """`views.trial`. A loss that is no finite number is the text "nan", "inf" or "-inf"."""
    if trial is None:
        return None
    names = dict.fromkeys(knob.knob for knob in trial.knobs)
    reports = []
    for knob in trial.knobs[:MAX_KNOBS]:
        row = plain_mapping(knob)
        file, line = row.pop("file"), row.pop("line")
        reports.append({**row, "place": None if file is None else {"file": file, "line": line}})
    return {
        "standing": {plain_value(name): standing([k for k in trial.knobs if k.knob == name]) for name in names},
        "knobs": reports,
        "seed": plain_value(trial.seed),
        "losses": [[step, _loss(value)] for step, value in trial.losses[:MAX_LOSSES]],
        "losses_rank": trial.losses_rank,
        "skipped": trial.skipped,
    }


def _loss(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def refused(report: Report) -> bool:
    """Whether a knob of the run was not applied."""
    trial = report.views.get("trial") or {}
    return REFUSED in (trial.get("standing") or {}).values()


def trial_line(report: Report, shorten: Shortener) -> str | None:
    """Knobs, seed and losses in a sentence without a head; None of a run without any. Not escaped for HTML."""
    trial = report.views.get("trial")
    if not trial:
        return None
    parts = list(_knobs(trial, shorten)) or ["none"]
    if trial["seed"] is not None:
        parts.append(f"seed {trial['seed']}")
    if trial["losses"]:
        parts.append(f"the loss of {words.count(len(trial['losses']))} steps is kept")
    if trial["skipped"]:
        parts.append(f"{words.count(trial['skipped'])} entries could not be read")
    return "; ".join(parts)


def _knobs(trial: _Row, shorten: Shortener) -> Iterator[str]:
    for name in list(trial["standing"])[:SHOWN]:
        rows = [row for row in trial["knobs"] if row["knob"] == name]
        standing_of = trial["standing"][name]
        yield _knob(standing_of, rows, shorten) if rows else f"{plain(name, _VALUE)} ({standing_of})"
    if len(trial["standing"]) > SHOWN:
        yield f"{len(trial['standing']) - SHOWN} more knobs"


def _knob(found: str, rows: list[_Row], shorten: Shortener) -> str:
    """`loader.num_workers=2 (applied, train.py:77)`, `amp.dtype=bf16 NOT applied: why`."""
    setting = f"{plain(rows[0]['knob'], _VALUE)}={plain(rows[0]['value'], _VALUE)}"
    bad = next((row for row in rows if not row["applied"]), None)
    if found == REFUSED and bad is not None:
        where = f" on rank {bad['rank']}" if any(row["applied"] for row in rows) and bad["rank"] is not None else ""
        return f"{setting} NOT applied{where}{_why(bad)}"
    good = [row for row in rows if row["applied"]]
    places = dict.fromkeys(_place(row, shorten) for row in good if row["place"] is not None)
    at = f", {next(iter(places))}" if places else ""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    rest = "" if found == APPLIED or bad is None else f"; not at {_place(bad, shorten)}{_why(bad)}"
    return f"{setting} (applied{at}{more}{rest})"


def _why(row: _Row) -> str:
    return f": {plain(row['reason'], _REASON)}" if row["reason"] else ""


def _place(row: _Row, shorten: Shortener) -> str:
    place = row["place"]
    return shorten(place["file"], place["line"]) if place is not None else "another place"
