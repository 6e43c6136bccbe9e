"""The experiment's section of report.html: what came of it, intervals as a drawing, the tables behind.

The drawing has a text alternative and a table that says the same; nothing needs a script or the network. Names and
values of knobs are the user's: every text goes through `escape.markup`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.report import experiment_words as say
from stepscope.report import words
from stepscope.report.comparison_words import signed_percent
from stepscope.report.escape import markup, one_line

WIDTH, ROW, LEFT, RIGHT, TOP = 960, 34, 330, 16, 12  # of the drawing, in its own units
AXIS = 26
DRAWN = 24  # candidates
IN_FULL = 30  # candidates with their phases and pairs
PAIRS = 20  # of one candidate
NAME = 44  # characters of a name beside its interval
SENTENCE = 800
WIDEST = math.log(8.0)  # of the axis to either side; beyond it marks stand at the edge
MOST_DRAWN = 0.87  # a ceiling beyond it would take most of the axis to show nothing
TICKS = (0.125, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0, 8.0)
APART = 64  # labels of the axis, in units of the drawing

Row = Mapping[str, Any]
Span = tuple[float, float]


def experiment(document: Row | None) -> str:
    """The section, or nothing."""
    if not document:
        return ""
    candidates = say.ranked(document)
    parts = (
        f"<p class='soft'>{markup(one_line(say.protocol(document)), SENTENCE)}.</p>",
        _notes(document),
        *(
            f"<p>{f'<strong>{text}</strong>' if number == 0 else text}</p>"
            for number, text in enumerate(
                markup(one_line(each, SENTENCE), SENTENCE) for each in say.conclusion(document)
            )
        ),
        _changes(document),
        drawing(candidates),
        _table(candidates),
        *(_details(row) for row in candidates[:IN_FULL]),
        _effects(document),
        _list("What no knob reaches either", say.by_hand(document)),
        _list("Left out", [f"{say.name(row)}: {row['reason']}" for row in document.get("skipped") or ()]),
        _noise(document),
        f"<h3>Repeat it</h3><pre><span>{markup(document.get('repeat') or '', 4000)}</span></pre>",
    )
    return f"<section class='experiment'><h2>Experiment</h2>{''.join(parts)}</section>"


def _notes(document: Row) -> str:
    texts = [*(document.get("notes") or ()), *filter(None, [say.state(document)])]
    items = "".join(f"<li>{markup(one_line(text), SENTENCE)}</li>" for text in texts)
    return f"<ul class='notes' aria-label='Notes on the experiment'>{items}</ul>" if items else ""


def _changes(document: Row) -> str:
    best = say.winners(document)
    lines = best[0].get("change") if best else None
    if not lines:
        return ""
    shown = "".join(f"<span>{markup(one_line(text), SENTENCE)}</span>" for text in lines)
    return f"<h3>What to change</h3><pre>{shown}</pre>"


def drawing(candidates: Sequence[Row]) -> str:
    """A line for each candidate: its interval, its estimate, its pairs as dots, and the ceiling as a notch."""
    rows = [row for row in candidates if _is_drawn(row)][:DRAWN]
    if not rows:
        return ""
    span = _span(rows)
    height = TOP + ROW * len(rows) + AXIS
    floor = height - AXIS
    marks = "".join(_mark(row, TOP + ROW * number + ROW / 2, span) for number, row in enumerate(rows))
    text = "; ".join(f"{say.name(row)}: {say.verdict(row)}, {say.change(row)}" for row in rows)
    zero = _x(1.0, span)
    return (
        f"<svg class='intervals' viewBox='0 0 {WIDTH} {height}' role='img' "
        f"aria-label='Change of the step time, as in the table below. {markup(text, 2000)}'>"
        f"<line class='zero' x1='{zero:.1f}' y1='4' x2='{zero:.1f}' y2='{floor}'/>{_axis(span, floor)}{marks}</svg>"
        "<p class='soft'>Bar: 95 % interval; tick: estimate; dots: pairs of runs; bracket: the most that the diagnosis "
        "predicted. Left of the line a step takes less time.</p>"
    )


def _is_drawn(row: Row) -> bool:
    effect = say.headline(row)
    return effect is not None and _is_ratio(effect.get("ratio")) and row.get("headline") not in say.RATES


def _is_ratio(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _ratios(row: Row) -> list[float]:
    """The pairs' mean step times, candidate over baseline: where their dots stand."""
    pairs = [(pair["baseline"]["mean_ms"], pair["candidate"]["mean_ms"]) for pair in row.get("runs") or ()]
    return [after / before for before, after in pairs if _is_ratio(before) and _is_ratio(after)]


