"""What came of an experiment: every candidate with its interval, beside what the diagnosis held possible.

Sections of it stand on a page, in a file without scripts, in a report and on a terminal. The document is the one of
`experiment.json`, whose types were checked when it was read.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepscope.dashboard import blocks, static_page
from stepscope.dashboard.blocks import Alone, Block, Row, rows_table
from stepscope.dashboard.pages import PageContext
from stepscope.model import Report
from stepscope.model.comparison import FASTER, NO_DIFFERENCE, SLOWER, UNDECIDED, VOID
from stepscope.model.counted import things
from stepscope.report import experiment_report, words
from stepscope.report.comparison_report import MEAN, signed_percent
from stepscope.report.escape import one_line

DRAWN = 24  # candidates
SCREEN_ROWS = 12  # of a table on a terminal
MOST_DRAWN = 0.87  # a ceiling beyond it would take most of the axis to show nothing
FINDINGS = "findings"  # the source of an experiment that makes its first run to diagnose it
AGAIN = "baseline again"  # a candidate without knobs: the baseline against itself
MEDIAN = "median_ms"
RATES = ("samples_per_second",)  # figures of which more is better
VERDICTS = {FASTER: "faster", SLOWER: "slower", NO_DIFFERENCE: "no difference", UNDECIDED: "undecided", VOID: "void"}


def load(folder: Path) -> dict[str, Any]:
    """The document of an experiment's folder; raises `UnreadableInputError`."""
    return experiment_report.experiment_document(experiment_report.load(folder))


def render(report: Report) -> str:
    """The experiment of a report as one HTML file without scripts, where there is no run to show beside it."""
    shown = list(build(Alone(), report.views["experiment"]))
    return static_page.render(str(report.run.get("name")), [static_page.Section("Experiment", shown)])


