"""report.html: one file without scripts or network, with what the terminal shows and the tables behind it.

The page forbids itself everything but its own style sheet (Content-Security-Policy), and every text of the run goes
through `escape.markup`. It is bounded to 3 MB by showing fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.model import Report
from stepscope.report import compiler_words, sentences, words
from stepscope.report.escape import markup, one_line
from stepscope.report.groups import groups
from stepscope.report.html_compilers import compilers
from stepscope.report.html_device import device_lines, device_times
from stepscope.report.html_experiment import experiment
from stepscope.report.html_figures import partition, series
from stepscope.report.html_risks import risks
from stepscope.report.html_style import STYLE
from stepscope.report.html_tables import tables
from stepscope.report.places import Shortener, command_line
from stepscope.report.trial import refused, trial_line

MAX_BYTES = 3_000_000
ROWS = (60, 10)  # of a table: first try, and where the page came out too large
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
HIT = " class='hit'"
SENTENCE = 600  # characters of a sentence in a finding


def render(report: Report, note: str | None = None) -> str:
    """The whole page; `note` is a sentence at its end."""
    page = ""
    for rows in ROWS:
        page = _page(report, rows, note)
        if len(page.encode("utf-8")) <= MAX_BYTES:
            break
    return page


def body(report: Report, most_bytes: int) -> str:
    """What the page shows, to stand in another page beside `STYLE`: as much of it as fits into `most_bytes`."""
    for rows in ROWS:
        shown = _body(report, rows)
        if len(shown.encode("utf-8")) <= most_bytes:
            return shown
    shown = _head(report) + findings(report, Shortener(report.run))
    return shown if len(shown.encode("utf-8")) <= most_bytes else ""


def name(report: Report) -> str:
    """The run's name as markup."""
    return markup(report.run.get("name") or "run", 120)


def _head(report: Report) -> str:
    shorten = Shortener(report.run)
    return "\n".join((_header(report, name(report)), _trial(report, shorten), _notes(report)))


def _body(report: Report, rows: int) -> str:
    shorten = Shortener(report.run)
    return "\n".join(
        (
            _head(report),
            experiment(report.views.get("experiment")),
            _device(report, shorten, rows),
            _steps(report),
            findings(report, shorten),
            risks(report, shorten),
            compilers(report, shorten, rows),
            _next(report),
            "<h2>Behind the findings</h2>",
            tables(report, shorten, rows=rows),
        )
    )


def _page(report: Report, rows: int, note: str | None) -> str:
    last = f"<p class='soft'>{markup(one_line(note), SENTENCE)}</p>\n" if note else ""
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='referrer' content='no-referrer'>\n"
        f"<title>{name(report)} – stepscope</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{_body(report, rows)}\n{last}</main>\n</body>\n</html>\n"
    )


def _header(report: Report, title: str) -> str:
    steps = report.steps
    command = command_line(report.run)
    line = f"<p class='soft'><code>{markup(command)}</code></p>" if command else ""
    if steps is None:
        seen = compiler_words.without_steps(report) or "No step was seen"
        return f"<header><h1>{title}</h1>{line}<p>{markup(seen)}.</p></header>"
    figures = [
        ("step, mean", words.milliseconds(steps["mean_ms"])),
        ("median", words.milliseconds(steps["median_ms"])),
        ("95th percentile", words.milliseconds(steps["p95_ms"])),
        ("steps per second", words.number(steps["per_second"])),
    ]
    if steps.get("samples_per_second") is not None:
        figures.append(("samples per second", words.number(steps["samples_per_second"])))
    boxes = "".join(f"<div><dt>{markup(label)}</dt><dd>{markup(text)}</dd></div>" for label, text in figures)
    said = f"{sentences.counted(steps)}, cut by {words.signal(steps.get('signal', ''))}."
    compiling = compiler_words.kind_note(report, steps["kind"])
    others = "".join(f"<p>{markup(text)}</p>" for text in (sentences.framework(report), compiling) if text)
    for other in (report.views.get("steps_by_kind") or [])[1:]:
        text = markup(sentences.step_kind(report, other))
        others += (
            f"<p><strong>{text}</strong></p>" if sentences.stands_out(report, other) else f"<p class='soft'>{text}</p>"
        )
    return f"<header><h1>{title}</h1>{line}<dl class='figures'>{boxes}</dl><p>{markup(said)}</p>{others}</header>"


