"""Two runs side by side, and the experiments that were made on this one.

The run that is chosen is the baseline, this one the candidate, unless the reader turns them round. What is said comes
from `stepscope compare`, word for word; here it is only laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stepscope.dashboard import blocks, history, static_page
from stepscope.dashboard.blocks import Alone, Block, Row, rows_table
from stepscope.dashboard.pages import PageContext, experiments, sweeps
from stepscope.errors import EnvironmentRefusal, UnreadableInputError, UsageError
from stepscope.report import sweep_report, words
from stepscope.report.comparison_report import comparison_document, signed_percent

WITH, SIDE = "with", "side"
CANDIDATE, BASELINE = "candidate", "baseline"
MAX_CHOICES = 500
HISTORY = "history"
MAX_VERSIONS = 20  # each is read as a whole
RECORD = "Open a folder with several runs: stepscope view RUNS. Any two of them can then be compared here."
COMMAND = "stepscope view stepscope-runs"
ALONE = "This is the only run that is open, and no experiment was made on it."
SEARCHES: dict[str, Any] = {"experiment": experiments, sweeps.VIEW: sweeps}  # kinds of entries that are not one run


def build(context: PageContext) -> list[Block]:
    """The blocks of the page. A comparison that cannot be made says why."""
    catalog = context.catalog
    entries = catalog.runs() if catalog is not None else []
    others = [row for row in entries if row["id"] != context.key and row.get("state") != "unreadable"]
    other = context.params.get(WITH, "") if catalog is not None else ""
    made = [*_choices(context, others), *(_with(context, other) if other else ())]
    own = [block for search, document in _in_report(context) for block in search.build(context, document)]
    made += [*own, *_history(context)]
    if not made or not (own or other or others):
        made.append(blocks.empty("Nothing to compare with", ALONE, RECORD, COMMAND))
    elif not other and not own:
        made.append(blocks.text("Choose a run to lay this one beside it.", "note"))
    return made


def empty(context: PageContext) -> bool:
    """Whether nothing can ever stand here: a server may find another run at any time."""
    return context.catalog is None and not _in_report(context)


def _in_report(context: PageContext) -> list[tuple[Any, Row]]:
    """What shows a search, and its document, for each that lies beside the run, or in its report."""
    views = context.base.report(source=context.source).views
    return [(search, views[kind]) for kind, search in SEARCHES.items() if isinstance(views.get(kind), Mapping)]


def render(document: Row) -> str:
    """A comparison as one HTML file without scripts or network: all rows that the terminal shows the first of."""
    return static_page.render(_title(document), [static_page.Section("Comparison", [*comparison(Alone(), document)])])


def _choices(context: PageContext, others: Sequence[Row]) -> Iterator[Block]:
    if not others:
        return

    def label(row: Row) -> str:
        if row.get("kind") in SEARCHES:
            return f"{row['name']} ({row['kind']})"
        mean_ms = row.get("mean_ms")
        return f"{row['name']} ({words.milliseconds(mean_ms)} a step)" if mean_ms is not None else str(row["name"])

    chosen = context.params.get(WITH, "")
    options = [("", "no other run"), *((row["id"], label(row)) for row in others[:MAX_CHOICES])]
    if chosen not in dict(options):
        chosen = ""
    yield blocks.choice("Compare with", WITH, chosen, options)
    if len(others) > MAX_CHOICES:
        yield blocks.text(f"The newest {MAX_CHOICES} of {len(others):,} runs.", "note")
    if chosen:
        sides = [(CANDIDATE, "the candidate (changed)"), (BASELINE, "the baseline (before)")]
        yield blocks.choice("This run is", SIDE, context.choice(SIDE, (CANDIDATE, BASELINE)), sides)


def _history(context: PageContext) -> Iterator[Block]:
    from stepscope import comparing

    same = context.catalog.of_script(context.key)[:MAX_VERSIONS] if context.catalog is not None else []
    if context.catalog is None or len(same) < 2:
        return
    shown = context.choice(HISTORY, ("", "shown"))
    options = [("", "not shown"), ("shown", f"its newest {len(same)} runs")]
    yield blocks.choice("History of this script", HISTORY, shown, options)
    if shown:
        keys, catalog = {place.path: place.key for place in same}, context.catalog
        versions, notes = comparing.history(keys, profiled=lambda run: catalog.profile(keys[run.paths[0]]))
        yield from history.table(context, history.document(versions, notes), "History of this script")


def _with(context: PageContext, other: str) -> Iterator[Block]:
    from stepscope import comparing

    assert context.catalog is not None
    try:
        folder = context.catalog.experiment(other)
        if folder is not None:
            search = sweeps if (folder / sweep_report.NAME).is_file() else experiments
            made = list(search.build(context, search.load(folder)))
        else:
            sides = [context.catalog.run(other), context.base]
            if context.choice(SIDE, (CANDIDATE, BASELINE)) == BASELINE:
                sides.reverse()
            document = comparison_document(comparing.compare(*sides), source=context.source)
            made = list(comparison(context, document))
    except (UsageError, UnreadableInputError, EnvironmentRefusal) as error:
        made = [blocks.empty("These cannot be compared", blocks.sentence(str(error)), "Choose another run.")]
    yield from made


SPREAD = ("p5_ms", "p25_ms", "p75_ms", "p99_ms")  # shown where a single run on each side gives no verdict
OF_ENERGY = ("joules_per_sample", "joules_per_step", "cost_per_1000_steps")  # shown where they are compared
FIGURES: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("mean_ms", "mean step", words.milliseconds),
    ("steady_ms", "steady step, as analyze has it", words.milliseconds),
    ("p5_ms", "5th percentile", words.milliseconds),
    ("p25_ms", "25th percentile", words.milliseconds),
    ("median_ms", "median step", words.milliseconds),
    ("p75_ms", "75th percentile", words.milliseconds),
    ("p95_ms", "95th percentile (stalls)", words.milliseconds),
    ("p99_ms", "99th percentile", words.milliseconds),
    ("samples_per_second", "samples per second", words.number),
    ("fixed_cost_s", "before the first step", words.seconds),
    ("joules_per_sample", "energy a sample", words.joules),
    ("joules_per_step", "energy a step", words.joules),
    ("cost_per_1000_steps", "cost of 1,000 steps", words.money),
)
KINDS = {  # in the order in which they are shown
    "phase": "Phases of a step",
    "category": "Parts of a profiled step",
    "function": "Functions, by sampled time",
    "line": "Lines of your code",
    "operator": "Operators",
    "kernel": "Kernels",
    "utilisation": "Use of the machine",
}
PERCENT = ("%", "% of samples")  # what they differ by are points
TONES = {"faster": "good", "slower": "warning"}
_STATUS = {"grew": None, "shrank": None, "same": "same, within noise"}  # the sign of the difference says the first two


def _title(document: Row) -> str:
    return f"{document['candidate']['label']} against {document['baseline']['label']}"


def comparison(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    """The whole of a comparison: the verdict first, then the step time, then all that changed."""
    found: Row | None = next(iter(document["candidates"]), None)
    phases = sorted(
        (row for row in (found or {}).get("phases", ()) if row["baseline_ms"] or row["candidate_ms"]),
        key=lambda row: -abs(row["difference_ms"] or 0),
    )
    if found is None:
        why = document["absent"].get("step time", "none is known of both sides")
        yield blocks.text(f"{_title(document)}: No step time to compare: {why}.")
    else:
        verdict = blocks.capital(str(found["text"] or words.term(found["verdict"])))
        yield blocks.text(f"{_title(document)}: {verdict}.", TONES.get(found["verdict"], "plain"))
        yield from _doubts(found)
        yield from _figures(context, document, found)
        yield from _phases(context, phases)
    # the kind that the phases tell in full is left out
    parts = {row["category"] for row in phases}
    told = "" if not parts else "category" if parts & words.PARTS.keys() else "phase"
    of_kind: dict[str, list[Row]] = {}
    for row in document["changes"]:
        of_kind.setdefault(row["kind"], []).append(row)
    most = context.ranked if isinstance(context, Alone) else None
    for kind, title in KINDS.items():
        rows = of_kind.get(kind, []) if kind != told else []
        in_ms = all(str(row["unit"]).startswith("ms") for row in rows)
        name, cells = ("changed", _NAMED) if in_ms else ("changed-mixed", _NAMED | _AMOUNTS)
        yield from rows_table(context, name, rows, id=f"changed-{kind}", title=title, say=cells, limit=most)
    yield from rows_table(context, "changed-findings", of_kind.get("finding"), say={"difference": difference})
    for kind in ("environment", "window"):
        yield from rows_table(context, f"changed-{kind}", of_kind.get(kind), say=_VALUES)
    pairs = found["runs"] if found is not None else []
    yield from rows_table(context, "pairs", pairs if len(pairs) > 1 else (), say=_SIDES)
    for note in (*document["notes"], *document["baseline"]["notes"], *document["candidate"]["notes"]):
        yield blocks.text(blocks.sentence(note), "note")
    by_reason: dict[str, list[str]] = {}  # what has the same reason together
    for what, why in document["absent"].items():
        by_reason.setdefault(str(why), []).append(str(what))
    for why, whats in by_reason.items():
        yield blocks.text(f"Not compared: {', '.join(whats)} ({why})", "note")


def _doubts(found: Row) -> Iterator[Block]:
    if found["energy"]:
        yield blocks.text(blocks.sentence(str(found["energy"]["text"])))
    flags = found["flags"]
    texts = [f"{flag['text']}{' (no verdict rests on such a run)' if flag['withholds'] else ''}" for flag in flags]
    if left_out := dict.fromkeys(run["label"] for run in found["left_out"]):
        texts.append(f"left out of the pairs for that: {', '.join(left_out)}")
    for text in dict.fromkeys(texts):
        yield blocks.text(blocks.sentence(text), "warning")
    if found["equivalence"] is not None and found["equivalence"]["judged"]:
        yield blocks.text(blocks.sentence(str(found["equivalence"]["text"])), "note")


def figures(document: Row, found: Row) -> Iterator[Row]:
    """The headline figures in words, with their key; those that a side lacks left out."""
    before, after = document["baseline"]["figures"], document["candidate"]["figures"]
    for key, label, show in FIGURES:
        effect = found["effects"].get(key)
        same = key == "steady_ms" and all(show(side.get(key)) == show(side.get("mean_ms")) for side in (before, after))
        shown = (key not in SPREAD or found["pairs"] <= 1) and (key not in OF_ENERGY or effect is not None)
        if key in before and key in after and not same and shown:
            known = effect is not None and effect["low"] is not None and effect["high"] is not None
            yield {
                "key": key,
                "label": label,
                "baseline": show(before[key]),
                "candidate": show(after[key]),
                "change": signed_percent(effect["ratio"]) if effect is not None else "",
                "interval": f"{signed_percent(effect['low'])} to {signed_percent(effect['high'])}" if known else "",
            }


def _figures(context: PageContext | Alone, document: Row, found: Row) -> Iterator[Block]:
    """Step times as numbers, the rest in words, and the changes with their intervals drawn."""
    before, after = document["baseline"]["figures"], document["candidate"]["figures"]
    steps: list[Row] = []
    rest: list[Row] = []
    drawn: list[dict[str, Any]] = []
    for figure in figures(document, found):
        key, effect = figure["key"], found["effects"].get(figure["key"])
        row = {"label": figure["label"], **experiments.changes(effect)}
        if key.endswith("_ms"):
            steps.append({**row, "baseline": before[key], "candidate": after[key]})
        else:
            rest.append(figure)
        if effect is not None and effect["low"] is not None:
            drawn.append(row)
    if drawn:
        sentences = (
            f"{row['label']} {signed_percent(1 + row['change'])}, {signed_percent(1 + row['low'])} to "
            f"{signed_percent(1 + row['high'])}"
            for row in drawn
        )
        changes, low, high = ([row[key] for row in drawn] for key in ("change", "low", "high"))
        intervals = blocks.series("change", "share", changes, low=low, high=high, role="measured")
        yield blocks.drawn("changes", f"{'; '.join(sentences)}.", [row["label"] for row in drawn], [intervals])
    yield from rows_table(context, "figures", steps, limit=len(steps))
    yield from rows_table(context, "other-figures", rest)


def _phases(context: PageContext | Alone, phases: list[Row]) -> Iterator[Block]:
    if not phases:
        return
    rows = [{**row, "name": words.part(row["category"])} for row in phases]
    most = difference({"difference": rows[0]["difference_ms"], "unit": "ms"})
    yield blocks.drawn(
        "parts",
        f"The largest difference is in {rows[0]['name']}: {most} a step.",
        ["baseline", "candidate"],
        [(row["name"], [row["baseline_ms"], row["candidate_ms"]], row["category"]) for row in rows],
    )
    yield from rows_table(context, "phases", rows, limit=len(rows))


def amount(value: float | None, unit: str) -> str:
    """A value of a change in words."""
    if value is None:
        return words.MISSING
    if unit in (*PERCENT, "cores"):
        return f"{words.number(value)} {'%' if unit in PERCENT else unit}"
    return words.milliseconds(value) if abs(value) >= 0.1 or value == 0 else f"{words.number(value * 1e3)} µs"


def difference(row: Row) -> str:
    """By how much something changed, with its sign; of percentages in points."""
    value, unit = row["difference"], row["unit"]
    if value is None:
        return words.MISSING
    text = amount(abs(value), unit)
    text = text.replace("%", "points") if unit in PERCENT else text
    return text if value == 0 or text.startswith("0 ") else f"{'+' if value > 0 else '-'}{text}"


def _name(row: Row) -> str:
    text = words.part(row["name"]) if row["kind"] == "category" else str(row["name"])
    return f"{text}, on the device" if row["unit"].startswith("ms of the device") and row["kind"] != "kernel" else text


# cells that are no value of the row
_Cells = dict[str, Callable[[Row], Any]]
_NAMED: _Cells = {"name": _name, "status": lambda row: _STATUS.get(row["status"], row["status"]) or None}
_AMOUNTS: _Cells = {
    "difference": difference,
    "baseline": lambda row: amount(row["baseline"], row["unit"]),
    "candidate": lambda row: amount(row["candidate"], row["unit"]),
}
_VALUES: _Cells = {
    side: lambda row, side=side: words.MISSING if row[side] is None else str(row[side])  # type: ignore[misc]
    for side in ("baseline", "candidate")
}
_SIDES: _Cells = {
    "baseline": lambda row: row["baseline"]["label"],
    "baseline_ms": lambda row: row["baseline"]["mean_ms"],
    "candidate": lambda row: row["candidate"]["label"],
    "candidate_ms": lambda row: row["candidate"]["mean_ms"],
}
