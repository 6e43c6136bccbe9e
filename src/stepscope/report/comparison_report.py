"""A comparison as JSON and CSV, and in words; outcomes also as the candidates of `experiment.json`.

Dataclasses become dictionaries, lists get an upper bound, and a verdict's word stands beside its candidate: what the
keys mean is said in `stepscope.model.comparison`, field by field. The words are plain text, not escaped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from stepscope.comparison.verdicts import percent
from stepscope.model.comparison import Change, Comparison, Measure, Outcome, SideFacts
from stepscope.report import words
from stepscope.report.source import SourceReader
from stepscope.report.table import csv_bytes
from stepscope.report.values import plain_mapping, plain_rows, plain_value

Row = Mapping[str, Any]

# Upper bounds of lists, so that a document of many runs stays small.
MAX_PAIRS = 200
MAX_CHANGES = 2_000
MAX_LOSSES = 500  # of one run: as many as a chart of that width can draw
MAX_ROWS = 200  # of any other list
MEAN = "mean_ms"
GONE = "gone"

CSV_COLUMNS = ("kind", "name", "status", "baseline", "candidate", "difference", "unit", "file", "line")


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """One candidate. `verdict` is the word; `effect` is that of the mean step time, candidate over baseline, None where
    it is not known; `effects` holds all figures, `headline` names what is compared, `decided_by` the figure that the
    verdict rests on."""
    effect = outcome.effects.get(MEAN)
    return {
        "knobs": plain_rows(outcome.knobs, MAX_ROWS),
        "verdict": outcome.verdict.word,
        "text": plain_value(outcome.verdict.text),
        "resolution": plain_value(outcome.verdict.resolution),
        "pairs_needed": outcome.verdict.pairs_needed,
        "headline": outcome.headline,
        "decided_by": outcome.verdict.figure or outcome.headline,
        "effect": plain_mapping(effect) if effect is not None else None,
        "pairs": effect.pairs if effect is not None else 0,
        "effects": plain_mapping(outcome.effects),
        "phases": plain_rows(outcome.phases, MAX_ROWS),
        "flags": plain_rows(outcome.flags, MAX_ROWS),
        "equivalence": plain_value(outcome.equivalence),
        "energy": plain_value(outcome.energy),
        "runs": [
            {"baseline": measure_document(one), "candidate": measure_document(other)}
            for one, other in outcome.pairs[:MAX_PAIRS]
        ],
        "left_out": [measure_document(measure) for measure in outcome.left_out[:MAX_PAIRS]],
    }


def measure_document(measure: Measure) -> dict[str, Any]:
    """One run, with at most `MAX_LOSSES` losses, evenly chosen."""
    row = plain_mapping(measure)
    row["losses"] = _thinned(row["losses"])
    return row


def comparison_document(comparison: Comparison, *, source: bool = True) -> dict[str, Any]:
    """The whole of `compare --json`, which the terminal and the page show. `source=False` quotes no line of source."""
    changes = plain_rows(comparison.changes, MAX_CHANGES)
    if source:
        _quote(changes, comparison)
    return {
        "schema": comparison.schema,
        "baseline": _side(comparison.baseline),
        "candidate": _side(comparison.candidate),
        "candidates": [outcome_document(comparison.outcome)] if comparison.outcome is not None else [],
        "changes": changes,
        "absent": plain_mapping(comparison.absent),
        "notes": plain_value(comparison.notes[:MAX_ROWS]),
    }


def to_csv(changes: tuple[Change, ...]) -> bytes:
    """The changes as UTF-8 CSV: a line of column names, then a line for each; a missing value is an empty field."""
    rows = [[getattr(change, column) for column in CSV_COLUMNS] for change in changes]
    return csv_bytes([CSV_COLUMNS, *rows])


def _quote(rows: list[dict[str, Any]], comparison: Comparison) -> None:
    """Give each row that names a line of the user's code its text, as `code`, where the file is as it was."""
    baseline, candidate = comparison.baseline, comparison.candidate
    ours, theirs = _reader(baseline), _reader(candidate)
    for row in rows:
        if row["file"] is not None and row["line"] is not None:
            side, reader = (baseline, ours) if row["status"] == GONE else (candidate, theirs)
            row["code"] = _line(reader, side.roots, row["file"], row["line"])


