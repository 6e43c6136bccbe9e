"""Analysis and diagnosis → the one document (`model.Report`) that every surface renders.

Only shapes change here: dataclasses become plain dictionaries, lists get an upper bound, and source lines are quoted
beside the places that findings name. Numbers stay raw, and none is computed. What the keys mean is said in
`stepscope.model`, field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from stepscope.diagnose import REPORT_FLOOR, RISKS, RULES
from stepscope.model import Analysis, Diagnosis, Finding, FixedCosts, Report, Risk, StepFacts
from stepscope.model.compilers import CompilersView
from stepscope.model.views import Views
from stepscope.report.source import SourceReader
from stepscope.report.trial import trial_document
from stepscope.report.values import field_names, plain_mapping, plain_rows, plain_value


class OnDemand(Mapping[str, Any]):
    """A mapping of what `makers` return. It is equal to any other of the same values."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = makers
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


MAX_VIEW_ROWS = 300  # of a list: operators, kernels, lines of memory and so on
MAX_STEPS = 500  # of one span
MAX_SPANS = 64  # shown one by one; traces of more ranks are shown together
NAMES = (
    *("overview", "gpus", "operators", "kernels", "memory", "modules", "counters"),
    *("communication", "distributed", "tensorboard", "absent"),
)


def views_document(views: Views | None) -> dict[str, Callable[[], Any]]:
    """What makes each of `NAMES`; None or empty, with a reason in `absent`, where the traces do not give it."""
    if views is None:
        return {**{name: lambda: None for name in NAMES}, "absent": dict}
    return {
        "overview": lambda: _overviews(views),
        "gpus": lambda: [plain_mapping(gpu) for span in views.spans[:MAX_SPANS] for gpu in span.gpus],
        **_with_total("operators", lambda: views.operators),
        **_with_total("kernels", lambda: views.kernels),
        "memory": lambda: _parts(views.memory),
        "modules": lambda: _parts(views.modules),
        "counters": lambda: [plain_mapping(counter) for counter in views.counters],
        **_with_total("communication", lambda: views.communication),
        "distributed": lambda: _parts(views.distributed),
        "tensorboard": lambda: plain_value(views.tensorboard),
        "absent": lambda: dict(views.absent),
    }


def _overviews(views: Views) -> list[dict[str, Any]]:
    found = [plain_mapping(span.overview) for span in views.spans[:MAX_SPANS] if span.overview is not None]
    for item in found:
        item["steps"] = item["steps"][:MAX_STEPS]
    return found


def _with_total(name: str, rows: Callable[[], Sequence[Any]]) -> dict[str, Callable[[], Any]]:
    return {name: lambda: [plain_mapping(row) for row in rows()[:MAX_VIEW_ROWS]], f"{name}_total": lambda: len(rows())}


def _parts(view: Any) -> dict[str, Any] | None:
    """A view whose fields are lists of rows, each bounded."""
    if view is None:
        return None
    found: dict[str, Any] = {}
    for name in field_names(view):
        part = getattr(view, name)
        if isinstance(part, tuple):
            found[name] = [plain_value(row) for row in part[:MAX_VIEW_ROWS]]
            if len(part) > MAX_VIEW_ROWS:
                found[f"{name}_total"] = len(part)
        else:
            found[name] = plain_value(part)
    return found


MAX_COMPILER_ROWS = 100
MAX_OF = {"points": 1_000, "metrics": 1_000}
MAX_INSIDE = 64  # of a list in a row: changes, steps, percentiles
MAX_TEXT = 1_000  # characters
MAX_VALUE = 200  # characters of a text in a row of a row: a value that changed
COMMENT = "#"  # what follows it in a reason is where, with the line's text


def compilers_document(view: CompilersView | None, *, source: bool) -> dict[str, Any] | None:
    """The view; `source` False leaves out what reasons quote."""
    if view is None:
        return None
    found: dict[str, Any] = {}
    for name in field_names(view):
        rows = getattr(view, name)
        limit = MAX_OF.get(name, MAX_COMPILER_ROWS)
        found[name] = [_cut_texts(plain_value(row)) for row in rows[:limit]]
        if len(rows) > limit:
            found[f"{name}_total"] = len(rows)
    if not source:
        for cause in found["causes"]:
            cause["text"] = without_quotes(cause["text"])
    return found


def without_quotes(reason: str) -> str:
    """A compiler's reason without the line of source that it names at its end."""
    return reason.partition(COMMENT)[0].rstrip()


def _cut_texts(value: Any, text: int = MAX_TEXT) -> Any:
    if isinstance(value, str):
        return value if len(value) <= text else value[: text - 1] + "…"
    if isinstance(value, list):
        return [_cut_texts(item, MAX_VALUE) for item in value[:MAX_INSIDE]]
    return {key: _cut_texts(item, text) for key, item in value.items()} if isinstance(value, dict) else value


# Upper bounds of the lists in a report, so that a page of it stays small. The tables in the run folder hold the rest.
MAX_FINDINGS = 50
MAX_ROWS = 100  # of a view: hot lines, operators, loops and so on
NOT_VIEWS = ("run", "quality", "steps", "fixed", "traces", "reading", "views", "compilers", "trial", "source_files")
MAX_SERIES = 2_000  # points of the step series of one kind
MAX_NOTES = 200
MAX_PLACES = 20  # of one finding
MAX_EVIDENCE = 40  # of one finding
_Maker = Callable[[], Any]  # of one view
_RISK_RULES = frozenset(rule.name for rule in RISKS)


