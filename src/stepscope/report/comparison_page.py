"""A comparison as one HTML file without scripts or network: all rows that the terminal shows the first of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import asdict

from stepscope.report import comparison_words as said
from stepscope.report import words
from stepscope.report.comparison_words import Row
from stepscope.report.escape import markup, one_line
from stepscope.report.html_style import STYLE

MAX_BYTES = 3_000_000
ROWS = (200, 20)  # of a table: first try, and where the page came out too large
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
SENTENCE = 800  # characters
CELL = 240
OWN_STYLE = ".verdict { font-size: 1.1rem; font-weight: 600; }\n.bad { color: var(--critical); }\n"

Cell = Callable[[Row], str]
Column = tuple[str, Cell, str]  # heading, text of a row, class


def render(document: Row) -> str:
    """The whole page of the document that `comparison_document` made."""
    page = ""
    for rows in ROWS:
        page = _page(document, rows)
        if len(page.encode("utf-8")) <= MAX_BYTES:
            break
    return page


def _page(document: Row, rows: int) -> str:
    title = markup(one_line(said.title(document)))
    body = "\n".join(part for part in (_header(document, title), *_sections(document, rows), _rest(document)) if part)
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='referrer' content='no-referrer'>\n"
        f"<title>{title} – stepscope</title>\n<style>{STYLE}{OWN_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(document: Row, title: str) -> str:
    style = {"good": "healthy", "bad": "bad"}.get(said.verdict_style(document), "")
    verdict = f"<p class='verdict {style}'>{markup(one_line(said.verdict(document)), SENTENCE)}.</p>"
    flags = "".join(f"<li>{markup(one_line(text), SENTENCE)}</li>" for text in said.warnings(document))
    warned = f"<ul class='notes' aria-label='What makes the timing doubtful'>{flags}</ul>" if flags else ""
    equal = said.equivalence(document)
    losses = f"<p class='soft'>{markup(one_line(equal), SENTENCE)}</p>" if equal else ""
    return f"<header><h1>{title}</h1>{verdict}{warned}{_figures(document)}{losses}</header>"


def _figures(document: Row) -> str:
    figures = said.figures(document)
    if not figures:
        return ""
    rows = [asdict(figure) for figure in figures]
    columns: list[Column] = [
        ("Figure", lambda row: row["label"], ""),
        ("Baseline", lambda row: row["baseline"], "right"),
        ("Candidate", lambda row: row["candidate"], "right"),
        ("Change", lambda row: row["change"], "right"),
        ("95 % interval", lambda row: row["interval"], "right"),
    ]
    return _table("Means over the runs of each side; change is the candidate's.", columns, rows, len(rows))


def _sections(document: Row, limit: int) -> list[str]:
    return [
        _phases(document, limit),
        *(_section(title, _AMOUNTS, rows, limit) for title, rows in said.amounts(document)),
        _section(said.FINDINGS, _FINDINGS, said.of_kind(document, "finding"), limit),
        _section(said.ENVIRONMENT, _TEXTS, said.of_kind(document, "environment"), limit),
        _section(said.WINDOW, _TEXTS, said.of_kind(document, "window"), limit),
        _section(said.RUNS, _RUNS, said.runs(document), limit),
    ]


def _phases(document: Row, limit: int) -> str:
    return _section(
        said.PHASES,
        [
            ("Part of the step", lambda row: said.phase(row["category"]), ""),
            ("Baseline", lambda row: said.amount(row["baseline_ms"], said.MS), "right"),
            ("Candidate", lambda row: said.amount(row["candidate_ms"], said.MS), "right"),
            ("Difference", said.phase_difference, "right"),
            ("95 % interval", said.phase_limits, "right"),
        ],
        said.phases(document),
        limit,
    )


_AMOUNTS: list[Column] = [
    ("Difference", said.difference, "right"),
    ("Baseline", lambda row: said.amount(row["baseline"], row["unit"]), "right"),
    ("Candidate", lambda row: said.amount(row["candidate"], row["unit"]), "right"),
    ("Name", said.name, "code"),
    ("Place", said.place, "line"),
    ("Source", lambda row: str(row.get("code") or ""), "source"),
    ("", said.status, ""),
]
_FINDINGS: list[Column] = [
    ("", lambda row: str(row["status"]), ""),
    ("Cost a step", said.difference, "right"),
    ("Finding", said.name, ""),
    ("Place", said.place, "line"),
    ("Rule", lambda row: str(row.get("rule") or ""), "code"),
]
_RUNS: list[Column] = [
    ("Baseline", lambda row: str(row["baseline"]["label"]), "code"),
    ("Mean step", lambda row: words.milliseconds(row["baseline"]["mean_ms"]), "right"),
    ("Candidate", lambda row: str(row["candidate"]["label"]), "code"),
    ("Mean step", lambda row: words.milliseconds(row["candidate"]["mean_ms"]), "right"),
]
_TEXTS: list[Column] = [
    ("Name", lambda row: str(row["name"]), ""),
    ("Baseline", lambda row: said.value(row["baseline"]), "code"),
    ("Candidate", lambda row: said.value(row["candidate"]), "code"),
]


def _section(title: str, columns: Sequence[Column], rows: Sequence[Row], limit: int) -> str:
    if not rows:
        return ""
    return f"<section><h2>{markup(title)}</h2>{_table('', columns, rows, limit)}</section>"


def _table(caption: str, columns: Sequence[Column], rows: Sequence[Row], limit: int) -> str:
    """One table; columns in which no row says anything are left out."""
    texts = [[cell(row) for _, cell, _ in columns] for row in rows[:limit]]
    used = [index for index in range(len(columns)) if any(row[index] for row in texts)]
    head = "".join(f"<th scope='col'{_class(columns[index][2])}>{markup(columns[index][0])}</th>" for index in used)
    body = "\n".join(
        "<tr>" + "".join(_cell(row[index], columns[index][2]) for index in used) + "</tr>" for row in texts
    )
    more = f" The first {limit} of {len(rows)}." if len(rows) > limit else ""
    heading = f"<caption>{markup(caption + more)}</caption>" if caption or more else ""
    return f"<div class='scroll'><table>{heading}<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"


def _class(style: str) -> str:
    return f" class='{style}'" if style in ("right", "line", "source") else ""


def _cell(value: str, style: str) -> str:
    text = markup(value, CELL)
    if style == "source":
        return f"<td class='source'><code title='{text}'>{text}</code></td>"
    return f"<td{_class(style)}>{f'<code>{text}</code>' if style in ('code', 'line') and text else text}</td>"


def _rest(document: Row) -> str:
    notes = "".join(f"<li class='plain'>{markup(one_line(text), SENTENCE)}</li>" for text in said.notes(document))
    absent = "".join(
        f"<li><strong>{markup(what)}</strong>: {markup(one_line(why), SENTENCE)}</li>"
        for what, why in said.absent(document)
    )
    parts = [f"<ul class='notes' aria-label='Notes'>{notes}</ul>" if notes else ""]
    parts.append(f"<section><h2>{said.ABSENT}</h2><ul>{absent}</ul></section>" if absent else "")
    return "".join(parts)
