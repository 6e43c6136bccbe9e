"""The first page: what the training loses, in order of cost, with where, why, and what to do about it.

Cards are the report's findings with links to the pages that show the evidence and a command that tries the fix. A
finding that another explains stands after it and says so: it is no loss in addition.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PAGES, PageContext, traced
from stepscope.model import Report
from stepscope.report import compiler_words, sentences, words
from stepscope.report.escape import one_line
from stepscope.report.sentences import groups, refused, trial_line

Row = Mapping[str, Any]

MAX_COMMAND = 2_000  # characters of a command that is offered to be copied
SENTENCE = 2_000
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
    "communication.straggler": ("steps", "timeline", "gpu"),
    "communication.unbalanced_work": ("steps", "timeline"),
    "compile": ("compiles", "steps"),
    "io": ("flame", "steps", "timeline"),
    "system": ("system", "steps"),
    "system.profiler_overhead": ("steps", "environment"),
}
EVERYWHERE = ("steps", "timeline")  # of a category that the table does not know


def build(context: PageContext) -> list[Block]:
    """The blocks of the page."""
    report = context.run.report(source=context.source)
    made = [blocks.text(blocks.sentence(text), "note") for text in sentences.quality(report)]
    made += [*_head(report), *_knobs(report, context), *_warnings(report)]
    cards = [_card(row, report, context) for row in _in_order(report)]
    risks = [_card(row, report, context, risk=True) for row in report.risks]
    overlap = sentences.overlap(report)
    if overlap:
        made.append(blocks.text(overlap, "note"))
    judged = sentences.is_judged(report)
    healthy = sentences.healthy(report) if not cards and judged else None
    if unexplained := sentences.unexplained(report):
        made.append(blocks.text(unexplained, "warning"))
    if not cards and not risks and not judged:
        made.append(blocks.empty("No finding", _why_none(report), RECORD, traced.again(context)))
    made.append(
        blocks.findings(
            cards[: context.limit],
            risks[: context.limit],
            healthy=healthy,
            abstained=report.abstained,
            ignored=report.ignored,
        )
    )
    if steps := sentences.next_steps(report):
        made.append(blocks.facts("Next", [blocks.fact(blocks.capital(label), command) for label, command in steps]))
    return made


def empty(context: PageContext) -> bool:
    """Whether nothing could be judged at all."""
    report = context.run.report(source=context.source)
    return not report.findings and not report.risks and not sentences.is_judged(report)


def _why_none(report: Report) -> str:
    return f"{blocks.sentence(sentences.without_steps(report))} What a step loses can only be said of steps."


def _head(report: Report) -> Iterator[Block]:
    """The headline: what a step takes."""
    steps = report.steps
    if steps is not None:
        items = blocks.measures(steps, HEAD, of="StepFacts")
        items += blocks.measures(report.views.get("fixed_costs") or {}, "Paid once: total_s", of="FixedCosts")
        yield blocks.figures(items)
        yield blocks.text(_said(report, steps))
        trained_by = sentences.framework(report)
        if trained_by:
            yield blocks.text(blocks.sentence(trained_by))
    else:
        seen = compiler_words.without_steps(report)
        if seen:
            yield blocks.text(blocks.sentence(seen))
    for other in (report.views.get("steps_by_kind") or ())[1:]:
        tone = "warning" if sentences.stands_out(report, other) else "note"
        yield blocks.text(blocks.sentence(sentences.step_kind(report, other)), tone)
    yield from _headline(report)


def _said(report: Report, steps: Row) -> str:
    text = f"{sentences.counted(steps)}, cut by {words.signal(steps.get('signal', ''))}."
    compiling = compiler_words.kind_note(report, steps["kind"])
    return f"{text} {blocks.sentence(compiling)}" if compiling else text


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


def _knobs(report: Report, context: PageContext) -> Iterator[Block]:
    if line := trial_line(report, context.shorten):
        yield blocks.text(f"Knobs: {line}", "warning" if refused(report) else "plain")


def _warnings(report: Report) -> Iterator[Block]:
    """What a reader has to know before the first figure."""
    for text in sentences.warnings(report):
        yield blocks.text(blocks.sentence(one_line(text, SENTENCE)), "warning")


def _in_order(report: Report) -> Iterator[Row]:
    """Causes by cost, each with what it explains behind it."""
    for group in groups(report):
        yield group.finding
        yield from group.explained


def _card(row: Row, report: Report, context: PageContext, *, risk: bool = False) -> dict[str, Any]:
    titles = {one["id"]: one["title"] for one in (*report.findings, *report.risks)}
    by = [one for one in (*report.findings, *report.risks) if row["id"] in one["explains"] and one["id"] != row["id"]]
    return {
        "id": row["id"],
        "rule": row["rule"],
        "category": row["category"],
        "title": one_line(row["title"], SENTENCE),
        "severity": row["severity"] if row["severity"] in ("critical", "warning", "info") else "info",
        "confidence": row["confidence"] if row["confidence"] in ("high", "medium", "low") else "low",
        "cost_ms_per_step": None if risk else row["cost_ms_per_step"],
        "share": None if risk else row["share"],
        "gain_ceiling": None if risk else row["gain_ceiling"],
        "expected_gain": None if risk or not row["expected_gain"] else dict(row["expected_gain"]),
        "gain": None if risk else sentences.gain(row),
        "of": None if risk else sentences.basis(row),
        "where": [where_of(place, context.shorten) for place in row["where"]],
        "ranks": list(row["ranks"]),
        "evidence": [_evidence(each) for each in row["evidence"]],
        "fix": one_line(row["fix"], SENTENCE),
        "caveat": one_line(row["caveat"], SENTENCE),
        "learn": row["learn"] if row["learn"].startswith("https://") else "",
        "falsified_by": one_line(row["falsified_by"], SENTENCE),
        "try": [{"knob": each["knob"], "value": each["value"]} for each in row["try"]],
        "explains": [{"id": name, "title": titles[name]} for name in row["explains"] if name in titles],
        "explained_by": [{"id": one["id"], "title": one["title"]} for one in by],
        "disagreements": [one_line(sentences.disagreement(each), SENTENCE) for each in row.get("disagreements") or ()],
        "links": links(row["rule"], row["category"], context),
        "command": _command(row["try"], report),
    }


def where_of(place: Row, shorten: blocks.Shorten) -> dict[str, Any]:
    """A place with the lines around it."""
    made = blocks.place_of(place, shorten)
    quoted = place.get("source")
    lines = None
    if quoted:
        numbered = enumerate(quoted["lines"], start=quoted["first_line"])
        lines = [{"line": number, "text": text, "here": number == place["line"]} for number, text in numbered]
    edited = bool(quoted and quoted["changed_since"])
    return {**made, "share": place.get("share"), "source": lines, "edited": edited}


def _evidence(row: Row) -> dict[str, str]:
    metric, value = words.evidence(dict(row))
    return {"metric": metric, "text": value, "source": row["source"]}


def links(rule: str, category: str, context: PageContext) -> list[blocks.Link]:
    """The pages that show what a finding stands on, those that are empty left out."""
    wanted: Sequence[str] = PAGES_OF.get(rule) or PAGES_OF.get(category) or EVERYWHERE
    return [blocks.link(PAGES[key].title, key) for key in wanted if not PAGES[key].empty(context)]


def _command(tries: Iterable[Row], report: Report) -> str | None:
    """A run with the knobs of the finding; None where it names none, or how the run was started is not known."""
    command = [str(word) for word in report.run.get("command") or ()]
    knobs = [word for row in tries for word in ("--knob", f"{row['knob']}={row['value']}")]
    if not knobs or not command:
        return None
    line = shlex.join(["stepscope", "run", *knobs, "--", *command])
    return line if len(line) <= MAX_COMMAND else None