def _trial(report: Report, shorten: Shortener) -> str:
    text = trial_line(report, shorten)
    if not text:
        return ""
    said = markup(one_line(text), SENTENCE)
    return f"<p>Knobs: {f'<strong>{said}</strong>' if refused(report) else said}</p>"


def _notes(report: Report) -> str:
    items = [
        f"<li class='plain'>{markup(text)}</li>"
        for text in (sentences.reading(report), sentences.links(report))
        if text
    ]
    items += [f"<li>{markup(one_line(text), SENTENCE)}</li>" for text in sentences.warnings(report)]
    items += [
        f"<li class='plain'>{markup(one_line(note['text']), SENTENCE)}</li>"
        for note in report.quality.get("notes") or []
        if note["level"] != "warning"
    ]
    return f"<ul class='notes' aria-label='Quality of the recording'>{''.join(items)}</ul>" if items else ""


def _steps(report: Report) -> str:
    if report.steps is None:
        return ""
    fixed = sentences.fixed_costs(report.views.get("fixed_costs") or {})
    said = f"<p class='soft'>{markup(fixed)}</p>" if fixed else ""
    parts = report.steps["partition"]
    known = any(part["category"] != "unattributed" for part in parts)
    bar = f"<section><h2>Where a step goes</h2>{partition(parts)}{said}</section>" if known else ""
    return f"{bar}{series(report.steps)}"


def _device(report: Report, shorten: Shortener, rows: int) -> str:
    parts = []
    times = sentences.device_rows(report)
    if times:
        parts.append(f"<h2>Device time</h2>{device_times(times, shorten, rows)}")
    view = report.views.get("device_lines")
    if view and view["total_ns"]:
        lines = device_lines(view, shorten, rows) if view["lines"] else "<p>No line could be found.</p>"
        parts.append(f"<h2>{sentences.DEVICE_LINES[view['basis']]}</h2>{lines}")
        footer = sentences.line_footer(view)
        parts.append(f"<p class='soft'>{markup(footer)}</p>" if footer else "")
        reasons = "".join(
            f"<li class='plain'>{markup(words.percent(share))}: {markup(why)}</li>"
            for why, share in sentences.unattributed(view)
        )
        parts.append(f"<ul class='notes' aria-label='Without a line'>{reasons}</ul>" if reasons else "")
    return f"<section>{''.join(parts)}</section>" if parts else ""


def findings(report: Report, shorten: Shortener) -> str:
    """The findings, each cause with what it explains, what was not judged and what is ignored."""
    parts = ["<section><h2>Findings</h2>"]
    overlap = sentences.overlap(report)
    parts += [f"<p class='soft'>{markup(overlap)}</p>"] if overlap else []
    for index, group in enumerate(groups(report), start=1):
        parts.append(_finding(f"{index}.", group.finding, shorten, below=group.explained))
        for number, finding in enumerate(group.explained, start=1):
            parts.append(_finding(f"{index}.{number}", finding, shorten))
    healthy = sentences.healthy(report) if not report.findings and sentences.is_judged(report) else None
    if healthy:
        parts.append(f"<p class='healthy'>{markup(healthy)}</p>")
    if unexplained := sentences.unexplained(report):
        parts.append(f"<p class='unexplained'>{markup(unexplained, SENTENCE)}</p>")
    for rows, label, key in (
        (report.abstained, "Not judged", "needs"),
        (report.ignored, "Ignored by configuration", "reason"),
    ):
        if rows:
            items = "".join(f"<li><code>{markup(row['rule'])}</code>: {markup(row[key])}</li>" for row in rows)
            parts.append(
                f"<details><summary>{label} <span class='soft'>({len(rows)})</span></summary><ul>{items}</ul></details>"
            )
    return "\n".join(parts) + "</section>"


