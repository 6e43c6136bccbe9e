"""The first pages: one screen that says where a step goes, what costs most, how to prove it and what to distrust; and
all that the training loses, in order of cost, with where, why, and what to do about it.

Everything on the first stands on another page in full, and leads there: it fits 1280 x 720 whatever the run holds.
Cards are the report's findings with links to the pages that show the evidence and a command that tries the fix. A
finding that another explains stands after it and says so: it is no loss in addition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze import curves
from stepscope.analyze.pictures import series
from stepscope.analyze.pictures.series import pick, positions
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PAGES, PageContext, traced
from stepscope.dashboard.pages.steps import labelled, overviews
from stepscope.dashboard.summary import SENTENCE, card, replayed
from stepscope.model import Report
from stepscope.report import compiler_words, sentences, words
from stepscope.report.escape import one_line
from stepscope.report.sentences import groups, refused, trial_line

Row = Mapping[str, Any]

RECORD = "Record a training run, or open traces of torch.profiler with operators and steps in them."
EVERYWHERE = ("steps", "timeline")  # of a category that the table does not know
FINDINGS, NOTES = 3, 3  # in a line each
POINTS = 160  # of a curve: a small one has fewer pixels than three times that
LOSS = sentences.LOSS
ROW = ("id", "title", "severity", "category", "cost_ms_per_step", "share", "gain_ceiling", "of", "command")
SMALLEST = 0.0005  # share of a part that is still drawn
TONES = ("warning", "plain", "note", "good")  # in which order lines are kept where there are more than fit


def findings(context: PageContext) -> list[Block]:
    report = context.run.report(source=context.source)
    made = list(said(report, context))
    # causes by cost, each with what it explains behind it
    ordered = [row for group in groups(report) for row in (group.finding, *group.explained)]
    cards = [_linked(row, report, context) for row in ordered]
    risks = [_linked(row, report, context, risk=True) for row in report.risks]
    judged = sentences.is_judged(report)
    healthy = sentences.healthy(report) if not cards and judged else None
    if not cards and not risks and not judged:
        made.append(nothing(context))
    shown = cards[: context.limit], risks[: context.limit]
    made.append(blocks.findings(*shown, healthy=healthy, abstained=report.abstained, ignored=report.ignored))
    made += hottest(report, context.shorten)
    for replay in report.views.get("replayed_operators") or ():
        made += replayed(context, replay)
    if steps := sentences.next_steps(report):
        made.append(blocks.facts("Next", [blocks.fact(blocks.capital(label), command) for label, command in steps]))
    return made


def hottest(report: Report, shorten: blocks.Shorten) -> Iterator[Block]:
    """The line that most samples stand in, whatever the findings speak of."""
    for row in ((report.views.get("stacks") or {}).get("hot_lines") or ())[:1]:
        where = f"{shorten(row['file'], row['line'])} ({row['function']})"
        text = f"Most sampled: {where}, {words.percent(row['share'])}, {words.term(row['phase'])}."
        yield blocks.text(text, "plain", blocks.link("Flame graph", "flame"))


def nothing(context: PageContext) -> Block:
    """Why nothing is said of what a step loses, and what to record."""
    report = context.run.report(source=context.source)
    why = f"{blocks.sentence(sentences.without_steps(report))} What a step loses can only be said of steps."
    return blocks.empty("No finding", why, RECORD, traced.again(context))


def said(report: Report, context: PageContext) -> Iterator[Block]:
    """What was read, and what a reader has to know before the first figure."""
    hang = blocks.link("The hang", "hang")
    for text, tone in sentences.hang(report)[:1]:
        yield blocks.text(blocks.sentence(one_line(text, SENTENCE)), "warning" if tone == "head" else tone, hang)
    yield from (blocks.text(blocks.sentence(text), "note") for text in sentences.quality(report))
    for number, text in enumerate(sentences.many_ranks(report)):
        link = None if number else blocks.link("All ranks", "ranks")
        yield blocks.text(blocks.sentence(text), "note" if number else "plain", link)
    yield from _head(report)
    if line := trial_line(report, context.shorten):
        yield blocks.text(f"Knobs: {line}", "warning" if refused(report) else "plain")
    for text in sentences.warnings(report):
        yield blocks.text(blocks.sentence(one_line(text, SENTENCE)), "warning")
    if overlap := sentences.overlap(report):
        yield blocks.text(overlap, "note")
    if unexplained := sentences.unexplained(report):
        yield blocks.text(unexplained, "warning")


def findings_empty(context: PageContext) -> bool:
    report = context.run.report(source=context.source)
    return not report.findings and not report.risks and not sentences.is_judged(report)


def _head(report: Report) -> Iterator[Block]:
    steps = report.steps
    if steps is not None:
        text = f"{sentences.counted(steps)}, cut by {words.signal(steps.get('signal', ''))}."
        compiling = compiler_words.kind_note(report, steps["kind"])
        yield blocks.text(f"{text} {blocks.sentence(compiling)}" if compiling else text)
        more = sentences.framework(report)
    else:
        more = compiler_words.without_steps(report)
    if more:
        yield blocks.text(blocks.sentence(more))
    for other in (report.views.get("steps_by_kind") or ())[1:]:
        tone = "warning" if sentences.stands_out(report, other) else "note"
        yield blocks.text(blocks.sentence(sentences.step_kind(report, other)), tone)


def _linked(row: Row, report: Report, context: PageContext, *, risk: bool = False) -> dict[str, Any]:
    known = blocks.LAYOUT.of_findings
    wanted = known.get(row["rule"]) or known.get(row["category"]) or EVERYWHERE
    links = [blocks.link(PAGES[key].title, key) for key in wanted if not PAGES[key].empty(context)]
    return card(row, report, context.shorten, links, risk=risk)


def overview(context: PageContext) -> list[Block]:
    report = context.run.report(source=context.source)
    if overview_empty(context):
        return [*said(report, context), nothing(context)]
    found = [group.finding for group in sentences.groups(report)]
    cards = [card(row, report, context.shorten) for row in found[:FINDINGS]]
    notes = sorted(said(report, context), key=lambda block: TONES.index(block["tone"]))
    figures = blocks.measures(report.steps, "overview", of="StepFacts") if report.steps is not None else []
    figures += blocks.measures(report.views.get("fixed_costs") or {}, "paid-once", of="FixedCosts")
    healthy = sentences.healthy(report) if not found and sentences.is_judged(report) else None
    return [
        {
            "kind": "overview",
            "figures": blocks.figures(figures),
            "bar": blocks.cleaned(_bar(report)),
            "findings": [blocks.cleaned({key: made[key] for key in ROW}) for made in cards],
            "total": len(report.findings),
            "risks": len(report.risks),
            "healthy": blocks.optional(healthy, blocks.MAX_TEXT),
            "charts": [chart for chart in (_step_time(context, report), _loss(context)) if chart is not None],
            "notes": notes[:NOTES],
            "more_notes": max(len(notes) - NOTES, 0),
        }
    ]


def overview_empty(context: PageContext) -> bool:
    report = context.run.report(source=context.source)
    return report.steps is None and not _profiled(report) and findings_empty(context)


def _profiled(report: Report) -> Mapping[str, Any] | None:
    return next((item for item in report.views.get("overview") or () if item["steps"]), None)


def _bar(report: Report) -> dict[str, Any] | None:
    """The parts of a mean step; of profiled steps where nothing else tells them."""
    parts = [(row["category"], row["ms"], row["share"]) for row in (report.steps or {}).get("partition", ())]
    title = "Where a mean step goes"
    if not any(share for name, _, share in parts if name != "unattributed"):
        item = _profiled(report)
        if item is None:
            return None
        title = f"Where a mean profiled step of {item['span']['worker']} goes"
        parts = [(name, part["mean_ns"] / 1e6, part["share"]) for name, part in item["parts"].items()]
    shown = [
        {"label": words.part(name), "role": name, "ms": ms, "share": share}
        for name, ms, share in parts
        if share >= SMALLEST
    ]
    largest = sorted(shown, key=lambda row: -row["share"])[:FINDINGS]
    listed = ", ".join(f"{row['label']} {words.percent(row['share'])}" for row in largest)
    return {"title": title, "sentence": f"Of a mean step: {listed}.", "parts": shown} if shown else None


def _step_time(context: PageContext, report: Report) -> Block | None:
    """Of the first process that has steps of the kind that the figures are of, else of the first profiled span."""
    if report.steps is not None:
        steps, kind = labelled(context), str(report.steps["kind"])
        if own := series.processes_of(steps, kind):
            parts = series.step_phases(steps, kind, own[0], POINTS)
            of = f" of {own[0]}" if len(own) > 1 else ""
            return _curve(
                f"{words.things(parts.total, f'{words.term(kind)} step')}{of}", parts.steps, parts.wall_ms, "ms"
            )
    found = next((item for item in overviews(context) if item.has_steps), None)
    if found is None:
        return None
    marked = pick(list(found.steps), positions([step.wall_ns for step in found.steps], POINTS))
    numbers = [int(step.step) if step.step.isdecimal() else at for at, step in enumerate(marked)]
    of = f"{words.things(len(found.steps), 'profiled step')} of {found.span.label}"
    return _curve(of, numbers, [step.wall_ns for step in marked], "ns")


def _curve(of: str, x: Sequence[int], values: Sequence[float], unit: str) -> Block | None:
    if len(x) < 2:
        return None
    low, high = (blocks.value_text(bound(values), unit) for bound in (min, max))
    sentence = f"The time of {of}, between {low} and {high}."
    return blocks.drawn("step-time", sentence, x, [("step time", values, "wall")], y=("step time", unit))


def _loss(context: PageContext) -> Block | None:
    """The training's loss, of the process whose curves the page of metrics shows."""
    tables, between = context.run.tables, context.scope.steps
    named = tables.metrics.filter(pl.col("name").str.to_lowercase().str.contains("loss")).drop_nulls(["value", "step"])
    if between is not None:
        named = named.filter(pl.col("step").is_between(*between))
    named = named.filter(pl.col("process").is_null() | pl.col("process").is_in(curves.processes(tables)[:1]))
    names = named["name"].unique(maintain_order=True).to_list()
    if not names:
        return None
    name = LOSS if LOSS in names else min(names, key=lambda each: (each.count("/"), each))
    curve = next(iter(curves.made(tables, named.filter(pl.col("name") == name))))
    points = curves.on_steps(curve)
    if len(points.x) < 2:
        return None
    made = curves.lines([points], POINTS)
    finite = points.values[np.isfinite(points.values)]
    sentence = f"{name} over {words.things(len(points.x), 'step')}"
    if len(finite):
        first, last = (blocks.value_text(float(finite[at]), "scalar") for at in (0, -1))
        sentence += f", from {first} to {last}"
    if odd := len(points.x) - len(finite):
        sentence += f"; {words.count(odd)} not finite"
    line = blocks.series(name, "scalar", made.lines[0].values, odd=made.lines[0].odd, joined=True)
    return blocks.drawn("loss", f"{sentence}.", made.x, [line], y=(name, "scalar"))