def _span(rows: Sequence[Row]) -> Span:
    """The ends of the axis, on logs: "no change" and all that is drawn lie between them, within reason."""
    values = [0.98, 1.02]
    for row in rows:
        effect = say.headline(row) or {}
        values += [float(effect[key]) for key in ("ratio", "low", "high") if _is_ratio(effect.get(key))]
        values += _ratios(row)
        if _has_ceiling(row):
            values.append(1.0 - row["ceiling"])
    low, high = math.log(min(values)), math.log(max(values))
    room = 0.05 * (high - low)
    return max(-WIDEST, low - room), min(WIDEST, high + room)


def _has_ceiling(row: Row) -> bool:
    ceiling = row.get("ceiling")
    return ceiling is not None and 0 < ceiling < MOST_DRAWN


def _x(ratio: float, span: Span) -> float:
    """Where a ratio stands; what lies beyond the axis stands at its edge."""
    low, high = span
    place = max(low, min(high, math.log(ratio)))
    return LEFT + (place - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _axis(span: Span, floor: float) -> str:
    ticks: list[float] = []
    for value in sorted(TICKS, key=lambda value: abs(math.log(value))):
        place = _x(value, span)
        if span[0] <= math.log(value) <= span[1] and all(abs(place - _x(other, span)) >= APART for other in ticks):
            ticks.append(value)
    named = ((_x(value, span), markup(signed_percent(value))) for value in sorted(ticks))
    return "".join(f"<text x='{x:.1f}' y='{floor + 18}' text-anchor='middle'>{name}</text>" for x, name in named)


def _mark(row: Row, middle: float, span: Span) -> str:
    effect = say.headline(row) or {}
    verdict = str(row.get("verdict"))
    style = verdict if verdict in say.VERDICTS else "undecided"
    name = say.name(row)
    label = name if len(name) <= NAME else f"{name[: NAME - 1]}…"
    parts = [f"<title>{markup(f'{name}: {say.verdict(row)}, {say.change(row)}')}</title>"]
    parts.append(f"<text class='name' x='{LEFT - 12}' y='{middle + 4:.1f}' text-anchor='end'>{markup(label)}</text>")
    if _is_ratio(effect.get("low")) and _is_ratio(effect.get("high")):
        left, right = _x(effect["low"], span), _x(effect["high"], span)
        parts.append(
            f"<rect class='bar' x='{left:.1f}' y='{middle - 6:.1f}' width='{max(2.0, right - left):.1f}' height='12'/>"
        )
    parts += [
        f"<rect class='dot' x='{_x(ratio, span) - 3:.1f}' y='{middle - 3:.1f}' width='6' height='6' rx='3'/>"
        for ratio in _ratios(row)
    ]
    place = _x(effect["ratio"], span)
    parts.append(
        f"<line class='tick' x1='{place:.1f}' y1='{middle - 10:.1f}' x2='{place:.1f}' y2='{middle + 10:.1f}'/>"
    )
    if _has_ceiling(row):
        at, top, low = _x(1.0 - row["ceiling"], span), middle - 12, middle + 12
        parts.append(
            f"<polyline class='ceiling' points='{at + 5:.1f},{top:.1f} {at:.1f},{top:.1f} {at:.1f},{low:.1f} "
            f"{at + 5:.1f},{low:.1f}'/>"
        )
    return f"<g class='{style}'>{''.join(parts)}</g>"


def _table(candidates: Sequence[Row]) -> str:
    if not candidates:
        return ""
    rows = [
        (
            f"<code>{markup(say.name(row))}</code>",
            markup(say.verdict(row)),
            markup(say.change(row)),
            markup(words.count(row.get("pairs"))),
            markup(say.ceiling(row)),
        )
        for row in candidates
    ]
    heads = ("Candidate", "Verdict", "Change of the step time (95 %)", "Pairs", "Predicted at best")
    return _grid("Every candidate against the baseline", heads, rows, right=(2, 3, 4))


def _grid(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A table; cells are ready markup."""
    style = dict.fromkeys(right, " class='right'")
    head = "".join(f"<th scope='col'{style.get(column, '')}>{markup(text)}</th>" for column, text in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{style.get(column, '')}>{cell}</td>" for column, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f"<div class='scroll'><table><caption>{markup(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _details(row: Row) -> str:
    """What stands behind a candidate's line, under a fold."""
    facts = "".join(f"<p>{text}</p>" for text in _facts(row))
    summary = f"{say.name(row)}: {row.get('text') or say.verdict(row)}"
    return (
        f"<details><summary>{markup(one_line(summary), SENTENCE)}</summary>{facts}{_phases(row)}{_pairs(row)}</details>"
    )


def _facts(row: Row) -> Iterator[str]:
    for label, texts in (
        ("In the script", list(row.get("change") or ())),
        ("Note", [text for text in (say.beyond(row), say.rate_note(row)) if text]),
        ("Loss", list(filter(None, [say.trains_alike(row)]))),
        ("Flags", say.flags(row)),
        ("Knobs", list(_applied(row))),
    ):
        for text in texts[:12]:
            yield f"<span class='soft'>{label}:</span> {markup(one_line(text), SENTENCE)}"


def _applied(row: Row) -> Iterator[str]:
    """What became of each knob, once for all runs that say the same."""
    told = []
    for each in row.get("applied") or ():
        name = f"{each['knob']}={each['value']}"
        if each.get("applied"):
            told.append(f"{name} applied" + (f", read back as {each['observed']}" if each.get("observed") else ""))
        else:
            told.append(f"{name} not applied: {each.get('reason') or 'no process said so'}")
    yield from dict.fromkeys(told)


def _phases(row: Row) -> str:
    rows = [
        (
            markup(words.term(phase["category"])),
            markup(words.milliseconds(phase["baseline_ms"])),
            markup(words.milliseconds(phase["candidate_ms"])),
            markup(_signed_ms(phase["difference_ms"])),
            markup(f"{_signed_ms(phase['low_ms'])} to {_signed_ms(phase['high_ms'])}")
            if phase.get("low_ms") is not None and phase.get("high_ms") is not None
            else words.MISSING,
        )
        for phase in row.get("phases") or ()
    ]
    heads = ("Part of the step", "Baseline", "Candidate", "Difference", "95 %")
    return _grid("Where the difference is", heads, rows, right=(1, 2, 3, 4)) if rows else ""


def _signed_ms(value: float | None) -> str:
    if value is None:
        return words.MISSING
    return f"{'+' if value > 0 else ''}{words.milliseconds(value)}"


def _pairs(row: Row) -> str:
    rows = []
    for number, pair in enumerate((row.get("runs") or ())[:PAIRS], start=1):
        before, after = pair["baseline"], pair["candidate"]
        cells = [str(number), markup(str(before.get("label", "")), 80), markup(str(after.get("label", "")), 80)]
        for key in ("mean_ms", "median_ms", "p95_ms"):
            cells.append(markup(f"{words.number(before.get(key))} → {words.number(after.get(key))}"))
        rows.append(cells)
    heads = ("Pair", "Baseline", "Candidate", "Mean, ms", "Median, ms", "95th percentile, ms")
    return _grid("Each pair of runs", heads, rows, right=(3, 4, 5)) if rows else ""


def _effects(document: Row) -> str:
    rows = [
        (f"<code>{markup(name)}</code>", markup(change), markup(ceiling), markup(runs))
        for name, change, ceiling, runs in map(say.main_effect, document.get("main_effects") or ())
    ]
    heads = ("Knob", "Change of the step time (95 %)", "Predicted at best", "Runs")
    return _grid("Main effects: a knob over all settings of the others", heads, rows, right=(1, 2, 3)) if rows else ""


def _list(title: str, texts: Sequence[str]) -> str:
    if not texts:
        return ""
    items = "".join(f"<li>{markup(one_line(text), SENTENCE)}</li>" for text in texts)
    return f"<h3>{markup(title)}</h3><ul>{items}</ul>"


def _noise(document: Row) -> str:
    found = document.get("noise") or {}
    smallest = say.noise(document)
    said = f"<p>{markup(smallest)}</p>" if smallest else ""
    for title, key in (("Set for every run", "settings"), ("Left as it is", "unchanged")):
        said += _list(title, [f"{name}: {text}" for name, text in found.get(key) or ()])
    return said
