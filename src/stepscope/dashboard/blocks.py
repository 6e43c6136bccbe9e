"""The parts that pages consist of, as plain dictionaries that JSON carries and the front end draws.

Their shapes are those of `web/src/lib/types.ts`. Every text passes `report.escape.plain`, so that names from a run are
harmless text wherever they end up; numbers that are not finite become None, which is "missing". Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from stepscope.dashboard.pictures import chart, findings, flame, mark, series, timeline
from stepscope.dashboard.values import MAX_TEXT, UNITS, Block, Help, Link, cell, cleaned, number, unit_of
from stepscope.report.escape import plain
from stepscope.report.table import TableDocument, unit_of_row

Shorten = Callable[[str, "int | None"], str]

__all__ = [
    "Block",
    "Help",
    "Link",
    "Shorten",
    "absent_block",
    "capital",
    "cell",
    "cell_link",
    "chart",
    "choice",
    "cleaned",
    "column",
    "column_meaning",
    "empty",
    "fact",
    "facts",
    "figure",
    "figures",
    "findings",
    "flame",
    "help_",
    "link",
    "mark",
    "meaning",
    "measured",
    "number",
    "place",
    "place_of",
    "sentence",
    "series",
    "table",
    "table_block",
    "text",
    "timeline",
    "unit_of",
]

HIDDEN_SPANS = ("worker", "span")  # columns left out where all rows are of one span


# ---- small parts -----------------------------------------------------------------------------------------------------


def help_(text: str, picture: str | None = None) -> Help:
    """What a figure means. `picture` names a drawing of the front end: "utilisation"."""
    return {"text": plain(text, MAX_TEXT), "picture": picture}


def meaning(record: str, key: str) -> Help | None:
    """The definition of a figure of a record of the analysis ("StepFacts"), as docs/metrics.md has it."""
    from stepscope.report.metrics import SECTIONS

    for section in SECTIONS:
        if section.record == record and key in section.metrics:
            return _defined(key, section.metrics[key].definition)
    return None


def column_meaning(table: str, key: str) -> Help | None:
    """The definition of a column of a table of `stepscope analyze --table`."""
    from stepscope.report.metrics import metric

    found = metric(table, key)
    return _defined(key, found.definition) if found else None


def _defined(key: str, definition: str) -> Help:
    return help_(definition, "utilisation" if "utilization" in key or "sm_efficiency" in key else None)


def place(
    file: str,
    line: int | None = None,
    function: str | None = None,
    *,
    shown: str,
    guess: bool = False,
    code: str | None = None,
) -> dict[str, Any]:
    """A line of code. `shown` is the short form (`context.shorten(file, line)`), `code` its text."""
    return {
        "file": plain(file, MAX_TEXT),
        "line": line,
        "function": None if function is None else plain(function),
        "shown": plain(shown),
        "guess": guess,
        "code": None if code is None else plain(code),
    }


def place_of(row: Mapping[str, Any], shorten: Shorten, code: str | None = None) -> dict[str, Any]:
    """The place that a row of a table or of the report names by `file`, `line` and `function`."""
    file, line = str(row["file"]), row.get("line")
    guess = not row.get("place_exact", True)
    return place(file, line, row.get("function"), shown=shorten(file, line), guess=guess, code=code or row.get("code"))


def link(label: str, page: str, params: Mapping[str, Any] | None = None) -> Link:
    """Another page of the same run."""
    given = {plain(key): plain(value) for key, value in (params or {}).items() if value is not None}
    return {"label": plain(label), "page": page, "params": given}


# ---- blocks of text --------------------------------------------------------------------------------------------------


def text(words: str, tone: str = "plain") -> Block:
    """A paragraph. `tone` is "plain", "note", "warning" or "good"."""
    return {"kind": "text", "text": plain(words, MAX_TEXT), "tone": tone}


def empty(title: str, why: str, record: str = "", command: str | None = None) -> Block:
    """Why there is nothing, what to record so that there is, and a command that does."""
    return {
        "kind": "empty",
        "title": plain(title),
        "why": plain(why, MAX_TEXT),
        "record": plain(record, MAX_TEXT),
        "command": None if command is None else plain(command, MAX_TEXT),
    }


def absent_block(reason: str, record: str = "", command: str | None = None, *, title: str = "Nothing to show") -> Block:
    """An empty block from a reason of `analyze.views.absent`, whose part after ": " says what to record."""
    why, _, advice = reason.partition(": ")
    if record or not advice:
        return empty(title, sentence(reason), record, command)
    return empty(title, sentence(why), sentence(advice), command)


def sentence(words: str) -> str:
    """A reason as a sentence: a capital letter in front, a full stop at the end."""
    words = words.strip()
    return capital(words) + ("" if words[-1:] in ".!?…" else ".")


def capital(words: str) -> str:
    """With a capital letter in front."""
    return words[:1].upper() + words[1:]


def figure(
    label: str,
    value: Any,
    unit: str = "",
    *,
    help: Help | None = None,
    note: str | None = None,
    missing: str | None = None,
) -> dict[str, Any]:
    """One figure; `missing` says why where `value` is None."""
    return {
        "label": plain(label),
        "value": plain(value) if isinstance(value, str) else number(value),
        "unit": UNITS.get(unit, "number"),
        "help": help,
        "note": None if note is None else plain(note),
        "missing": None if missing is None else plain(missing),
    }


def measured(label: str, record: object, key: str, *, note: str | None = None) -> dict[str, Any]:
    """The figure `key` of a record of the analysis, with its unit and its definition."""
    from stepscope.report.metrics import SECTIONS

    name = type(record).__name__
    found = next(
        (section.metrics[key] for section in SECTIONS if section.record == name and key in section.metrics), None
    )
    unit = unit_of(key, found.unit if found else "") or "number"
    return figure(label, getattr(record, key), unit, help=_defined(key, found.definition) if found else None, note=note)


def figures(items: Iterable[Mapping[str, Any]], title: str | None = None) -> Block:
    """Figures side by side."""
    return {
        "kind": "figures",
        "title": None if title is None else plain(title),
        "items": [dict(item) for item in items],
    }


def fact(label: str, value: Any, note: str | None = None) -> dict[str, Any]:
    """A name with a text; None is "not known"."""
    return {
        "label": plain(label),
        "value": None if value is None else plain(value, MAX_TEXT),
        "note": None if note is None else plain(note),
    }


def facts(title: str, rows: Iterable[Mapping[str, Any]]) -> Block:
    """Rows made by `fact`."""
    return {"kind": "facts", "title": plain(title), "rows": [dict(row) for row in rows]}


def choice(label: str, param: str, value: str, options: Iterable[tuple[str, str]]) -> Block:
    """A choice that reloads the page with `param` set; `options` are (value, label)."""
    made = [{"value": plain(key), "label": plain(shown)} for key, shown in options]
    return {"kind": "choice", "label": plain(label), "param": param, "value": plain(value), "options": made}


# ---- tables ----------------------------------------------------------------------------------------------------------


def column(
    key: str,
    label: str,
    unit: str = "",
    *,
    help: Help | None = None,
    numeric: bool | None = None,
    bar: bool = False,
    signed: bool = False,
    place: bool = False,
    link: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A column; numeric unless `unit` is "" or "text". `signed` is for differences; `link` is made by `cell_link`."""
    unit = UNITS.get(unit, "number")
    return {
        **({"signed": True} if signed else {}),
        "key": key,
        "label": plain(label),
        "unit": unit,
        "numeric": (unit not in ("", "text")) if numeric is None else numeric,
        "help": help,
        "bar": bar,
        "place": place,
        "link": None if link is None else dict(link),
    }


