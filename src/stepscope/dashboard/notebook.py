"""Findings as a piece of HTML that a notebook shows below a cell: one element, no script, nothing from a network.

Its style sheet is bound to that element and takes text and background from the notebook, bright or dark. Where a viewer
drops style sheets (a notebook that is not trusted) what is left is still in order: headings, lists, lines of source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from typing import Any

from stepscope.dashboard import static_page
from stepscope.dashboard.pages.findings import where_of
from stepscope.model import Report
from stepscope.report import compiler_words, sentences, words
from stepscope.report.escape import LONGEST, markup, one_line, plain
from stepscope.report.sentences import groups
from stepscope.report.words import Shortener

SENTENCE = 600  # characters of one
SHOWN = 8  # findings, with what they explain; the rest is counted
LEVEL = static_page.Level(rows=0, cards=SHOWN, text=SENTENCE, cell=LONGEST)
COLUMNS = 100  # of the plain text twin
_CELL = re.compile(r"/notebook/cell_(\d+)\.py$")  # where the magic keeps the source of cell N
_MARKS = {"critical": "▲", "warning": "◆", "info": "●"}
_ROOT = "stepscope-findings"
_STYLE = """
.R { font-size: 13px; line-height: 1.45; max-width: 70rem; margin: .4rem 0; }
.R p { margin: .15rem 0; }
.R .head { font-size: 1.1em; font-weight: 600; }
.R .soft { opacity: .75; }
.R article { border: 1px solid; border-color: color-mix(in srgb, currentColor 25%, transparent);
  border-left: 5px solid #5b7fd6; border-radius: 5px; padding: .45rem .8rem; margin: .5rem 0; }
.R article.critical { border-left-color: #c5362d; }
.R article.warning { border-left-color: #b7791f; }
.R article.explained { margin-left: 1.4rem; }
.R .title { font-weight: 600; }
.R .cost { float: right; font-weight: 600; font-variant-numeric: tabular-nums; margin-left: 1rem; }
.R pre { margin: .25rem 0; padding: .3rem 0; overflow-x: auto; font-size: .95em;
  background: color-mix(in srgb, currentColor 6%, transparent); }
.R pre span { display: block; padding: 0 .6rem; white-space: pre; }
.R pre .hit { font-weight: 700; background: color-mix(in srgb, #b7791f 22%, transparent); }
.R ul { margin: .1rem 0; padding-left: 1.2rem; }
.R summary { cursor: pointer; }
""".replace(".R", f".{_ROOT}")


class CellShortener(Shortener):
    """Places as `Shortener` shows them, and those in cells of a notebook by the number of the cell."""

    def __call__(self, file: str, line: int | None = None) -> str:
        """`file:line` or `cell [3], line 7`, harmless to print."""
        cell = _CELL.search(file)
        if cell is None:
            return super().__call__(file, line)
        return f"cell [{cell[1]}]" + (f", line {line}" if line is not None else "")


def fragment(report: Report, *, page: str | None = None) -> str:
    """One HTML element with the headline and the findings; `page` is where everything else can be seen."""
    shorten = CellShortener(report.run)
    parts = [_headline(report), _warnings(report), *_cards(report, shorten), _outlook(report), _more(page)]
    return f"<section class='{_ROOT}' aria-label='stepscope findings'><style>{_STYLE}</style>{''.join(parts)}</section>"


def text(report: Report) -> str:
    """The same for where no HTML is shown: the terminal's report, without colour."""
    from rich.console import Console

    from stepscope.report import terminal

    stream = StringIO()
    # whatever a notebook's environment says of colours and of itself
    console = Console(file=stream, width=COLUMNS, color_system=None, force_terminal=False, force_jupyter=False)
    terminal.render(report, console)
    return stream.getvalue()


def _headline(report: Report) -> str:
    name, steps = plain(report.run.get("name") or "run", 120), report.steps
    if steps is None:
        seen = compiler_words.without_steps(report) or sentences.without_steps(report)
        return f"<p class='head'>{markup(f'{name}: {seen}')}</p>"
    said = (
        f"{name}: {words.milliseconds(steps['mean_ms'])} a step, {words.number(steps['per_second'])} steps per second "
        f"({sentences.counted(steps)})"
    )
    fixed = sentences.fixed_costs(report.views.get("fixed_costs") or {})
    below = f"<p class='soft'>{markup(fixed)}</p>" if fixed else ""
    return f"<p class='head'>{markup(said)}</p>{_partition(steps['partition'])}{below}"


def _partition(parts: Sequence[dict[str, Any]]) -> str:
    """Where a step goes, in a line."""
    known = [part for part in parts if part["share"] > 0 and part["category"] != "unattributed"]
    if not known:
        return ""
    said = ", ".join(f"{words.term(part['category'])} {words.percent(part['share'])}" for part in known)
    return f"<p>{markup(f'Where a step goes: {said}', SENTENCE)}</p>"


def _warnings(report: Report) -> str:
    items = "".join(f"<li>{markup(one_line(said), SENTENCE)}</li>" for said in sentences.warnings(report))
    return f"<ul aria-label='Before you read it'>{items}</ul>" if items else ""


def _cards(report: Report, shorten: Shortener) -> list[str]:
    rows = [
        (finding, explained)
        for group in groups(report)
        for finding, explained in ((group.finding, False), *((row, True) for row in group.explained))
    ]
    shown = [_card(finding, shorten, explained=explained) for finding, explained in rows[:SHOWN]]
    overlap = sentences.overlap(report)
    if overlap:
        shown.append(f"<p class='soft'>{markup(overlap)}</p>")
    if len(rows) > SHOWN:
        shown.append(f"<p class='soft'>and {len(rows) - SHOWN} smaller ones in the report</p>")
    return shown


def _card(finding: dict[str, Any], shorten: Shortener, *, explained: bool) -> str:
    severity = finding["severity"] if finding["severity"] in _MARKS else "info"
    shown = (where_of(each, shorten) for each in finding["where"])
    places = "".join(static_page.place(each, LEVEL, alone=rank > 0) for rank, each in enumerate(shown))
    seen = "".join(_evidence(row) for row in finding["evidence"])
    tries = ", ".join(f"<code>{markup(row['knob'])}={markup(row['value'])}</code>" for row in finding["try"])
    lines = (
        ("Fix", markup(one_line(finding["fix"]), SENTENCE)),
        ("Price", markup(one_line(finding["caveat"]), SENTENCE) if finding["caveat"] else ""),
        ("Gain", markup(sentences.gain(finding))),
        ("Try", tries),
    )
    facts = "".join(f"<p><b>{label}:</b> {content}</p>" for label, content in lines if content)
    details = f"<details><summary>Evidence</summary><ul>{seen}</ul></details>" if seen else ""
    note = "<p class='soft'>Counted in the finding above, not in addition.</p>" if explained else ""
    return (
        f"<article class='{severity}{' explained' if explained else ''}'>"
        f"<p><span class='cost'>{markup(sentences.cost(finding))}</span>"
        f"<span aria-hidden='true'>{_MARKS[severity]}</span> {severity}, {markup(finding['confidence'])} confidence</p>"
        f"<p class='title'>{markup(one_line(finding['title']))}</p>{note}{places}{facts}{details}</article>"
    )


def _evidence(row: dict[str, Any]) -> str:
    """A figure that a finding stands on, as an item of a list."""
    metric, value = words.evidence(row)
    source = f" <span class='soft'>({markup(row['source'])})</span>" if row["source"] else ""
    return f"<li>{markup(metric)}: <strong>{markup(value)}</strong>{source}</li>"


def _outlook(report: Report) -> str:
    """What to say without a finding, which risks there are, and what could not be judged."""
    said = []
    unexplained = sentences.unexplained(report)
    if not report.findings and unexplained is None:
        healthy = sentences.healthy(report) if sentences.is_judged(report) else None
        said.append(f"<p>{markup(healthy or 'No finding.')}</p>")
    if unexplained is not None:
        said.append(f"<p>{markup(unexplained, SENTENCE)}</p>")
    for risk in report.risks:
        said.append(f"<p><b>Risk:</b> {markup(one_line(risk['title']), SENTENCE)}</p>")
    if report.abstained:
        items = "".join(f"<li>{markup(row['rule'])}: {markup(row['needs'])}</li>" for row in report.abstained)
        said.append(f"<details><summary>Not judged ({len(report.abstained)})</summary><ul>{items}</ul></details>")
    return "".join(said)


def _more(page: str | None) -> str:
    return f"<p class='soft'>Everything else: <code>{markup(page)}</code></p>" if page else ""
