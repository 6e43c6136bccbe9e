"""Two runs side by side, and the experiments that were made on this one.

The run that is chosen is the baseline, this one the candidate, unless the reader turns them round. What is said comes
from `stepscope compare`, word for word; here it is only laid out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import asdict

from stepscope.dashboard import blocks, history, static_page
from stepscope.dashboard.blocks import Alone, Block, Row, rows_table
from stepscope.dashboard.pages import PageContext, experiments, sweeps
from stepscope.errors import EnvironmentRefusal, UnreadableInputError, UsageError
from stepscope.report import comparison_report as said
from stepscope.report import history_report, sweep_report, words

Document = dict[str, Any]

WITH, SIDE = "with", "side"
CANDIDATE, BASELINE = "candidate", "baseline"
MAX_CHOICES = 500
HISTORY = "history"
MAX_VERSIONS = 20  # each is read as a whole
RECORD = "Open a folder with several runs: stepscope view RUNS. Any two of them can then be compared here."
COMMAND = "stepscope view stepscope-runs"
ALONE = "This is the only run that is open, and no experiment was made on it."
SEARCHES: dict[str, Any] = {"experiment": experiments, "sweep": sweeps}  # kinds of entries that are not one run
TONES = {"good": "good", "bad": "warning"}
STEP_TIMES = tuple(key for key, _, _ in said.FIGURES if key.endswith("_ms"))

_HELP = dict.fromkeys(("change", "low", "high"), experiments.CHANGE_HELP)
_STEP = blocks.columns(
    f"Figure: label; Baseline: baseline ms; Candidate: candidate ms; Change: {experiments.CHANGE}", help=_HELP
)
_TEXTS = blocks.columns(
    "Figure: label; Baseline: baseline; Candidate: candidate; Change: change; 95 % interval: interval"
)
_PHASE = blocks.columns(
    "Part of the step: name; Difference: difference_ms ms bar signed; Baseline: baseline_ms ms; "
    "Candidate: candidate_ms ms; 95 %, from: low_ms ms signed; to: high_ms ms signed"
)
_NAMED = "; Name: name; Line: place; Status: status"
_MS = blocks.columns(
    f"Difference: difference ms bar signed; Baseline: baseline ms; Candidate: candidate ms{_NAMED}",
    name=lambda row: said.name(dict(row)),
    status=lambda row: said.status(dict(row)) or None,
)
_MIXED = blocks.columns(
    f"Difference: difference; Baseline: baseline; Candidate: candidate{_NAMED}",
    difference=lambda row: said.difference(dict(row)),
    baseline=lambda row: said.amount(row["baseline"], row["unit"]),
    candidate=lambda row: said.amount(row["candidate"], row["unit"]),
    name=lambda row: said.name(dict(row)),
    status=lambda row: said.status(dict(row)) or None,
)
_FINDING = blocks.columns(
    "Status: status; Cost a step: difference; Finding: name; Line: place; Rule: rule",
    difference=lambda row: said.difference(dict(row)),
)
_VALUES = blocks.columns(
    "Name: name; Baseline: baseline; Candidate: candidate",
    baseline=lambda row: said.value(row["baseline"]),
    candidate=lambda row: said.value(row["candidate"]),
)
_RUN = blocks.columns(
    "Baseline: baseline; its mean step: baseline_ms ms; Candidate: candidate; "
    "the candidate's mean step: candidate_ms ms",
    baseline=lambda row: row["baseline"]["label"],
    baseline_ms=lambda row: row["baseline"]["mean_ms"],
    candidate=lambda row: row["candidate"]["label"],
    candidate_ms=lambda row: row["candidate"]["mean_ms"],
)


def build(context: PageContext) -> list[Block]:
    """The blocks of the page. A comparison that cannot be made says why."""
    made = list(_choices(context))
    other = context.params.get(WITH, "") if context.catalog is not None else ""
    if other:
        made += _with(context, other)
    own = [*_own(context)]
    made += own
    made += _history(context)
    if not made or (not own and not other and not _others(context)):
        made.append(blocks.empty("Nothing to compare with", ALONE, RECORD, COMMAND))
    elif not other and not own:
        made.append(blocks.text("Choose a run to lay this one beside it.", "note"))
    return made


def empty(context: PageContext) -> bool:
    """Whether nothing can ever stand here: a server may find another run at any time."""
    return context.catalog is None and not any(search.of_run(context) for search in SEARCHES.values())


def _own(context: PageContext) -> Iterator[Block]:
    """The experiment and the sweep that lie in the run's report."""
    for search in SEARCHES.values():
        document = search.of_run(context)
        yield from search.build(context, document) if document is not None else ()


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


def _history(context: PageContext) -> Iterator[Block]:
    from stepscope import comparing

    same = context.catalog.of_script(context.key)[:MAX_VERSIONS] if context.catalog is not None else []
    if context.catalog is None or len(same) < 2:
        return
    shown = context.choice(HISTORY, ("", "shown"))
    options = [("", "not shown"), ("shown", f"its newest {len(same)} runs")]
    yield blocks.choice("History of this script", HISTORY, shown, options)
    if shown:
        versions, notes = comparing.history(context.catalog.run(place.key) for place in same)
        yield from history.table(context, history_report.document(versions, notes), "History of this script")


def _side(context: PageContext) -> str:
    return context.choice(SIDE, (CANDIDATE, BASELINE))


