"""The page of steps: what each is made of, how long they take, the longest ones, and what is paid once.

Journals know every step of a run and its phases, traces know what the devices did in a few of them; where a run has
both, both are shown. Ranks and kinds of steps are shown one at a time and summed up in a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stepscope.dashboard import blocks, selectors
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, step_tables, traced, traced_steps
from stepscope.report import words

if TYPE_CHECKING:
    from stepscope.engine.step_labels import LabelledSteps
    from stepscope.model import StepFacts
    from stepscope.model.timeline import LongStep, StepDistribution, StepPhases

POINTS, EMBEDDED_POINTS = 600, 300  # of a chart
LONGEST, LEAST_LONGEST = 100, 10  # steps in the table of the longest, where more and where fewer are above the median
MANY = 120  # steps from which areas are read more easily than bars
MAX_MARKS = 24
SYNC = "steps"
REASONS = {
    "steady": "steady",
    "warmup": "warm-up",
    "first_batch": "first batch of an epoch",
    "window": "under the profiler",
    "compile": "compiling",
    "profiler": "the script's profiler starts or stops in it",
    "incomplete": "at the end of the trace, its device work not recorded whole",
}
EVENTS = {"gc": "garbage collection", "save": "torch.save", "loader": "new loader iterator", "region": "region"}
FACTS = (
    ("Mean step", "mean_ms"),
    ("Median", "median_ms"),
    ("95th percentile", "p95_ms"),
    ("Steps per second", "per_second"),
    ("Samples per second", "samples_per_second"),
    ("Steady steps", "count"),
    ("First step of an epoch", "first_batch_ms"),
)
FIXED = (
    ("Paid once, in all", "total_s"),
    ("Before the first step", "before_first_step_s"),
    ("First step", "first_step_s"),
    ("Warm-up", "warmup_s"),
    ("Profiler windows", "windows_s"),
)
RECORD = "Record the training with stepscope, or mark its steps with stepscope.step() or torch.profiler's step()."


def build(context: PageContext) -> list[Block]:
    """The blocks of the page."""
    if empty(context):
        why = blocks.empty("No step was seen", _why_none(context), RECORD, traced.again(context))
        return [why, *step_tables.sampled(context)]
    kinds = [facts.kind for facts in _facts(context)]
    kind = context.choice("kind", kinds) if kinds else ""
    made = traced.choice(context, "Kind of step", "kind", kind, [(each, words.term(each)) for each in kinds])
    if kinds:
        made += _of_kind(context, kind)
    else:
        made += traced_steps.build(context)
    made += [*_fixed(context), *step_tables.by_process(context, labelled(context)), *step_tables.ranks(context)]
    made += [*step_tables.logged(context), *step_tables.sampled(context)]
    return made


def empty(context: PageContext) -> bool:
    """Whether neither a journal nor a trace holds a step."""
    return not context.run.analysis.steps and not traced_steps.overviews(context)


def labelled(context: PageContext) -> LabelledSteps:
    """The steps of the scope with what makes each unusual: the first of a chosen range is no warm-up for that."""
    import polars as pl

    from stepscope.engine.step_labels import LabelledSteps

    whole, chosen = context.base.labelled, context.scope.steps
    if chosen is None:
        return whole
    return LabelledSteps(whole.frame.filter(pl.col("step").is_between(*chosen)), whole.fallback)


def _facts(context: PageContext) -> tuple[StepFacts, ...]:
    """What the steps of the scope cost, by kind. A kind without a steady step in it is measured by what there is."""
    import polars as pl

    from stepscope.analyze import step_times
    from stepscope.engine.step_labels import STEADY, LabelledSteps

    read = context.run.analysis.steps
    if context.scope.steps is None:
        return read
    found = labelled(context)
    kinds = found.frame.filter(pl.col("reason") == STEADY)["kind"].unique().to_list()
    steady = LabelledSteps(found.frame.filter(pl.col("kind").is_in(kinds)), found.fallback)
    known = {facts.kind: facts for facts in (*read, *step_times.step_facts(steady))}
    return tuple(known[facts.kind] for facts in read)


def _why_none(context: PageContext) -> str:
    from stepscope.report import sentences

    if context.scope.steps is not None:
        return "None of the steps that are chosen is in this recording."
    return blocks.sentence(sentences.without_steps(context.run.report(source=context.source)))


def _of_kind(context: PageContext, kind: str) -> list[Block]:
    from stepscope.analyze.pictures import series

    steps = labelled(context)
    facts = next(each for each in _facts(context) if each.kind == kind)
    known = series.processes_of(steps, kind)
    chosen = selectors.processes(context.run, context.scope.worker)
    own = [process for process in known if chosen is None or process in chosen]
    made = [_figures(facts), *_said(facts, context), *_partition(facts)]
    if not own:
        return [*made, blocks.text(f"{context.scope.worker} has no {words.term(kind)} step of its own.", "note")]
    limit = EMBEDDED_POINTS if context.embedded else POINTS
    parts = series.step_phases(steps, kind, own[0], limit)
    traced = traced_steps.build(context)
    if parts.parts_ms or not traced:
        made.append(_chart(parts, context, several=len(own) > 1))
    made += traced
    found = series.distribution(steps, kind, own)
    if found is not None and sum(found.steady) + sum(found.others) > 1:
        made.append(_distribution(found, facts))
    longest = series.longest(context.run.tables, steps, kind, min(LONGEST, context.limit), own)
    longest = tuple(row for at, row in enumerate(longest) if at < LEAST_LONGEST or row.extra_ms > 0)
    of_kind = (row for row in series.by_process(steps) if row.kind == kind and row.process in own)
    made.append(_longest(longest, sum(row.steps for row in of_kind), context))
    return made


def _figures(facts: StepFacts) -> Block:
    """Figures of all ranks together."""
    items = [blocks.measured(label, facts, key) for label, key in FACTS if getattr(facts, key) is not None]
    return blocks.figures(items)


def _said(facts: StepFacts, context: PageContext) -> Iterator[Block]:
    """What the figures are of, and what was left out of them."""
    ranks = f" of {len(facts.ranks)} ranks together" if len(facts.ranks) > 1 else ""
    text = f"Steady {words.term(facts.kind)} steps{ranks}, cut by {words.signal(facts.signal)}."
    out = [f"{count} {REASONS.get(reason, words.term(reason))}" for reason, count in facts.excluded.items()]
    if out:
        text += f" Not counted: {', '.join(out)}."
    if context.scope.worker is not None and len(facts.ranks) > 1:
        text += " The figures are those of all ranks; the charts are of the chosen worker."
    yield blocks.text(text)
    if facts.low_confidence:
        yield blocks.text("Few steady steps: take every figure as a rough one.", "warning")


def _partition(facts: StepFacts) -> list[Block]:
    """The mean step by part, where parts are known."""
    if not any(part.category != "unattributed" for part in facts.partition):
        return []
    columns = [
        blocks.column("part", "Part", "text"),
        blocks.column("ms", "Time a step", "ms", help=blocks.meaning("PartitionPart", "ms"), bar=True),
        blocks.column("share", "Share", "share", help=blocks.meaning("PartitionPart", "share")),
    ]
    rows = [{"part": words.term(part.category), "ms": part.ms, "share": part.share} for part in facts.partition]
    return [blocks.table("partition", "Where a mean step goes", columns, rows, limit=len(rows))]


def _chart(parts: StepPhases, context: PageContext, *, several: bool) -> Block:
    """The steps one beside the other, each stacked of its phases."""
    notes = []
    if parts.total > len(parts.steps):
        notes.append(f"{len(parts.steps):,} of {parts.total:,} steps: of each stretch the shortest and the longest.")
    if several and context.scope.worker is None:
        notes.append(f"Steps of {parts.process}; choose a worker to see another's.")
    usual = [at for at, reason in enumerate(parts.reasons) if reason not in ("warmup", "profiler")] or list(
        range(len(parts.steps))
    )
    longest = max(usual, key=lambda at: parts.wall_ms[at])
    sentence = (
        f"{words.term(parts.kind).capitalize()} steps {parts.steps[0]} to {parts.steps[-1]} of {parts.process}; the "
        f"longest after the warm-up is step {parts.steps[longest]} with {words.milliseconds(parts.wall_ms[longest])}"
    )
    if parts.parts_ms:
        phase = max(parts.parts_ms, key=lambda name: parts.parts_ms[name][longest] or 0.0)
        sentence += f", most of it {words.term(phase)}"
        made = [blocks.series(words.term(name), "ms", values, role=name) for name, values in parts.parts_ms.items()]
        title, type_ = "What each step is made of", "stacked_area" if len(parts.steps) > MANY else "stacked_bars"
    else:
        made = [blocks.series("step time", "ms", parts.wall_ms, role="wall")]
        title, type_ = "Step time", "line" if len(parts.steps) > MANY else "bars"
    return blocks.chart(
        "steps",
        title,
        type_,
        sentence=sentence + ".",
        x=("step", "number", parts.steps),
        y=("time of the step", "ms"),
        y_min=0,
        series=made,
        marks=_marks(parts),
        help=blocks.meaning("StepPhases", "parts_ms" if parts.parts_ms else "wall_ms"),
        notes=notes,
        sync=SYNC,
        select="steps",
    )


def _marks(parts: StepPhases) -> list[Mapping[str, Any]]:
    """Stretches of steps that are not steady, with the reason; single first batches would only cover the picture."""
    found: list[dict[str, Any]] = []
    before = ""
    for step, reason in zip(parts.steps, parts.reasons, strict=True):
        if reason == before and found:
            found[-1]["to"] = step
        elif reason not in ("steady", "first_batch"):
            found.append(blocks.mark(step, step, REASONS.get(reason, words.term(reason))))
        before = reason if reason not in ("steady", "first_batch") else ""
    found.sort(key=lambda row: float(row["from"] - row["to"]))  # the widest first
    return sorted(found[:MAX_MARKS], key=lambda row: float(row["from"]))


def _distribution(found: StepDistribution, facts: StepFacts) -> Block:
    made = [blocks.series("steady", "count", found.steady, role="measured")]
    if any(found.others):
        made.append(blocks.series("others", "count", found.others, role="other"))
    marks = []
    if found.longer:
        marks.append(blocks.mark(found.edges_ms[-2], found.edges_ms[-1], "and longer"))
    return blocks.chart(
        "distribution",
        "How long steps take",
        "histogram",
        sentence=(
            f"Half of the steady steps take less than {words.milliseconds(facts.median_ms)}, one in twenty more than "
            f"{words.milliseconds(facts.p95_ms)}; the longest of all takes {words.milliseconds(found.longest_ms)}."
        ),
        x=("time of the step", "ms", found.edges_ms[:-1]),
        y=("steps", "count"),
        y_min=0,
        series=made,
        marks=marks,
        help=blocks.meaning("StepDistribution", "steady"),
        notes=["The last bin holds all longer steps too."] if found.longer else [],
    )


def _longest(rows: tuple[LongStep, ...], total: int, context: PageContext) -> Block:
    """The longest steps; a click on one opens it in the timeline."""
    link = None if context.embedded else blocks.cell_link("timeline", "steps", "range")
    columns = [
        blocks.column("step", "Step", "number", link=link),
        blocks.column("wall_ms", "Time", "ms", help=blocks.meaning("LongStep", "wall_ms"), bar=True),
        blocks.column("extra_ms", "Above the median", "ms", help=blocks.meaning("LongStep", "extra_ms")),
        blocks.column("phase", "Longest above usual", "text"),
        blocks.column("phase_extra_ms", "by how much", "ms", help=blocks.meaning("LongStep", "phase_extra_ms")),
        blocks.column("reason", "Kind of step", "text"),
        blocks.column("events", "What happened in it", "text"),
    ]
    if len({row.process for row in rows}) > 1:
        columns.insert(1, blocks.column("process", "Process", "text"))
    if not any(row.events for row in rows):
        columns.pop()
    if not any(row.phase for row in rows):
        columns = [column for column in columns if not column["key"].startswith("phase")]
    made = [
        {
            "step": row.step,
            "process": row.process,
            "wall_ms": row.wall_ms,
            "extra_ms": row.extra_ms,
            "phase": words.term(row.phase) if row.phase else None,
            "phase_extra_ms": row.phase_extra_ms,
            "reason": REASONS.get(row.reason, words.term(row.reason)),
            "events": ", ".join(_event(event) for event in row.events) or None,
            "range": f"{row.step}:{row.step}",
        }
        for row in rows
    ]
    return blocks.table(
        "longest", "The longest steps", columns, made, limit=context.limit, total=total, sorted_by="wall_ms"
    )


def _event(event: Any) -> str:
    name = f" {event.name}" if event.name and event.kind != "gc" else ""
    return f"{EVENTS.get(event.kind, words.term(event.kind))}{name} {words.milliseconds(event.ms)}"


def _fixed(context: PageContext) -> list[Block]:
    """What the run paid once."""
    costs = context.base.analysis.fixed
    if costs.total_s is None:
        return []
    items = [blocks.measured(label, costs, key) for label, key in FIXED if getattr(costs, key) is not None]
    return [blocks.figures(items, "Fixed costs of the run")]
