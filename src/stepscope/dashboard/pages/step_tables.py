"""Below the charts of the page of steps: processes, ranks, logged values, and what sampled stacks say of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages.rows import Col, rows_table
from stepscope.report import words
from stepscope.report.words import STAGES, WAIT_PARTS

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext
    from stepscope.engine.step_labels import LabelledSteps

Row = Mapping[str, Any]
MAX_LOGGED = 6  # charts of values that the script logged
POINTS = 400

_PROCESS = (
    Col("Process", "process"),
    Col("Kind", "kind"),
    Col("Steps", "steps", "count"),
    Col("Steady", "steady", "count"),
    Col("Mean", "mean_ms", "ms", bar=True),
    Col("Median", "median_ms", "ms"),
    Col("95th percentile", "p95_ms", "ms"),
    Col("Longest", "longest_ms", "ms"),
)
_RANK = (
    Col("Rank", "rank", "number"),
    Col("Mean step", "wall_ms", "ms"),
    Col("Own work", "own_ms", "ms", bar=True),
    Col("Exchange and waiting", "exchange_ms", "ms"),
    Col("Samples a step", "samples", "number"),
)
_WAIT = (
    Col("Rank", "rank", "number"),
    Col("Share of the wait", "share", "share", bar=True),
    Col("Per step", "ms_per_step", "ms"),
    Col("What", "kind", say=lambda row: WAIT_PARTS.get(str(row["kind"]), str(row["kind"]))),
    Col("Line", "place"),
    Col("On top", "leaf", code=True),
    Col("Samples", "samples", "count"),
)
_SLOW = (
    Col("Extra", "extra_ms_per_step", "ms", bar=True),
    Col("In slow steps", "slow_ms_per_step", "ms"),
    Col("In typical ones", "typical_ms_per_step", "ms"),
    Col("Line", "place"),
    Col("Phase", "phase", say=lambda row: words.term(row["phase"]) if row["phase"] else None),
    Col("On top", "leaf", code=True),
    Col("Samples", "samples", "count"),
)
_RANK_LINE = (
    Col("Spread", "spread", "number", bar=True),
    Col("Line", "place"),
    Col("Phase", "phase", say=lambda row: words.term(row["phase"]) if row["phase"] else None),
    Col("By rank", "by_rank", say=lambda row: _by_rank(row)),
    Col("On top", "leaf", code=True),
)
_STAGE = (
    Col("Stage", "stage", say=lambda row: STAGES.get(str(row["stage"]), str(row["stage"]))),
    Col("Share", "share", "share", bar=True),
    Col("Waiting", "waiting_share", "share"),
    Col("Samples", "samples", "count"),
)
_HOT = (
    Col("Share", "share", "share", bar=True),
    Col("Per step", "ms_per_step", "ms"),
    Col("Line", "place"),
    Col("Process", "role", say=lambda row: words.term(row["role"])),
    Col("Phase", "phase", say=lambda row: words.term(row["phase"]) if row["phase"] else None),
    Col("Waiting", "waiting_share", "share"),
    Col("On top", "library_leaf", code=True),
)
_LOOP = (
    Col("Calls", "callee"),
    Col("Calls a step", "calls_per_step", "number"),
    Col("Per step", "ms_per_step", "ms", bar=True),
    Col("Operators a call", "operators_per_call", "number"),
    Col("Line", "place"),
    Col("Equals", "dimension"),
)
_PYTHON = (
    Col("Share", "share", "share", bar=True),
    Col("Per step", "ms_per_step", "ms"),
    Col("Line", "place"),
    Col("Phase", "phase", say=lambda row: words.term(row["phase"]) if row["phase"] else None),
    Col("Outside operators", "python_fraction", "share"),
    Col("Samples", "samples", "count"),
)
_IO = (
    Col("Operation", "operation"),
    Col("Calls a step", "calls_per_step", "number"),
    Col("Per step", "ms_per_step", "ms", bar=True),
    Col("Line", "place"),
    Col("Seen in", "source"),
)
_REGION = (
    Col("Region", "name"),
    Col("Calls", "calls", "count"),
    Col("Calls a step", "calls_per_step", "number"),
    Col("Per step", "ms_per_step", "ms", bar=True),
    Col("Seen in", "source"),
)


def by_process(context: PageContext, steps: LabelledSteps) -> list[Block]:
    """Each process and kind, where there is more than one."""
    from stepscope.analyze.pictures import series

    found = series.by_process(steps)
    if len(found) < 2:
        return []
    rows = [{**asdict(row), "kind": words.term(row.kind)} for row in found]
    return rows_table(context, "processes", "Steps by process and kind", "ProcessSteps", _PROCESS, rows)


def ranks(context: PageContext) -> list[Block]:
    """Who works and who waits, in the same steps."""
    found = context.run.analysis.ranks
    if found is None:
        return []
    rows = [asdict(work) for work in found.ranks]
    exchange = ", ".join(words.term(phase) for phase in found.exchange)
    note = f"Rank {found.slowest} works longest, in {words.percent(found.slowest_share)} of {found.steps:,} steps"
    return rows_table(
        context,
        "ranks",
        "Ranks side by side: a mean step of each",
        "RankWork",
        _RANK,
        rows,
        notes=[f"{note}; ranks wait for each other in: {exchange or 'no phase'} ({found.exchange_source})."],
    )


def logged(context: PageContext) -> list[Block]:
    """The losses that were kept, and what the script logged, over the steps."""
    from stepscope.analyze.pictures.series import pick, positions

    made = []
    for number, (name, points) in enumerate(_logged(context)):
        kept = positions([value for _, value in points], POINTS)
        shown = pick(points, kept)
        made.append(
            blocks.chart(
                f"logged-{number}",
                name,
                "line",
                sentence=(
                    f"{name} over {len(points):,} steps, from {words.number(points[0][1])} to "
                    f"{words.number(points[-1][1])}."
                ),
                x=("step", "number", [step for step, _ in shown]),
                y=(name, "number"),
                series=[blocks.series(name, "number", [value for _, value in shown])],
                sync="steps",
                select="steps",
            )
        )
    return made


def _logged(context: PageContext) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """(name, (step, value) in order) of what was logged; series of one value draw no line."""
    import polars as pl

    trial = context.run.analysis.trial
    if trial is not None and len(trial.losses) > 1:
        chosen = context.scope.steps
        losses = [point for point in trial.losses if chosen is None or chosen[0] <= point[0] <= chosen[1]]
        if len(losses) > 1:
            yield "Loss", losses
    scalars = context.run.tables.scalars.drop_nulls(["step", "name", "value"])
    if scalars.is_empty():
        return
    lead = scalars.sort("rank", "process")["process"][0]
    own = scalars.filter(pl.col("process") == lead).sort("name", "step")
    for (name,), rows in list(own.partition_by("name", as_dict=True, maintain_order=True).items())[:MAX_LOGGED]:
        if rows.height > 1:
            yield str(name), rows.select("step", "value").rows()


def sampled(context: PageContext) -> list[Block]:
    """What sampled stacks and windows say: waits, slow steps, ranks, hot lines, loops, files, regions, stages."""
    views = context.run.report(source=context.source).views
    seen = views.get("sampled") or {}
    waits = [{**part, "rank": wait["rank"]} for wait in seen.get("waits") or () for part in wait["parts"]]
    slow, rank_lines = seen.get("slow_steps") or {}, seen.get("rank_lines") or {}
    unit = rank_lines.get("unit")
    tables = (
        ("waits", "What the wait for the loader is made of", "WaitPart", _WAIT, waits, ()),
        ("slow-lines", "Lines of slow steps", "SlowLine", _SLOW, slow.get("lines"), _slow_note(slow)),
        ("rank-lines", "Lines in which ranks differ", "RankLine", _RANK_LINE, rank_lines.get("lines"), [unit or ""]),
        ("hot-lines", "Hot lines", "HotLine", _HOT, (views.get("stacks") or {}).get("hot_lines"), ()),
        ("loader-lines", "Lines of the loader", "HotLine", _HOT, (views.get("loader") or {}).get("lines"), ()),
        ("loops", "Python loops that call the same thing once per item", "LoopFacts", _LOOP, views.get("loops"), ()),
        ("python", "Python on the main thread", "PythonFacts", _PYTHON, views.get("python"), ()),
        ("io", "Blocking file access in steady steps", "IoFacts", _IO, views.get("io"), ()),
        ("regions", "Regions named in the code", "regions", _REGION, views.get("regions"), ()),
        ("stages", "Stages of the run, by sampled stacks", "StageTime", _STAGE, seen.get("stages"), ()),
    )
    return [
        block
        for id, title, record, columns, rows, notes in tables
        for block in rows_table(context, id, title, record, columns, rows, notes=[note for note in notes if note])
    ]


def _slow_note(slow: Row) -> list[str]:
    if not slow:
        return []
    return [
        f"{slow['slow_steps']:,} slow steps (above {words.milliseconds(slow['threshold_ms'])}, "
        f"{words.milliseconds(slow['slow_mean_ms'])} on average) against {slow['typical_steps']:,} typical ones "
        f"({words.milliseconds(slow['typical_mean_ms'])}); time of the main thread per step, sampled."
    ]


def _by_rank(row: Row) -> str:
    found = sorted(row["by_rank"].items(), key=lambda pair: -pair[1])[:8]
    return ", ".join(f"{rank}: {words.number(value)}" for rank, value in found)
