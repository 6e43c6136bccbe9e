"""The parts that pages consist of, as plain dictionaries that JSON carries and the front end draws.

Their shapes are those of `web/src/lib/types.ts`. Every text passes `report.escape.plain`, so that names from a run are
harmless text wherever they end up; numbers that are not finite become None, which is "missing". Nothing is computed.

What a page says of the figures of a record or of its rows is declared in layout.json, by name: figures and columns of
tables in a text, as `Label: key unit`, separated by semicolons (`columns`), and of charts what does not depend on the
run. Units and definitions are those of docs/definitions.md where the text names none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from stepscope.report import words
from stepscope.report.escape import plain

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext
    from stepscope.report.definitions import Definition

Block: TypeAlias = dict[str, Any]
Help: TypeAlias = dict[str, Any]
Link: TypeAlias = dict[str, Any]
Row: TypeAlias = Mapping[str, Any]
Shorten = Callable[[str, "int | None"], str]

MAX_TEXT: Final = 4_000  # characters of a sentence or a paragraph
MAX_NAME: Final = 400  # characters of a name or a cell
MAX_DEPTH: Final = 12  # of what `cleaned` looks into

# units as docs/definitions.md words them, in the words of the front end
UNITS: Final = {
    **{unit: unit for unit in ("ns", "us", "ms", "s", "bytes", "share", "pct", "count", "per_s", "bytes_per_s")},
    **{unit: unit for unit in ("celsius", "W", "MHz", "number", "text", "")},
    "none": "",
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
    "scalar": "scalar",
}
# ends of names that tell a unit, the longest first
ENDINGS: Final = (
    *(("bytes_per_s", "bytes_per_s"), ("_per_s", "per_s"), ("per_second", "per_s"), ("bytes", "bytes")),
    *(("_ns", "ns"), ("_us", "us"), ("_ms", "ms"), ("_s", "s"), ("_pct", "pct"), ("share", "share")),
    *(("_celsius", "celsius"), ("_c", "celsius"), ("_w", "W"), ("_mhz", "MHz"), ("ratio", "number")),
    *(("ms_per_step", "ms"), ("bytes_per_step", "bytes"), ("_per_step", "number"), ("_cores", "number")),
)


class TableLayout(Struct, frozen=True):
    """A table of rows; `record` has the definitions of its figures. `whole` keeps columns in which no row says
    anything; `help` are definitions that the record has not, by key."""

    columns: str
    title: str = ""
    record: str = ""
    notes: tuple[str, ...] = ()
    sorted_by: str | None = None
    whole: bool = False
    help: Mapping[str, str] = {}


class ChartLayout(Struct, frozen=True):
    """What `chart` takes of a chart; `of` is the record and the key that define it, where there is no `help`.

    `metrics` are `name role label` of what is drawn of many series; `quiet`: left out where all is 0.
    """

    type: str
    x: tuple[str, str]
    y: tuple[str, str]
    title: str = ""
    of: tuple[str, str] = ("", "")
    help: str | None = None
    y_min: int | None = None
    y_max: int | None = None
    notes: tuple[str, ...] = ()
    sync: str | None = None
    select: str | None = None
    small: bool = False
    metrics: str = ""
    quiet: bool = False


class ViewLayout(Struct, frozen=True):
    """A table of `analyze --table` on a page, `table` where that has another name. `columns` are like its own, with
    "bar" behind a key that has one; `bars` are those of its own columns. `links`: page, parameter and key of the
    row."""

    table: str | None = None
    title: str | None = None
    columns: str = ""
    bars: tuple[str, ...] = ()
    links: Mapping[str, tuple[str, str, str]] = {}
    open_depth: int | None = None
    own_notes: bool = True


class Advice(Struct, frozen=True):
    """What to record for a view, and options of `stepscope run` that do."""

    text: str
    options: tuple[str, ...] = ()


class _Layout(Struct, frozen=True):
    """Figures are a text, or several with the reason why one is missing; `of_findings` are pages that show more of a
    finding, by its rule or its category."""

    tables: dict[str, TableLayout]
    figures: dict[str, str | dict[str, str]]
    charts: dict[str, ChartLayout]
    views: dict[str, ViewLayout]
    advice: dict[str, Advice]
    of_findings: dict[str, tuple[str, ...]]


LAYOUT = msgspec.json.decode((resources.files(__package__) / "layout.json").read_bytes(), type=_Layout)


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


def optional(text: str | None, limit: int = MAX_NAME) -> str | None:
    """A harmless text, None where there is none."""
    return None if text is None else plain(text, limit)


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
    odd: Iterable[tuple[int, str]] = (),
    joined: bool = False,
    faint: bool = False,
    held: bool = False,
) -> dict[str, Any]:
    """One line, area or set of bars; `role` gives it one colour on all pages.

    Of intervals `low` and `high`, and `points`: for every x the measurements that its value is the mean of. Of lines
    `odd`: position and word ("NaN") of values that are not finite; `joined` leads over x at which there is none, `held`
    stays at a value until the next, and `faint` are the values that the next series smooths.
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
    marked = [[at, plain(word)] for at, word in odd]
    return {
        **made,
        **({"odd": marked} if marked else {}),
        **{name: True for name, is_so in {"joined": joined, "faint": faint, "held": held}.items() if is_so},
    }