def build(
    analysis: Analysis, diagnosis: Diagnosis, *, source: bool = True, experiment: Mapping[str, Any] | None = None
) -> Report:
    """Assemble the document.

    `experiment` is what `experiment_document` made of an experiment on this run. `source=False` leaves every line of
    the user's source text out of it. Never raises on odd content: what JSON cannot carry (non-finite numbers, lone
    surrogates) becomes null or an escape.
    """
    reader = SourceReader(analysis.source_files, recorded_ns=analysis.run.started_ns) if source else None
    makers = _views(analysis)
    makers["compilers"] = lambda: compilers_document(analysis.compilers, source=source)
    makers["trial"] = lambda: trial_document(analysis.trial)
    not_judged = [*(each.rule for each in diagnosis.abstained), *(each.rule for each in diagnosis.ignored)]
    makers["rules_judged"] = lambda: len(RULES) - sum(rule not in _RISK_RULES for rule in not_judged)
    makers["findings_share"] = lambda: diagnosis.counted_share
    if reader is not None:
        makers = {name: partial(_quoted, make, reader) for name, make in makers.items()}
    if experiment is not None:
        makers["experiment"] = lambda: dict(experiment)
    return Report(
        run={key: value for key, value in plain_mapping(analysis.run).items() if key != "source_hashes"},
        quality={
            "counts": plain_mapping(analysis.quality.counts),
            "reading": plain_value(analysis.reading),
            "traces": plain_rows(analysis.traces, MAX_ROWS),
            "notes": plain_rows(analysis.quality.notes, MAX_NOTES),
        },
        steps=_steps(analysis.steps[0], analysis.fixed) if analysis.steps else None,
        findings=tuple(_finding(finding, reader) for finding in diagnosis.findings[:MAX_FINDINGS]),
        risks=tuple(_risk(risk, reader) for risk in diagnosis.risks[:MAX_FINDINGS]),
        abstained=tuple(_abstained(diagnosis)),
        ignored=tuple(plain_rows(diagnosis.ignored, MAX_ROWS)),
        views=OnDemand(makers),
        unexplained=plain_mapping(diagnosis.unexplained) if diagnosis.unexplained is not None else None,
    )


def _abstained(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Rules that lacked an input; those about what the run never used would only be noise."""
    rows = [{"rule": each.rule, "needs": each.needs} for each in diagnosis.abstained if not each.quiet]
    return rows[:MAX_ROWS]


def _steps(facts: StepFacts, fixed: FixedCosts) -> dict[str, Any]:
    """The headline kind. Keys of the report's schema first, then what the statistics rest on."""
    row = _step_row(facts)
    first = ("kind", "count", "mean_ms", "median_ms", "p95_ms", "per_second", "samples_per_second")
    head = {key: row.pop(key) for key in first}
    partition, series = row.pop("partition"), row.pop("series")
    return {**head, "fixed_cost_s": plain_value(fixed.total_s), "partition": partition, "series": series, **row}


def _step_row(facts: StepFacts) -> dict[str, Any]:
    row = plain_mapping(facts)
    row["series"] = row["series"][:MAX_SERIES]
    return row


def _finding(finding: Finding, reader: SourceReader | None) -> dict[str, Any]:
    row = plain_mapping(finding)
    order = (
        *("id", "rule", "category", "title", "severity", "confidence", "cost_ms_per_step", "share"),
        *("gain_ceiling", "expected_gain", "where", "ranks", "evidence", "fix", "caveat", "learn"),
    )
    ordered = {key: row.pop(key) for key in order}
    ordered["try"] = row.pop("try_")
    ordered.update(row)
    return _bounded(ordered, reader)


def _risk(risk: Risk, reader: SourceReader | None) -> dict[str, Any]:
    row = {"try" if key == "try_" else key: value for key, value in plain_mapping(risk).items()}
    return _bounded(row, reader)


def _bounded(row: dict[str, Any], reader: SourceReader | None) -> dict[str, Any]:
    """With lists of bounded length, and the source beside every place."""
    row["where"] = row["where"][:MAX_PLACES]
    row["evidence"] = row["evidence"][:MAX_EVIDENCE]
    for place in row["where"]:
        place["source"] = reader.context(place["file"], place["line"]) if reader is not None else None
    return row


def _views(analysis: Analysis) -> dict[str, _Maker]:
    """What makes every part of the analysis that is not elsewhere in the document, under its own name."""
    views: dict[str, _Maker] = {
        "floor_share": lambda: REPORT_FLOOR,  # the smallest share of the step for which a finding is made
        "steps_by_kind": lambda: [_step_row(facts) for facts in analysis.steps],
        "fixed_costs": lambda: plain_mapping(analysis.fixed),
    }
    for name in field_names(analysis):
        if name not in NOT_VIEWS:
            views[name] = partial(_part, analysis, name)
    return {**views, **views_document(analysis.views)}


def _part(analysis: Analysis, name: str) -> Any:
    return _shortened(plain_value(getattr(analysis, name)))


def _shortened(view: Any) -> Any:
    """A view whose lists, itself and one level down, hold at most `MAX_ROWS`."""
    if isinstance(view, list):
        return view[:MAX_ROWS]
    if isinstance(view, dict):
        return {key: value[:MAX_ROWS] if isinstance(value, list) else value for key, value in view.items()}
    return view


def _quoted(make: _Maker, reader: SourceReader) -> Any:
    """A view, each row of which that names a line of the user's code has the text of that line, as `code`."""
    view = make()
    for row in (row for row in (view if isinstance(view, list) else [view]) if isinstance(row, dict)):
        lines = [line for value in row.values() if isinstance(value, list) for line in value]
        for item in (row, *lines):
            place = item.get("place", item) if isinstance(item, dict) else None
            if isinstance(place, dict) and {"file", "line"} <= place.keys():
                item["code"] = reader.line(place["file"], place["line"])
    return view
