"""Pages as plain HTML: what `blocks` say, drawn without a script, for where no front end was built and none may run.

One function for each kind of block of `web/src/lib/types.ts`. Every text goes through `escape.markup`; the page forbids
itself everything but its own style sheet, and is bounded by showing fewer rows and cards and shorter texts.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from stepscope.dashboard.blocks import Block, value_text
from stepscope.report import words
from stepscope.report.escape import markup

# Colours of the parts of a step by position; neighbours differ in lightness too, both themes keep 3:1 to the page.
PART_COLOURS = ("#c2410c", "#2563eb", "#0d9488", "#9333ea", "#a16207", "#be185d", "#64748b")

STYLE = "\n" + Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
STYLE += "".join(f".part-{at} {{ background: {colour}; }}\n" for at, colour in enumerate(PART_COLOURS))


MAX_BYTES = 3_000_000
POLICY = "default-src 'none'; style-src {}; base-uri 'none'; form-action 'none'"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 180, 72, 22, 10  # of a drawing, in its own units
ROW, NAMES = 26, 330  # height of a line of intervals, and the room that its name has
HEAT_ROWS, CELL, SHADES, HEAT_LOG = 60, 15, 16, 100  # of a heat map; a scale of larger ratios is logarithmic
NAME = 44  # characters of a name in a drawing
FEW = 24  # values of x up to which the figures of a chart stand in a table too
STACKED = ("stacked_area", "stacked_bars")
LINES = ("line", "multiples", "stacked_area")
TONES = {"good": "healthy", "warning": "unexplained", "note": "soft", "head": "head"}

Item = Mapping[str, Any]


class Level(Struct, frozen=True):
    """What a page may hold: rows of a table, cards of findings, characters of a text and of a cell."""

    rows: int
    cards: int
    text: int
    cell: int


LEVELS = (Level(60, 100, 2_000, 240), Level(20, 40, 600, 160), Level(5, 12, 300, 80))


class Section(Struct, frozen=True):
    """The blocks of one page under its title; one that is not `opened` lies under a fold."""

    title: str
    blocks: Sequence[Block]
    opened: bool = True


def render(title: str, sections: Sequence[Section], note: str | None = None, command: str | None = None) -> str:
    """A whole page of at most 3 MB; `note` is a sentence at its end, `command` made what it shows."""
    last = f"<p class='soft'>{markup(note, 600)}</p>\n" if note else ""
    head = (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(hashes([STYLE]))}">\n'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='referrer' content='no-referrer'>\n"
        f"<title>{markup(title, 120)} – stepscope</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
    )
    end = f"\n{last}</main>\n</body>\n</html>\n"
    return head + body(title, sections, MAX_BYTES - len((head + end).encode("utf-8")), command) + end


def body(title: str, sections: Sequence[Section], most_bytes: int, command: str | None = None) -> str:
    """What the page shows, to stand in another page beside `STYLE`: as much of it as fits into `most_bytes`."""
    heading = f"<h1>{markup(title, 120)}</h1>\n"
    heading += f"<p class='soft'><code>{markup(command)}</code></p>\n" if command else ""
    for shown in (sections, sections[:1]):
        for level in LEVELS:
            made = heading + "\n".join(_section(section, level) for section in shown)
            if len(made.encode("utf-8")) <= most_bytes:
                return made
    return heading if len(heading.encode("utf-8")) <= most_bytes else ""


def hashes(texts: Iterable[str]) -> str:
    """The sources of a policy that allow exactly these texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii") for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def drawn(shown: Iterable[Block], level: Level) -> str:
    """Blocks as markup, to stand in another document; of folded ones the title alone is seen."""
    made = []
    for block in shown:
        draw = _BLOCKS[block["kind"]]
        if "folded" in block:
            inside = draw({**block, "title": None}, level)
            made.append(f"<details><summary>{markup(block['title'])}</summary>{inside}</details>")
        else:
            made.append(draw(block, level))
    return "\n".join(made)


