"""What came of a sweep: its best trials, which parameter decides a metric, and every trial."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from stepscope.analyze.curves import contour
from stepscope.dashboard import blocks, static_page
from stepscope.dashboard.blocks import Alone, Block, Col, Row, rows_table
from stepscope.dashboard.pages import PageContext
from stepscope.model import Report
from stepscope.model.sweep import FAILED, FINISHED, MAXIMUM, PED_ANOVA, PRUNED
from stepscope.report import sweep_report as say
from stepscope.report import words
from stepscope.report.document import bare_report
from stepscope.report.escape import one_line, plain

VIEW = "sweep"
SCREEN_ROWS = 12  # trials on a terminal
DRAWN = 1_000  # trials in a picture
SLICES = 6  # parameters that have a picture of their own
MAX_SIDE = 256  # cells along a side of a contour: a parameter has no more choices
LEVELS = 10  # of the lines of a contour one less


def load(folder: Path) -> dict[str, Any]:
    """The document of a sweep's folder; raises `UnreadableInputError`."""
    return say.sweep_document(say.load(folder))


def beside(report: Report, document: Row) -> Report:
    """The report of a trial with the sweep in it."""
    return replace(report, views={**report.views, VIEW: dict(document)})


def alone(document: Row) -> Report:
    name = Path(document["folder"]).name if document["folder"] else VIEW
    return beside(bare_report(name, document["command"], document["cwd"]), document)


def render(report: Report) -> str:
    """The sweep of a report as one HTML file without scripts, where there is no run to show beside it."""
    shown = list(build(Alone(), report.views[VIEW]))
    return static_page.render(str(report.run.get("name")), [static_page.Section("Sweep", shown)])


def build(context: PageContext | Alone, document: Row) -> Iterator[Block]:
    """The conclusion, the trials drawn, what decides each metric, and the tables behind."""
    yield from _conclusion(document)
    yield blocks.text(blocks.sentence(_protocol(document)), "note")
    yield from _lines(document)
    for found in document["importances"]:
        yield from _decides(context, document, found)
    yield from _slices(document)
    yield from _contour(document)
    yield from _trials(context, document, document["trials"], sorted_by=None)
    if document["repeat"]:
        yield blocks.facts("To repeat it", [blocks.fact("Command", document["repeat"])])


def screen(document: Row) -> list[list[Block]]:
    """What a terminal shows: without pictures, and the best trials alone."""
    context = Alone(SCREEN_ROWS)
    command = shlex.join(str(word) for word in document["command"])
    head = [
        blocks.text(f"Sweep: {one_line(command)}", "head"),
        blocks.text(blocks.sentence(_protocol(document)), "note"),
    ]
    ranked = [[*_decides(context, document, found)] for found in document["importances"]]
    trials = _trials(context, document, _ranked(document), sorted_by="best first")
    for row in (row for table in trials for row in table["rows"]):  # of any size, and often close to each other
        row |= {key: say.number(value) for key, value in row.items() if key[:1] in "pm" and key[1:].isdecimal()}
    return [[*head, *_conclusion(document)], *ranked, trials]


def _conclusion(document: Row) -> Iterator[Block]:
    if document["stopped"]:
        yield blocks.text(f"The sweep was stopped: {document['stopped']}.", "warning")
    best, names, front = document["best"], metrics(document), document["front"]
    if best is None:
        yield blocks.text("No trial finished with its metric, so there is no best one.")
        return
    values = ", ".join(f"{name} {say.number(value)}" for name, value in zip(names, best["values"], strict=False))
    params = [param["name"] for param in document["params"] if param["name"] in best["params"]]
    settings = ", ".join(f"{say.bare(name)}={say.number(best['params'][name])}" for name in params)
    yield blocks.text(f"Best by {names[0]}: trial {best['number'] + 1}, {settings}: {values}.", "good")
    if len(front) == 1:
        yield blocks.text(f"No trial is better than it in {names[0]} or in {names[1]}.")
    elif front:
        trials = words.things(len(front), "trial")
        yield blocks.text(f"{trials} on the front: of each, no other trial is better in both metrics.")


def metrics(document: Row) -> list[str]:
    return [str(row["name"]) for row in document["metrics"]]


def _protocol(document: Row) -> str:
    """How many trials there were, and how they were chosen and judged."""
    states = Counter(trial["state"] for trial in document["trials"])
    parts = [f"{states[state]} {state}" for state in (FINISHED, PRUNED, FAILED) if state in states]
    made = sum(states[state] for state in (FINISHED, PRUNED, FAILED))
    of = "" if made >= document["asked"] else f" of {document['asked']}"
    counted = f"{made}{of} {'trial' if document['asked'] == 1 else 'trials'}" + (
        f": {', '.join(parts)}" if parts else ""
    )
    ways = [
        f"{row['name']} {'maximised' if row['direction'] == MAXIMUM else 'minimised'}"
        + (f" ({'its best value' if row['of'] == 'best' else 'mean of its last tenth'})" if row["of"] != "last" else "")
        for row in document["metrics"]
    ]
    return f"{counted}; {' and '.join(ways)}; sampler {document['sampler']}, seed {document['seed']}"


