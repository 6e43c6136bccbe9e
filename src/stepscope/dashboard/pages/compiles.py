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
_UNTOLD = "no source of this backend tells"
_FIGURES = (
    "Compiles: compiles count; of them recompiles: recompiles count; Compile time: compile_ms ms; "
    "of it in steps: in_steps_ms ms; Longest compile: longest_ms ms; Graph breaks: graph_breaks count; "
    "At the limit of versions: limit_hits count; Failed compiles: failures count; "
    "Transfers to the host: transfers count; Calls run on the host: fallbacks count"
)
_RARE = ("limit_hits", "failures", "transfers", "fallbacks")  # left out where there are none
_REASON = (("reason", "text"), ("advice", "hint"))
_CHANGES = "backend; kind; why: cause; step; what: subject; old; new; line: file; function"
_POINTS = (("step", "wall_ms", "step"), ("of it compiling", "compile_ms", "compile"))
_LIMITS = blocks.columns(
    "Line: place none; Function: function; Since step: step count; Before: before_ms ms; Steps: before_steps count; "
    "After: after_ms ms; Steps after: after_steps count"
)


def empty(context: PageContext) -> bool:
    """Whether no compiler was seen."""
    view = context.run.analysis.compilers
    return view is None or not (view.backends or view.warnings)


def build(context: PageContext) -> list[Block]:
    """The page."""
    view = context.run.analysis.compilers
    if view is None or empty(context):
        return [traced.absent(context, "compilers", TITLE, NO_COMPILER)]
    told: Mapping[str, Any] = context.run.report(source=context.source).views["compilers"]
    made = list(_said(told, view.backends))
    if view.steps:
        made.append(traced.block(context, "compile-steps", view.steps, bars=("compile_ms",)))
    for kind in dict.fromkeys(point.kind for point in view.points):
        made += _points(view, kind)
    made += [*_causes(context, told), *_limits(context, view), *_more(context, told)]
    return [*made, *traced.paragraphs(view.notes)]


def _said(told: Mapping[str, Any], backends: Sequence[CompilerFacts]) -> Iterator[Block]:
    """Figures, warnings in a compiler's own words, and how often it compiled when it should have been done."""
    for facts in backends:
        versions = f" ({', '.join(facts.versions[:2])})" if facts.versions else ""
        made = zip(blocks.columns(_FIGURES), blocks.measures(facts, _FIGURES, missing=_UNTOLD), strict=True)
        items = [item for each, item in made if item["value"] or (facts.compiles and each.key not in _RARE)]
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
        f"compile-steps-{kind}",
        f"Steps that compiled, {words.term(kind)}",
        "bars",
        f"{words.things(len(points), f'{words.term(kind)} step')} compiled, broke or moved something to the host; "
        f"step {worst.step} compiled longest, {words.milliseconds(worst.compile_ms)}.",
        ("step", "count", [point.step for point in points]),
        ("time", "ms"),
        parts,
        ("CompilerPoint", "compile_ms"),
        notes=["Only steps in which something was compiled, broken off or moved, of the lead rank."],
        select="steps",
    )


def _causes(context: PageContext, told: Mapping[str, Any]) -> Iterator[Block]:
    found = traced.rows(context, "compiles", group="cause")
    if found.rows:
        yield _of_causes(context, "compiles", found.rows, told)
    else:
        yield from traced.paragraphs([found.absent])
    changes = traced.rows(context, "compiles", group="change")
    if changes.rows:
        rows, title = [_worded(row) for row in changes.rows], "What changed"
        yield traced.block(context, "compiles", rows, id="compile-changes", title=title, columns=_CHANGES)


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
    return traced.block(context, name, made, columns=shown, bars=("total_ms",))


def _limits(context: PageContext, view: CompilersView) -> Iterator[Block]:
    if not view.limits:
        return
    causes = {cause.id: cause for cause in view.causes}
    rows: list[dict[str, Any]] = []
    for limit in view.limits:
        cause = causes.get(limit.cause)
        row: dict[str, Any] = {each.key: getattr(limit, each.key) for each in _LIMITS[2:]}
        row["function"] = cause.function if cause is not None else None
        if cause is not None and cause.place is not None:
            row["place"] = blocks.place_of(asdict(cause.place), context.shorten)
        rows.append(row)
    yield blocks.table(
        "compile-limits",
        "Functions at their limit of versions",
        blocks.heads("EagerAfterLimit", _LIMITS),
        rows,
        limit=context.limit,
        notes=["Inputs that match no version run eagerly since then. Times are those of steps, compiling left out."],
    )


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
