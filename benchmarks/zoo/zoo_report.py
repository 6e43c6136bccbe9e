"""The section of the zoo in RESULTS.md: a row for every script, and the rates. Pure: rows in, Markdown out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import traceml_peer
from score import ALARM, Gain, Score
from table import Entry

CATEGORY_LIMIT, LINE_LIMIT = 0.90, 0.80  # of the planted scripts
EXCESS_LIMIT = 15  # points, in the median
SECTION = """
## The bottleneck zoo

Small training scripts on the CPU, each with one planted cost and a twin without it, and some with nothing planted
(`benchmarks/zoo`, the table in `table.py`). Each is recorded once by `stepscope run`, then run unrecorded in both forms
in alternating order and timed by its own watch: what the twin saves is the measured gain. How a row is judged is said
in `benchmarks/zoo/score.py`, what counts as the planted line in `benchmarks/zoo/planted.py`. Beside it stands what
TraceML says first on the same scripts in the same run; the table that maps its diagnoses onto our categories is in
`benchmarks/zoo/traceml_peer.py`. A script that is told wrong stays in the table.
"""


@dataclass(frozen=True)
class Row:
    """What is known of one script; `problem` says what failed, and then the script counts as told wrong."""

    entry: Entry
    score: Score | None = None
    gain: Gain | None = None
    peer: traceml_peer.Said | None = None
    problem: str = ""


def text(rows: Sequence[Row], how: str, machine: dict[str, str], peer_problem: str) -> str:
    """Everything between the markers."""
    lines = [how, "", *(f"- {name}: {value}" for name, value in machine.items()), ""]
    planted = [row for row in rows if not row.entry.clean]
    clean = [row for row in rows if row.entry.clean]
    if planted:
        lines += _planted_table(planted)
    if clean:
        lines += _clean_table(clean)
    lines += [f"- {line}" for line in _rates(planted, clean)]
    if peer_problem:
        lines.append(f"- TraceML: not run: {peer_problem}")
    return "\n".join(lines)


def _planted_table(rows: Sequence[Row]) -> list[str]:
    columns = "script, planted, expected, says first, category right, line right, gain of the twin, ceiling, above, "
    head = (columns + "TraceML says, right").split(", ")
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *map(_planted_row, rows), ""]


def _planted_row(row: Row) -> str:
    score, gain, peer = row.score, row.gain, row.peer
    expected = " or ".join(row.entry.expected or ())
    cells = [
        row.entry.name,
        row.entry.cost + (f" ({gain.planted_ms:.0f} ms a step)" if gain else ""),
        expected,
        f"failed: {_cell(row.problem)}" if row.problem else _says(score),
        _mark(score.category if score else None),
        _mark(score.line if score else None),
        "–" if gain is None else f"{gain.median * 100:.0f} [{gain.low * 100:.0f}, {gain.high * 100:.0f}] %",
        "–" if score is None or score.ceiling is None else f"{score.ceiling * 100:.0f} %",
        _excess(score),
        _peer(peer),
        _mark(peer.right(row.entry.expected) if peer else None),
    ]
    return "| " + " | ".join(cells) + " |"


def _excess(score: Score | None) -> str:
    if score is None or score.excess_points is None:
        return "–"
    return f"{score.excess_points:+.0f}" + ("" if score.ceiling_holds else " **exceeded**")


def _clean_table(rows: Sequence[Row]) -> list[str]:
    lines = ["| clean script | what it is | says first | false alarms | TraceML | right |", "|---|---|---|---|---|---|"]
    for row in rows:
        alarms = row.score.alarms if row.score else ()
        told = ", ".join(f"{alarm.rule} {alarm.share * 100:.0f} %" for alarm in alarms) or "none"
        first = f"failed: {_cell(row.problem)}" if row.problem else _says(row.score)
        peer = [_peer(row.peer), _mark(row.peer.right(None) if row.peer else None)]
        alarm = "–" if row.score is None else told
        lines.append("| " + " | ".join([row.entry.name, row.entry.cost, first, alarm, *peer]) + " |")
    return [*lines, ""]


def _rates(planted: Sequence[Row], clean: Sequence[Row]) -> list[str]:
    lines = []
    if planted:
        scores = [row.score for row in planted]
        lines.append(_rate("first finding's category right", [bool(s and s.category) for s in scores], CATEGORY_LIMIT))
        lines.append(_rate("line right", [bool(s and s.line) for s in scores], LINE_LIMIT))
        lines += _ceilings([score for score in scores if score is not None])
    if clean:
        quiet = [row.score is not None and not row.score.alarms for row in clean]
        lines.append(_rate(f"clean without a finding above {ALARM * 100:.0f} % other than compute", quiet, 1))
    for name, group in (("planted: category right", planted), ("clean: nothing but computing blamed", clean)):
        told = [row.peer.right(row.entry.expected) for row in group if row.peer is not None]
        ran = [right for right in told if right is not None]
        if ran:
            lines.append(f"TraceML, {name}: {sum(ran)} of {len(ran)}; it names no lines and bounds no gains")
    return lines


def _rate(name: str, right: Sequence[bool], limit: float) -> str:
    share = sum(right) / len(right)
    verdict = "holds" if share >= limit else "missed"
    return f"{name}: {sum(right)} of {len(right)} ({share * 100:.0f} %, at least {limit * 100:.0f} %): {verdict}"


def _ceilings(scores: Sequence[Score]) -> list[str]:
    judged = [score for score in scores if score.excess_points is not None]
    if not judged:
        return ["ceilings: none to judge"]
    holds = sum(bool(score.ceiling_holds) for score in judged)
    excess = statistics.median(score.excess_points for score in judged if score.excess_points is not None)
    return [
        f"ceiling at least the measured gain less its interval: {holds} of {len(judged)}: "
        + ("holds" if holds == len(judged) else "missed"),
        f"ceiling above the measured gain, median: {excess:+.0f} points (at most {EXCESS_LIMIT}): "
        + ("holds" if excess <= EXCESS_LIMIT else "missed"),
    ]


def _says(score: Score | None) -> str:
    if score is None:
        return "–"
    if score.first is None:
        return "nothing"
    first = score.first
    return f"{first.rule} {first.share * 100:.0f} %" + (f", {_cell(first.place)}" if first.place else "")


def _peer(peer: traceml_peer.Said | None) -> str:
    if peer is None:
        return "not run"
    return peer.kind or f"not run: {_cell(peer.problem)}"


def _mark(right: bool | None) -> str:
    return "–" if right is None else "yes" if right else "**no**"


def _cell(words: str) -> str:
    return words.replace("|", "/").replace("\n", " ")
