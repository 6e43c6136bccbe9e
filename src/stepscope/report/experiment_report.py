"""An experiment as JSON, and in words.

`experiment_document` makes the dictionary that `experiment.json` and `views.experiment` of a report hold and that
terminal and page show; `loads` turns a file back into an `Experiment`, because a run folder may come from elsewhere:
what is shown of it has passed the types once more. The sentences are plain text, not escaped, and compute no figure.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import EnvironmentRefusal, UnreadableInputError
from stepscope.files import open_regular
from stepscope.model import Report
from stepscope.model.comparison import EXPERIMENT_SCHEMA, FASTER, NO_DIFFERENCE, SLOWER, UNDECIDED, VOID, Experiment
from stepscope.model.counted import things
from stepscope.report import outputs, words
from stepscope.report.comparison_report import MEAN, measure_document, outcome_document, signed_percent
from stepscope.report.document import bare_report, load_report
from stepscope.report.values import json_bytes, plain_rows, plain_value

NAME = "experiment.json"
MAX_BYTES = 32 * 1024 * 1024  # of a file that is read; ours are well below one
MAX_ROWS = 200

Row = Mapping[str, Any]
_KEPT = (
    *("schema", "finished", "stopped", "protocol", "skipped", "by_hand", "effects", "noise", "notes"),
    *("repeat", "source", "folder", "cwd", "runs", "wall_s"),
)


def experiment_document(experiment: Experiment) -> dict[str, Any]:
    """The whole of `experiment.json`. A candidate is what `compare --json` makes of one, and what was tried beside it:
    its name, ceiling and finding, what became of its knobs, and what to write into the script."""
    row = {key: plain_value(getattr(experiment, key)) for key in _KEPT}
    return {
        **{key: row[key] for key in ("schema", "finished", "stopped", "protocol")},
        "baseline": {"runs": [measure_document(measure) for measure in experiment.baseline[:MAX_ROWS]]},
        "candidates": [
            {
                "name": plain_value(tried.candidate.name),
                **outcome_document(tried.outcome),
                "ceiling": plain_value(tried.candidate.ceiling),
                "finding": plain_value(tried.candidate.finding),
                "applied": plain_rows(tried.applied, MAX_ROWS),
                "change": plain_value(tried.change),
            }
            for tried in experiment.tried[:MAX_ROWS]
        ],
        **{key: row[key][:MAX_ROWS] for key in ("skipped", "by_hand")},
        "main_effects": row["effects"][:MAX_ROWS],
        "noise": row["noise"],
        "notes": row["notes"][:MAX_ROWS],
        **{key: row[key] for key in ("repeat", "source", "folder", "cwd", "runs", "wall_s")},
    }


def dumps(experiment: Experiment) -> bytes:
    return json_bytes(experiment_document(experiment))


def loads(data: bytes) -> Experiment:
    """Read a document back; keys it does not know are left out. Raises `UnreadableInputError`."""
    try:
        row = msgspec.json.decode(data)
        if not isinstance(row, dict):
            raise UnreadableInputError("not an experiment; name the experiment.json of `stepscope experiment`")
        if row.get("schema") != EXPERIMENT_SCHEMA:
            raise UnreadableInputError(
                f"an experiment of schema {str(row.get('schema'))[:60]!r}, this version reads {EXPERIMENT_SCHEMA}"
            )
        return _experiment(row)
    except (msgspec.DecodeError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableInputError(f"not an experiment of stepscope: {error}; make one anew") from None


def load(path: Path) -> Experiment:
    """Read an experiment.json, or the one in a folder; raises `UnreadableInputError`."""
    file = path / NAME if path.is_dir() else path
    try:
        with open_regular(file, follow=True) as handle:
            data = handle.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableInputError(f"{file}: {error.strerror}; name the folder of an experiment") from None
    if len(data) > MAX_BYTES:
        raise UnreadableInputError(f"{file}: larger than any experiment of ours; name another file")
    try:
        return loads(data)
    except UnreadableInputError as error:
        raise UnreadableInputError(f"{file}: {error}") from None


def view(folder: Path) -> dict[str, Any] | None:
    """The experiment that lies in a run folder, ready for its report; None where there is none that can be read."""
    if not (folder / NAME).is_file():
        return None
    try:
        return experiment_document(load(folder / NAME))
    except UnreadableInputError:
        return None


def _experiment(row: dict[str, Any]) -> Experiment:
    """The document in the layout of the records, then converted at once; what an older file lacks is empty."""
    nested = {
        "baseline": [_measure(run) for run in (row.get("baseline") or {}).get("runs") or ()],
        "tried": [_tried(candidate) for candidate in row.get("candidates") or ()],
        "effects": row.get("main_effects") or [],
    }
    return msgspec.convert({"skipped": [], "noise": None, **row, **nested}, Experiment)


def _tried(row: dict[str, Any]) -> dict[str, Any]:
    """A candidate of the document holds in one row what are three records: itself, its outcome, its verdict."""
    decided_by = row.get("decided_by")
    verdict = {
        "text": "",
        **row,
        "word": row["verdict"],
        "figure": None if decided_by == row.get("headline", MEAN) else decided_by,
    }
    outcome = {
        "knobs": [],
        "effects": {},
        "phases": [],
        **row,
        "verdict": verdict,
        "pairs": [(_measure(pair["baseline"]), _measure(pair["candidate"])) for pair in row.get("runs") or ()],
        "left_out": [_measure(run) for run in row.get("left_out") or ()],
    }
    return {"applied": [], "change": [], **row, "candidate": {"knobs": [], **row}, "outcome": outcome}


def _measure(row: dict[str, Any]) -> dict[str, Any]:
    """A run; a loss that was no finite number is null in JSON, and not a number here."""
    return {**row, "losses": [(step, math.nan if value is None else value) for step, value in row.get("losses") or ()]}


def with_experiment(report: Report, experiment: Mapping[str, Any]) -> Report:
    return msgspec.structs.replace(report, views={**report.views, "experiment": dict(experiment)})


def write(experiment: Experiment, report: Report | None, folder: Path, render: outputs.Render) -> tuple[Path, ...]:
    """Write experiment.json, and report.json and report.html with the experiment in them; returns their paths.

    `report` is that of a run of the baseline, None where there is none; `render` makes the page. Raises
    `EnvironmentRefusal` where the folder cannot be written.
    """
    path = folder / NAME
    outputs.write_file(path, dumps(experiment))
    shown = with_experiment(report or _without_run(experiment), experiment_document(experiment))
    return path, *outputs.write(shown, folder, render)


def leave_with(experiment: Experiment, run: Path, render: outputs.Render | None) -> Path | None:
    """Lay experiment.json into the run folder that the candidates came from, and show it in the report that lies there.

    The report itself stays as it was, `render` makes a page of it; one that cannot be read is left alone, as it is
    without `render`. None where nothing can be written.
    """
    try:
        outputs.write_file(run / NAME, dumps(experiment))
        if render is not None:
            report = load_report(run / outputs.JSON_NAME)
            outputs.write(with_experiment(report, experiment_document(experiment)), run, render)
    except EnvironmentRefusal:
        return None
    except UnreadableInputError:
        pass
    return run / NAME


def _without_run(experiment: Experiment) -> Report:
    """The report of no run at all: the command, and nothing measured of it."""
    name = Path(experiment.folder).name if experiment.folder else "experiment"
    return bare_report(name, experiment.protocol.command, experiment.cwd)


FINDINGS = "findings"  # the source of an experiment that makes its first run to diagnose it
AGAIN = "baseline again"  # a candidate without knobs: the baseline against itself
MEDIAN = "median_ms"
RATES = ("samples_per_second",)  # figures of which more is better
VERDICTS = {
    FASTER: "faster",
    SLOWER: "slower",
    NO_DIFFERENCE: "no difference",
    UNDECIDED: "undecided",
    VOID: "void",
}


def name(candidate: Row) -> str:
    """The candidate's knobs; of a set a family is named once: loader.num_workers=2 + persistent_workers=true."""
    knobs = candidate.get("knobs") or []
    if not knobs:
        return str(candidate.get("name") or AGAIN)
    family, parts = "", []
    for row in knobs:
        knob = str(row["knob"])
        head, dot, tail = knob.rpartition(".")
        shown = tail if dot and head == family and ":" not in knob else knob
        family = head
        parts.append(f"{shown}={row['value']}")
    return " + ".join(parts)