def cell_link(page: str, param: str, key: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A click on a cell opens `page` with `params`, and with `param` set to the row's value of `key`."""
    given = {plain(name): plain(value) for name, value in (params or {}).items() if value is not None}
    return {"page": page, "params": given, "param": param, "key": key}


def table(
    id: str,
    title: str,
    columns: Iterable[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    *,
    limit: int,
    total: int | None = None,
    sorted_by: str | None = None,
    notes: Iterable[str] = (),
    tree: bool = False,
    open_depth: int | None = None,
) -> Block:
    """A table of at most `limit` rows. Of a tree every row has its `depth`, parents stand before their children."""
    made: Block = {
        "kind": "table",
        "id": id,
        "title": plain(title),
        "columns": [dict(each) for each in columns],
        "rows": [{key: cell(value) for key, value in row.items()} for row in rows[:limit]],
        "total": len(rows) if total is None else total,
        "sorted_by": sorted_by,
        "notes": [plain(note, MAX_TEXT) for note in notes],
    }
    if tree:
        made["tree"] = True
        made["open_depth"] = 1 if open_depth is None else open_depth
    return made


def table_block(
    found: TableDocument,
    *,
    id: str,
    limit: int,
    shorten: Shorten,
    title: str | None = None,
    columns: Sequence[tuple[str, str]] | None = None,
    bars: Collection[str] = (),
    links: Mapping[str, Mapping[str, Any]] | None = None,
    keep: Collection[str] = (),
    open_depth: int | None = None,
    notes: Iterable[str] = (),
) -> Block:
    """The table of `report.table.document(...)`, with the definitions of its columns; empty where it says why.

    Args:
        id: of the table on its page, for links that restore its order.
        shorten: `context.shorten`.
        columns: (heading, key) in order; those of the terminal by default, without columns that hold nothing. The key
            "file" is the place: file, line and function of the row.
        bars: keys of columns with a bar behind the number.
        links: `cell_link`s by the key of their column.
        keep: keys that rows carry beside those of the columns.
        open_depth: given for a tree, whose rows have `depth` or `level`.
    """
    if found.absent is not None:
        return absent_block(found.absent, title=title or found.title)
    links = links or {}
    shown = [(label, key) for label, key in columns or found.shown.columns if _worth_showing(found, key)]
    heads = [label for label, _ in shown]
    units = {each.key: each.unit for each in found.columns}
    made = []
    for label, key in shown:
        name = plain(key.replace("_", " ")) if heads.count(label) > 1 and label != "→" else label
        for end in (" ns", " ms", " bytes"):
            name = name.removesuffix(end)
        made.append(_document_column(found, key, name, units.get(key, ""), key in bars, links.get(key)))
    keys = [*(key for _, key in shown if key != "file"), *keep, *(link["key"] for link in links.values())]
    return table(
        id,
        title or found.title,
        made,
        [_document_row(row, keys, shorten) for row in found.rows[:limit]],
        limit=limit,
        total=found.total,
        sorted_by=found.sorted_by,
        notes=(*found.notes, *notes),
        tree=open_depth is not None,
        open_depth=open_depth,
    )


def _document_column(
    found: TableDocument, key: str, label: str, stated: str, bar: bool, link: Mapping[str, Any] | None
) -> dict[str, Any]:
    if key == "file":
        return column("place", label, place=True)
    value = next((row[key] for row in found.rows if row.get(key) is not None), None)
    if isinstance(value, (str, bool)):
        return column(key, label, "text", help=column_meaning(found.table, key), link=link)
    unit = unit_of(key, stated) or "number"
    help_of, signed = column_meaning(found.table, key), "delta" in key
    made = column(key, label, unit, help=help_of, bar=bar, signed=signed, link=link)
    return {**made, "unit_key": "unit"} if any(unit_of_row(row, key) for row in found.rows) else made


def _document_row(row: Mapping[str, Any], keys: Iterable[str], shorten: Shorten) -> dict[str, Any]:
    made = {key: row.get(key) for key in keys}
    if row.get("file"):
        made["place"] = place_of(row, shorten)
    if "depth" in row or "level" in row:
        made["depth"] = row.get("depth") or row.get("level") or 0
    return made


def _worth_showing(found: TableDocument, key: str) -> bool:
    """Whether a row has a value there; of spans only where there are several."""
    if key in HIDDEN_SPANS:
        return len({(row.get("worker"), row.get("span")) for row in found.rows}) > 1
    values = {row.get(key) for row in found.rows} - {None}
    return bool(values - {0}) if key in found.shown.quiet else bool(values)
