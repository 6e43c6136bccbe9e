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

# cells that are no value of the row
_CHANGE = {"name": said.name, "status": lambda row: said.status(row) or None}
_FINDING = {"difference": said.difference}
_MIXED = {
    **_CHANGE,
    **_FINDING,
    "baseline": lambda row: said.amount(row["baseline"], row["unit"]),
    "candidate": lambda row: said.amount(row["candidate"], row["unit"]),
}
_VALUES = {
    "baseline": lambda row: said.value(row["baseline"]),
    "candidate": lambda row: said.value(row["candidate"]),
}
_RUN = {
    "baseline": lambda row: row["baseline"]["label"],
    "baseline_ms": lambda row: row["baseline"]["mean_ms"],
    "candidate": lambda row: row["candidate"]["label"],
    "candidate_ms": lambda row: row["candidate"]["mean_ms"],
}


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
        name = "changed" if all(str(row["unit"]).startswith("ms") for row in rows) else "changed-mixed"
        most = context.ranked if isinstance(context, Alone) else None
        id = f"changed-{rows[0]['kind']}"
        yield from rows_table(
            context, name, rows, id=id, title=title, say=_CHANGE if name == "changed" else _MIXED, limit=most
        )
    yield from rows_table(context, "changed-findings", said.of_kind(document, "finding"), say=_FINDING)
    for kind in ("environment", "window"):
        yield from rows_table(context, f"changed-{kind}", said.of_kind(document, kind), say=_VALUES)
    yield from rows_table(context, "pairs", said.runs(document), say=_RUN)
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
        intervals = blocks.series("change", "share", changes, low=low, high=high, role="measured")
        yield blocks.drawn("changes", f"{'; '.join(sentences)}.", [row["label"] for row in drawn], [intervals])
    yield from rows_table(context, "figures", steps, limit=len(steps))
    rest = [asdict(figure) for label, figure in shown.items() if label not in {row["label"] for row in steps}]
    yield from rows_table(context, "other-figures", rest)


def _phases(context: PageContext | Alone, document: Document) -> Iterator[Block]:
    """Where the difference is: both steps stacked of their parts, and the parts as a table."""
    rows = [{**row, "name": said.phase(row["category"])} for row in said.phases(document)]
    if not rows:
        return
    most = rows[0]
    yield blocks.drawn(
        "parts",
        f"The largest difference is in {most['name']}: {said.phase_difference(most)} a step.",
        ["baseline", "candidate"],
        [(row["name"], [row["baseline_ms"], row["candidate_ms"]], row["category"]) for row in rows],
    )
    yield from rows_table(context, "phases", rows, limit=len(rows))
