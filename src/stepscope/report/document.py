"""Analysis and diagnosis → the one document (`model.Report`) that every surface renders.

Only shapes change here: dataclasses become plain dictionaries, lists get an upper bound, and source lines are quoted
beside the places that findings name. Numbers stay raw, and none is computed. What the keys mean is said in
`stepscope.model`, field by field.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from stepscope.diagnose import REPORT_FLOOR, RULES
from stepscope.model import Analysis, Diagnosis, Finding, FixedCosts, Report, StepFacts
from stepscope.report.source import SourceReader

# Upper bounds of the lists in a report, so that a page of it stays small. The tables in the run folder hold the rest.
MAX_FINDINGS = 50
MAX_ROWS = 100  # of a view: hot lines, operators, loops and so on
NOT_VIEWS = ("run", "quality", "steps", "fixed", "traces", "reading")
MAX_SERIES = 2_000  # points of the step series of one kind
MAX_NOTES = 200
MAX_PLACES = 20  # of one finding
MAX_EVIDENCE = 40  # of one finding
MAX_TEXT = 4_000  # characters of one string


def build(analysis: Analysis, diagnosis: Diagnosis, *, source: bool = True) -> Report:
    """Assemble the document.

    `source=False` leaves every line of the user's source text out of it. Never raises on odd content: what JSON
    cannot carry (non-finite numbers, lone surrogates) becomes null or an escape.
    """
    reader = SourceReader(analysis.run.user_roots, recorded_ns=analysis.run.started_ns) if source else None
    views = _views(analysis)
    views["rules_judged"] = len(RULES) - len(diagnosis.abstained) - len(diagnosis.ignored)
    if reader is not None:
        _quote_rows(views, reader)
    return Report(
        run=_mapping(analysis.run),
        quality={
            "counts": _mapping_of(analysis.quality.counts),
            "reading": _value(analysis.reading),
            "traces": _rows(analysis.traces),
            "notes": _rows(analysis.quality.notes, MAX_NOTES),
        },
        steps=_steps(analysis.steps[0], analysis.fixed) if analysis.steps else None,
        findings=tuple(_finding(finding, reader) for finding in diagnosis.findings[:MAX_FINDINGS]),
        abstained=tuple(_rows(diagnosis.abstained)),
        ignored=tuple(_rows(diagnosis.ignored)),
        views=views,
    )


def _steps(facts: StepFacts, fixed: FixedCosts) -> dict[str, Any]:
    """The headline kind. Keys of the report's schema first, then what the statistics rest on."""
    row = _step_row(facts)
    first = ("kind", "count", "mean_ms", "median_ms", "p95_ms", "per_second", "samples_per_second")
    head = {key: row.pop(key) for key in first}
    partition, series = row.pop("partition"), row.pop("series")
    return {**head, "fixed_cost_s": _value(fixed.total_s), "partition": partition, "series": series, **row}


def _step_row(facts: StepFacts) -> dict[str, Any]:
    row = _mapping(facts)
    row["series"] = row["series"][:MAX_SERIES]
    return row


def _finding(finding: Finding, reader: SourceReader | None) -> dict[str, Any]:
    row = _mapping(finding)
    order = (
        *("id", "rule", "category", "title", "severity", "confidence", "cost_ms_per_step", "share"),
        *("gain_ceiling", "expected_gain", "where", "ranks", "evidence", "fix", "caveat", "learn"),
    )
    ordered = {key: row.pop(key) for key in order}
    ordered["try"] = row.pop("try_")
    ordered.update(row)
    ordered["where"] = ordered["where"][:MAX_PLACES]
    ordered["evidence"] = ordered["evidence"][:MAX_EVIDENCE]
    for place in ordered["where"]:
        place["source"] = reader.context(place["file"], place["line"]) if reader is not None else None
    return ordered


def _views(analysis: Analysis) -> dict[str, Any]:
    """Every part of the analysis that is not elsewhere in the document, under its own name."""
    views: dict[str, Any] = {
        "floor_share": REPORT_FLOOR,  # the smallest share of the step for which a finding is made
        "steps_by_kind": [_step_row(facts) for facts in analysis.steps],
        "fixed_costs": _mapping(analysis.fixed),
    }
    for item in dataclasses.fields(analysis):
        if item.name not in NOT_VIEWS:
            views[item.name] = _shortened(_value(getattr(analysis, item.name)))
    return views


def _shortened(view: Any) -> Any:
    """A view whose lists, itself and one level down, hold at most `MAX_ROWS`."""
    if isinstance(view, list):
        return view[:MAX_ROWS]
    if isinstance(view, dict):
        return {key: value[:MAX_ROWS] if isinstance(value, list) else value for key, value in view.items()}
    return view


def _quote_rows(views: dict[str, Any], reader: SourceReader) -> None:
    """Give each row that names a line of the user's code the text of that line, as `code`."""
    for view in views.values():
        rows = view if isinstance(view, list) else [view]
        for row in (row for row in rows if isinstance(row, dict)):
            lines = [line for value in row.values() if isinstance(value, list) for line in value]
            for item in (row, *lines):
                place = item.get("place", item) if isinstance(item, dict) else None
                if isinstance(place, dict) and {"file", "line"} <= place.keys():
                    item["code"] = reader.line(place["file"], place["line"])


def _rows(values: Iterable[Any], limit: int = MAX_ROWS) -> list[dict[str, Any]]:
    return [_mapping(value) for _, value in zip(range(limit), values, strict=False)]


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return _mapping_of(value)
    return {item.name: _value(getattr(value, item.name)) for item in dataclasses.fields(value)}


def _mapping_of(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {_string(str(key)): _value(item) for key, item in value.items()}


def _value(value: Any) -> Any:
    """`value` as JSON can carry it: dictionaries, lists, strings, numbers, booleans and None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else float(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _mapping_of(value)
    if dataclasses.is_dataclass(value):
        return _mapping(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_value(item) for item in value]
    return _string(str(value))


def _string(text: str) -> str:
    return text[:MAX_TEXT].encode("utf-8", errors="backslashreplace").decode("utf-8")