def mark(start: float | str, end: float | str, label: str, *, event: bool = False) -> dict[str, Any]:
    """A point (`start` equal to `end`) or range of x to be pointed out; an `event` says nothing of the values there."""
    ends = {"from": start, "to": end}
    return {
        **{key: plain(at) if isinstance(at, str) else number(at) for key, at in ends.items()},
        "label": plain(label),
        **({"event": True} if event else {}),
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
    small: bool = False,
) -> Block:
    """A chart of type line, stacked_area, stacked_bars, bars, histogram, scatter, interval, heat or multiples.

    Of a heat map each series is a row of cells, of multiples a small chart; both have one scale for all. A heat map
    that is a contour has `lines` and `points` besides (web/src/lib/types.ts).

    Args:
        sentence: what the picture says, for those who do not see it.
        x: label, unit and values; every series has as many.
        y: label and unit.
        sync: charts with the same name zoom together.
        select: "steps" where a range drawn on x (step numbers) selects steps on all pages.
        small: beside another, without its sentence: one of many, or of an overview.
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
        **({"small": True} if small else {}),
    }


def axis(label: str, values: Iterable[Any], *, log: bool = False, choices: Sequence[str] = ()) -> dict[str, Any]:
    """One of parallel axes: a value for each line, or the number of its choice; null where a line has none."""
    known = list(choices)
    placed = [known.index(value) if value in known else None for value in values] if known else map(number, values)
    return {"label": plain(label), "log": log, "choices": [plain(each) for each in known], "values": list(placed)}


def drawn(
    name: str, sentence: str, along: Iterable[Any], parts: Iterable[Mapping[str, Any] | tuple[Any, ...]], **given: Any
) -> Block:
    """A chart as it is declared by this name, but for what is `given`, over the values `along` x. `parts` are made by
    `series`, or (name, values, role) in the unit of y."""
    declared = LAYOUT.charts[name]
    made: dict[str, Any] = {"id": name, **msgspec.structs.asdict(declared), **given}
    of, text = made.pop("of"), made.pop("help")
    del made["metrics"], made["quiet"]
    made["x"] = (*made["x"], along)
    made["series"] = [
        each if isinstance(each, Mapping) else series(each[0], made["y"][1], each[1], role=each[2]) for each in parts
    ]
    help = meaning(*of) if text is None else help_(text, "utilisation" if "utilisation" in text else None)
    return chart(sentence=sentence, help=help, **made)


def folded(made: Iterable[Block]) -> list[Block]:
    """Blocks of which the title alone is seen until they are opened."""
    return [{**block, "folded": True} for block in made]


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
        "healthy": optional(healthy, MAX_TEXT),
        "abstained": [{"rule": plain(row["rule"]), "needs": plain(row["needs"], MAX_TEXT)} for row in abstained],
        "ignored": [{"rule": plain(row["rule"]), "reason": plain(row["reason"], MAX_TEXT)} for row in ignored],
    }


def flame(id: str, document: Mapping[str, Any], first: str | None = None) -> Block:
    """A stepscope.flame/1 document; `first` is the key of the tree to begin with."""
    harmless = {name: [plain(each, MAX_TEXT) for each in document[name]] for name in ("names", "files")}
    return {"kind": "flame", "id": id, "document": {**document, **harmless}, "first": first}


def help_(text: str, picture: str | None = None) -> Help:
    """What a figure means. `picture` names a drawing of the front end: "utilisation"."""
    return {"text": plain(text, MAX_TEXT), "picture": picture}


def meaning(record: str, key: str) -> Help | None:
    """The definition of a figure of a record of the analysis ("StepFacts"), as in docs/definitions.md; None of ""."""
    return _defined(key, _definition_of(record, key))


def column_meaning(table: str, key: str) -> Help | None:
    """The definition of a column of a table of `stepscope analyze --table`."""
    from stepscope.report.definitions import definition

    return _defined(key, definition(table, key))


def _definition_of(record: str, key: str) -> Definition | None:
    from stepscope.report.definitions import definition_of  # reads all definitions, which a terminal does not need

    return definition_of(record, key) if record else None


def _defined(key: str, found: Definition | None) -> Help | None:
    picture = "utilisation" if "utilization" in key or "sm_efficiency" in key else None
    return help_(found.definition, picture) if found else None


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
        "function": optional(function),
        "shown": plain(shown),
        "guess": guess,
        "code": optional(code),
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


def value_text(value: Any, unit: str, *, signed: bool = False) -> str:
    """A value as the terminal shows it; missing is a dash, a place its short form."""
    if isinstance(value, Mapping):
        return ("~" if value.get("guess") else "") + str(value["shown"])
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, str):
        return words.MISSING if value is None else value
    said = _UNITS.get(unit, words.count)(abs(value) if signed else value)
    return said if not signed or value == 0 else ("+" if value > 0 else "-") + said


_UNITS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "ns": words.nanoseconds,
    "us": lambda value: words.milliseconds(value / 1e3),
    "ms": words.milliseconds,
    "s": words.seconds,
    "bytes": words.size,
    "share": words.percent,
    "pct": lambda value: words.percent(value / 100),
    "per_s": lambda value: f"{words.number(value)} /s",
    "bytes_per_s": lambda value: f"{words.size(value)}/s",
    "celsius": lambda value: f"{words.count(value)} °C",
    "W": lambda value: f"{words.count(value)} W",
    "MHz": lambda value: f"{words.count(value)} MHz",
    "scalar": lambda value: f"{value:.4g}",  # of the training's own, however small it is
}


def text(words: str, tone: str = "plain", link: Link | None = None) -> Block:
    """A paragraph, with a link behind it. `tone` is "plain", "note", "warning", "good", or "head": a heading up to the
    first colon."""
    return {"kind": "text", "text": plain(words, MAX_TEXT), "tone": tone, **({"link": link} if link else {})}


def empty(title: str, why: str, record: str = "", command: str | None = None) -> Block:
    """Why there is nothing, what to record so that there is, and a command that does."""
    return {
        "kind": "empty",
        "title": plain(title),
        "why": plain(why, MAX_TEXT),
        "record": plain(record, MAX_TEXT),
        "command": optional(command, MAX_TEXT),
    }


def sentence(words: str) -> str:
    """A reason as a sentence: a capital letter in front, a full stop at the end."""
    words = words.strip()
    return capital(words) + ("" if words[-1:] in ".!?…" else ".")


def capital(words: str) -> str:
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
        "note": optional(note),
        "missing": optional(missing),
    }


def measures(record: Any, declared: str, *, of: str = "") -> list[dict[str, Any]]:
    """Figures of a record of the analysis, or of a mapping of a record named `of`, as they are declared.

    Those that are not known are left out, unless a reason is declared.
    """
    record_name, items, texts = of or type(record).__name__, [], LAYOUT.figures[declared]
    for text, missing in {texts: ""}.items() if isinstance(texts, str) else texts.items():
        for each in columns(text):
            value = record.get(each.key) if isinstance(record, Mapping) else getattr(record, each.key)
            if value is not None or missing:
                found = _definition_of(record_name, each.key)
                unit = each.unit or unit_of(each.key, found.unit if found else "") or "number"
                help = _defined(each.key, found)
                items.append(figure(each.label, value, unit, help=help, missing=missing or None))
    return items


def figures(items: Iterable[Mapping[str, Any]], title: str | None = None) -> Block:
    return {"kind": "figures", "title": optional(title), "items": [dict(item) for item in items]}


def fact(label: str, value: Any, note: str | None = None) -> dict[str, Any]:
    """A name with a text; None is "not known"."""
    return {
        "label": plain(label),
        "value": optional(value, MAX_TEXT),
        "note": optional(note),
    }


def facts(title: str, rows: Iterable[Mapping[str, Any]]) -> Block:
    return {"kind": "facts", "title": plain(title), "rows": [dict(row) for row in rows]}


def choice(label: str, param: str, value: str, options: Iterable[tuple[str, str]]) -> Block:
    """A choice that reloads the page with `param` set; `options` are (value, label)."""
    made = [{"value": plain(key), "label": plain(shown)} for key, shown in options]
    return {"kind": "choice", "label": plain(label), "param": param, "value": plain(value), "options": made}


def column(
    key: str,
    label: str,
    unit: str = "",
    *,
    help: Help | None = None,
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
        "numeric": unit not in ("", "text"),
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


PLACE = "place"
FLAGS = ("bar", "signed", "quiet", "code", "hidden")


def _whole(file: str, line: int | None) -> str:
    return file if line is None else f"{file}:{line}"


class Alone(Struct, frozen=True):
    """What a table must know of a document without a run around it, whose paths stand as they are."""

    limit: int = 200
    ranked: int | None = None  # rows of a table that begins with its largest figures, `limit` where None
    shorten: Shorten = _whole


class Col(Struct, frozen=True):
    """A column: `say` makes the cell of a row, by default its value under `key`. The key "place" is a line of code.

    `help` is the definition where the table's record has none under that key; of `flags`, "code" shortens the path in a
    text, "signed" is for differences, "bar" draws one, "quiet" leaves the column out where all of it is 0 or empty, and
    "hidden" has rows carry what no column shows.
    """

    label: str
    key: str
    unit: str = ""
    flags: tuple[str, ...] = ()
    say: Callable[[Row], Any] | None = None
    help: str | None = None


# words for a value of a run, written where a unit stands
TERMS: dict[str, Callable[[Any], str]] = {
    "term": words.term,
    "part": words.part,
    "stage": lambda value: words.STAGES.get(value, value),
    "wait": lambda value: words.WAIT_PARTS.get(value, value),
    "joules": words.joules,
    "list": "; ".join,
}


def columns(
    text: str, help: Mapping[str, str] | None = None, say: Mapping[str, Callable[[Row], Any]] | None = None
) -> tuple[Col, ...]:
    """Columns written as `Label: key unit flag…`, separated by semicolons; `help` and `say` by key."""
    made = []
    for each in text.split("; "):
        label, _, declared = each.rpartition(": ")
        key, *more = declared.split()
        unit = "".join(word for word in more if word not in FLAGS)
        flags = tuple(word for word in more if word in FLAGS)
        said = (say or {}).get(key)
        if unit in TERMS:
            said, unit = _in_words(key, TERMS[unit]), ""
        made.append(Col(label, key, unit, flags, said, (help or {}).get(key)))
    return tuple(made)


def _in_words(key: str, words_of: Callable[[Any], str]) -> Callable[[Row], Any]:
    return lambda row: words_of(row[key]) if row[key] else None


def rows_table(
    context: PageContext | Alone,
    name: str,
    rows: Iterable[Row] | None,
    *,
    id: str | None = None,
    title: str | None = None,
    columns_of: Sequence[Col] | None = None,
    without: Collection[str] = (),
    say: Mapping[str, Callable[[Row], Any]] | None = None,
    notes: Iterable[str] = (),
    total: int | None = None,
    limit: int | None = None,
) -> list[Block]:
    """The table that is declared by this name, `id` on its page; nothing where there is no row.

    Columns in which no row says anything are left out, and those `without` which it is asked for. `columns_of` stand
    for the declared ones, `limit` for that of the context; `say` makes cells, by key.
    """
    declared = LAYOUT.tables[name]
    own = columns(declared.columns, declared.help, say) if columns_of is None else columns_of
    made = [{each.key: _cell(each, row, context) for each in own} for row in rows or ()]
    says = {
        each.key
        for each in own
        for row in made
        if row[each.key] is not None and (row[each.key] or "quiet" not in each.flags)
    }
    used = [each for each in own if (declared.whole or each.key in says) and each.key not in without]
    # nobody points at a column on a terminal or on paper, and reading all definitions takes time
    record = "" if isinstance(context, Alone) else declared.record
    heads = [
        column(
            each.key,
            each.label,
            each.unit or "text",
            help=meaning(record, each.key) if each.help is None else help_(each.help) if each.help else None,
            bar="bar" in each.flags,
            signed="signed" in each.flags,
            place=each.key == PLACE,
        )
        for each in used
        if "hidden" not in each.flags
    ]
    shown = table(
        id or name.rpartition("/")[2],
        declared.title if title is None else title,
        heads,
        made,
        limit=context.limit if limit is None else limit,
        total=total,
        sorted_by=declared.sorted_by,
        notes=(*declared.notes, *notes),
    )
    return [shown] if made else []


def _cell(column: Col, row: Row, context: PageContext | Alone) -> Any:
    if column.say is not None:
        return column.say(row)
    if column.key != PLACE:
        value = row.get(column.key)
        return context.shorten(str(value), None) if "code" in column.flags and value else value
    found = row.get(PLACE) if PLACE in row else row
    if not found or not found.get("file"):
        return None
    return place_of({**found, "place_exact": row.get("place_exact", True)}, context.shorten, row.get("code"))