def _section(section: Section, level: Level) -> str:
    shown, title = drawn(section.blocks, level), markup(section.title)
    if section.opened:
        return f"<section><h2>{title}</h2>\n{shown}\n</section>"
    return f"<details><summary>{title}</summary>\n{shown}\n</details>"


def _paragraph(text: str, level: Level, style: str | None = "soft") -> str:
    return f"<p{_class(style)}>{markup(text, level.text)}</p>"


def _text(block: Block, level: Level) -> str:
    link = f" {markup(block['link']['label'])}." if "link" in block else ""
    return f"<p{_class(TONES.get(block['tone']))}>{markup(block['text'], level.text)}{link}</p>"


def _empty(block: Block, level: Level) -> str:
    why = f"<p><strong>{markup(block['title'])}</strong>: {markup(block['why'], level.text)}</p>"
    record = _paragraph(block["record"], level) if block["record"] else ""
    command = f"<pre><span>{markup(block['command'], level.text)}</span></pre>" if block["command"] else ""
    return why + record + command


def _figures(block: Block, level: Level) -> str:
    made = ""
    for item in block["items"][: level.rows]:
        said = markup(value_text(item["value"], item["unit"]), level.cell)
        about = item["note"] if item["value"] is not None else item["missing"] or item["note"]
        note = f" <span class='soft'>{markup(about, level.cell)}</span>" if about else ""
        made += f"<div><dt>{markup(item['label'], level.cell)}</dt><dd>{said}{note}</dd></div>"
    return f"{_heading(block['title'])}<dl class='figures'>{made}</dl>"


def _facts(block: Block, level: Level) -> str:
    rows = block["rows"][: level.rows]
    columns = [_column("label", "Name"), _column("value", "Value"), _column("note", "Note")]
    whole = Level(level.rows, level.cards, level.text, level.text)  # commands are copied
    return _heading(block["title"]) + _rows(columns, rows, _first(len(rows), len(block["rows"])), whole)


def _table(block: Block, level: Level) -> str:
    rows = block["rows"][: level.rows]
    notes = " ".join([_first(len(rows), block["total"]), *block["notes"]]).strip()
    return _heading(block["title"]) + _rows(block["columns"], rows, notes, level, tree=bool(block.get("tree")))


def _column(key: str, label: str, unit: str = "text") -> Item:
    return {"key": key, "label": label, "unit": unit, "numeric": unit != "text"}


def _first(shown: int, total: int) -> str:
    return f"The first {shown} of {total}." if total > shown else ""


def _rows(columns: Sequence[Item], rows: Sequence[Item], caption: str, level: Level, *, tree: bool = False) -> str:
    used = [column for column in columns if any(row.get(column["key"]) is not None for row in rows)]
    styles = [_class("right" if each["numeric"] else "line" if each.get("place") else None) for each in used]
    head = "".join(
        f"<th scope='col'{style}>{markup(each['label'])}</th>" for style, each in zip(styles, used, strict=True)
    )
    body = []
    for row in rows:
        cells = [f"<td{style}>{_cell(row, each, level)}</td>" for style, each in zip(styles, used, strict=True)]
        if tree:
            cells[0] = cells[0].replace(">", ">" + "&nbsp;" * (2 * min(int(row.get("depth") or 0), 20)), 1)
        body.append(f"<tr>{''.join(cells)}</tr>")
    said = f"<caption>{markup(caption, level.text)}</caption>" if caption else ""
    table = f"<table>{said}<thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(body)}\n</tbody></table>"
    return f"<div class='scroll'>{table}</div>"


def _cell(row: Item, column: Item, level: Level) -> str:
    value = row.get(column["key"])
    unit = str(row.get(column["unit_key"])) if "unit_key" in column else column["unit"]
    said = markup(value_text(value, unit, signed=bool(column.get("signed"))), level.cell)
    if not isinstance(value, Mapping):
        return said
    named = value.get("function") if "function" not in row else None  # a column of its own says it
    function = f" <code>{markup(named, level.cell)}</code>" if named else ""
    code = f"<br><code>{markup(value['code'], level.cell)}</code>" if value.get("code") else ""
    return f"<code>{said}</code>{function}{code}"


