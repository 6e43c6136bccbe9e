"""The page of metrics: every curve of the run over steps or time, by groups, with what happened meanwhile.

A chart holds what can be compared: a name, or those that stand together (`analyze.curves.charts`). Other runs are laid
over it. Layers that were watched are a heat map and small charts of one scale.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from stepscope.analyze import curves
from stepscope.analyze.curves import SECOND, Curve, Gap, Line, Moment, Points
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, processes, traced
from stepscope.errors import EnvironmentRefusal, UnreadableInputError, UsageError
from stepscope.report import words

if TYPE_CHECKING:
    from stepscope.api import Run

POINTS, EMBEDDED_POINTS = 600, 150  # of a curve
CHARTS, EMBEDDED_CHARTS = 6, 5  # of a group, where all groups are shown
MOST_CHARTS = 60
LINES = 10  # of a chart, of one run
LAYERS, EMBEDDED_LAYERS = 120, 60  # rows of a heat map
COLUMNS, EMBEDDED_COLUMNS = 200, 80
MULTIPLES, EMBEDDED_MULTIPLES = 24, 8
MARKS = 8  # of one kind
STEP, TIME = "step", "time"
OVER = ((STEP, "steps"), (TIME, "time"))
SMOOTHING = (("", "none"), *((str(window), f"mean of the last {window} values") for window in (10, 50, 200)))
WITH = ("with", "with2", "with3")  # other runs; the next can be chosen once the one before is
SYNC = {STEP: "steps", TIME: "time"}
WATCHED = "layers"
RECORD = "stepscope run keeps losses, learning rates and norms by itself; stepscope.log(name, value) keeps others."
IN_UNIT = ("first", "last", "lowest", "highest")


class Other(NamedTuple):
    """A run that is laid over this one."""

    name: str
    curves: Mapping[str, Curve]
    origin_ns: int


class Shown(Struct, frozen=True):
    """What is drawn, and how."""

    context: PageContext
    over: str
    window: int
    curves: Mapping[str, Curve]
    origin_ns: int
    others: Sequence[Other]
    marks: Sequence[Mapping[str, Any]]
    gaps: Sequence[Gap]
    small: bool  # of all groups together: side by side

    def points(self, curve: Curve, origin_ns: int) -> Points:
        """The curve on the axis that was chosen."""
        return curves.on_steps(curve) if self.over == STEP else curves.over_time(curve, origin_ns)

    def end(self, found: Mapping[str, Curve], origin_ns: int) -> float:
        """The last x of all curves."""
        known = [curve for curve in found.values() if len(curve.steps)]
        if self.over == STEP:
            return max(int(curve.steps[-1]) for curve in known)
        return (max(int(curve.times_ns[-1]) for curve in known) - origin_ns) / SECOND


def empty(context: PageContext) -> bool:
    tables = context.run.tables
    return tables.metrics.is_empty() and tables.steps.is_empty() and tables.system.is_empty()


def build(context: PageContext) -> list[Block]:
    tables = context.run.tables
    wanted = processes(context.run, context.scope.worker)
    known = [process for process in curves.processes(tables) if wanted is None or process in wanted]
    process = next(iter(known), None)
    own = _curves(context.run, process, narrow=context.scope.steps is not None)
    if not own:
        why = "Neither steps nor metrics nor telemetry were recorded" + (
            "." if context.scope.steps is None and context.scope.worker is None else " of what is chosen: choose all."
        )
        return [blocks.empty("No curves", why, RECORD, traced.again(context))]
    over = context.choice("over", [key for key, _ in OVER])
    window = context.choice("smooth", [key for key, _ in SMOOTHING])
    made = [
        *traced.choice(context, "Over", "over", over, OVER),
        *traced.choice(context, "Smoothing", "smooth", window, SMOOTHING),
    ]
    others, asked = _others(context)
    made += asked
    origin = _origin(context.run, own)
    happened = curves.moments(tables, context.run.labelled, process)
    marks, left_out = _marks(happened, over, origin)
    gaps = curves.gaps(context.run.labelled, process)
    layers = curves.layers(own)
    found = curves.charts(name for name in own if not (layers and name.startswith(f"{curves.WATCHED}/")))
    groups = [*found, *([WATCHED] if layers else [])]
    group = context.choice("group", ["", *groups])
    options = [("", "all"), *((each, each or "without a group") for each in groups if each)]
    shown = Shown(context, over, int(window or 0), own, origin, others, marks, gaps, small=not group)
    made += traced.choice(context, "Group", "group", group, options)
    made += _notes(context, process, len(known), left_out)
    most = MOST_CHARTS if group else EMBEDDED_CHARTS if context.embedded else CHARTS
    names: Counter[str] = Counter()
    for key, charts in found.items():
        if group in ("", key):
            made += _group(shown, key, charts, most, names)
    if layers and group in ("", WATCHED):
        small = context.embedded or group == WATCHED
        for what, of_layers in layers.items():
            made += _layers(shown, what, of_layers, small=small)
    rows = [{**asdict(curves.summary(curve)), "unit": blocks.unit_of(name) or "scalar"} for name, curve in own.items()]
    listed = blocks.rows_table(context, "curves", rows)
    for column in (column for table in listed for column in table["columns"] if column["key"] in IN_UNIT):
        column["unit_key"] = "unit"
    return [*made, *listed]


def _curves(run: Run, process: str | None, *, narrow: bool = False) -> Mapping[str, Curve]:
    key = ("curves", process)
    return traced.kept(run, key, lambda: curves.curves(run.tables, run.labelled, process, narrow=narrow))


def _origin(run: Run, found: Mapping[str, Curve]) -> int:
    return run.tables.run.started_ns or min((int(curve.times_ns[0]) for curve in found.values()), default=0)


# ---- other runs ------------------------------------------------------------------------------------------------------


def _others(context: PageContext) -> tuple[list[Other], list[Block]]:
    """The runs that are laid over this one, with their choices, and why one of them cannot be."""
    if context.embedded or context.catalog is None:
        return [], []
    known = traced.other_runs(context)
    others: list[Other] = []
    made: list[Block] = []
    for number, param in enumerate(WITH):
        given = context.params.get(param, "")
        options = [("", "no other run"), *known]
        if given not in dict(options):
            options.append((given, given))  # further down the list of runs, or no run at all
        made += traced.choice(context, "and with" if number else "Compare with", param, given, options)
        if not given:
            break
        try:
            others.append(_other(context, context.catalog.run(given), dict(options)[given]))
        except (UsageError, UnreadableInputError, EnvironmentRefusal) as error:
            made.append(blocks.empty("No comparison", blocks.sentence(str(error)), "Choose another run."))
    return others, made


def _other(context: PageContext, run: Run, name: str) -> Other:
    found = _curves(run, next(iter(curves.processes(run.tables)), None))
    origin = _origin(run, found)
    if context.scope.steps is not None:
        low, high = context.scope.steps
        found = {name: curve.where((curve.steps >= low) & (curve.steps <= high)) for name, curve in found.items()}
    return Other(name, found, origin)


# ---- charts ----------------------------------------------------------------------------------------------------------


def _group(
    shown: Shown, key: str, charts: Mapping[str, Sequence[str]], most: int, ids: Counter[str]
) -> Iterator[Block]:
    drawn = [made for title, names in list(charts.items())[:most] if (made := _chart(shown, title, names, ids))]
    title = key or "Without a group"
    said = f"{title}: {words.things(len(drawn), 'chart')}"
    if len(charts) > most:
        said += f" of {len(charts)}" + (
            "" if shown.context.embedded or most == MOST_CHARTS else "; choose the group to see more"
        )
    yield blocks.text(f"{said}.")
    if len(drawn) < min(len(charts), most):
        yield blocks.text("What was kept before the first step stands on the axis of time alone.", "note")
    yield from drawn


def _chart(shown: Shown, title: str, names: Sequence[str], ids: Counter[str]) -> Block | None:
    holds = curves.holds(names[0])
    drawn = []
    for run in (Other("", shown.curves, shown.origin_ns), *shown.others):
        for name in (each for each in names[:LINES] if each in run.curves):
            points = shown.points(run.curves[name], run.origin_ns)
            until = shown.end(run.curves, run.origin_ns) if holds else -np.inf
            label = _label(title, name, len(names)) + (f": {run.name}" if run.name else "")
            drawn += [(label, run.curves[name], points, until)] if len(points.x) else []
    if not drawn:
        return None
    limit = EMBEDDED_POINTS if shown.context.embedded else POINTS
    window = 0 if holds else shown.window
    made = curves.lines([curves.held(points, end) for *_, points, end in drawn], max(limit // len(drawn), 80), window)
    unit = blocks.unit_of(names[0]) or "scalar"
    series = []
    joined = len(drawn) > 1
    for at, (label, *_) in enumerate(drawn):
        series.append(_series(label, unit, made.lines[at], joined=joined, faint=bool(window), held=holds))
        if window:
            series.append(_series(f"{label}, mean of the last {window} values", unit, made.smooth[at], joined=joined))
    sentences = [_sentence(label, curve, points, unit, shown.over) for label, curve, points, _ in drawn[:3]]
    if window:
        sentences.append(f"Smoothed: mean of the last {window} values, in front of the values themselves.")
    ids[slug := _slug(title)] += 1
    notes = []
    longest = max(len(points.x) for *_, points, _ in drawn)
    if len(made.x) < longest:
        kept = "of each stretch the lowest, the highest and the first not finite"
        notes.append(f"{len(made.x):,} of {longest:,} points: {kept}.")
    if len(names) > LINES:
        notes.append(f"The first {LINES} of {len(names)} curves.")
    marks = list(shown.marks)
    if shown.gaps and any(curve.source == curves.STEPS for _, curve, *_ in drawn):
        marks += _left_out(shown)
        counts = Counter(gap.reason for gap in shown.gaps for _ in range(gap.length))
        said = (f"{words.things(count, 'step')} {words.STEP_REASONS[reason]}" for reason, count in counts.items())
        notes.append(f"Left out: {', '.join(said)}.")
    return blocks.chart(
        f"m-{slug}" + (f"-{ids[slug]}" if ids[slug] > 1 else ""),
        title,
        "line",
        sentence=" ".join(sentences),
        x=("step", "number", made.x) if shown.over == STEP else ("time since the start", "s", made.x),
        y=(title, unit),
        series=series,
        marks=marks,
        notes=notes,
        sync=SYNC[shown.over],
        select="steps" if shown.over == STEP else None,
        small=shown.small,
    )


def _left_out(shown: Shown) -> Iterator[Mapping[str, Any]]:
    for gap in shown.gaps[:: -(-len(shown.gaps) // MARKS)]:
        low, high = gap.steps if shown.over == STEP else ((at - shown.origin_ns) / SECOND for at in gap.times_ns)
        yield blocks.mark(low, high, f"left out: {words.STEP_REASONS[gap.reason]}")


def _label(title: str, name: str, several: int) -> str:
    """What tells the curve from others of its chart."""
    if several == 1 or name == title:
        return name
    if name.startswith(f"{title}/"):
        return name.removeprefix(f"{title}/")
    return name.rpartition("/")[2].rpartition(".")[0] or "host"  # a reading of several subjects


def _series(label: str, unit: str, line: Line, **more: Any) -> dict[str, Any]:
    return blocks.series(label, unit, line.values, odd=line.odd, **more)


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60]


def _sentence(label: str, curve: Curve, points: Points, unit: str, over: str) -> str:
    """From the first to the last value, the lowest, and what is not finite."""
    said = f"{label} over {words.things(len(points.x), STEP if over == STEP else 'value')}"
    finite = np.isfinite(points.values)
    known = points.values[finite]
    if len(known):
        first, last, low, high = (
            blocks.value_text(float(value), unit) for value in (known[0], known[-1], known.min(), known.max())
        )
        said += f": from {first} to {last}, between {low} and {high}"
    if len(known) < len(points.x):
        at = int(np.argmin(finite))
        where = f"step {points.x[at]:.0f}" if over == STEP else words.seconds(float(points.x[at]))
        word = curves.word(points.values[at])
        said += f"; {len(points.x) - len(known):,} not finite, the first {word} at {where}"
    return f"{said} ({curve.source})."


def _marks(found: Sequence[Moment], over: str, origin_ns: int) -> tuple[list[Mapping[str, Any]], list[str]]:
    labels: dict[float, list[str]] = {}
    left_out = []
    for kind in dict.fromkeys(moment.kind for moment in found):
        own = [moment for moment in found if moment.kind == kind]
        every = -(-len(own) // MARKS)
        for moment in own[::every]:
            x = moment.step if over == STEP else (moment.time_ns - origin_ns) / SECOND
            labels.setdefault(x, []).append(moment.label)
        if every > 1:
            left_out.append(f"one in {every} of {words.things(len(own), _SINGULAR.get(kind, kind))}")
    return [blocks.mark(x, x, ", ".join(said), event=True) for x, said in sorted(labels.items())], left_out


_SINGULAR = {"save": "checkpoint", "compile": "recompilation", "lr": "jump of the learning rate"}


def _notes(context: PageContext, process: str | None, several: int, left_out: Sequence[str]) -> Iterator[Block]:
    said = []
    if several > 1:
        said.append(f"Curves of {process} and of the machine; choose a worker to see another's.")
    if left_out:
        said.append(f"Marked: {', '.join(left_out)}.")
    if context.embedded:
        said.append("stepscope view RUN shows them over time, smoothed, and with other runs.")
    if said:
        yield blocks.text(" ".join(said), "note")


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layers(shown: Shown, what: str, found: Mapping[str, Curve], *, small: bool) -> Iterator[Block]:
    """The heat map of what was watched, and small charts of the layers that changed most.

    A layer of another run stands below the same one of this run, in the same colours and on the same scale.
    """
    embedded = shown.context.embedded
    beside = {run.name: own for run in shown.others if (own := curves.layers(run.curves).get(what))}
    most = (EMBEDDED_LAYERS if embedded else LAYERS) // (1 + len(beside))
    first: dict[str, Curve] = {}
    of_layer: dict[str, str] = {}
    for layer, curve in list(found.items())[:most]:
        rows = {layer: curve, **{f"{layer}: {name}": own[layer] for name, own in beside.items() if layer in own}}
        first |= rows
        of_layer |= dict.fromkeys(rows, layer)
    made = curves.heat(first, EMBEDDED_COLUMNS if embedded else COLUMNS)
    if not made.x:
        return
    known = [value for line in made.lines for value in line.values if value is not None]
    said = f"{what} of {words.things(min(most, len(found)), 'layer')}"
    said += f"{f', of {len(beside) + 1} runs,' if beside else ''} over steps {made.x[0]:.0f} to {made.x[-1]:.0f}"
    if known:
        said += f": between {min(known):.3g} and {max(known):.3g}"
    odd = [(made.x[at], layer, word) for layer, line in zip(first, made.lines, strict=True) for at, word in line.odd]
    if odd:
        step, layer, word = min(odd)
        said += f"; {word} first in {layer} at step {step:.0f}"
    notes = ["Each column is the highest value of its stretch of steps."]
    if len(found) > most:
        notes.append(f"The first {most} of {len(found)} layers.")
    for name, own in beside.items():
        if missing := sum(layer not in found for layer in own):
            notes.append(f"{name} has {words.things(missing, 'layer')} that this run has not.")
    slug, drawn = _slug(what), dict(zip(first, made.lines, strict=True))

    def matrix(type: str, title: str, sentence: str, lines: Mapping[str, Line], notes: Sequence[str]) -> Block:
        return blocks.chart(
            f"{type}-{slug}",
            title,
            type,
            sentence=sentence,
            x=("step", "number", made.x),
            y=("value", "scalar"),
            series=[_series(name, "scalar", line, joined=True) for name, line in lines.items()],
            notes=notes,
            sync=SYNC[STEP],
            select="steps",
        )

    yield matrix("heat", f"{what} by layer", f"{said}.", drawn, notes)
    if not small:
        return
    limit = EMBEDDED_MULTIPLES if embedded else MULTIPLES
    chosen = sorted(dict.fromkeys(of_layer.values()), key=lambda layer: _change(drawn[layer]), reverse=True)
    chosen = chosen[: max(1, limit // (1 + len(beside)))]
    lines = {name: line for name, line in drawn.items() if of_layer[name] in chosen}
    said = f"{what} of the {words.things(len(chosen), 'layer')} that changed most, all on one scale."
    yield {**matrix("multiples", f"{what}, layer by layer", said, lines, notes[:1]), "id": f"small-{slug}"}


def _change(line: Line) -> float:
    """How many times the lowest the highest is; what is not finite changed most."""
    known = [abs(value) for value in line.values if value]
    return np.inf if line.odd else max(known) / min(known) if known else 0.0
