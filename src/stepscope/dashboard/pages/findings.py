"""The first page: what the training loses, in order of cost, with where, why, and what to do about it.

Cards are the report's findings with links to the pages that show the evidence and a command that tries the fix. A
finding that another explains stands after it and says so: it is no loss in addition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PAGES, PageContext, traced
from stepscope.dashboard.summary import SENTENCE, card, replayed
from stepscope.model import Report
from stepscope.report import compiler_words, sentences, words
from stepscope.report.escape import one_line
from stepscope.report.sentences import groups, refused, trial_line

Row = Mapping[str, Any]

SHOWN_PARTS = 3
RECORD = "Record a training run, or open traces of torch.profiler with operators and steps in them."
HEAD = (
    "Mean step: mean_ms; Median: median_ms; 95th percentile: p95_ms; Steps per second: per_second per_s; "
    "Samples per second: samples_per_second per_s; Steady steps: count count"
)
# pages that show more of a finding, by its rule, else by its category
PAGES_OF = {
    "input": ("steps", "timeline", "flame"),
    "input.loader_bound": ("steps", "timeline", "system"),
    "host": ("flame", "timeline", "operators"),
    "sync": ("timeline", "operators", "kernels"),
    "launch": ("timeline", "kernels", "operators"),
    "compute": ("kernels", "operators", "modules"),
    "memory": ("memory", "steps"),
    "transfer": ("timeline", "kernels", "operators"),
    "communication": ("gpu", "timeline", "steps"),
    "communication.late_ranks": ("ranks", "flame", "timeline"),
    "communication.hang": ("hang", "flame"),
    "communication.straggler": ("ranks", "steps", "timeline", "gpu"),
    "communication.unbalanced_work": ("ranks", "steps", "timeline"),
    "compile": ("compiles", "steps"),
    "io": ("flame", "steps", "timeline"),
    "system": ("system", "steps"),
    "system.profiler_overhead": ("steps", "environment"),
}
EVERYWHERE = ("steps", "timeline")  # of a category that the table does not know


def build(context: PageContext) -> list[Block]:
    """The blocks of the page."""
    report = context.run.report(source=context.source)
    hang = blocks.link("The hang", "hang")
    made = [
        blocks.text(blocks.sentence(one_line(text, SENTENCE)), "warning" if tone == "head" else tone, hang)
        for text, tone in sentences.hang(report)[:1]
    ]
    made += [blocks.text(blocks.sentence(text), "note") for text in sentences.quality(report)]
    for number, text in enumerate(sentences.many_ranks(report)):
        link = None if number else blocks.link("All ranks", "ranks")
        made.append(blocks.text(blocks.sentence(text), "note" if number else "plain", link))
    made += _head(report)
    if line := trial_line(report, context.shorten):
        made.append(blocks.text(f"Knobs: {line}", "warning" if refused(report) else "plain"))
    # what a reader has to know before the first figure
    warnings = sentences.warnings(report)
    made += [blocks.text(blocks.sentence(one_line(text, SENTENCE)), "warning") for text in warnings]
    # causes by cost, each with what it explains behind it
    ordered = [row for group in groups(report) for row in (group.finding, *group.explained)]
    cards = [_linked(row, report, context) for row in ordered]
    risks = [_linked(row, report, context, risk=True) for row in report.risks]
    if overlap := sentences.overlap(report):
        made.append(blocks.text(overlap, "note"))
    judged = sentences.is_judged(report)
    healthy = sentences.healthy(report) if not cards and judged else None
    if unexplained := sentences.unexplained(report):
        made.append(blocks.text(unexplained, "warning"))
    if not cards and not risks and not judged:
        why = f"{blocks.sentence(sentences.without_steps(report))} What a step loses can only be said of steps."
        made.append(blocks.empty("No finding", why, RECORD, traced.again(context)))
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


def empty(context: PageContext) -> bool:
    """Whether nothing could be judged at all."""
    report = context.run.report(source=context.source)
    return not report.findings and not report.risks and not sentences.is_judged(report)


def _head(report: Report) -> Iterator[Block]:
    steps = report.steps
    if steps is not None:
        items = blocks.measures(steps, HEAD, of="StepFacts")
        items += blocks.measures(report.views.get("fixed_costs") or {}, "Paid once: total_s", of="FixedCosts")
        yield blocks.figures(items)
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
    yield from _headline(report)


def _headline(report: Report) -> Iterator[Block]:
    """Where a mean step goes, in a sentence: the largest parts, of profiled steps where nothing else tells them."""
    parts = {part["category"]: part["share"] for part in (report.steps or {}).get("partition", ())}
    parts.pop("unattributed", None)
    overviews = [item for item in report.views.get("overview") or () if item["steps"]]
    profiled = not any(parts.values()) and bool(overviews)
    if profiled:
        parts = {name: part["share"] for name, part in overviews[0]["parts"].items()}
    shown = sorted(((share, name) for name, share in parts.items() if share > 0), reverse=True)[:SHOWN_PARTS]
    if shown:
        said = ", ".join(f"{words.PARTS.get(name, words.term(name))} {words.percent(share)}" for share, name in shown)
        of = f" profiled step of {overviews[0]['span']['worker']}" if profiled else " step"
        yield blocks.text(f"Of a mean{of}: {said}.", "plain")


def _linked(row: Row, report: Report, context: PageContext, *, risk: bool = False) -> dict[str, Any]:
    wanted = PAGES_OF.get(row["rule"]) or PAGES_OF.get(row["category"]) or EVERYWHERE
    links = [blocks.link(PAGES[key].title, key) for key in wanted if not PAGES[key].empty(context)]
    return card(row, report, context.shorten, links, risk=risk)
