"""Two runs side by side, and the experiments that were made on this one.

The run that is chosen is the baseline, this one the candidate, unless the reader turns them round. What is said comes
from `stepscope compare`, word for word; here it is only laid out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import asdict

from stepscope.dashboard import blocks, static_page
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, experiments
from stepscope.dashboard.pages.rows import Alone, Col, TableContext, rows_table
from stepscope.errors import EnvironmentRefusal, UnreadableInputError, UsageError
from stepscope.report import comparison_report as said
from stepscope.report import words

Document = dict[str, Any]
Row = Mapping[str, Any]

WITH, SIDE = "with", "side"
CANDIDATE, BASELINE = "candidate", "baseline"
MAX_CHOICES = 500
RECORD = "Open a folder with several runs: stepscope view RUNS. Any two of them can then be compared here."
COMMAND = "stepscope view stepscope-runs"
ALONE = "This is the only run that is open, and no experiment was made on it."
TONES = {"good": "good", "bad": "warning"}
STEP_TIMES = tuple(key for key, _, _ in said.FIGURES if key.endswith("_ms"))

_STEP = (
    Col("Figure", "label"),
    Col("Baseline", "baseline", "ms"),
    Col("Candidate", "candidate", "ms"),
    Col("Change", "change", "share", help=experiments.CHANGE_HELP, signed=True),
    Col("95 %, from", "low", "share", help=experiments.CHANGE_HELP, signed=True),
    Col("to", "high", "share", help=experiments.CHANGE_HELP, signed=True),
)
_TEXTS = (
    Col("Figure", "label"),
    Col("Baseline", "baseline"),
    Col("Candidate", "candidate"),
    Col("Change", "change"),
    Col("95 % interval", "interval"),
)
_PHASE = (
    Col("Part of the step", "name"),
    Col("Difference", "difference_ms", "ms", bar=True, signed=True),
    Col("Baseline", "baseline_ms", "ms"),
    Col("Candidate", "candidate_ms", "ms"),
    Col("95 %, from", "low_ms", "ms", signed=True),
    Col("to", "high_ms", "ms", signed=True),
)
_MS = (
    Col("Difference", "difference", "ms", bar=True, signed=True),
    Col("Baseline", "baseline", "ms"),
    Col("Candidate", "candidate", "ms"),
    Col("Name", "name", say=lambda row: said.name(dict(row))),
    Col("Line", "place"),
    Col("Status", "status", say=lambda row: said.status(dict(row)) or None),
)
_MIXED = (
    Col("Difference", "difference", say=lambda row: said.difference(dict(row))),
    Col("Baseline", "baseline", say=lambda row: said.amount(row["baseline"], row["unit"])),
    Col("Candidate", "candidate", say=lambda row: said.amount(row["candidate"], row["unit"])),
    Col("Name", "name", say=lambda row: said.name(dict(row))),
    Col("Line", "place"),
    Col("Status", "status", say=lambda row: said.status(dict(row)) or None),
)
_FINDING = (
    Col("Status", "status"),
    Col("Cost a step", "difference", say=lambda row: said.difference(dict(row))),
    Col("Finding", "name"),
    Col("Line", "place"),
    Col("Rule", "rule"),
)
_VALUES = (
    Col("Name", "name"),
    Col("Baseline", "baseline", say=lambda row: said.value(row["baseline"])),
    Col("Candidate", "candidate", say=lambda row: said.value(row["candidate"])),
)
_RUN = (
    Col("Baseline", "baseline", say=lambda row: row["baseline"]["label"]),
    Col("its mean step", "baseline_ms", "ms", say=lambda row: row["baseline"]["mean_ms"]),
    Col("Candidate", "candidate", say=lambda row: row["candidate"]["label"]),
    Col("the candidate's mean step", "candidate_ms", "ms", say=lambda row: row["candidate"]["mean_ms"]),
)


def build(context: PageContext) -> list[Block]:
    """The blocks of the page. A comparison that cannot be made says why."""
    made = list(_choices(context))
    other = context.params.get(WITH, "") if context.catalog is not None else ""
    if other:
        made += _with(context, other)
    own = experiments.of_run(context)
    made += experiments.build(context, own) if own is not None else []
    if not made or (own is None and not other and not _others(context)):
        made.append(blocks.empty("Nothing to compare with", ALONE, RECORD, COMMAND))
    elif not other and own is None:
        made.append(blocks.text("Choose a run to lay this one beside it.", "note"))
    return made


def empty(context: PageContext) -> bool:
    """Whether nothing can ever stand here: a server may find another run at any time."""
    return context.catalog is None and experiments.of_run(context) is None


def render(document: Document) -> str:
    """A comparison as one HTML file without scripts or network: all rows that the terminal shows the first of."""
    shown = list(comparison(Alone(), document))
    return static_page.render(said.title(document), [static_page.Section("Comparison", shown)])


def _others(context: PageContext) -> list[Row]:
    if context.catalog is None:
        return []
    return [row for row in context.catalog.runs() if row["id"] != context.key and row.get("state") != "unreadable"]


def _choices(context: PageContext) -> Iterator[Block]:
    others = _others(context)
    if not others:
        return
    chosen = context.params.get(WITH, "")
    options = [("", "no other run"), *((row["id"], _label(row)) for row in others[:MAX_CHOICES])]
    if chosen not in dict(options):
        chosen = ""
    yield blocks.choice("Compare with", WITH, chosen, options)
    if len(others) > MAX_CHOICES:
        yield blocks.text(f"The newest {MAX_CHOICES} of {len(others):,} runs.", "note")
    if chosen:
        sides = [(CANDIDATE, "the candidate (changed)"), (BASELINE, "the baseline (before)")]
        yield blocks.choice("This run is", SIDE, _side(context), sides)


def _side(context: PageContext) -> str:
    return context.choice(SIDE, (CANDIDATE, BASELINE))


def _label(row: Row) -> str:
    name = str(row["name"])
    if row.get("kind") == "experiment":
        return f"{name} (experiment)"
    return f"{name} ({words.milliseconds(row['mean_ms'])} a step)" if row.get("mean_ms") is not None else name


def _with(context: PageContext, other: str) -> Iterator[Block]:
    """Another run beside this one; of an experiment, what came of it."""
    assert context.catalog is not None
    try:
        folder = context.catalog.experiment(other)
        document = experiments.load(folder) if folder is not None else _compared(context, other)
    except (UsageError, UnreadableInputError, EnvironmentRefusal) as error:
        yield blocks.empty("These cannot be compared", blocks.sentence(str(error)), "Choose another run.")
        return
    yield from experiments.build(context, document) if folder is not None else comparison(context, document)


def _compared(context: PageContext, other: str) -> Document:
    from stepscope import comparing
    from stepscope.report.comparison_report import comparison_document

    assert context.catalog is not None
    sides = [context.catalog.run(other), context.base]
    if _side(context) == BASELINE:
        sides.reverse()
    return comparison_document(comparing.compare(*sides), source=context.source)


def comparison(context: TableContext, document: Document) -> Iterator[Block]:
    """The whole of a comparison: the verdict first, then the step time, then all that changed."""
    yield blocks.text(
        f"{said.title(document)}: {said.verdict(document)}.", TONES.get(said.verdict_style(document), "plain")
    )
    for warning in said.warnings(document):
        yield blocks.text(blocks.sentence(warning), "warning")
    equal = said.equivalence(document)
    if equal:
        yield blocks.text(blocks.sentence(equal), "note")
    yield from _figures(context, document)
    yield from _phases(context, document)
    for title, rows in said.amounts(document):
        yield from _amounts(context, f"changed-{rows[0]['kind']}", title, rows)
    for id, title, columns, kind in (
        ("findings", said.FINDINGS, _FINDING, "finding"),
        ("environment", said.ENVIRONMENT, _VALUES, "environment"),
        ("window", said.WINDOW, _VALUES, "window"),
    ):
        yield from rows_table(context, f"changed-{id}", title, "Change", columns, said.of_kind(document, kind))
    yield from rows_table(context, "pairs", said.RUNS, "Measure", _RUN, said.runs(document))
    for note in said.notes(document):
        yield blocks.text(blocks.sentence(note), "note")
    absent = [blocks.fact(what, why) for what, why in said.absent(document)]
    if absent:
        yield blocks.facts(said.ABSENT, absent)


def _figures(context: TableContext, document: Document) -> Iterator[Block]:
    """The headline figures: step times as numbers, the rest in words, and the changes with their intervals drawn."""
    found = said.outcome(document)
    if found is None:
        return
    shown = {figure.label: figure for figure in said.figures(document)}
    before, after = document["baseline"]["figures"], document["candidate"]["figures"]
    steps, drawn = [], []
    for key, label, _ in said.FIGURES:
        if label not in shown:
            continue
        effect = found["effects"].get(key)
        row = {"label": label, **_effect(effect)}
        if key in STEP_TIMES:
            steps.append({**row, "baseline": before[key], "candidate": after[key]})
        if effect is not None and effect["low"] is not None:
            drawn.append(row)
    if drawn:
        yield _intervals(drawn)
    notes = ["Means over the runs of each side; change is the candidate's."]
    yield from rows_table(context, "figures", "Step time", "Effect", _STEP, steps, notes=notes)
    rest = [asdict(figure) for label, figure in shown.items() if label not in {row["label"] for row in steps}]
    yield from rows_table(context, "other-figures", "Other figures", "Effect", _TEXTS, rest)


def _effect(effect: Row | None) -> dict[str, float | None]:
    """Ratios as what they add: the form in which changes are read."""
    if effect is None:
        return {"change": None, "low": None, "high": None}
    pairs = (("change", "ratio"), ("low", "low"), ("high", "high"))
    return {name: None if effect[key] is None else effect[key] - 1 for name, key in pairs}


def _intervals(rows: list[dict[str, Any]]) -> Block:
    said_of = "; ".join(
        f"{row['label']} {said.signed_percent(1 + row['change'])}, {said.signed_percent(1 + row['low'])} to "
        f"{said.signed_percent(1 + row['high'])}"
        for row in rows
    )
    return blocks.chart(
        "changes",
        "Changes with their 95 % intervals",
        "interval",
        sentence=f"{said_of}.",
        x=("figure", "text", [row["label"] for row in rows]),
        y=("change of the figure", "share"),
        series=[
            blocks.series(
                "change",
                "share",
                [row["change"] for row in rows],
                low=[row["low"] for row in rows],
                high=[row["high"] for row in rows],
                role="measured",
            )
        ],
        help=blocks.help_(experiments.CHANGE_HELP),
    )


def _phases(context: TableContext, document: Document) -> Iterator[Block]:
    """Where the difference is: both steps stacked of their parts, and the parts as a table."""
    rows = [{**row, "name": said.phase(row["category"])} for row in said.phases(document)]
    if not rows:
        return
    most = rows[0]
    yield blocks.chart(
        "parts",
        "What a mean step is made of on both sides",
        "stacked_bars",
        sentence=f"The largest difference is in {most['name']}: {said.phase_difference(most)} a step.",
        x=("side", "text", ["baseline", "candidate"]),
        y=("time of the step", "ms"),
        y_min=0,
        series=[
            blocks.series(row["name"], "ms", [row["baseline_ms"], row["candidate_ms"]], role=row["category"])
            for row in rows
        ],
        help=blocks.meaning("PhaseEffect", "difference_ms"),
    )
    yield from rows_table(context, "phases", said.PHASES, "PhaseEffect", _PHASE, rows)


def _amounts(context: TableContext, id: str, title: str, rows: list[Document]) -> list[Block]:
    in_ms = all(str(row["unit"]).startswith("ms") for row in rows)
    return rows_table(context, id, title, "Change", _MS if in_ms else _MIXED, rows)
