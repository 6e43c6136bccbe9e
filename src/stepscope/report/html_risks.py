"""The risks in report.html: a list beside the findings, with places, evidence and advice."""

from __future__ import annotations

from typing import Any

from stepscope.model import Report
from stepscope.report import words
from stepscope.report.escape import markup, one_line
from stepscope.report.places import Shortener

SENTENCE = 600  # characters


def risks(report: Report, shorten: Shortener) -> str:
    """A section, or nothing."""
    if not report.risks:
        return ""
    items = "".join(_risk(risk, shorten) for risk in report.risks)
    return (
        "<section><h2>Risks</h2><p class='soft'>What may end or slow down the run later. No cost was measured, so that "
        f"these are not ranked among the findings.</p><ul class='notes'>{items}</ul></section>"
    )


def _risk(risk: dict[str, Any], shorten: Shortener) -> str:
    places = ", ".join(f"<code>{markup(shorten(place['file'], place['line']))}</code>" for place in risk["where"])
    seen = "; ".join(_seen(row) for row in risk["evidence"])
    learn = risk["learn"] if risk["learn"].startswith("https://") else ""
    parts = (
        f"<strong>{markup(one_line(risk['title']))}</strong> "
        f"<span class='soft'>{markup(risk['confidence'])} confidence, <code>{markup(risk['rule'])}</code></span>",
        f"At {places}" if places else "",
        f"Seen: {seen}" if seen else "",
        f"Fix: {markup(one_line(risk['fix']), SENTENCE)}",
        f"Price: {markup(one_line(risk['caveat']), SENTENCE)}" if risk["caveat"] else "",
        f"Wrong if: {markup(one_line(risk['falsified_by']), SENTENCE)}",
        f"<a href='{markup(learn)}' rel='noreferrer'>{markup(learn)}</a>" if learn else "",
    )
    return f"<li>{'<br>'.join(part for part in parts if part)}</li>"


def _seen(row: dict[str, Any]) -> str:
    metric, value = words.evidence(row)
    source = f" <span class='soft'>({markup(row['source'])})</span>" if row["source"] else ""
    return f"{markup(metric)}: {markup(value)}{source}"
