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

RECORD = "Record a training run, or open traces of torch.profiler with operators and steps in them."
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


def empty(context: PageContext) -> bool:
    """Whether nothing could be judged at all."""
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
    wanted = PAGES_OF.get(row["rule"]) or PAGES_OF.get(row["category"]) or EVERYWHERE
    links = [blocks.link(PAGES[key].title, key) for key in wanted if not PAGES[key].empty(context)]
    return card(row, report, context.shorten, links, risk=risk)