def build(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    """The conclusion, the intervals drawn, and the tables behind."""
    yield from _conclusion(document)
    yield from _warnings(document)
    yield blocks.text(blocks.sentence(_protocol(document)), "note")
    yield from _changes(document)
    yield from _intervals(ranked(document))
    yield from _compared(context, document)
    yield from _runs(context, document)
    yield from _skipped(context, document)
    yield from _by_hand(document)
    yield from _how(document)
    if document["repeat"]:
        yield blocks.facts("To repeat it", [blocks.fact("Command", document["repeat"])])


def screen(document: Row) -> list[list[Block]]:
    """What a terminal shows: without pictures and single runs."""
    context = Alone(SCREEN_ROWS)
    head = [blocks.text(f"Experiment: {one_line(shlex.join(document['protocol']['command']))}", "head")]
    head.append(blocks.text(_protocol(document), "note"))
    if source := document["source"]:
        of = "the first run" if source == FINDINGS else source
        head.append(blocks.text(f"candidates from the findings of {of}", "note"))
    sections = (_compared(context, document), _changes(document), _by_hand(document), _skipped(context, document))
    return [[*head, *_warnings(document)], *map(list, (_conclusion(document), *sections, _how(document)))]


def outcome(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    """What it has shown, and what to change."""
    yield from _conclusion(document)
    yield from rows_table(context, "candidates", map(_candidate, ranked(document)))
    yield from _changes(document)


def name(knobs: list[Row], otherwise: str = "") -> str:
    """Knobs of a candidate; of a set a family is named once: loader.num_workers=2 + persistent_workers=true."""
    family, parts = "", []
    for row in knobs:
        head, dot, tail = row["knob"].rpartition(".")
        shown = tail if dot and head == family and ":" not in row["knob"] else row["knob"]
        family = head
        parts.append(f"{shown}={row['value']}")
    return " + ".join(parts) or otherwise or AGAIN


def _name(row: Row) -> str:
    return name(row["knobs"], row["name"])


def _effect(row: Row) -> Row | None:
    found: Row | None = row["effects"].get(row["headline"] or MEAN) or row["effect"]
    return found


def _by_median(row: Row) -> bool:
    """Whether the verdict rests on the median step instead of what is compared."""
    return bool(row["decided_by"] == MEDIAN and row["headline"] != MEDIAN)


def _verdict(row: Row) -> str:
    text, needed = VERDICTS.get(row["verdict"], str(row["verdict"])), row["pairs_needed"]
    if row["verdict"] == NO_DIFFERENCE and row["resolution"] is not None:
        return f"{text} > {words.percent(row['resolution'])}"
    if row["verdict"] == UNDECIDED and needed:
        return f"{text}, {needed} more {'pair' if needed == 1 else 'pairs'}"
    return text


def ranked(document: Row) -> list[Row]:
    """The candidates, the largest gain first, then those without an effect; void ones last."""

    def key(row: Row) -> tuple[int, float]:
        effect = _effect(row)
        if row["verdict"] == VOID or effect is None:
            return (2 if row["verdict"] == VOID else 1, 0.0)
        ratio = float(effect["ratio"])
        return 0, 1 / ratio if row["headline"] in RATES and ratio > 0 else ratio

    return sorted(document["candidates"], key=key)


def _winners(document: Row) -> list[Row]:
    return [row for row in ranked(document) if row["verdict"] == FASTER]


def _is_self_test(document: Row) -> bool:
    """Whether the baseline was compared with itself alone."""
    if not document["candidates"]:
        return bool((document["noise"] or {}).get("pairs"))
    return all(not row["knobs"] for row in document["candidates"])


def _conclusion(document: Row) -> Iterator[Block]:
    won = bool(_winners(document))
    for number, text in enumerate(conclusion(document)):
        yield blocks.text(text, "good" if won and number == 0 else "plain")


def conclusion(document: Row) -> list[str]:
    """What it has shown, and the first loss that has to be edited away."""
    if _is_self_test(document):
        return [_noise(document) or "Too few pairs of equal runs: how small an effect this machine shows is not known."]
    candidates, best, screened = document["candidates"], _winners(document), len(document["main_effects"])
    said, but = [], "which no knob reaches"
    if best:
        text = best[0]["text"] or _verdict(best[0])
        text = text.removeprefix("faster by ").removeprefix("faster: ")
        said, but = [f"{_name(best[0])} makes training faster: {text}."], "which only an edit removes"
        if best[1:]:
            are = "are" if best[2:] else "is"
            said.append(f"{len(best) - 1} more of {len(candidates)} candidates {are} faster too.")
    elif candidates:
        said.append(_none_helps(candidates))
    elif document["stopped"] and document["runs"] > 1:
        told = f"{screened} of its knobs show below what they do" if screened else "too few to tell what a knob does"
        runs = things(document["runs"], "run")
        said.append(f"Nothing is confirmed: the experiment was stopped after {runs}, {told}.")
    elif screened:
        none = f"none of {screened} in the screening, so there is no combination to confirm"
        said.append(f"No knob is shown to help: {none}.")
    else:
        said.append("Nothing was tried.")
    for row in document["by_hand"][:1]:
        at = _place(row, document["cwd"])
        where = f"at {at}" if at else "no single line"
        said.append(
            f"What the step loses most to is {where}, {but}: {row['title']}{_at_most(row)}. By hand: {row['fix']}"
        )
    return said


def _none_helps(candidates: list[Row]) -> str:
    by_word = Counter(row["verdict"] for row in candidates)
    counts = ", ".join(f"{by_word[word]} {text}" for word, text in VERDICTS.items() if word in by_word)
    if by_word[VOID] == len(candidates):
        return f"No candidate could be judged: {counts} of {len(candidates)}."
    head = "No knob is shown to help" if by_word[UNDECIDED] else "No knob helps"
    return f"{head}: of {len(candidates)} tried, {counts}."


def _place(row: Row, cwd: str | None) -> str | None:
    if not row["file"]:
        return None
    root = cwd.rstrip(os.sep) + os.sep if cwd else ""
    short = row["file"].removeprefix(root)
    return f"{short}:{row['line']}" if row["line"] is not None else short


def _at_most(row: Row) -> str:
    return f" ({words.percent(row['ceiling'])} of the step at most)" if row["ceiling"] is not None else ""


def _by_hand(document: Row) -> Iterator[Block]:
    """What else has to be edited away, beside the first that the conclusion names."""
    for row in document["by_hand"][0 if _is_self_test(document) else 1 :]:
        at = _place(row, document["cwd"])
        yield blocks.text(f"No knob reaches: {f'{at}: ' if at else ''}{row['title']}{_at_most(row)}. {row['fix']}")


def _noise(document: Row) -> str | None:
    found = document["noise"]
    if not found or found["smallest_effect"] is None:
        return None
    share, pairs = words.percent(found["smallest_effect"]), things(found["pairs"], "pair")
    return f"With {pairs} this machine shows effects from {share} on: equal runs differ by that much."


def _protocol(document: Row) -> str:
    row, seconds = document["protocol"], document["wall_s"]
    least, most = row["least_pairs"], row["most_pairs"]
    pairs = f"{things(most, 'pair')} a candidate"
    if least != most:
        pairs = f"{least} to {pairs}, until the interval is ± {words.percent(row['width'])} wide"
    waited = ""
    if seconds:
        waited = f" in {seconds / 60:.1f} min" if seconds < 6_000 else f" in {seconds / 3600:.1f} h"
        waited = f" in {seconds:.0f} s" if seconds < 100 else waited
    steps = (
        f"each up to {things(row['warmup_steps'], 'step')} of warm-up, {words.count(row['measured_steps'])} measured"
    )
    return f"{things(document['runs'], 'run')}{waited}; {steps}; {pairs}"


def _warnings(document: Row) -> Iterator[Block]:
    notes = list(document["notes"])
    if not document["finished"]:
        why = f" ({document['stopped']})" if document["stopped"] else ""
        notes.append(f"not finished{why}: the same command goes on where it stopped")
    yield from (blocks.text(blocks.sentence(text), "warning") for text in notes)


def _changes(document: Row) -> Iterator[Block]:
    lines = [line for best in _winners(document)[:1] for line in best["change"]]
    if lines:
        facts = [blocks.fact(f"Change {number}", line) for number, line in enumerate(lines, start=1)]
        yield blocks.facts("What to change in the script", facts)


def _compared(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    candidates = ranked(document)
    effects = [
        {**row, "name": name([row["knob"], *row["with_knobs"]]), **changes(row), "ceiling": _ceiling(row)}
        for row in document["main_effects"]
    ]
    spent = [
        (row, phase) for row in candidates for phase in row["phases"] if phase["baseline_ms"] or phase["candidate_ms"]
    ]
    for id, rows in (
        ("candidates", [_candidate(row) for row in candidates]),
        ("candidate-notes", [note for row in candidates for note in _notes(row)]),
        ("candidate-phases", [{**phase, "name": _name(row)} for row, phase in spent]),
        ("main-effects", effects),
    ):
        yield from rows_table(context, id, rows)


def _candidate(row: Row) -> dict[str, Any]:
    """The change as a share: what a ratio adds to 1."""
    effect = row["effects"].get(MEDIAN) if row["decided_by"] == MEDIAN else None
    return {
        "name": _name(row),
        "verdict": _verdict(row),
        **changes(effect or _effect(row)),
        "ceiling": _ceiling(row),
        "pairs": row["pairs"],
    }


def _notes(row: Row) -> Iterator[dict[str, str]]:
    ceiling, high, beyond = row["ceiling"], (row["effect"] or {}).get("high"), None
    if row["verdict"] == FASTER and ceiling is not None and high is not None and high < 1.0 - ceiling:
        # for certain: the diagnosis was wrong then, and says so
        at_most = f"{words.percent(ceiling)} at most"
        beyond = f"more than the diagnosis held possible ({at_most}): its ceiling was too low"
    flags = sorted(row["flags"], key=lambda flag: not flag["withholds"])  # those that withhold a verdict first
    rate = "compared by samples per second, because the batch size differs; what it does to convergence is not judged"
    median = "the change is that of the median step, by which it was decided"
    for about, text in (
        ("verdict", row["text"]),
        ("verdict", median if _by_median(row) else None),
        ("energy", row["energy"] and row["energy"]["text"]),
        ("prediction", beyond),
        ("figure", rate if row["headline"] in RATES else None),
        ("loss", row["equivalence"] and row["equivalence"]["text"]),
        *(("in the script", line) for line in row["change"]),
        *(("doubt", text) for text in dict.fromkeys(flag["text"] for flag in flags)),
    ):
        if text:
            yield {"name": _name(row), "about": about, "text": text}


def _ceiling(row: Row) -> float | None:
    return None if row["ceiling"] is None else -row["ceiling"]


def changes(effect: Row | None) -> dict[str, float | None]:
    """Ratios as what they add: the form in which changes are read."""
    found = effect or {}
    pairs = (("change", "ratio"), ("low", "low"), ("high", "high"))
    return {name: None if found.get(key) is None else found[key] - 1 for name, key in pairs}


def _intervals(candidates: list[Row]) -> Iterator[Block]:
    drawn = [(row, found) for row in candidates if (found := _candidate(row))["change"] is not None]
    drawn = [(row, found) for row, found in drawn if row["headline"] not in RATES][:DRAWN]
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
    said = "; ".join(f"{found['name']}: {found['verdict']}, {_change(row)}" for row, found in drawn)
    yield blocks.drawn("intervals", f"{said}.", [found["name"] for _, found in drawn], made)


def _change(row: Row) -> str:
    """By how much the step time changes, with its interval: -38 % (-40 to -36 %); of the median where that decided."""
    by_median = _by_median(row)
    effect = row["effects"].get(MEDIAN) if by_median else _effect(row)
    if effect is None:
        return words.MISSING
    said = signed_percent(effect["ratio"])
    if effect["low"] is not None and effect["high"] is not None:
        said += f" ({signed_percent(effect['low']).removesuffix(' %')} to {signed_percent(effect['high'])})"
    return f"median {said}" if by_median else said


def _pair_changes(row: Row) -> list[float]:
    """What each pair of runs says alone: its mean step times, candidate over baseline, less 1."""
    pairs = [(pair["baseline"]["mean_ms"], pair["candidate"]["mean_ms"]) for pair in row["runs"]]
    return [after / before - 1 for before, after in pairs if before and after and before > 0 and after > 0]


def _runs(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    candidates = ranked(document)
    sides, keys = ("baseline", "candidate"), ("mean_ms", "median_ms", "p95_ms")
    pairs = [
        {
            "name": _name(row),
            "pair": number,
            **{side: pair[side]["label"] for side in sides},
            **{f"{side}_{key}": pair[side][key] for side in sides for key in keys},
        }
        for row in candidates
        for number, pair in enumerate(row["runs"], start=1)
    ]
    yield from rows_table(context, "experiment-pairs", pairs)
    distinct: dict[tuple[str, ...], Row] = {}  # once what all runs of a candidate say alike
    for row in candidates:
        for each in row["applied"]:
            key = (_name(row), *(str(each[one]) for one in ("knob", "value", "applied", "observed", "reason")))
            distinct.setdefault(key, {**each, "name": _name(row)})
    yield from rows_table(context, "applied", distinct.values())


def _skipped(context: PageContext | Alone, document: Row) -> list[Block]:
    skipped = ({"name": _name(row), "reason": row["reason"]} for row in document["skipped"])
    return rows_table(context, "skipped", skipped)


def _how(document: Row) -> Iterator[Block]:
    smallest = _noise(document)
    if smallest and not _is_self_test(document):  # of one that is the conclusion
        yield blocks.text(smallest, "note")
    found = document["noise"] or {}
    facts = [blocks.fact(name, text) for name, text in found.get("settings", ())]
    facts += [blocks.fact(name, text, "left as it is") for name, text in found.get("unchanged", ())]
    if facts:
        yield blocks.facts("How it was measured", facts)
