"""What compilers did: compiles by cause, what changed, which steps they took, graph breaks, transfers, metrics.

A run has one such view, of all ranks together, so that the page follows no worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from stepscope.analyze.views.select import NO_COMPILER
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.model.compilers import CompilerFacts, CompilersView
from stepscope.report import compiler_words as said
from stepscope.report import words
from stepscope.report.document import without_quotes
from stepscope.report.table import SHOWN

TITLE = "Compiles"
WARNINGS = 8
# figures that are left out where there are none
_RARE = ("At the limit of versions", "Failed compiles", "Transfers to the host", "Calls run on the host")
_REASON = (("reason", "text"), ("advice", "hint"))
_POINTS = (("step", "wall_ms", "step"), ("of it compiling", "compile_ms", "compile"))


def empty(context: PageContext) -> bool:
    view = context.run.analysis.compilers
    return view is None or not (view.backends or view.warnings)


def build(context: PageContext) -> list[Block]:
    view = context.run.analysis.compilers
    if view is None or empty(context):
        return [traced.absent(context, "compilers", TITLE, NO_COMPILER)]
    told: Mapping[str, Any] = context.run.report(source=context.source).views["compilers"]
    made = list(_said(told, view.backends))
    if view.steps:
        made.append(traced.block(context, "compile-steps", view.steps))
    for kind in dict.fromkeys(point.kind for point in view.points):
        made += _points(view, kind)
    made += [*_causes(context, told), *_limits(context, view), *_more(context, told)]
    return [*made, *traced.paragraphs(view.notes)]


def _said(told: Mapping[str, Any], backends: Sequence[CompilerFacts]) -> Iterator[Block]:
    for facts in backends:
        versions = f" ({', '.join(facts.versions[:2])})" if facts.versions else ""
        made = blocks.measures(facts, "compilers")
        items = [item for item in made if item["value"] or (facts.compiles and item["label"] not in _RARE)]
        yield blocks.figures(items, f"{facts.backend}{versions}")
    for row in told["warnings"][:WARNINGS]:
        text, note = said.warning(row)
        yield blocks.text(f"{text} ({note})", "warning")
    texts: list[str | None] = [text for row in told["storms"] for text in said.storm(row)]
    texts += [said.after_warmup(row) for row in told["steps"]]
    texts += said.operators(told["causes"])
    yield from traced.paragraphs(texts, "plain")


def _points(view: CompilersView, kind: str) -> Iterator[Block]:
    points = [point for point in view.points if point.kind == kind]
    timed = [point for point in points if point.compile_ms]
    if not timed:
        return
    worst = max(timed, key=lambda point: point.compile_ms or 0)
    parts = [
        (name, [getattr(point, key) for point in points], role)
        for name, key, role in _POINTS
        if any(getattr(point, key) is not None for point in points)
    ]
    yield blocks.drawn(
        "compile-steps",
        f"{words.things(len(points), f'{words.term(kind)} step')} compiled, broke or moved something to the host; "
        f"step {worst.step} compiled longest, {words.milliseconds(worst.compile_ms)}.",
        [point.step for point in points],
        parts,
        id=f"compile-steps-{kind}",
        title=f"Steps that compiled, {words.term(kind)}",
    )


def _causes(context: PageContext, told: Mapping[str, Any]) -> Iterator[Block]:
    found = traced.rows(context, "compiles", group="cause")
    if found.rows:
        yield _of_causes(context, "compiles", found.rows, told)
    else:
        yield from traced.paragraphs([found.absent])
    changes = traced.rows(context, "compiles", group="change")
    if changes.rows:
        yield traced.block(context, "compile-changes", [_worded(row) for row in changes.rows])


def _worded(row: Mapping[str, Any]) -> dict[str, Any]:
    why = said.CAUSES.get(row["cause"]) or words.term(row["cause"])
    return {**row, "kind": words.term(row["kind"]), "cause": why or None, "text": row.get("text") or None}


def _of_causes(context: PageContext, name: str, rows: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> Block:
    """A table of causes, of values that change the chain they went through, with the compiler's reasons.

    Reasons quote source lines: not where no source is wanted.
    """
    several = len({row["backend"] for row in rows}) > 1
    shown = [each for each in SHOWN[name].columns if several or each[1] != "backend"]
    shown += [each for each in _REASON if each[1] not in {key for _, key in shown}]
    shown = [(label, "changed" if key == "subject" else key) for label, key in shown]
    changed = {row["id"]: said.changed(row) for row in told["causes"]}
    made = [{**_worded(row), "changed": changed.get(row["id"]) or row["subject"]} for row in rows]
    if not context.source:
        for row in made:
            row["text"] = without_quotes(row["text"] or "") or None
    return traced.block(context, name, made, columns=shown)


def _limits(context: PageContext, view: CompilersView) -> Iterator[Block]:
    if not view.limits:
        return
    causes = {cause.id: cause for cause in view.causes}
    rows: list[dict[str, Any]] = []
    for limit in view.limits:
        cause = causes.get(limit.cause)
        place = asdict(cause.place) if cause is not None and cause.place is not None else None
        rows.append({**asdict(limit), "function": cause and cause.function, "place": place})
    yield from blocks.rows_table(context, "compile-limits", rows)


def _more(context: PageContext, told: Mapping[str, Any]) -> Iterator[Block]:
    missing = []
    for name, label in (
        ("graph-breaks", "Graph breaks"),
        ("transfers", "Transfers to the host"),
        ("xla-metrics", "Metrics of torch_xla"),
    ):
        found = traced.rows(context, name)
        if not found.rows:
            missing.append(blocks.fact(label, blocks.sentence(found.absent or "none")))
        elif name == "xla-metrics":
            yield traced.block(context, name, found.rows)
        else:
            yield _of_causes(context, name, found.rows, told)
    if missing:
        yield blocks.facts("Not in this recording", missing)
