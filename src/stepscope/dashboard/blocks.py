"""The parts that pages consist of, as plain dictionaries that JSON carries and the front end draws.

Their shapes are those of `web/src/lib/types.ts`. Every text passes `report.escape.plain`, so that names from a run are
harmless text wherever they end up; numbers that are not finite become None, which is "missing". Nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from stepscope.report.escape import plain
from stepscope.report.table import TableDocument, unit_of_row

Block: TypeAlias = dict[str, Any]
Help: TypeAlias = dict[str, Any]
Link: TypeAlias = dict[str, Any]

MAX_TEXT: Final = 4_000  # characters of a sentence or a paragraph
MAX_NAME: Final = 400  # characters of a name or a cell
MAX_DEPTH: Final = 12  # of what `cleaned` looks into

# units as docs/metrics.md words them, in the words of the front end
UNITS: Final = {
    **{unit: unit for unit in ("ns", "us", "ms", "s", "bytes", "share", "pct", "count", "per_s", "bytes_per_s")},
    **{unit: unit for unit in ("celsius", "W", "MHz", "number", "text", "")},
    "percent": "pct",
    "%": "pct",
    "1/s": "per_s",
    "bytes/s": "bytes_per_s",
    "C": "celsius",
    "fraction": "share",
    "steps": "count",
    "ratio": "number",
    "cores": "number",
    "Hz": "per_s",
}
# ends of names that tell a unit, the longest first
ENDINGS: Final = (
    *(("bytes_per_s", "bytes_per_s"), ("_per_s", "per_s"), ("per_second", "per_s"), ("bytes", "bytes")),
    *(("_ns", "ns"), ("_us", "us"), ("_ms", "ms"), ("_s", "s"), ("_pct", "pct"), ("share", "share")),
    *(("_celsius", "celsius"), ("_c", "celsius"), ("_w", "W"), ("_mhz", "MHz"), ("ratio", "number")),
    *(("ms_per_step", "ms"), ("bytes_per_step", "bytes"), ("_per_step", "number"), ("_cores", "number")),
)


def number(value: Any) -> int | float | None:
    """A number as JSON can carry it: integers, finite floats, also of numpy; None for everything else."""
    if value is None or isinstance(value, (str, bytes)):
        return None
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    item = getattr(value, "item", None)
    return number(item()) if callable(item) else None


def cell(value: Any) -> Any:
    """A value of a table: number, text, truth value, place, or None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return plain(value, MAX_NAME)
    if isinstance(value, Mapping):
        return cleaned(value)
    if isinstance(value, (list, tuple)):
        return plain(", ".join(str(part) for part in value), MAX_NAME)
    return number(value)