def _label(row: Row) -> str:
    name = str(row["name"])
    if row.get("kind") in SEARCHES:
        return f"{name} ({row['kind']})"
    return f"{name} ({words.milliseconds(row['mean_ms'])} a step)" if row.get("mean_ms") is not None else name


def _with(context: PageContext, other: str) -> Iterator[Block]:
    assert context.catalog is not None
    try:
        folder = context.catalog.experiment(other)
        search = None if folder is None else sweeps if (folder / sweep_report.NAME).is_file() else experiments
        document = search.load(folder) if search and folder else _compared(context, other)
    except (UsageError, UnreadableInputError, EnvironmentRefusal) as error:
        yield blocks.empty("These cannot be compared", blocks.sentence(str(error)), "Choose another run.")
        return
    yield from search.build(context, document) if search else comparison(context, document)


def _compared(context: PageContext, other: str) -> Document:
    from stepscope import comparing

    assert context.catalog is not None
    sides = [context.catalog.run(other), context.base]
    if _side(context) == BASELINE:
        sides.reverse()
    return said.comparison_document(comparing.compare(*sides), source=context.source)


def comparison(context: PageContext | Alone, document: Document) -> Iterator[Block]:
    """The whole of a comparison: the verdict first, then the step time, then all that changed."""
    yield blocks.text(
        f"{said.title(document)}: {said.verdict(document)}.", TONES.get(said.verdict_style(document), "plain")
    )
    energy = said.energy(said.outcome(document))
    if energy:
        yield blocks.text(blocks.sentence(energy))
    for warning in said.warnings(document):
        yield blocks.text(blocks.sentence(warning), "warning")
    equal = said.equivalence(document)
    if equal:
        yield blocks.text(blocks.sentence(equal), "note")
    yield from _figures(context, document)
    yield from _phases(context, document)
    for title, rows in said.amounts(document):
        columns = _MS if all(str(row["unit"]).startswith("ms") for row in rows) else _MIXED
        most = context.ranked if isinstance(context, Alone) else None
        yield from rows_table(context, f"changed-{rows[0]['kind']}", title, "Change", columns, rows, limit=most)
    for id, title, columns, kind in (
        ("findings", said.FINDINGS, _FINDING, "finding"),
        ("environment", said.ENVIRONMENT, _VALUES, "environment"),
        ("window", said.WINDOW, _VALUES, "window"),
    ):
        yield from rows_table(context, f"changed-{id}", title, "Change", columns, said.of_kind(document, kind))
    yield from rows_table(context, "pairs", said.RUNS, "Measure", _RUN, said.runs(document))
    for note in said.notes(document):
        yield blocks.text(blocks.sentence(note), "note")
    for what, why in said.absent(document):
        yield blocks.text(f"Not compared: {what} ({why})", "note")


def _figures(context: PageContext | Alone, document: Document) -> Iterator[Block]:
    """The headline figures: step times as numbers, the rest in words, and the changes with their intervals drawn."""
    found = said.outcome(document)
    if found is None:
        return
    shown = {figure.label: figure for figure in said.figures(document)}
    before, after = document["baseline"]["figures"], document["candidate"]["figures"]
    steps: list[dict[str, Any]] = []
    drawn: list[dict[str, Any]] = []
    for key, label, _ in said.FIGURES:
        if label not in shown:
            continue
        effect = found["effects"].get(key)
        row = {"label": label, **experiments.changes(effect)}
        if key in STEP_TIMES:
            steps.append({**row, "baseline": before[key], "candidate": after[key]})
        if effect is not None and effect["low"] is not None:
            drawn.append(row)
    if drawn:
        sentences = (
            f"{row['label']} {said.signed_percent(1 + row['change'])}, {said.signed_percent(1 + row['low'])} to "
            f"{said.signed_percent(1 + row['high'])}"
            for row in drawn
        )
        low, high = ([row[key] for row in drawn] for key in ("low", "high"))
        changes = [row["change"] for row in drawn]
        yield blocks.chart(
            "changes",
            "Changes with their 95 % intervals",
            "interval",
            sentence=f"{'; '.join(sentences)}.",
            x=("figure", "text", [row["label"] for row in drawn]),
            y=("change of the figure", "share"),
            series=[blocks.series("change", "share", changes, low=low, high=high, role="measured")],
            help=blocks.help_(experiments.CHANGE_HELP),
        )
    notes = ["Means over the runs of each side; change is the candidate's."]
    yield from rows_table(context, "figures", "Step time", "Effect", _STEP, steps, notes=notes, limit=len(steps))
    rest = [asdict(figure) for label, figure in shown.items() if label not in {row["label"] for row in steps}]
    yield from rows_table(context, "other-figures", "Other figures", "Effect", _TEXTS, rest)


def _phases(context: PageContext | Alone, document: Document) -> Iterator[Block]:
    """Where the difference is: both steps stacked of their parts, and the parts as a table."""
    rows = [{**row, "name": said.phase(row["category"])} for row in said.phases(document)]
    if not rows:
        return
    most = rows[0]
    yield blocks.drawn(
        "parts",
        "What a mean step is made of on both sides",
        "stacked_bars",
        f"The largest difference is in {most['name']}: {said.phase_difference(most)} a step.",
        ("side", "text", ["baseline", "candidate"]),
        ("time of the step", "ms"),
        [(row["name"], [row["baseline_ms"], row["candidate_ms"]], row["category"]) for row in rows],
        ("PhaseEffect", "difference_ms"),
    )
    yield from rows_table(context, "phases", said.PHASES, "PhaseEffect", _PHASE, rows, limit=len(rows))
