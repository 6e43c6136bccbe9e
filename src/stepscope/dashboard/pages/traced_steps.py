"""Profiled steps on the page of steps: what the devices and the host did in each, as traces tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import traced
from stepscope.report import words

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext
    from stepscope.model.views import Overview, StepBreakdown

POINTS, EMBEDDED_POINTS = 400, 200
MANY = 120
SMALLEST = 0.0005  # share of a part that is still drawn


def overviews(context: PageContext) -> list[Overview]:
    """Those of the chosen worker and span that hold steps, or whose whole length counts as one."""
    views = context.run.analysis.views
    if views is None:
        return []
    found = [span.overview for span in traced.of_scope(context, views) if span.overview is not None]
    return [item for item in found if item.steps]


def build(context: PageContext) -> list[Block]:
    """A chart of the first chosen span, and the mean step of all of them."""
    found = overviews(context)
    if not found:
        return []
    made = [_chart(found[0], context, several=len(found) > 1)] if found[0].has_steps or len(found) == 1 else []
    return [*made, *_means(found, context)]


def _chart(item: Overview, context: PageContext, *, several: bool) -> Block:
    from stepscope.analyze.pictures.series import pick, positions

    limit = EMBEDDED_POINTS if context.embedded else POINTS
    steps = list(item.steps)
    steps = pick(steps, positions([step.wall_ns for step in steps], limit))
    parts = [name for name, summary in item.parts.items() if summary.share >= SMALLEST]
    longest = max(steps, key=lambda step: step.wall_ns)
    most = max(item.parts, key=lambda name: item.parts[name].share)
    notes = [f"Steps of {item.span.label}; choose a worker or span to see another's."] if several else []
    if len(steps) < len(item.steps):
        notes.append(f"{len(steps)} of {len(item.steps)} steps: of each stretch the shortest and the longest.")
    if item.dropped_steps:
        dropped = words.things(item.dropped_steps, "last step")
        notes.append(f"Left out, because the end of its device work was not recorded: {dropped}.")
    if not item.has_steps:
        notes.append("No step is marked in this trace: its whole length counts as one.")
    share = words.percent(item.parts[most].share)
    return blocks.chart(
        "profiled",
        "What each profiled step is made of",
        "stacked_area" if len(steps) > MANY else "stacked_bars",
        sentence=(
            f"{_counted(len(item.steps))}, {words.nanoseconds(item.wall.mean_ns)} on average; {share} of it is "
            f"{words.PARTS.get(most, words.term(most))}. The longest is step {longest.step} with "
            f"{words.nanoseconds(longest.wall_ns)}."
        ),
        x=("step", "number", [_number(step) for step in steps]),
        y=("time of the step", "ns"),
        y_min=0,
        series=[
            blocks.series(
                words.PARTS.get(name, words.term(name)), "ns", [step.parts_ns.get(name) for step in steps], role=name
            )
            for name in parts
        ],
        help=blocks.meaning("StepBreakdown", "parts_ns"),
        notes=notes,
        sync="steps",
        select="steps" if item.has_steps else None,
    )


def _counted(steps: int) -> str:
    return f"{steps:,} profiled step{'s' if steps != 1 else ''}"


def _number(step: StepBreakdown) -> int | str:
    return int(step.step) if step.step.isdecimal() else step.step


def _means(found: list[Overview], context: PageContext) -> list[Block]:
    """The mean profiled step of each span, by part, with the parts of the TensorBoard plugin behind."""
    rows: list[dict[str, Any]] = []
    for item in found:
        for split, parts in (("stepscope", item.parts), ("TensorBoard plugin", item.plugin)):
            for name, summary in parts.items():
                if summary.share >= SMALLEST:
                    rows.append(
                        {
                            "span": item.span.label,
                            "split": split,
                            "part": words.PARTS.get(name, words.term(name)),
                            "mean_ns": summary.mean_ns,
                            "median_ns": summary.median_ns,
                            "p95_ns": summary.p95_ns,
                            "share": summary.share,
                        }
                    )
    columns = [blocks.column("span", "Span", "text")] if len(found) > 1 else []
    columns += [
        blocks.column("split", "Split by", "text"),
        blocks.column("part", "Part", "text"),
        *(
            blocks.column(key, label, unit, help=blocks.meaning("Summary", key), bar=key == "mean_ns")
            for label, key, unit in (
                ("Mean", "mean_ns", "ns"),
                ("Median", "median_ns", "ns"),
                ("95th percentile", "p95_ns", "ns"),
                ("Share", "share", "share"),
            )
        ),
    ]
    return [
        blocks.table(
            "profiled-means",
            "Where a mean profiled step goes",
            columns,
            rows,
            limit=context.limit,
            notes=["The parts of each split exclude each other and sum to the step."],
        )
    ]
