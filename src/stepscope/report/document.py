"""Analysis and diagnosis → the one document (`model.Report`) that every surface renders, and report.json, which holds
it key for key.

Only shapes change here: dataclasses become plain dictionaries, lists get an upper bound, so that a page of it stays
small, and source lines are quoted beside the places that findings name. Numbers stay raw, and none is computed. What
the keys mean is said in `stepscope.model`, field by field. `read_report(report_bytes(report)) == report`; a file
of another schema is refused by name, so that a reader never shows figures whose meaning it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from stepscope.diagnose import REPORT_FLOOR, RISKS, RULES
from stepscope.errors import UnreadableInputError
from stepscope.files import read_small
from stepscope.model import REPORT_SCHEMA, Analysis, Diagnosis, Finding, Report, StepFacts
from stepscope.model.comparison import TrialFacts, standing
from stepscope.model.compilers import CompilersView
from stepscope.model.views import Views
from stepscope.report.escape import field_names, json_bytes, plain_mapping, plain_rows, plain_value
from stepscope.report.replays import evidence as replayed_evidence
from stepscope.report.source import SourceReader

Row = dict[str, Any]
_Makers = dict[str, Callable[[], Any]]  # what makes each view

# Upper bounds of lists. The tables in the run folder hold the rest.
MAX_FINDINGS = 50
MAX_ROWS = 100  # of a view: hot lines, loops and so on
MAX_VIEW_ROWS = 300  # of operators, kernels, lines of memory and so on
MAX_SERIES = 2_000  # points of the step series of one kind
MAX_STEPS = 500  # of one span
MAX_SPANS = 64  # shown one by one; traces of more ranks are shown together
MAX_NOTES = 200
MAX_HOSTS = 10_000  # by name
MAX_PLACES = 20  # of one finding
MAX_EVIDENCE = 40  # of one finding
MAX_KNOBS = 100  # reports
# of compilers
MAX_COMPILER_ROWS = 100
MAX_OF = {"points": 1_000, "metrics": 1_000}
MAX_INSIDE = 64  # of a list in a row: changes, steps, percentiles
MAX_TEXT = 1_000  # characters
MAX_VALUE = 200  # characters of a text in a row of a row: a value that changed
COMMENT = "#"  # what follows it in a reason is where, with the line's text

NOT_VIEWS = (
    *("run", "quality", "steps", "fixed", "traces", "reading", "views", "compilers", "trial", "source_files"),
    "hang",  # there alone where a hang was looked for
)
OF_TRACES = (
    *("overview", "gpus", "operators", "kernels", "memory", "modules", "counters"),
    *("communication", "distributed", "tensorboard"),
)
_RISK_RULES = frozenset(rule.name for rule in RISKS)

MAX_BYTES = 2**29  # far more than any report of ours
KEY_ORDER = (
    *("schema", "run", "quality", "steps", "findings", "risks", "unexplained"),
    *("abstained", "ignored", "views"),
)


def bare_report(name: str, command: Sequence[str], cwd: str | None) -> Report:
    """The report of no run at all: the command, and nothing measured of it."""
    return Report(
        run={"name": name, "command": list(command), "cwd": cwd},
        quality={"counts": {}, "reading": None, "traces": [], "notes": []},
        steps=None,
        findings=(),
        abstained=(),
        ignored=(),
        views={},
    )


def report_bytes(report: Report) -> bytes:
    return json_bytes({**{key: getattr(report, key) for key in KEY_ORDER}, "views": dict(report.views)})


def read_report(data: bytes) -> Report:
    """Read a document back; raises `UnreadableInputError` for anything that is not one."""
    try:
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnreadableInputError(f"not a stepscope report: {error}; make one with `stepscope analyze RUN`") from None
    if report.schema != REPORT_SCHEMA:
        raise UnreadableInputError(
            f"a report of schema {report.schema}, this version reads {REPORT_SCHEMA}; run `stepscope analyze RUN` again"
        )
    return report


def load_report(path: Path) -> Report:
    """Read a report file; raises `UnreadableInputError`."""
    try:
        return read_report(read_small(path, MAX_BYTES, follow=True))
    except OSError as error:
        raise UnreadableInputError(f"{path}: {error.strerror}; name a report.json") from None


class OnDemand(Mapping[str, Any]):
    """A mapping of what `makers` return. It is equal to any other of the same values."""

    def __init__(self, makers: _Makers) -> None:
        self._makers = makers
        self._made: Row = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def build(
    analysis: Analysis,
    diagnosis: Diagnosis,
    *,
    source: bool = True,
    experiment: Mapping[str, Any] | None = None,
    replays: Sequence[Mapping[str, Any]] = (),
) -> Report:
    """Assemble the document.

    `experiment` is what `experiment_document` made of an experiment on this run, `replays` are operators of it that
    were replayed alone. `source=False` leaves every line of the user's source text out of it. Never raises on odd
    content: what JSON cannot carry (non-finite numbers, lone surrogates) becomes null or an escape.
    """
    reader = SourceReader(analysis.source_files, recorded_ns=analysis.run.started_ns) if source else None
    not_judged = [*(each.rule for each in diagnosis.abstained), *(each.rule for each in diagnosis.ignored)]
    # rules about what the run never used would only be noise
    abstained = [{"rule": row.rule, "needs": row.needs} for row in diagnosis.abstained if not row.quiet]
    makers: _Makers = {
        "floor_share": lambda: REPORT_FLOOR,  # the smallest share of the step for which a finding is made
        "steps_by_kind": lambda: [_step_row(facts) for facts in analysis.steps],
        "fixed_costs": lambda: plain_mapping(analysis.fixed),
        **{name: partial(_part, analysis, name) for name in field_names(analysis) if name not in NOT_VIEWS},
        **_of_traces(analysis.views),
        "ranks_read": lambda: _ranks_read(analysis),
        "compilers": lambda: _compilers(analysis.compilers, source=source),
        "trial": lambda: _trial(analysis.trial),
        "rules_judged": lambda: len(RULES) - sum(rule not in _RISK_RULES for rule in not_judged),
        "findings_share": lambda: diagnosis.counted_share,
    }
    if analysis.hang is not None:
        makers["hang"] = lambda: _bounded(analysis.hang)
    if reader is not None:
        makers = {name: partial(_quoted, make, reader) for name, make in makers.items()}
    if experiment is not None:
        makers["experiment"] = lambda: dict(experiment)
    if replays:
        makers["replayed_operators"] = lambda: list(replays)
    return Report(
        run={key: value for key, value in plain_mapping(analysis.run).items() if key != "source_hashes"},
        quality={
            "counts": plain_mapping(analysis.quality.counts),
            "reading": plain_value(analysis.reading),
            "traces": plain_rows(analysis.traces, MAX_ROWS),
            "notes": plain_rows(analysis.quality.notes, MAX_NOTES),
        },
        steps=_headline(analysis) if analysis.steps else None,
        findings=tuple(_finding(finding, reader, replays) for finding in diagnosis.findings[:MAX_FINDINGS]),
        risks=tuple(_with_source(plain_mapping(risk), reader) for risk in diagnosis.risks[:MAX_FINDINGS]),
        abstained=tuple(abstained[:MAX_ROWS]),
        ignored=tuple(plain_rows(diagnosis.ignored, MAX_ROWS)),
        views=OnDemand(makers),
        unexplained=plain_mapping(diagnosis.unexplained) if diagnosis.unexplained is not None else None,
    )


def _headline(analysis: Analysis) -> Row:
    """The headline kind. Keys of the report's schema first, then what the statistics rest on."""
    row = _step_row(analysis.steps[0])
    first = ("kind", "count", "mean_ms", "median_ms", "p95_ms", "per_second", "samples_per_second")
    head = {**{key: row[key] for key in first}, "fixed_cost_s": plain_value(analysis.fixed.total_s)}
    return {**head, "partition": row["partition"], "series": row["series"], **row}