def _values(document: Row, trial: Row) -> list[float | None]:
    own = [*trial["values"], *[None] * len(document["metrics"])]
    return own[: len(document["metrics"])]


def _ranked(document: Row) -> list[Row]:
    """The trials: those of the front and the best ones first, those that did not finish last."""
    front = set(document["front"])
    sign = -1.0 if document["metrics"][0]["direction"] == MAXIMUM else 1.0

    def key(trial: Row) -> tuple[bool, bool, float, int]:
        value = trial["value"]
        return (
            trial["state"] != FINISHED,
            trial["number"] not in front,
            sign * value if value is not None else math.inf,
            trial["number"],
        )

    return sorted(document["trials"], key=key)


def _trials(context: PageContext | Alone, document: Row, trials: list[Row], *, sorted_by: str | None) -> list[Block]:
    front = set(document["front"])
    names = [str(param["name"]) for param in document["params"]]
    short = [say.bare(name) for name in names]  # where no two of them are called alike then
    columns = [Col("Trial", "trial", "number"), Col("State", "state")]
    columns += [
        Col(name, f"p{at}", "text" if document["params"][at]["choices"] else "number")
        for at, name in enumerate(short if len(set(short)) == len(short) else names)
    ]
    columns += [Col(name, f"m{at}", "number") for at, name in enumerate(metrics(document))]
    columns += [
        Col("Front", "front", help="No other trial is better in one metric without being worse in the other."),
        Col("Steps", "steps", "count"),
        Col("ms a step", "mean_ms", "ms"),
        Col("Whole run", "wall_s", "s"),
        Col("Why", "reason"),
    ]
    rows = [
        {
            **trial,
            "trial": trial["number"] + 1,
            **{f"p{at}": trial["params"].get(param["name"]) for at, param in enumerate(document["params"])},
            **{f"m{at}": value for at, value in enumerate(_values(document, trial))},
            "front": "yes" if trial["number"] in front else None,
        }
        for trial in trials
    ]
    notes = [f"{sorted_by}; all are in the report"] if sorted_by and len(rows) > context.limit else ()
    return rows_table(context, "trials", rows, columns_of=columns, notes=notes)


def _decides(context: PageContext | Alone, document: Row, found: Row) -> Iterator[Block]:
    yield blocks.text(_ranking(found))
    important = found["important"]
    rows = [
        {
            **row,
            "name": say.bare(row["param"]),
            "trials": found["trials"],
            "matters": "yes" if row["param"] in important else "unsure",
        }
        for row in found["rows"]
    ]
    at = metrics(document).index(found["metric"]) if found["metric"] in metrics(document) else 0
    title = f"What decides {found['metric']}"
    yield from rows_table(context, "importance", rows, id=f"importance-{at}", title=title)
    pairs = [row for row in found["pairs"] if row["share"] is not None]
    title, say_pair = f"Pairs that decide {found['metric']}", {key: _bare(key) for key in ("first", "second")}
    yield from rows_table(context, "sweep/pairs", pairs, id=f"pairs-{at}", title=title, say=say_pair, limit=5)


def _ranking(found: Row) -> str:
    """What the importance of a metric rests on, or why there is none."""
    if found["note"]:
        return f"What decides {found['metric']}: {found['note']}."
    how = "a surface of lines, curves and products of pairs"
    if found["method"] == PED_ANOVA:
        how = "how differently the best tenth of them lies in a parameter (PED-ANOVA)"
    said = ", ".join(map(say.bare, found["important"])) or "no parameter for certain"
    return f"What decides {found['metric']}: {said}. From {found['trials']} finished trials, by {how}."


def _bare(key: str) -> Callable[[Row], str]:
    return lambda row: say.bare(row[key])


def _done(document: Row) -> list[Row]:
    return [trial for trial in document["trials"] if trial["value"] is not None][:DRAWN]


def _lines(document: Row) -> Iterator[Block]:
    trials = _done(document)
    if len(trials) < 2:
        return
    axes = [
        blocks.axis(
            param["name"],
            [trial["params"].get(param["name"]) for trial in trials],
            log=bool(param["log"]),
            choices=list(param["choices"]),
        )
        for param in document["params"]
    ]
    axes += [
        blocks.axis(name, [_values(document, trial)[at] for trial in trials])
        for at, name in enumerate(metrics(document))
    ]
    first = document["metrics"][0]
    said = f"{len(trials)} finished trials as lines, coloured by {first['name']}; the table has the figures."
    yield {  # lines through parallel axes, coloured by their value on the axis of the first metric
        "kind": "parallel",
        "id": "parallel",
        "title": "Every trial",
        "sentence": plain(said, blocks.MAX_TEXT),
        "axes": axes,
        "names": [f"trial {trial['number'] + 1}" for trial in trials],
        "shade": len(document["params"]),
        "more_is_better": first["direction"] == MAXIMUM,
    }