def _findings(block: Block, level: Level) -> str:
    parts = [_card(card, number, level) for number, card in numbered(block["findings"][: level.cards])]
    parts += _left_out(block["findings"], level, "findings")
    if block["healthy"]:
        parts.append(_paragraph(block["healthy"], level, "healthy"))
    if block["risks"]:
        parts.append(
            "<h2>Risks</h2><p class='soft'>What may end or slow down the run later. No cost was measured, so that "
            "these are not ranked among the findings.</p>"
        )
        parts += [_card(card, "", level) for card in block["risks"][: level.cards]]
        parts += _left_out(block["risks"], level, "risks")
    for rows, label, key in (
        (block["abstained"], "Not judged", "needs"),
        (block["ignored"], "Ignored by configuration", "reason"),
    ):
        said = (f"<code>{markup(row['rule'])}</code>: {markup(row[key], level.text)}" for row in rows)
        if items := "".join(f"<li>{each}</li>" for each in said):
            parts.append(f"<details><summary>{label} ({len(rows)})</summary><ul>{items}</ul></details>")
    return "\n".join(parts)


def _left_out(cards: Sequence[Item], level: Level, noun: str) -> list[str]:
    more = len(cards) - level.cards
    return [f"<p class='soft'>and {more} smaller {noun}</p>"] if more > 0 else []


def numbered(cards: Iterable[Item]) -> Iterator[tuple[str, Item]]:
    """Causes as 1., 2.; what one explains stands behind it, as 1.1."""
    cause, below = 0, 0
    group: set[str] = set()
    for card in cards:
        if group & {each["id"] for each in card["explained_by"]}:
            below += 1
            yield f"{cause}.{below}", card
        else:
            cause, below, group = cause + 1, 0, set()
            yield f"{cause}.", card
        group.add(card["id"])