def _step_row(facts: StepFacts) -> Row:
    row = plain_mapping(facts)
    return {**row, "series": row["series"][:MAX_SERIES]}


def _finding(finding: Finding, reader: SourceReader | None, replays: Sequence[Mapping[str, Any]]) -> Row:
    row = plain_mapping(finding)
    row["evidence"] = [*replayed_evidence(row, replays), *row["evidence"]]
    first = (
        *("id", "rule", "category", "title", "severity", "confidence", "cost_ms_per_step", "share"),
        *("gain_ceiling", "expected_gain", "where", "ranks", "evidence", "fix", "caveat", "learn", "try_"),
    )
    return _with_source({**{key: row[key] for key in first}, **row}, reader)


def _with_source(row: Row, reader: SourceReader | None) -> Row:
    """A finding or a risk with lists of bounded length, and the source beside every place."""
    row = {"try" if key == "try_" else key: value for key, value in row.items()}
    row["where"] = row["where"][:MAX_PLACES]
    row["evidence"] = row["evidence"][:MAX_EVIDENCE]
    for place in row["where"]:
        place["source"] = reader.context(place["file"], place["line"]) if reader is not None else None
    return row


def _part(analysis: Analysis, name: str) -> Any:
    """A part of the analysis under its own name; its lists, itself and one level down, hold at most `MAX_ROWS`."""
    view = plain_value(getattr(analysis, name))
    if isinstance(view, dict):
        return {key: value[:MAX_ROWS] if isinstance(value, list) else value for key, value in view.items()}
    return view[:MAX_ROWS] if isinstance(view, list) else view