def _places(param: Row) -> dict[str, float] | None:
    """Where the choices of a parameter lie on an axis: at their numbers, else at their places; None of a range."""
    choices = [str(choice) for choice in param["choices"]]
    known = _numbers(choices) or range(1, len(choices) + 1)
    return dict(zip(choices, known, strict=True)) if choices else None


def _numbers(choices: Sequence[Any]) -> list[float]:
    """Choices as numbers; none where one of them is a word, as they have no order then."""
    try:
        numbers = [float(choice) for choice in choices]
    except ValueError:
        return []
    return numbers if all(map(math.isfinite, numbers)) else []


def _position(param: Row, value: Any) -> float | None:
    """Where a value lies on the axis of a picture; of a logarithmic range its logarithm."""
    places = _places(param)
    if places is not None:
        return places.get(str(value))
    if isinstance(value, str) or value is None or (param["log"] and value <= 0):
        return None
    return math.log10(value) if param["log"] else float(value)


def _axis(param: Row) -> str:
    places = _places(param) or {}
    if any(str(choice) != f"{at:g}" for choice, at in places.items()):
        return f"{param['name']}: {', '.join(f'{at:g} = {choice}' for choice, at in places.items())}"
    return f"log10 of {param['name']}" if param["log"] else str(param["name"])


def _by_importance(document: Row) -> list[Row]:
    """Parameters, the most important for the first metric first where they are ranked."""
    order = [row["param"] for row in document["importance"]]
    names = {name: at for at, name in enumerate(order)}
    return sorted(document["params"], key=lambda param: names.get(param["name"], len(names)))


def _slices(document: Row) -> Iterator[Block]:
    trials, metric = _done(document), metrics(document)[0]
    for at, param in enumerate(_by_importance(document)[:SLICES]):
        placed = [(_position(param, trial["params"].get(param["name"])), trial["value"]) for trial in trials]
        points = sorted((x, y) for x, y in placed if x is not None)
        if len({x for x, _ in points}) < 2:
            continue
        yield blocks.drawn(
            "slice",
            f"{metric} of {len(points)} finished trials over {param['name']}.",
            [x for x, _ in points],
            [(metric, [y for _, y in points], None)],
            id=f"slice-{at}",
            title=f"{metric} over {param['name']}",
            x=(_axis(param), "number"),
            y=(metric, "number"),
        )


def _contour(document: Row) -> Iterator[Block]:
    """The metric over the first pair: the surface that was fitted, with lines of equal height, and the trials on it."""
    ranked = document["importances"]
    found = ranked[0]["contour"] if ranked else None
    params = {param["name"]: param for param in document["params"]}
    if not found or not {found["first"], found["second"]} <= params.keys():
        return
    across, up = params[found["first"]], params[found["second"]]
    columns, places = (
        [place for value in found[side] if (place := _position(param, value)) is not None]
        for side, param in (("x", across), ("y", up))
    )
    values = [[value for value in row if value is not None] for row in found["values"]]
    whole = len(found["x"]) == len(columns) and len(values) == len(places) == len(found["y"])
    if not whole or {len(row) for row in values} != {len(columns)} or max(len(columns), len(places)) > MAX_SIDE:
        return  # a document of others
    rows = values[::-1]  # what is larger stands above
    lines: list[list[float]] = []
    if len(columns) > 1 and all(_numbers(param["choices"]) or not param["choices"] for param in (across, up)):
        low, high = min(map(min, rows)), max(map(max, rows))
        for level in (low + (high - low) * at / LEVELS for at in range(1, LEVELS)):
            for start, end in contour(rows, level):
                lines.append([_between(columns, start[0]), start[1] + 0.5, _between(columns, end[0]), end[1] + 0.5])
    trials = [trial["params"] for trial in _done(document)]
    placed = [(_position(across, own.get(across["name"])), _row(up, places, own.get(up["name"]))) for own in trials]
    metric = metrics(document)[0]
    chart = blocks.drawn(
        "contour",
        f"{metric} by the surface that was fitted to the trials, over {across['name']} along and {up['name']} "
        f"upwards, the mean over all other parameters; it explains {words.percent(found['explained'])} of what differs "
        "between the trials. Lines are steps of equal size; rings are trials.",
        columns,
        [
            blocks.series(name if isinstance(name, str) else f"{name:.3g}", "number", row)
            for name, row in zip(found["y"][::-1], rows, strict=True)
        ],
        title=f"{metric} over {across['name']} and {up['name']}",
        x=(_axis(across), "number"),
        y=(up["name"], "text"),
    )
    yield chart | {"lines": lines, "points": [[x, y] for x, y in placed if x is not None and y is not None]}


def _between(places: Sequence[float], number: float) -> float:
    """The place at a number that may lie between two places."""
    at = min(int(number), len(places) - 2)
    return places[at] + (number - at) * (places[at + 1] - places[at])


def _row(param: Row, places: Sequence[float], value: Any) -> float | None:
    place, count = _position(param, value), len(places)
    if place is None:
        return None
    if place in places:
        return count - places.index(place) - 0.5
    if param["choices"] or count < 2:
        return None
    step = (places[-1] - places[0]) / (count - 1)
    return count - ((place - places[0]) / step + 0.5)