def verdict(candidate: Row) -> str:
    word = str(candidate.get("verdict"))
    text = VERDICTS.get(word, word)
    if word == NO_DIFFERENCE and candidate.get("resolution") is not None:
        return f"{text} > {words.percent(candidate['resolution'])}"
    needed = candidate.get("pairs_needed")
    if word == UNDECIDED and needed:
        return f"{text}, {needed} more {'pair' if needed == 1 else 'pairs'}"
    return text


def headline(candidate: Row) -> Row | None:
    """The effect on what is compared, None where there is none; a verdict may rest on the median step instead."""
    effects = candidate.get("effects") or {}
    found = effects.get(candidate.get("headline") or "mean_ms") or candidate.get("effect")
    return found if isinstance(found, Mapping) else None


def change(candidate: Row) -> str:
    """By how much the step time changes, with its interval: -38 % (-40 to -36 %); of the median where that decided."""
    if candidate.get("decided_by") == MEDIAN and candidate.get("headline") != MEDIAN:
        effect = (candidate.get("effects") or {}).get(MEDIAN)
        return f"median {_with_interval(effect)}" if isinstance(effect, Mapping) else words.MISSING
    return _with_interval(headline(candidate))


def _with_interval(effect: Row | None) -> str:
    if effect is None or effect.get("ratio") is None:
        return words.MISSING
    if effect.get("low") is None or effect.get("high") is None:
        return signed_percent(effect["ratio"])
    low, high = signed_percent(effect["low"]).removesuffix(" %"), signed_percent(effect["high"])
    return f"{signed_percent(effect['ratio'])} ({low} to {high})"