def _ranks_read(analysis: Analysis) -> Row | None:
    """Names of hosts are kept of many, because tables over several runs are made of them."""
    view, read = _part(analysis, "ranks_read"), analysis.ranks_read
    if read is None:
        return None
    return {**view, "judged_hosts": [plain_value(host) for host in read.judged_hosts[:MAX_HOSTS]]}


def _quoted(make: Callable[[], Any], reader: SourceReader) -> Any:
    """A view, each row of which that names a line of the user's code has the text of that line, as `code`."""
    view = make()
    for row in (row for row in (view if isinstance(view, list) else [view]) if isinstance(row, dict)):
        lines = [line for value in row.values() if isinstance(value, list) for line in value]
        for item in (row, *lines):
            place = item.get("place", item) if isinstance(item, dict) else None
            if isinstance(place, dict) and {"file", "line"} <= place.keys():
                item["code"] = reader.line(place["file"], place["line"])
    return view


def _of_traces(views: Views | None) -> _Makers:
    """What makes each view of traces; None or empty, with a reason in `absent`, where the traces do not give it."""
    if views is None:
        return {**dict.fromkeys(OF_TRACES, lambda: None), "absent": dict}
    return {
        "overview": lambda: [
            plain_mapping(msgspec.structs.replace(one, steps=one.steps[:MAX_STEPS]))
            for span in views.spans[:MAX_SPANS]
            if (one := span.overview) is not None
        ],
        "gpus": lambda: [plain_mapping(gpu) for span in views.spans[:MAX_SPANS] for gpu in span.gpus],
        **_with_total("operators", lambda: views.operators),
        **_with_total("kernels", lambda: views.kernels),
        "memory": lambda: _bounded(views.memory),
        "modules": lambda: _bounded(views.modules),
        "counters": lambda: [plain_mapping(counter) for counter in views.counters],
        **_with_total("communication", lambda: views.communication),
        "distributed": lambda: _bounded(views.distributed),
        "tensorboard": lambda: plain_value(views.tensorboard),
        "absent": lambda: dict(views.absent),
    }


def _with_total(name: str, rows: Callable[[], Sequence[Any]]) -> _Makers:
    return {name: lambda: plain_rows(rows(), MAX_VIEW_ROWS), f"{name}_total": lambda: len(rows())}


def _bounded(view: Any, limits: Mapping[str, int] | None = None, usual: int = MAX_VIEW_ROWS) -> Row | None:
    """A view whose fields are lists of rows, each bounded, and its length beside it where it was longer."""
    if view is None:
        return None
    found: Row = {}
    for name in field_names(view):
        part, limit = getattr(view, name), (limits or {}).get(name, usual)
        found[name] = plain_value(part[:limit] if isinstance(part, tuple) else part)
        if isinstance(part, tuple) and len(part) > limit:
            found[f"{name}_total"] = len(part)
    return found


def _compilers(view: CompilersView | None, *, source: bool) -> Row | None:
    bounded = _bounded(view, MAX_OF, MAX_COMPILER_ROWS)
    if bounded is None:
        return None
    found: Row = {
        name: [_cut_texts(row) for row in part] if isinstance(part, list) else part for name, part in bounded.items()
    }
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


def _trial(trial: TrialFacts | None) -> Row | None:
    if trial is None:
        return None
    reports = []
    for row in plain_rows(trial.knobs, MAX_KNOBS):
        file, line = row.pop("file"), row.pop("line")
        reports.append({**row, "place": None if file is None else {"file": file, "line": line}})
    names = dict.fromkeys(knob.knob for knob in trial.knobs)
    return {
        "standing": {plain_value(name): standing([k for k in trial.knobs if k.knob == name]) for name in names},
        "knobs": reports,
        "seed": plain_value(trial.seed),
        "skipped": trial.skipped,
    }
