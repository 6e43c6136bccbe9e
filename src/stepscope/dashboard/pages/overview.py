"""The first page: one screen that says where a step goes, what costs most and how to prove it, and what to distrust.

Everything on it stands on another page in full, and leads there: it fits 1280 x 720 whatever the run holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze import curves
from stepscope.analyze.pictures import curve_lines, series
from stepscope.analyze.pictures.series import pick, positions
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, findings
from stepscope.dashboard.pages.steps import labelled, overviews
from stepscope.dashboard.summary import card
from stepscope.model import Report
from stepscope.report import sentences, words

FINDINGS, NOTES = 3, 3  # in a line each
POINTS = 160  # of a curve: a small one has fewer pixels than three times that
LOSS = sentences.LOSS
HEAD = (
    "Mean step: mean_ms; Median: median_ms; 95th percentile: p95_ms; Steps per second: per_second per_s; "
    "Samples per second: samples_per_second per_s; Steady steps: count count"
)
ROW = ("id", "title", "severity", "category", "cost_ms_per_step", "share", "gain_ceiling", "of", "command")
SMALLEST = 0.0005  # share of a part that is still drawn
TONES = ("warning", "plain", "note", "good")  # in which order lines are kept where there are more than fit


def build(context: PageContext) -> list[Block]:
    """The blocks of the page."""
    report = context.run.report(source=context.source)
    if empty(context):
        return [*findings.said(report, context), findings.nothing(context)]
    found = [group.finding for group in sentences.groups(report)]
    cards = [card(row, report, context.shorten) for row in found[:FINDINGS]]
    said = sorted(findings.said(report, context), key=lambda block: TONES.index(block["tone"]))
    return [
        blocks.overview(
            figures=_figures(report),
            bar=_bar(report),
            findings=[{key: made[key] for key in ROW} for made in cards],
            total=len(report.findings),
            risks=len(report.risks),
            healthy=sentences.healthy(report) if not found and sentences.is_judged(report) else None,
            charts=[chart for chart in (_step_time(context, report), _loss(context)) if chart is not None],
            notes=said[:NOTES],
            more_notes=max(len(said) - NOTES, 0),
        )
    ]


def empty(context: PageContext) -> bool:
    """Whether there is neither a step nor a finding."""
    report = context.run.report(source=context.source)
    return report.steps is None and not _profiled(report) and findings.empty(context)


def _figures(report: Report) -> Block:
    items = blocks.measures(report.steps, HEAD, of="StepFacts") if report.steps is not None else []
    items += blocks.measures(report.views.get("fixed_costs") or {}, "Paid once: total_s", of="FixedCosts")
    return blocks.figures(items)


def _profiled(report: Report) -> Mapping[str, Any] | None:
    """The first span with steps."""
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
        {"label": words.PARTS.get(name, words.term(name)), "role": name, "ms": ms, "share": share}
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
    made = [blocks.series("step time", unit, values, role="wall")]
    axes: dict[str, Any] = {"x": ("step", "number", x), "y": ("step time", unit)}
    return blocks.chart("step-time", "Step time", "line", sentence=sentence, **axes, y_min=0, series=made, small=True)


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
    points = curve_lines.on_steps(curve)
    if len(points.x) < 2:
        return None
    made = curve_lines.lines([points], POINTS)
    finite = points.values[np.isfinite(points.values)]
    said = f"{name} over {words.things(len(points.x), 'step')}"
    if len(finite):
        first, last = (blocks.value_text(float(finite[at]), "scalar") for at in (0, -1))
        said += f", from {first} to {last}"
    if odd := len(points.x) - len(finite):
        said += f"; {words.count(odd)} not finite"
    line = blocks.series(name, "scalar", made.lines[0].values, odd=made.lines[0].odd, joined=True)
    x = ("step", "number", made.x)
    return blocks.chart("loss", "Loss", "line", sentence=f"{said}.", x=x, y=(name, "scalar"), series=[line], small=True)