def beyond(candidate: Row) -> str | None:
    """Where a gain is larger than its ceiling, for certain: the diagnosis was wrong then, and says so."""
    share, effect = candidate.get("ceiling"), candidate.get("effect")
    if share is None or effect is None or effect.get("high") is None or candidate.get("verdict") != FASTER:
        return None
    if effect["high"] >= 1.0 - share:
        return None
    return f"more than the diagnosis held possible ({words.percent(share)} at most): its ceiling was too low"


def rate_note(candidate: Row) -> str | None:
    """Said where samples per second are compared, because the step is another one."""
    if candidate.get("headline") not in RATES:
        return None
    return "compared by samples per second, because the batch size differs; what it does to convergence is not judged"


def flags(candidate: Row) -> list[str]:
    """What makes its runs doubtful, those that withhold a verdict first; each once."""
    rows = sorted(candidate.get("flags") or (), key=lambda row: not row.get("withholds"))
    return list(dict.fromkeys(str(row["text"]) for row in rows))


def trains_alike(candidate: Row) -> str | None:
    found = candidate.get("equivalence")
    return str(found["text"]) if found and found.get("text") else None


def shown_place(file: str | None, line: int | None, cwd: str | None) -> str | None:
    if not file:
        return None
    root = cwd.rstrip(os.sep) + os.sep if cwd else ""
    short = file[len(root) :] if root and file.startswith(root) else file
    return f"{short}:{line}" if line is not None else short


def ranked(document: Row) -> list[Row]:
    """The candidates, the largest gain first, then those without an effect; void ones last."""

    def key(candidate: Row) -> tuple[int, float]:
        effect = headline(candidate)
        if candidate.get("verdict") == VOID or effect is None or effect.get("ratio") is None:
            return (2 if candidate.get("verdict") == VOID else 1, 0.0)
        ratio = float(effect["ratio"])
        more_is_better = candidate.get("headline") in RATES and ratio > 0
        return 0, 1 / ratio if more_is_better else ratio

    return sorted(document.get("candidates") or (), key=key)


def winners(document: Row) -> list[Row]:
    """The candidates that are faster, the fastest first."""
    return [candidate for candidate in ranked(document) if candidate.get("verdict") == FASTER]


def is_self_test(document: Row) -> bool:
    """Whether the baseline was compared with itself alone."""
    candidates = document.get("candidates") or ()
    if not candidates:
        return bool((document.get("noise") or {}).get("pairs"))
    return all(not candidate.get("knobs") for candidate in candidates)