def _reader(side: SideFacts) -> SourceReader:
    starts = [measure.started_ns for measure in side.measures if measure.started_ns is not None]
    return SourceReader(side.source_files, recorded_ns=min(starts, default=None))


def _line(reader: SourceReader, roots: tuple[str, ...], file: str, line: int) -> str | None:
    for root in roots:
        found = reader.context(os.path.join(root, file), line, around=0)
        if found is not None:
            return None if found["changed_since"] else str(found["lines"][0]).strip() or None
    return None


def _side(side: SideFacts) -> dict[str, Any]:
    row = {key: value for key, value in plain_mapping(side).items() if key != "source_files"}
    row["measures"] = [measure_document(measure) for measure in side.measures[:MAX_PAIRS]]
    return row


def _thinned(losses: list[Any]) -> list[Any]:
    if len(losses) <= MAX_LOSSES:
        return losses
    return [losses[place * len(losses) // MAX_LOSSES] for place in range(MAX_LOSSES)]


# shown where a single run on each side gives no verdict, and only its steps say something
SPREAD = ("p5_ms", "p25_ms", "p75_ms", "p99_ms")
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
OF_ENERGY = ("joules_per_sample", "joules_per_step", "cost_per_1000_steps")  # shown where they are compared
KINDS = {  # in the order in which they are shown
    "phase": "Phases of a step",
    "category": "Parts of a profiled step",
    "function": "Functions, by sampled time",
    "line": "Lines of your code",
    "operator": "Operators",
    "kernel": "Kernels",
    "utilisation": "Use of the machine",
}
FINDINGS = "Findings"
ENVIRONMENT = "What else differs"
WINDOW = "What was measured"
PHASES = "Where the difference of the mean step is"
RUNS = "Pairs of runs"
MS = "ms"
UNITS = {"%": "%", "cores": "cores", "% of samples": "%"}
PERCENT = ("%", "% of samples")  # what they differ by are points
_STATUS = {"grew": "", "shrank": "", "same": "same, within noise"}  # the sign of the difference says the first two
_VERDICT_STYLES = {"faster": "good", "slower": "bad"}


class Figure(Struct, frozen=True):
    label: str
    baseline: str
    candidate: str
    change: str
    interval: str


def title(document: Row) -> str:
    return f"{document['candidate']['label']} against {document['baseline']['label']}"


def verdict(document: Row) -> str:
    """The sentence, with a capital letter; where there is no step time, that."""
    found = outcome(document)
    if found is None:
        return f"No step time to compare: {document['absent'].get('step time', 'none is known of both sides')}"
    text = str(found["text"] or words.term(found["verdict"]))
    return text[:1].upper() + text[1:]


def verdict_style(document: Row) -> str:
    """ "good", "bad" or "" for all that is no decision."""
    found = outcome(document)
    return _VERDICT_STYLES.get(found["verdict"], "") if found is not None else ""


def outcome(document: Row) -> Row | None:
    candidates = document["candidates"]
    found: Row | None = candidates[0] if candidates else None
    return found


def figures(document: Row) -> list[Figure]:
    """The headline table, figures that a side lacks left out."""
    found = outcome(document)
    if found is None:
        return []
    before, after = document["baseline"]["figures"], document["candidate"]["figures"]
    rows = []
    for key, label, show in FIGURES:
        effect = found["effects"].get(key)
        same = key == "steady_ms" and all(show(side.get(key)) == show(side.get("mean_ms")) for side in (before, after))
        shown = (key not in SPREAD or found["pairs"] <= 1) and (key not in OF_ENERGY or effect is not None)
        if key in before and key in after and not same and shown:
            change = signed_percent(effect["ratio"]) if effect is not None else ""
            rows.append(Figure(label, show(before[key]), show(after[key]), change, _interval(effect)))
    return rows


def signed_percent(ratio: float | None) -> str:
    """A ratio as what it adds: +3.1 %, -28 %."""
    return words.MISSING if ratio is None else f"{percent(ratio - 1, sign=True)} %"


def difference(row: Row) -> str:
    value = row["difference"]
    if value is None:
        return words.MISSING
    text = amount(abs(value), row["unit"])
    return _signed(text.replace("%", "points") if row["unit"] in PERCENT else text, value)


def phase_difference(row: Row) -> str:
    return _signed(amount(abs(row["difference_ms"]), MS), row["difference_ms"])


def amount(value: float | None, unit: str) -> str:
    if value is None:
        return words.MISSING
    if unit in UNITS:
        return f"{words.number(value)} {UNITS[unit]}"
    return words.milliseconds(value) if abs(value) >= 0.1 or value == 0 else f"{words.number(value * 1e3)} µs"


def status(row: Row) -> str:
    return _STATUS.get(row["status"], str(row["status"]))


def place(row: Row) -> str:
    if row["file"] is None:
        return ""
    return f"{row['file']}:{row['line']}" if row["line"] is not None else str(row["file"])


def name(row: Row) -> str:
    text = str(row["name"])
    if row["kind"] == "category":
        text = phase(text)
    return f"{text}, on the device" if row["unit"].startswith("ms of the device") and row["kind"] != "kernel" else text


def phase(category: str) -> str:
    return words.PARTS.get(category, words.term(category))


def of_kind(document: Row, kind: str) -> list[Row]:
    return [row for row in document["changes"] if row["kind"] == kind]


def amounts(document: Row) -> list[tuple[str, list[Row]]]:
    """(title, rows) of each kind of figures that has rows, but for the kind that `phases` tells in full."""
    parts = {row["category"] for row in phases(document)}
    told = "" if not parts else "category" if parts & words.PARTS.keys() else "phase"
    return [(title, rows) for kind, title in KINDS.items() if kind != told and (rows := of_kind(document, kind))]


def phases(document: Row) -> list[Row]:
    """The parts of the mean step, the largest difference first, those that neither side has left out."""
    found = outcome(document)
    rows = found["phases"] if found is not None else []
    rows = [row for row in rows if row["baseline_ms"] or row["candidate_ms"]]
    return sorted(rows, key=lambda row: -abs(row["difference_ms"] or 0))


def runs(document: Row) -> list[Row]:
    found = outcome(document)
    pairs: list[Row] = found["runs"] if found is not None else []
    return pairs if len(pairs) > 1 else []


def value(text: Any) -> str:
    return words.MISSING if text is None else str(text)


def warnings(document: Row) -> list[str]:
    """Flags, each text once: what makes the timing doubtful, verdict withheld or not."""
    found = outcome(document)
    flags = found["flags"] if found is not None else []
    texts = [f"{flag['text']}{' (no verdict rests on such a run)' if flag['withholds'] else ''}" for flag in flags]
    left_out = [run["label"] for run in found["left_out"]] if found is not None else []
    if left_out:
        texts.append(f"left out of the pairs for that: {', '.join(dict.fromkeys(left_out))}")
    return list(dict.fromkeys(texts))


def notes(document: Row) -> list[str]:
    return [*document["notes"], *document["baseline"]["notes"], *document["candidate"]["notes"]]


def absent(document: Row) -> list[tuple[str, str]]:
    """(what, why) of all that could not be compared, what has the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for what, why in document["absent"].items():
        by_reason.setdefault(str(why), []).append(str(what))
    return [(", ".join(what), why) for why, what in by_reason.items()]


def equivalence(document: Row) -> str | None:
    found = outcome(document)
    equal = found["equivalence"] if found is not None else None
    return str(equal["text"]) if equal is not None and equal["judged"] else None


def energy(outcome: Mapping[str, Any] | None) -> str | None:
    """What the joules say, as a sentence without its end; None where no run has any."""
    found = (outcome or {}).get("energy")
    return str(found["text"]) if found else None


def _interval(effect: Row | None) -> str:
    if effect is None or effect["low"] is None or effect["high"] is None:
        return ""
    return f"{signed_percent(effect['low'])} to {signed_percent(effect['high'])}"


def _signed(text: str, value: float) -> str:
    """`text` of an amount with the sign of `value`."""
    if value == 0 or text.startswith("0 "):
        return text
    return f"{'+' if value > 0 else '-'}{text}"
