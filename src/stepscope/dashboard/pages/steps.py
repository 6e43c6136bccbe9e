"""The page of steps: what each is made of, how long they take, the longest ones, and what is paid once.

Journals know every step of a run and its phases, traces know what the devices and the host did in a few of them; where
a run has both, both are shown. Ranks and kinds of steps are shown one at a time and summed up in a table. Below the
charts stand processes, ranks, and what sampled stacks say of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import polars as pl
from msgspec.structs import asdict

from stepscope.analyze import step_times
from stepscope.analyze.pictures import series
from stepscope.analyze.pictures.series import pick, positions
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block, Row
from stepscope.dashboard.pages import PageContext, processes, traced
from stepscope.engine.step_labels import STEADY, LabelledSteps
from stepscope.model import StepFacts
from stepscope.model.timeline import LongStep, StepDistribution, StepPhases
from stepscope.model.views import Overview
from stepscope.report import sentences, words

POINTS, EMBEDDED_POINTS = 600, 300  # of a chart
LONGEST, LEAST_LONGEST = 100, 10  # steps in the table of the longest, where more and where fewer are above the median
MANY = 120  # steps from which areas are read more easily than bars
MAX_MARKS = 24
RECORD = "Record the training with stepscope, or mark its steps with stepscope.step() or torch.profiler's step()."


def build(context: PageContext) -> list[Block]:
    if empty(context):
        why = "None of the steps that are chosen is in this recording."
        if context.scope.steps is None:
            why = blocks.sentence(sentences.without_steps(context.run.report(source=context.source)))
        return [blocks.empty("No step was seen", why, RECORD, traced.again(context)), *_sampled(context)]
    steps, known = labelled(context), {facts.kind: facts for facts in _facts(context)}
    made = _profiled(context)
    if known:
        kind = context.choice("kind", list(known))
        choice = traced.choice(context, "Kind of step", "kind", kind, [(each, words.term(each)) for each in known])
        made = [*choice, *_of_kind(context, steps, known[kind], made)]
    costs = context.base.analysis.fixed
    if costs.total_s is not None:  # what the run paid once
        made.append({**blocks.figures(blocks.measures(costs, "fixed"), "Fixed costs of the run"), "folded": True})
    processes_of = series.by_process(steps)
    by_process = map(asdict, processes_of if len(processes_of) > 1 else ())
    made += blocks.folded([*blocks.rows_table(context, "processes", by_process), *_ranks(context)])
    if not context.run.tables.metrics.is_empty():
        said = "Losses, learning rates, norms and what else the run learned stand beside its step times on the page"
        made.append(blocks.text(said, link=blocks.link("Metrics", "metrics")))
    made += blocks.folded(_sampled(context))
    return sorted(made, key=lambda block: "folded" in block)  # what is folded stands below the pictures


def empty(context: PageContext) -> bool:
    return not context.run.analysis.steps and not overviews(context)


def labelled(context: PageContext) -> LabelledSteps:
    """The steps of the scope with what makes each unusual: the first of a chosen range is no warm-up for that."""
    whole, chosen = context.base.labelled, context.scope.steps
    if chosen is None:
        return whole
    return LabelledSteps(whole.frame.filter(pl.col("step").is_between(*chosen)), whole.fallback)


def _facts(context: PageContext) -> tuple[StepFacts, ...]:
    """What the steps of the scope cost, by kind. A kind without a steady step in it is measured by what there is."""
    read = context.run.analysis.steps
    if context.scope.steps is None:
        return read
    found = labelled(context)
    kinds = found.frame.filter(pl.col("reason") == STEADY)["kind"].unique().to_list()
    steady = LabelledSteps(found.frame.filter(pl.col("kind").is_in(kinds)), found.fallback)
    known = {facts.kind: facts for facts in (*read, *step_times.step_facts(steady))}
    return tuple(known[facts.kind] for facts in read)


def _of_kind(context: PageContext, steps: LabelledSteps, facts: StepFacts, profiled: list[Block]) -> Iterator[Block]:
    kind = facts.kind
    chosen = processes(context.run, context.scope.worker)
    own = [process for process in series.processes_of(steps, kind) if chosen is None or process in chosen]
    yield blocks.figures(blocks.measures(facts, "steps"))
    yield from _said(facts, context)
    if any(part.category != "unattributed" for part in facts.partition):
        rows = [{"part": words.term(part.category), "ms": part.ms, "share": part.share} for part in facts.partition]
        yield from blocks.folded(blocks.rows_table(context, "partition", rows, limit=len(rows)))
    if not own:
        yield blocks.text(f"{context.scope.worker} has no {words.term(kind)} step of its own.", "note")
        return
    parts = series.step_phases(steps, kind, own[0], EMBEDDED_POINTS if context.embedded else POINTS)
    if parts.parts_ms or not profiled:
        yield _chart(parts, several=len(own) > 1 and context.scope.worker is None)
    yield from profiled
    found = series.distribution(steps, kind, own)
    if sum(found.steady) + sum(found.others) > 1:
        yield _distribution(found, facts)
    longest = series.longest(context.run.tables, steps, kind, min(LONGEST, context.limit), own)
    longest = tuple(row for at, row in enumerate(longest) if at < LEAST_LONGEST or row.extra_ms > 0)
    of_kind = (row for row in series.by_process(steps) if row.kind == kind and row.process in own)
    yield from blocks.folded(_longest(longest, sum(row.steps for row in of_kind), context))


def _said(facts: StepFacts, context: PageContext) -> Iterator[Block]:
    ranks = f" of {len(facts.ranks)} ranks together" if len(facts.ranks) > 1 else ""
    text = f"Steady {words.term(facts.kind)} steps{ranks}, cut by {words.signal(facts.signal)}."
    out = [f"{count} {words.STEP_REASONS.get(reason, words.term(reason))}" for reason, count in facts.excluded.items()]
    if out:
        text += f" Not counted: {', '.join(out)}."
    if context.scope.worker is not None and len(facts.ranks) > 1:
        text += " The figures are those of all ranks; the charts are of the chosen worker."
    yield blocks.text(text)
    if facts.low_confidence:
        yield blocks.text("Few steady steps: take every figure as a rough one.", "warning")


def _chart(parts: StepPhases, *, several: bool) -> Block:
    notes = []
    if parts.total > len(parts.steps):
        notes.append(f"{len(parts.steps):,} of {parts.total:,} steps: of each stretch the shortest and the longest.")
    if several:
        notes.append(f"Steps of {parts.process}; choose a worker to see another's.")
    usual = [at for at, reason in enumerate(parts.reasons) if reason not in ("warmup", "profiler")]
    longest = max(usual or range(len(parts.steps)), key=lambda at: parts.wall_ms[at])
    sentence = (
        f"{words.term(parts.kind).capitalize()} steps {parts.steps[0]} to {parts.steps[-1]} of {parts.process}; the "
        f"longest after the warm-up is step {parts.steps[longest]} with {words.milliseconds(parts.wall_ms[longest])}"
    )
    many = len(parts.steps) > MANY
    made: list[tuple[str, Sequence[float | None], str]] = [("step time", parts.wall_ms, "wall")]
    given: dict[str, Any] = {"title": "Step time", "of": ("StepPhases", "wall_ms"), "type": "line" if many else "bars"}
    if parts.parts_ms:
        phase = max(parts.parts_ms, key=lambda name: parts.parts_ms[name][longest] or 0.0)
        sentence += f", most of it {words.term(phase)}"
        made = [(words.term(name), values, name) for name, values in parts.parts_ms.items()]
        given = {"of": ("StepPhases", "parts_ms"), "type": "stacked_area" if many else "stacked_bars"}
    return blocks.drawn("steps", f"{sentence}.", parts.steps, made, marks=_marks(parts), notes=notes, **given)


def _marks(parts: StepPhases) -> list[Mapping[str, Any]]:
    found = []
    for reason, stretch in groupby(zip(parts.reasons, parts.steps, strict=True), key=itemgetter(0)):
        if reason not in ("steady", "first_batch"):
            steps = [step for _, step in stretch]
            found.append(blocks.mark(steps[0], steps[-1], words.STEP_REASONS.get(reason, words.term(reason))))
    found.sort(key=lambda row: float(row["from"] - row["to"]))  # the widest first
    return sorted(found[:MAX_MARKS], key=lambda row: float(row["from"]))


def _distribution(found: StepDistribution, facts: StepFacts) -> Block:
    others = [("others", found.others, "other")] if any(found.others) else []
    return blocks.drawn(
        "distribution",
        f"Half of the steady steps take less than {words.milliseconds(facts.median_ms)}, one in twenty more than "
        f"{words.milliseconds(facts.p95_ms)}; the longest of all takes {words.milliseconds(found.longest_ms)}.",
        found.edges_ms[:-1],
        [("steady", found.steady, "measured"), *others],
        marks=[blocks.mark(found.edges_ms[-2], found.edges_ms[-1], "and longer")] if found.longer else [],
        notes=["The last bin holds all longer steps too."] if found.longer else [],
    )


def _longest(rows: tuple[LongStep, ...], total: int, context: PageContext) -> list[Block]:
    several = len({row.process for row in rows}) > 1
    made = [
        {
            **asdict(row),
            "phase_extra_ms": row.phase_extra_ms if row.phase else None,
            "reason": words.STEP_REASONS.get(row.reason, words.term(row.reason)),
            "events": ", ".join(_event(event) for event in row.events) or None,
            "range": f"{row.step}:{row.step}",
        }
        for row in rows
    ]
    tables = blocks.rows_table(context, "longest", made, total=total, without=() if several else ("process",))
    if not context.embedded:
        for column in (column for table in tables for column in table["columns"] if column["key"] == "step"):
            column["link"] = blocks.cell_link("timeline", "steps", "range")
    return tables


def _event(event: Any) -> str:
    name = f" {event.name}" if event.name and event.kind != "gc" else ""
    return f"{words.STEP_EVENTS.get(event.kind, words.term(event.kind))}{name} {words.milliseconds(event.ms)}"


PROFILED, EMBEDDED_PROFILED = 400, 200  # points of a chart
SMALLEST = 0.0005  # share of a part that is still drawn


def overviews(context: PageContext) -> list[Overview]:
    """Those of the chosen worker and span that hold steps, or whose whole length counts as one."""
    views = context.run.analysis.views
    spans = traced.of_scope(context, views) if views is not None else ()
    return [span.overview for span in spans if span.overview is not None and span.overview.steps]


def _profiled(context: PageContext) -> list[Block]:
    found = overviews(context)
    if not found:
        return []
    made = [_profiled_chart(found[0], context, several=len(found) > 1)] if found[0].has_steps or len(found) == 1 else []
    return [*made, *blocks.folded(_means(found, context))]


def _profiled_chart(item: Overview, context: PageContext, *, several: bool) -> Block:
    limit = EMBEDDED_PROFILED if context.embedded else PROFILED
    steps = list(item.steps)
    steps = pick(steps, positions([step.wall_ns for step in steps], limit))
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
    named = {name: words.part(name) for name in item.parts}
    return blocks.drawn(
        "profiled",
        f"{words.things(len(item.steps), 'profiled step')}, {words.nanoseconds(item.wall.mean_ns)} on average; {share} "
        f"of it is {named[most]}. The longest is step {longest.step} with {words.nanoseconds(longest.wall_ns)}.",
        [int(step.step) if step.step.isdecimal() else step.step for step in steps],
        [
            (named[name], [step.parts_ns.get(name) for step in steps], name)
            for name, summary in item.parts.items()
            if summary.share >= SMALLEST
        ],
        type="stacked_area" if len(steps) > MANY else "stacked_bars",
        notes=notes,
        select="steps" if item.has_steps else None,
    )


def _means(found: list[Overview], context: PageContext) -> list[Block]:
    rows = [
        {
            **asdict(summary),
            "span": item.span.label,
            "split": split,
            "part": words.part(name),
        }
        for item in found
        for split, parts in (("stepscope", item.parts), ("TensorBoard plugin", item.plugin))
        for name, summary in parts.items()
        if summary.share >= SMALLEST
    ]
    return blocks.rows_table(context, "profiled-means", rows, without=() if len(found) > 1 else ("span",))


def _ranks(context: PageContext) -> list[Block]:
    found = context.run.analysis.ranks
    if found is None:
        return []
    exchange = ", ".join(words.term(phase) for phase in found.exchange) or "no phase"
    note = (
        f"Rank {found.slowest} works longest, in {words.percent(found.slowest_share)} of {found.steps:,} steps; "
        f"ranks wait for each other in: {exchange} ({found.exchange_source})."
    )
    return blocks.rows_table(context, "steps/ranks", map(asdict, found.ranks), notes=[note])


def _sampled(context: PageContext) -> Iterator[Block]:
    views = context.run.report(source=context.source).views
    seen = views.get("sampled") or {}
    waits = [{**part, "rank": wait["rank"]} for wait in seen.get("waits") or () for part in wait["parts"]]
    slow, rank_lines = seen.get("slow_steps") or {}, seen.get("rank_lines") or {}
    for name, rows, note in (
        ("waits", waits, None),
        ("slow-lines", slow.get("lines"), _of_slow_steps(slow)),
        ("rank-lines", rank_lines.get("lines"), rank_lines.get("unit")),
        ("hot-lines", (views.get("stacks") or {}).get("hot_lines"), None),
        ("loader-lines", (views.get("loader") or {}).get("lines"), None),
        *((name, views.get(name), None) for name in ("loops", "python", "io", "regions")),
        ("stages", seen.get("stages"), None),
    ):
        yield from blocks.rows_table(context, name, rows, say={"by_rank": _by_rank}, notes=[note] if note else [])


def _by_rank(row: Row) -> str:
    most = sorted(row["by_rank"].items(), key=lambda pair: -pair[1])[:8]
    return ", ".join(f"{rank}: {words.number(value)}" for rank, value in most)


def _of_slow_steps(slow: Row) -> str | None:
    if not slow:
        return None
    return (
        f"{slow['slow_steps']:,} slow steps (above {words.milliseconds(slow['threshold_ms'])}, "
        f"{words.milliseconds(slow['slow_mean_ms'])} on average) against {slow['typical_steps']:,} typical ones "
        f"({words.milliseconds(slow['typical_mean_ms'])}); time of the main thread per step, sampled."
    )