def cleaned(value: Any, depth: int = 0) -> Any:
    """`value` with every text harmless and every number finite, however it is nested."""
    if isinstance(value, str):
        return plain(value, MAX_TEXT)
    if value is None or isinstance(value, bool):
        return value
    if depth >= MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {plain(key): cleaned(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [cleaned(item, depth + 1) for item in value]
    return number(value)


def unit_of(key: str, stated: str = "") -> str:
    """The front end's unit of a figure: as its definition states it, else by the end of its name."""
    if stated and stated in UNITS:
        return UNITS[stated]
    return next((unit for ending, unit in ENDINGS if key.endswith(ending)), "number" if stated else "")


def series(
    name: str,
    unit: str,
    values: Iterable[Any],
    *,
    low: Iterable[Any] | None = None,
    high: Iterable[Any] | None = None,
    points: Iterable[Iterable[Any]] | None = None,
    role: str | None = None,
) -> dict[str, Any]:
    """One line, area or set of bars; `role` gives it one colour on all pages.

    Of intervals `low` and `high`, and `points`: for every x the measurements that its value is the mean of.
    """
    made: dict[str, Any] = {
        "name": plain(name),
        "unit": UNITS.get(unit, "number"),
        "values": [number(value) for value in values],
        "role": role,
    }
    if low is not None and high is not None:
        made["low"] = [number(value) for value in low]
        made["high"] = [number(value) for value in high]
    if points is not None:
        made["points"] = [[number(value) for value in each] for each in points]
    return made


def mark(start: float | str, end: float | str, label: str) -> dict[str, Any]:
    """A point (`start` equal to `end`) or range of x that is pointed out."""
    ends = {"from": start, "to": end}
    return {
        **{key: plain(at) if isinstance(at, str) else number(at) for key, at in ends.items()},
        "label": plain(label),
    }


def chart(
    id: str,
    title: str,
    type: str,
    *,
    sentence: str,
    x: tuple[str, str, Iterable[Any]],
    y: tuple[str, str],
    series: Iterable[Mapping[str, Any]],
    y_min: float | None = None,
    y_max: float | None = None,
    marks: Iterable[Mapping[str, Any]] = (),
    help: Help | None = None,
    notes: Iterable[str] = (),
    sync: str | None = None,
    select: str | None = None,
) -> Block:
    """A chart of type line, stacked_area, stacked_bars, bars, histogram, scatter or interval.

    Args:
        sentence: what the picture says, for those who do not see it.
        x: label, unit and values; every series has as many.
        y: label and unit.
        sync: charts with the same name zoom together.
        select: "steps" where a range drawn on x (step numbers) selects steps on all pages.
    """
    along = [plain(value) if isinstance(value, str) else number(value) for value in x[2]]
    return {
        "kind": "chart",
        "id": id,
        "title": plain(title),
        "type": type,
        "sentence": plain(sentence, MAX_TEXT),
        "x": {"label": plain(x[0]), "unit": UNITS.get(x[1], "number"), "values": along},
        "y": {"label": plain(y[0]), "unit": UNITS.get(y[1], "number"), "min": number(y_min), "max": number(y_max)},
        "series": [dict(each) for each in series],
        "marks": [dict(each) for each in marks],
        "help": help,
        "notes": [plain(note, MAX_TEXT) for note in notes],
        "sync": sync,
        "select": select,
    }


def findings(
    cards: Iterable[Mapping[str, Any]],
    risks: Iterable[Mapping[str, Any]],
    *,
    healthy: str | None = None,
    abstained: Iterable[Mapping[str, Any]] = (),
    ignored: Iterable[Mapping[str, Any]] = (),
) -> Block:
    """Cards as `pages.findings` makes them; `healthy` says that nothing is worth fixing, where that is so."""
    return {
        "kind": "findings",
        "findings": [cleaned(card) for card in cards],
        "risks": [cleaned(card) for card in risks],
        "healthy": None if healthy is None else plain(healthy, MAX_TEXT),
        "abstained": [{"rule": plain(row["rule"]), "needs": plain(row["needs"], MAX_TEXT)} for row in abstained],
        "ignored": [{"rule": plain(row["rule"]), "reason": plain(row["reason"], MAX_TEXT)} for row in ignored],
    }


def timeline(
    id: str,
    *,
    from_ns: int,
    to_ns: int,
    steps: Iterable[Mapping[str, Any]],
    tracks: Iterable[Mapping[str, Any]],
    window: Mapping[str, Any],
    sliceable: bool,
    details: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> Block:
    """Tracks of slices. `window` is the first one, a stepscope.timeline/1 document with harmless names."""
    return {
        "kind": "timeline",
        "id": id,
        "from_ns": from_ns,
        "to_ns": to_ns,
        "steps": [cleaned(row) for row in steps],
        "tracks": [cleaned(row) for row in tracks],
        "window": {**window, "names": [plain(name) for name in window.get("names", ())]},
        "notes": [plain(note, MAX_TEXT) for note in notes],
        "sliceable": sliceable,
        "details": None if details is None else {str(key): cleaned(item) for key, item in details.items()},
    }


def flame(id: str, document: Mapping[str, Any], first: str | None = None) -> Block:
    """A stepscope.flame/1 document; `first` is the key of the tree to begin with."""
    harmless = {name: [plain(each, MAX_TEXT) for each in document[name]] for name in ("names", "files")}
    return {"kind": "flame", "id": id, "document": {**document, **harmless}, "first": first}


Shorten = Callable[[str, "int | None"], str]


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