def _card(card: Item, number: str, level: Level) -> str:
    cost = ""
    if card["cost_ms_per_step"] is not None or card["share"] is not None:
        said = f"{words.milliseconds(card['cost_ms_per_step'])} a step, {words.percent(card['share'])}"
        cost = f"<span class='cost'>{markup(' '.join((said, card['of'] or '')).strip(), level.text)}</span>"
    places = "".join(_place(where, level, alone=rank > 0) for rank, where in enumerate(card["where"]))
    seen = (
        f"{row['metric']}: {row['text']}" + (f" ({row['source']})" if row["source"] else "") for row in card["evidence"]
    )
    learn = markup(card["learn"]) if card["learn"].startswith("https://") else ""
    facts = {
        "Seen": _list(seen),
        "Sources": _list(card["disagreements"]),
        "Fix": markup(card["fix"], level.text),
        "Price": markup(card["caveat"], level.text),
        "Gain": markup(card["gain"] or "", level.text),
        "Try": ", ".join(f"<code>{markup(row['knob'])}={markup(row['value'])}</code>" for row in card["try"]),
        "Command": f"<code>{markup(card['command'], level.text)}</code>" if card["command"] else "",
        "Ranks": markup(", ".join(str(rank) for rank in card["ranks"]), level.text),
        "Wrong if": markup(card["falsified_by"], level.text),
        "Explains": _list(f"{row['title']} (not in addition)" for row in card["explains"]),
        "Explained by": _list(f"{row['title']} (not in addition)" for row in card["explained_by"]),
        "Learn": f"<a href='{learn}' rel='noreferrer'>{learn}</a>" if learn else "",
        "Rule": f"<code>{markup(card['rule'])}</code>",
    }
    shown = "".join(f"<dt>{label}</dt><dd>{content}</dd>" for label, content in facts.items() if content)
    below = "" if number.endswith(".") or not number else " explained"
    return (
        f"<article class='finding {card['severity']}{below}'><header><span class='severity'>{card['severity']}</span>"
        f"<span class='soft'>{card['confidence']} confidence</span>{cost}</header>"
        f"<h3>{markup(' '.join((number, card['title'])).strip(), level.text)}</h3>{places}<dl>{shown}</dl></article>"
    )


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{markup(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _place(where: Item, level: Level, *, alone: bool) -> str:
    """A place with its source: the line `alone`, or with the lines around it."""
    function = f" <code>{markup(where['function'], level.cell)}</code>" if where["function"] else ""
    part = where["share"] if where["share"] is not None and where["share"] < words.WHOLE else None
    share = f" <span class='soft'>{markup(words.percent(part))} of it</span>" if part is not None else ""
    head = f"<p><code>{markup(value_text(where, ''), level.cell)}</code>{function}{share}</p>"
    lines = "".join(
        f"<span{_class('hit' if line['here'] else None)}>{line['line']:>5}  {markup(line['text'], level.cell)}</span>"
        for line in where["source"] or ()
        if line["here"] or not alone
    )
    edited = "<p class='soft'>The file was edited since the run.</p>" if lines and where["edited"] else ""
    return f"{head}<pre>{lines}</pre>{edited}" if lines else head


def _overview(block: Block, level: Level) -> str:
    """The parts of a step as one bar, the findings in a line each; figures, charts and lines as on any page."""
    made = _figures(block["figures"], level) if block["figures"]["items"] else ""
    if bar := block["bar"]:
        rects, legend, left = "", "", 0.0
        for at, row in enumerate(bar["parts"]):
            number, width = at % len(PART_COLOURS), row["share"] * WIDTH
            rects += f"<rect x='{left:.1f}' width='{width:.1f}' height='18' fill='{PART_COLOURS[number]}'/>"
            said = f"{row['label']} {value_text(row['ms'], 'ms')} ({words.percent(row['share'])}) "
            legend += f"<span class='swatch part-{number}'></span>{markup(said)}"
            left += width
        picture = f"<svg viewBox='0 0 {WIDTH} 18' role='img' aria-label='{markup(bar['sentence'], 600)}'>{rects}</svg>"
        made += f"{_heading(bar['title'])}{picture}<p>{legend}</p>"
    rows = ""
    for row in block["findings"]:
        cost = f"{markup(words.milliseconds(row['cost_ms_per_step']))} a step, {markup(words.percent(row['share']))}"
        command = f"<br><code>{markup(row['command'], level.text)}</code>" if row["command"] else ""
        rows += f"<li>{markup(row['title'], level.text)} <strong>{cost}</strong>{command}</li>"
    made += _heading("What costs most") + (f"<ol>{rows}</ol>" if rows else "")
    made += _paragraph(block["healthy"], level, "healthy") if block["healthy"] else ""
    more = block["total"] - len(block["findings"])
    made += f"<p class='soft'>{words.things(more, 'finding')} more below.</p>" if more > 0 else ""
    return made + drawn(block["charts"], level) + drawn(block["notes"], level)


def _chart(block: Block, level: Level) -> str:
    """The sentence, the drawing, and where there are few the figures themselves."""
    along, series = block["x"]["values"], block["series"]
    draw = {"interval": _intervals, "heat": _heat}.get(block["type"])
    parts = [_parallel(block, level), (draw or _drawing)(block)]
    parts += [_paragraph(note, level) for note in block["notes"]]
    if len(along) <= FEW and series and draw is None:
        columns = [_column("x", block["x"]["label"], "text" if _is_text(along) else block["x"]["unit"])]
        columns += [_column(str(at), row["name"], row["unit"]) for at, row in enumerate(series)]
        rows = [
            {
                "x": x,
                **{
                    str(at): dict(row.get("odd", ())).get(place, _at(row["values"], place))
                    for at, row in enumerate(series)
                },
            }
            for place, x in enumerate(along[: level.rows])
        ]
        parts.append(_rows(columns, rows, _first(len(rows), len(along)), level))
    return "".join(parts)


def _parallel(block: Block, level: Level) -> str:
    """The sentence: of lines through axes the figures are in the table that stands beside it."""
    return _heading(block["title"]) + _paragraph(block["sentence"], level, None)


def _is_text(values: Sequence[Any]) -> bool:
    return any(isinstance(value, str) for value in values)


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _svg(block: Block, height: float, inside: str, said: str, style: str | None = None) -> str:
    """A picture with its sentence for those who do not see it, and what is said below."""
    label = markup(block["sentence"], 2_000)
    box = f"<svg{_class(style)} viewBox='0 0 {WIDTH} {height}' role='img' aria-label='{label}'>{inside}</svg>"
    return f"{box}<p class='soft'>{said}</p>"


def _drawing(block: Block) -> str:
    """Every series over x: as a line, an area, bars or points; those of stacked charts upon each other."""
    given, kind = block["x"]["values"], block["type"]
    along = [float(at) for at in range(len(given))] if _is_text(given) or None in given else [float(x) for x in given]
    series: list[_Pairs] = []
    under: dict[int, float] = {}
    for row in block["series"]:
        if kind in STACKED:
            over = {at: under.get(at, 0.0) + (value or 0.0) for at, value in enumerate(row["values"])}
            series.append([(under.get(at, 0.0), top) for at, top in over.items()])
            under |= over
        else:
            series.append([None if value is None else (0.0, float(value)) for value in row["values"]])
    known = [y for row in series for pair in row if pair is not None for y in pair]
    if len(along) < 2 or not known:
        return ""
    low, high, first = min(0.0, *known), max(known), min(along)
    wide, tall = (max(along) - first) or 1.0, (high - low) or 1.0
    slot = 0.0 if kind in LINES else (WIDTH - LEFT - 8) / len(along)

    def x(value: float) -> float:
        return LEFT + slot / 2 + (value - first) / wide * (WIDTH - LEFT - 8 - slot)

    def y(value: float) -> float:
        return TOP + (high - value) / tall * (HEIGHT - BOTTOM - TOP)

    marks, legend = [], ""
    for number, (pairs, row) in enumerate(zip(series, block["series"], strict=True)):
        part = number % len(PART_COLOURS)
        colour = PART_COLOURS[part]
        legend += f"<span class='swatch part-{part}'></span>{markup(row['name'])} "
        for run in _runs(along, pairs, row):
            over_ = [f"{x(at):.1f},{y(pair[1]):.1f}" for at, pair in run]
            if slot:
                marks += [_bar(x(at), y(pair[0]), y(pair[1]), slot, colour, kind) for at, pair in run]
            elif kind in ("line", "multiples"):
                faint = " stroke-opacity='0.4'" if row.get("faint") else ""
                marks.append(f"<polyline points='{' '.join(over_)}' fill='none' stroke='{colour}'{faint}/>")
            else:
                below = [f"{x(at):.1f},{y(pair[0]):.1f}" for at, pair in reversed(run)]
                marks.append(f"<polygon points='{' '.join(over_ + below)}' fill='{colour}'/>")
        marks += [
            f"<text x='{x(along[at]):.1f}' y='{TOP + 4}' text-anchor='middle' fill='{colour}'>×</text>"
            for at, _ in row.get("odd", ())
        ]
    unit = block["y"]["unit"]
    ends = [markup(value_text(value, block["x"]["unit"]), NAME) for value in (given[0], given[-1])]
    marks += [
        f"<text x='{LEFT - 6}' y='18' text-anchor='end'>{markup(value_text(high, unit))}</text>",
        f"<text x='{LEFT - 6}' y='{HEIGHT - BOTTOM}' text-anchor='end'>{markup(value_text(low, unit))}</text>",
        f"<text x='{LEFT}' y='{HEIGHT - 5}'>{markup(block['x']['label'])} {ends[0]}</text>",
        f"<text x='{WIDTH - 8}' y='{HEIGHT - 5}' text-anchor='end'>{ends[1]}</text>",
    ]
    return _svg(block, HEIGHT, "".join(marks), legend)


def _bar(middle: float, floor: float, top: float, slot: float, colour: str, kind: str) -> str:
    """A bar from `floor` to `top`, of a scatter a point at `top`."""
    width, height = (3.0, 3.0) if kind == "scatter" else (max(slot * 0.8, 1.0), abs(floor - top))
    left, upper = middle - width / 2, min(top, floor) if kind != "scatter" else top - 1.5
    return f"<rect x='{left:.1f}' y='{upper:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{colour}'/>"


_Pairs = list[tuple[float, float] | None]  # from and to of every x, None where it is missing


def _runs(along: Sequence[float], row: _Pairs, given: Item) -> Iterator[list[tuple[float, tuple[float, float]]]]:
    """Stretches without a missing value: a line leads over none, unless its series is `joined`."""
    run: list[tuple[float, tuple[float, float]]] = []
    odd = {at for at, _ in given.get("odd", ())}
    for at, (x, pair) in enumerate(zip(along, row, strict=False)):
        if pair is not None:
            run += [(x, run[-1][1])] if run and given.get("held") else []
            run.append((x, pair))
        elif run and not (given.get("joined") and at not in odd):
            yield run
            run = []
    if run:
        yield run


def _intervals(block: Block) -> str:
    """A line for each name: interval and estimate of every series, and where nothing changes dashed."""
    names, series = [str(name) for name in block["x"]["values"]], block["series"]
    ends = [value for row in series for key in ("values", "low", "high") for value in row.get(key) or ()]
    ends += [value for row in series for each in row.get("points") or () for value in each]
    ends = [value for value in ends if value is not None]
    if not names or not ends:
        return ""
    low, high = min(0.0, *ends), max(0.0, *ends)
    wide = (high - low) or 1.0

    def x(value: float) -> float:
        return NAMES + float(value - low) / wide * (WIDTH - NAMES - 16)

    tall, labels = ROW * len(names), words.shortened(names, NAME)
    marks = [f"<line class='zero' x1='{x(0.0):.1f}' y1='0' x2='{x(0.0):.1f}' y2='{tall}'/>"]
    for at, name in enumerate(names):
        middle = at * ROW + ROW / 2
        marks.append(f"<text class='name' x='0' y='{middle + 4}'>{markup(labels[name], NAME)}</text>")
        for row in series:
            least, most, value = (_at(row.get(key) or (), at) for key in ("low", "high", "values"))
            if least is not None and most is not None:
                width = f"{max(x(most) - x(least), 1):.1f}"
                marks.append(f"<rect class='bar' x='{x(least):.1f}' y='{middle - 6}' width='{width}' height='12'/>")
            marks += [
                f"<rect class='dot' x='{x(each) - 3:.1f}' y='{middle - 3:.1f}' width='6' height='6' rx='3'/>"
                for each in _at(row.get("points") or (), at) or ()
                if each is not None
            ]
            if value is not None:
                style, across = "ceiling" if row["role"] == "ceiling" else "tick", f"{x(value):.1f}"
                marks.append(f"<line class='{style}' x1='{across}' y1='{middle - 9}' x2='{across}' y2='{middle + 9}'/>")
    unit = block["y"]["unit"]
    said = f"{block['y']['label']}, {value_text(low, unit, signed=True)} to {value_text(high, unit, signed=True)}"
    signs = "Bar: interval; tick: estimate; dots: single measurements; dashed: no change."
    return _svg(block, tall, "".join(marks), f"{markup(said)}. {signs}", "intervals")


def _heat(block: Block) -> str:
    """A row of cells for each series on one scale, as in `web/src/charts/heat.ts`; crosses are not finite."""
    series, along = block["series"][:HEAT_ROWS], block["x"]["values"]
    known = [value for row in series for value in row["values"] if value is not None]
    if not known or not along:
        return ""
    low, high = min(known), max(known)
    least = min((value for value in known if value > 0), default=high)
    logarithmic = low >= 0 and high > HEAT_LOG * least
    low = least if logarithmic else low
    wide = (WIDTH - NAMES) / len(along)

    def share(value: float) -> float:
        if high <= low or value <= low:
            return 0.0
        return math.log(value / low) / math.log(high / low) if logarithmic else (value - low) / (high - low)

    labels = words.shortened((row["name"] for row in series), NAME)
    marks: list[str] = []
    shades: dict[int, list[str]] = {}  # one path for all cells of a shade
    for at, row in enumerate(series):
        foot = at * CELL + CELL - 3
        marks.append(f"<text class='name' x='0' y='{foot}'>{markup(labels[row['name']], NAME)}</text>")
        for column, value in enumerate(row["values"]):
            if value is not None:
                square = f"M{NAMES + column * wide:.1f} {at * CELL}h{wide:.1f}v{CELL - 1}h-{wide:.1f}z"
                shades.setdefault(round(share(value) * SHADES), []).append(square)
        marks += [
            f"<text x='{NAMES + (column + 0.5) * wide:.1f}' y='{foot}' text-anchor='middle'>×</text>"
            for column, _ in row.get("odd", ())
        ]
    cells = [
        f"<path class='cell' fill-opacity='{0.08 + 0.92 * shade / SHADES:.2f}' d='{''.join(squares)}'/>"
        for shade, squares in shades.items()
    ]
    unit = block["y"]["unit"]
    ends = [markup(value_text(value, block["x"]["unit"]), NAME) for value in (along[0], along[-1])]
    said = f"{markup(block['x']['label'])} {ends[0]} to {ends[1]}; from light, {value_text(low, unit)}, to dark, "
    said += f"{value_text(high, unit)}{', logarithmic' if logarithmic else ''}"
    if len(block["series"]) > len(series):
        said += f"; the first {len(series)} of {len(block['series'])} rows"
    return _svg(block, len(series) * CELL, "".join(cells + marks), f"{said}.")


def _flame(block: Block, level: Level) -> str:
    """The first tree as its hottest rows: what a box holds less what stands on it, added up by function and line."""
    document = block["document"]
    trees = document["trees"]
    if not trees:
        return ""
    tree = next((each for each in trees if each["key"] == block["first"]), trees[0])
    own = list(tree["value"])
    for node, parent in enumerate(tree["parent"]):
        if parent >= 0:
            own[parent] -= tree["value"][node]
    by_frame: defaultdict[int, float] = defaultdict(float)
    for frame, value in zip(tree["frame"], own, strict=True):
        by_frame[frame] += max(value, 0.0)
    whole = tree["value"][0] or 1.0
    hottest = sorted(((value, frame) for frame, value in by_frame.items() if value > 0), reverse=True)
    rows = []
    for value, frame in hottest[: level.rows]:
        name, file, line, _ = document["frames"][frame]
        where = {"name": document["names"][name], "file": document["files"][file] or None, "line": line}
        rows.append({**where, "own": value, "share": value / whole})
    unit = {"ms per step": "ms"}.get(tree["unit"], tree["unit"])
    columns = [_column("own", f"Itself, {tree['unit']}", unit), _column("share", "Of all", "share")]
    columns += [_column("name", "Function"), _column("file", "File"), _column("line", "Line", "count")]
    caption = f"The hottest functions of the flame graph ({tree['label']}). {_first(len(rows), len(hottest))}"
    return _heading(document["title"]) + _rows(columns, rows, caption, level)


def _timeline(block: Block, level: Level) -> str:
    span = words.nanoseconds(block["to_ns"] - block["from_ns"])
    said = f"A timeline of {span} in {len(block['tracks'])} tracks, which takes a script to draw."
    notes = "".join(_paragraph(note, level) for note in block["notes"])
    return f"<p>{markup(said)} <code>stepscope view RUN</code> shows it.</p>{notes}"


def _heading(title: str | None) -> str:
    return f"<h3>{markup(title)}</h3>" if title else ""


def _class(style: str | None) -> str:
    return f" class='{style}'" if style else ""


_BLOCKS: dict[str, Callable[[Block, Level], str]] = {
    "text": _text,
    "empty": _empty,
    "figures": _figures,
    "facts": _facts,
    "table": _table,
    "chart": _chart,
    "parallel": _parallel,
    "findings": _findings,
    "timeline": _timeline,
    "flame": _flame,
    "overview": _overview,
    "choice": lambda _block, _level: "",  # there is no server to ask for another form of the page
}