def _finding(number: str, finding: dict[str, Any], shorten: Shortener, *, below: Sequence[dict[str, Any]] = ()) -> str:
    severity = finding["severity"] if finding["severity"] in ("critical", "warning", "info") else "info"
    places = "".join(place(each, shorten, alone=rank > 0) for rank, each in enumerate(finding["where"]))
    facts = "".join(f"<dt>{markup(label)}</dt><dd>{content}</dd>" for label, content in _facts(finding, below))
    depth = "" if number.endswith(".") else " explained"
    return (
        f"<article class='finding {severity}{depth}'><header><span class='severity'>{severity}</span>"
        f"<span class='soft'>{markup(finding['confidence'])} confidence</span>"
        f"<span class='cost'>{markup(sentences.cost(finding))}</span></header>"
        f"<h3>{number} {markup(one_line(finding['title']))}</h3>{places}<dl>{facts}</dl></article>"
    )


def _facts(finding: dict[str, Any], below: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Label and ready markup of each line of a finding."""
    rows = "".join(evidence(row) for row in finding["evidence"])
    if rows:
        yield "Seen", f"<ul>{rows}</ul>"
    for row in finding.get("disagreements") or ():
        yield "Sources", markup(one_line(sentences.disagreement(row)), SENTENCE)
    yield "Fix", markup(one_line(finding["fix"]), SENTENCE)
    if finding["caveat"]:
        yield "Price", markup(one_line(finding["caveat"]), SENTENCE)
    yield "Gain", markup(sentences.gain(finding))
    if finding["try"]:
        yield "Try", ", ".join(f"<code>{markup(row['knob'])}={markup(row['value'])}</code>" for row in finding["try"])
    if finding["ranks"]:
        yield "Ranks", markup(", ".join(str(rank) for rank in finding["ranks"]))
    yield "Wrong if", markup(one_line(finding["falsified_by"]), SENTENCE)
    if below:
        items = "".join(f"<li>{markup(one_line(sentences.explained(row)), SENTENCE)}</li>" for row in below)
        yield "Explains", f"<ul>{items}</ul>"
    if finding["learn"].startswith("https://"):
        yield "Learn", f"<a href='{markup(finding['learn'])}' rel='noreferrer'>{markup(finding['learn'])}</a>"
    yield "Rule", f"<code>{markup(finding['rule'])}</code>"


def evidence(row: dict[str, Any]) -> str:
    """A figure that a finding stands on, as an item of a list."""
    metric, value = words.evidence(row)
    source = f" <span class='soft'>({markup(row['source'])})</span>" if row["source"] else ""
    return f"<li>{markup(metric)}: <strong>{markup(value)}</strong>{source}</li>"


def place(row: dict[str, Any], shorten: Shortener, *, alone: bool) -> str:
    """A place with its source: the line `alone`, or with the lines around it."""
    function = f" <code>{markup(row['function'])}</code>" if row["function"] else ""
    part = row["share"] if row["share"] is not None and row["share"] < words.WHOLE else None
    share = f" <span class='soft'>{markup(words.percent(part))} of it</span>" if part is not None else ""
    head = f"<p><code>{markup(shorten(row['file'], row['line']))}</code>{function}{share}</p>"
    source = row.get("source")
    if not source:
        return head
    lines = "".join(
        _source_line(number, text, hit=number == row["line"])
        for number, text in enumerate(source["lines"], start=source["first_line"])
        if number == row["line"] or not alone
    )
    changed = "<p class='soft'>The file was edited since the run.</p>" if source["changed_since"] else ""
    return f"{head}<pre>{lines}</pre>{changed}"


def _source_line(number: int, text: str, *, hit: bool) -> str:
    return f"<span{HIT if hit else ''}>{number:>5}  {markup(text)}</span>"


def _next(report: Report) -> str:
    command = command_line(report.run)
    if not report.findings or not command:
        return ""
    return (
        "<section><h2>Next</h2><p>Make one change, record again and compare the step time:</p>"
        f"<pre><span>stepscope run -- {markup(command)}</span></pre></section>"
    )