def conclusion(document: Row) -> list[str]:
    if is_self_test(document):
        return [noise(document) or "Too few pairs of equal runs: how small an effect this machine shows is not known."]
    candidates, best = document.get("candidates") or (), winners(document)
    if best:
        text = f"{name(best[0])} makes training faster: {sentence(best[0])}."
        more = f"{len(best) - 1} more of {len(candidates)} candidates {'are' if best[2:] else 'is'} faster too."
        return [text, *([more] if best[1:] else []), *_out_of_reach(document, "which only an edit removes")]
    screened = len(document.get("main_effects") or ())
    if not candidates and document.get("stopped") and (document.get("runs") or 0) > 1:
        told = f"{screened} of its knobs show below what they do" if screened else "too few to tell what a knob does"
        text = f"Nothing is confirmed: the experiment was stopped after {things(document['runs'], 'run')}, {told}."
        return [text, *_out_of_reach(document, "which no knob reaches")]
    if screened and not candidates:
        text = f"No knob is shown to help: none of {screened} in the screening, so there is no combination to confirm."
        return [text, *_out_of_reach(document, "which no knob reaches")]
    if not candidates:
        return ["Nothing was tried.", *_out_of_reach(document, "which no knob reaches")]
    return [_none_helps(candidates), *_out_of_reach(document, "which no knob reaches")]


def sentence(candidate: Row) -> str:
    """The verdict in full, without its first word where the sentence round it says that."""
    text = str(candidate.get("text") or verdict(candidate))
    return text.removeprefix("faster by ").removeprefix("faster: ")


def _none_helps(candidates: Sequence[Row]) -> str:
    by_word: dict[str, int] = {}
    for candidate in candidates:
        by_word[str(candidate.get("verdict"))] = by_word.get(str(candidate.get("verdict")), 0) + 1
    counts = ", ".join(f"{by_word[word]} {text}" for word, text in VERDICTS.items() if word in by_word)
    open_ = by_word.get(UNDECIDED, 0)
    if by_word.get(VOID, 0) == len(candidates):
        return f"No candidate could be judged: {counts} of {len(candidates)}."
    head = "No knob is shown to help" if open_ else "No knob helps"
    return f"{head}: of {len(candidates)} tried, {counts}."


def _out_of_reach(document: Row, but: str) -> Iterator[str]:
    """The first loss that has to be edited away."""
    for row in (document.get("by_hand") or ())[:1]:
        place = shown_place(row.get("file"), row.get("line"), document.get("cwd"))
        at = f"at {place}" if place else "no single line"
        yield f"What the step loses most to is {at}, {but}: {row['title']}{_most(row)}. By hand: {row['fix']}"


def by_hand(document: Row) -> list[str]:
    found = []
    for row in (document.get("by_hand") or ())[0 if is_self_test(document) else 1 :]:
        place = shown_place(row.get("file"), row.get("line"), document.get("cwd"))
        found.append(f"{f'{place}: ' if place else ''}{row['title']}{_most(row)}. {row['fix']}")
    return found


def _most(row: Row) -> str:
    share = row.get("ceiling")
    return f" ({words.percent(share)} of the step at most)" if share is not None else ""


def noise(document: Row) -> str | None:
    found = document.get("noise")
    if not found or found.get("smallest_effect") is None:
        return None
    share, pairs = words.percent(found["smallest_effect"]), found["pairs"]
    return f"With {things(pairs, 'pair')} this machine shows effects from {share} on: equal runs differ by that much."


def protocol(document: Row) -> str:
    row = document["protocol"]
    warmup, steps = row["warmup_steps"], words.count(row["measured_steps"])
    least, most = row["least_pairs"], row["most_pairs"]
    pairs = f"{things(most, 'pair')} a candidate"
    if least != most:
        pairs = f"{least} to {pairs}, until the interval is ± {words.percent(row['width'])} wide"
    parts = [
        things(document["runs"], "run") + (f" in {duration(document['wall_s'])}" if document["wall_s"] else ""),
        f"each up to {things(warmup, 'step')} of warm-up, {steps} measured",
        pairs,
    ]
    return "; ".join(parts)


def source(document: Row) -> str | None:
    found = document.get("source")
    if not found:
        return None
    return f"candidates from the findings of {'the first run' if found == FINDINGS else found}"


def state(document: Row) -> str | None:
    """Said of an experiment that is not finished."""
    if document.get("finished"):
        return None
    why = document.get("stopped")
    return f"not finished{f' ({why})' if why else ''}: the same command goes on where it stopped"


def duration(seconds: float | None) -> str:
    """A time that somebody waited for: 48 s, 6.1 min, 1.4 h."""
    if seconds is None:
        return words.MISSING
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6_000 else f"{seconds / 3600:.1f} h"


def main_effect(row: Row) -> str:
    return name({"knobs": [row["knob"], *(row.get("with_knobs") or ())]})
