"""What came of an experiment: every candidate with its interval, beside what the diagnosis held possible."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepscope.dashboard import blocks, static_page
from stepscope.dashboard.blocks import Alone, Block, Row, rows_table
from stepscope.dashboard.pages import PageContext
from stepscope.model import Report
from stepscope.report import experiment_report as say
from stepscope.report.comparison_report import energy as energy_said
from stepscope.report.escape import one_line

DRAWN = 24  # candidates
SCREEN_ROWS = 12  # of a table on a terminal
MOST_DRAWN = 0.87  # a ceiling beyond it would take most of the axis to show nothing


def of_run(context: PageContext) -> Row | None:
    """The experiment that lies beside the run, or in its report."""
    found = context.base.report(source=context.source).views.get("experiment")
    return found if isinstance(found, Mapping) else None


def load(folder: Path) -> dict[str, Any]:
    """The document of an experiment's folder; raises `UnreadableInputError`."""
    return say.experiment_document(say.load(folder))


def render(report: Report) -> str:
    """The experiment of a report as one HTML file without scripts, where there is no run to show beside it."""
    shown = list(build(Alone(), report.views["experiment"]))
    return static_page.render(str(report.run.get("name")), [static_page.Section("Experiment", shown)])


def build(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    """The conclusion, the intervals drawn, and the tables behind."""
    yield from _conclusion(document)
    yield from _warnings(document)
    yield blocks.text(blocks.sentence(say.protocol(document)), "note")
    yield from _changes(document)
    yield from _intervals(say.ranked(document))
    yield from _compared(context, document)
    yield from _runs(context, document)
    yield from _skipped(context, document)
    yield from _by_hand(document)
    yield from _how(document)
    if document.get("repeat"):
        yield blocks.facts("To repeat it", [blocks.fact("Command", document["repeat"])])


def screen(document: Row) -> list[list[Block]]:
    """What a terminal shows: without pictures and single runs."""
    context = Alone(SCREEN_ROWS)
    command = shlex.join(str(word) for word in document["protocol"]["command"])
    head = [blocks.text(f"Experiment: {one_line(command)}", "head")]
    head += [blocks.text(text, "note") for text in (say.protocol(document), say.source(document)) if text]
    sections = (_compared(context, document), _changes(document), _by_hand(document), _skipped(context, document))
    how = _how(document)
    return [[*head, *_warnings(document)], *map(list, (_conclusion(document), *sections, how))]


def outcome(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    """What it has shown, and what to change."""
    yield from _conclusion(document)
    yield from _candidates(context, document)
    yield from _changes(document)


def _conclusion(document: Row) -> Iterator[Block]:
    won = bool(say.winners(document))
    for number, text in enumerate(say.conclusion(document)):
        yield blocks.text(text, "good" if won and number == 0 else "plain")


def _warnings(document: Row) -> Iterator[Block]:
    for text in (*(document.get("notes") or ()), *filter(None, [say.state(document)])):
        yield blocks.text(blocks.sentence(str(text)), "warning")


def _changes(document: Row) -> Iterator[Block]:
    lines = [line for best in say.winners(document)[:1] for line in best.get("change") or ()]
    if lines:
        facts = [blocks.fact(f"Change {number}", line) for number, line in enumerate(lines, start=1)]
        yield blocks.facts("What to change in the script", facts)


def _by_hand(document: Row) -> Iterator[Block]:
    yield from (blocks.text(f"No knob reaches: {text}") for text in say.by_hand(document))


def _candidates(context: PageContext | Alone, document: Row) -> list[Block]:
    return rows_table(context, "candidates", map(_candidate, say.ranked(document)))


def _compared(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    """The candidates, what to know of them, where the difference is, and what each knob does by itself."""
    candidates = say.ranked(document)
    yield from _candidates(context, document)
    notes = [note for row in candidates for note in _notes(row)]
    yield from rows_table(context, "candidate-notes", notes)
    phases = [{**phase, "name": say.name(row)} for row in candidates for phase in row.get("phases") or ()]
    yield from rows_table(context, "candidate-phases", phases)
    effects = [
        {"name": say.main_effect(row), **changes(row), "ceiling": _ceiling(row), "runs": row.get("runs")}
        for row in document.get("main_effects") or ()
    ]
    yield from rows_table(context, "main-effects", effects)


def _candidate(row: Row) -> dict[str, Any]:
    """The change as a share: what a ratio adds to 1."""
    effect = say.headline(row)
    if row.get("decided_by") == say.MEDIAN:
        effect = (row.get("effects") or {}).get(say.MEDIAN) or effect
    return {
        "name": say.name(row),
        "verdict": say.verdict(row),
        **changes(effect),
        "ceiling": _ceiling(row),
        "pairs": row.get("pairs"),
    }


def _notes(row: Row) -> Iterator[dict[str, str]]:
    median = row.get("decided_by") == say.MEDIAN and row.get("headline") != say.MEDIAN
    for about, text in (
        ("verdict", str(row.get("text") or "") or None),
        ("verdict", "the change is that of the median step, by which it was decided" if median else None),
        ("energy", energy_said(row)),
        ("prediction", say.beyond(row)),
        ("figure", say.rate_note(row)),
        ("loss", say.trains_alike(row)),
        *(("in the script", line) for line in row.get("change") or ()),
        *(("doubt", flag) for flag in say.flags(row)),
    ):
        if text:
            yield {"name": say.name(row), "about": about, "text": text}


def _ceiling(row: Row) -> float | None:
    return None if row.get("ceiling") is None else -row["ceiling"]


def changes(effect: Row | None) -> dict[str, float | None]:
    """Ratios as what they add: the form in which changes are read."""
    found = effect or {}
    pairs = (("change", "ratio"), ("low", "low"), ("high", "high"))
    return {name: None if found.get(key) is None else found[key] - 1 for name, key in pairs}


def _intervals(candidates: list[Row]) -> Iterator[Block]:
    """A candidate a line: estimate and interval, and the ceiling of the finding it is from."""
    drawn = [(row, found) for row in candidates if (found := _candidate(row))["change"] is not None]
    drawn = [(row, found) for row, found in drawn if row.get("headline") not in say.RATES][:DRAWN]
    if not drawn:
        return
    made = [
        blocks.series(
            "measured, with 95 % interval",
            "share",
            [found["change"] for _, found in drawn],
            low=[found["low"] for _, found in drawn],
            high=[found["high"] for _, found in drawn],
            points=[_pair_changes(row) for row, _ in drawn],
            role="measured",
        )
    ]
    given = [found["ceiling"] for _, found in drawn]
    ceilings = [value if value is not None and -MOST_DRAWN < value < 0 else None for value in given]
    if any(value is not None for value in ceilings):
        made.append(blocks.series("predicted at best", "share", ceilings, role="ceiling"))
    said = "; ".join(f"{found['name']}: {found['verdict']}, {say.change(row)}" for row, found in drawn)
    yield blocks.drawn("intervals", f"{said}.", [found["name"] for _, found in drawn], made)


def _pair_changes(row: Row) -> list[float]:
    """What each pair of runs says alone: its mean step times, candidate over baseline, less 1."""
    pairs = [(pair["baseline"]["mean_ms"], pair["candidate"]["mean_ms"]) for pair in row.get("runs") or ()]
    return [after / before - 1 for before, after in pairs if before and after and before > 0 and after > 0]


def _runs(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    candidates = say.ranked(document)
    sides, keys = ("baseline", "candidate"), ("mean_ms", "median_ms", "p95_ms")
    pairs = [
        {
            "name": say.name(row),
            "pair": number,
            **{side: pair[side].get("label") for side in sides},
            **{f"{side}_{key}": pair[side].get(key) for side in sides for key in keys},
        }
        for row in candidates
        for number, pair in enumerate(row.get("runs") or (), start=1)
    ]
    yield from rows_table(context, "experiment-pairs", pairs)
    distinct: dict[tuple[str, ...], Row] = {}  # once what all runs of a candidate say alike
    for row in candidates:
        for each in row.get("applied") or ():
            names = ("knob", "value", "applied", "observed", "reason")
            key = (say.name(row), *(str(each.get(name)) for name in names))
            distinct.setdefault(key, {**each, "name": say.name(row)})
    yield from rows_table(context, "applied", distinct.values())


def _skipped(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    skipped = [{"name": say.name(row), "reason": row["reason"]} for row in document.get("skipped") or ()]
    yield from rows_table(context, "skipped", skipped)


def _how(document: Row) -> Iterator[Block]:
    smallest = say.noise(document)
    if smallest and not say.is_self_test(document):  # of one that is the conclusion
        yield blocks.text(smallest, "note")
    found = document.get("noise") or {}
    facts = [blocks.fact(name, text) for name, text in found.get("settings") or ()]
    facts += [blocks.fact(name, text, "left as it is") for name, text in found.get("unchanged") or ()]
    if facts:
        yield blocks.facts("How it was measured", facts)
