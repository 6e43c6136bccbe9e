"""What sampled stacks say of a run beyond hot lines: stages, phases, waits, slow steps, and where ranks differ."""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.host import slow_steps
from stepscope.analyze.host.sampled_time import SampledLoop, sampled_loop, whole_by_weight
from stepscope.analyze.host.stack_selection import idle_sampled
from stepscope.analyze.input import loader_waits
from stepscope.analyze.ranks import durations
from stepscope.engine import intervals
from stepscope.engine.call_tree import UserPaths, at, rows_of
from stepscope.engine.intervals import Intervals
from stepscope.engine.samples import Samples
from stepscope.engine.step_labels import STEADY as STEADY_STEP
from stepscope.model import PHASES, HotLine, StackFacts, StepFacts
from stepscope.model.sampled import CallerLine, SampledViews, StageTime
from stepscope.tables import phases
from stepscope.tables.arrays import NONE, Floats, Int64
from stepscope.tables.phases import COMPILE, IMPORT
from stepscope.tables.schema import Tables


def sampled_views(context: Context, train: StepFacts | None) -> SampledViews | None:
    """None without sampled stacks of time. What cannot be said is in `absent`, with its reason."""
    if context.tables.stacks.is_empty() or "bytes" in context.tables.segments["unit"]:
        return None
    idle = idle_sampled(context.tables)
    users = UserPaths(context.calls, context.code)
    loop = sampled_loop(context, users)
    found = () if loop is None else loader_waits.loader_waits(context, loop, users, idle, train)
    slow, no_slow = slow_steps.slow_steps(context, users)
    of_ranks, no_ranks = durations.rank_lines(context, loop, users, idle)
    of_stages = stages(context)
    no_loop, by_phase = "", pl.DataFrame(schema={"phase": pl.String, "samples": pl.Int64})
    if loop is not None:
        by_phase = loop.rows.group_by("phase").agg(pl.col("samples").sum())
        by_phase = by_phase.sort(["samples", "phase"], descending=[True, False])
    else:
        no_loop = "no stack of a main thread was sampled in steady steps"
        if context.labelled.frame.is_empty():
            no_loop = "no step is known, and no sampled stack of a main thread fetches a batch or calls a model"
    absent = {
        "stages": "" if of_stages else "no main thread of a rank was sampled",
        "phases": no_loop,
        "waits": no_loop or ("" if found else "no main thread was sampled in a DataLoader"),
        "slow_steps": no_slow,
        "rank_lines": no_ranks,
    }
    return SampledViews(
        stages=of_stages,
        phases={str(phase): int(count) / int(by_phase["samples"].sum()) for phase, count in by_phase.iter_rows()},
        waits=found,
        slow_steps=slow,
        rank_lines=of_ranks,
        absent={name: reason for name, reason in absent.items() if reason},
        callers=() if loop is None else callers(loop, users),
    )


STARTUP, WARMUP, STEADY, OTHER = "startup", "warmup", "steady", "other"
STAGES = (IMPORT, COMPILE, STARTUP, WARMUP, STEADY, OTHER)
_TIMED = (STARTUP, WARMUP, STEADY, OTHER)  # the columns of `_Clock.lengths`
_OF_REASON = {STEADY_STEP: STEADY, "first_batch": STEADY, "warmup": WARMUP, "compile": WARMUP}
_IN_STEPS = tuple(phase for phase in PHASES if phase != phases.OTHER)  # stacks that can only be seen inside steps
_STACK = ("host", "file", "pid", "thread", "node")


def stages(context: Context) -> tuple[StageTime, ...]:
    """The stages that have samples, in order of a run; none where no main thread of a rank was sampled."""
    main = (pl.col("role") == "rank") & pl.col("main_thread").fill_null(False) & (pl.col("samples") > 0)
    rows = context.tables.stacks.filter(main)
    if rows.is_empty():
        return ()
    samples = rows["samples"].to_numpy()
    weights = np.zeros((rows.height, len(STAGES)))
    for column, stage in enumerate((IMPORT, COMPILE)):
        weights[:, column] = rows["stage"].to_numpy() == stage
    rest = np.flatnonzero(weights.sum(axis=1) == 0)
    weights[rest, 2:] = _weights(context, rows[rest])
    split = whole_by_weight(samples, weights)
    waiting = split[rows["waiting"].fill_null(False).to_numpy()].sum(axis=0)
    waits_known = idle_sampled(context.tables) is not False
    return tuple(
        StageTime(
            stage=stage,
            samples=int(count),
            share=int(count) / int(samples.sum()),
            waiting_share=int(waits) / int(count) if waits_known else None,
        )
        for stage, count, waits in zip(STAGES, split.sum(axis=0), waiting, strict=True)
        if count
    )


def _weights(context: Context, rows: pl.DataFrame) -> Floats:
    """By row how the time it was seen in divides into the stages of `_TIMED`; nothing but "other" without times."""
    weights = np.zeros((rows.height, len(_TIMED)))
    process = rows["process"].to_numpy()
    start, end = (rows[name].fill_null(-1).to_numpy() for name in ("start_ns", "end_ns"))
    in_steps = rows["phase"].is_in(_IN_STEPS).fill_null(False).to_numpy()
    frame = context.labelled.frame.filter(pl.col("start_ns").is_not_null() & pl.col("process").is_not_null())
    stage = pl.col("reason").replace_strict(_OF_REASON, default=OTHER, return_dtype=pl.String)
    own_kind = pl.col("kind") == ("train" if (frame["kind"] == "train").any() else "eval")
    frame = frame.with_columns(stage=pl.when(own_kind).then(stage).otherwise(pl.lit(OTHER)))
    seen = []  # the same from the times in which each stack was seen
    for (name,), steps in frame.sort("process", "start_ns").partition_by("process", as_dict=True).items():
        own = np.flatnonzero((process == name) & (start >= 0) & (end >= 0))
        lengths, only = _lengths(steps, start[own], end[own])
        # what is done in steps alone was not done before or between them
        inside = in_steps[own] & (only.sum(axis=1) > 0)
        weights[own] = np.where(inside[:, None], only, lengths)
        stretches = context.tables.stretches.filter((pl.col("process") == name) & (pl.col("role") == "rank"))
        lengths, _ = _lengths(steps, stretches["start_ns"].to_numpy(), stretches["end_ns"].to_numpy())
        seen.append(stretches.select(_STACK).hstack(pl.DataFrame(lengths, schema=list(_TIMED))))
    if seen:
        sums = pl.concat(seen).group_by(_STACK).agg(pl.col(_TIMED).sum())
        joined = rows.select(_STACK).join(sums, on=_STACK, how="left", nulls_equal=True, maintain_order="left")
        exact = joined.select(pl.col(_TIMED).fill_null(0.0)).to_numpy()
        weights = np.where(exact.sum(axis=1, keepdims=True) > 0, exact, weights)
    weights[weights.sum(axis=1) <= 0, _TIMED.index(OTHER)] = 1.0
    return weights


def _lengths(steps: pl.DataFrame, start: Int64, end: Int64) -> tuple[Floats, Floats]:
    """ns of each interval in the stages of `_TIMED`, by the steps of a process; and what of them lies in its steps."""
    starts = steps["start_ns"].to_numpy()
    ends = starts + steps["wall_ns"].to_numpy()
    ends = np.minimum(ends, np.append(starts[1:], ends[-1:]))  # steps of different kinds may lie in each other
    stage, end = steps["stage"].to_numpy(), np.maximum(end, start + 1)
    of_stage = [Intervals(starts[stage == name], ends[stage == name]) for name in _TIMED]
    inside = np.stack([intervals.covered(times, start, end) for times in of_stage], axis=1).astype(np.float64)
    lengths = inside.copy()
    lengths[:, 0] = np.clip(np.minimum(end, starts[0]) - start, 0, None)
    lengths[:, -1] = end - start - lengths[:, :-1].sum(axis=1)
    return lengths, inside


MAX_LINES = 200  # more than any report shows; the table `stacks` holds the rest


def stack_facts(tables: Tables, samples: Samples | None, train: StepFacts | None) -> StackFacts | None:
    """None without sampled stacks. A line's `ms_per_step` is its share of the main thread times the mean step."""
    if samples is None:
        return None
    ranks, workers = samples.rank_steps(), samples.workers()
    mean_ms = train.mean_ms if train else None
    phases = ranks.group_by("phase").agg(pl.col("samples").sum()).sort("phase")
    lines = [*hot_lines(ranks, "rank", mean_ms), *hot_lines(workers, "loader_worker", None)]
    weights = tables.stacks.group_by("source").agg(pl.col("samples").sum())
    weights = weights.sort("samples", "source", descending=[True, False])
    rates = tables.stacks.filter(pl.col("source") == weights[0, 0])["rate_hz"].drop_nulls()
    counts = tables.quality.counts
    return StackFacts(
        source=str(weights[0, 0] or "unknown"),
        rate_hz=float(rates.median() or 0.0) if len(rates) else 0.0,  # type: ignore[arg-type]
        samples=int(tables.stacks["samples"].sum()),
        skipped=sum(count for name, count in counts.items() if "stack" in name and "skipped" in name),
        steady_samples=int(ranks["samples"].sum()),
        by_phase={str(phase): int(count) for phase, count in phases.rows()},
        hot_lines=tuple(lines[:MAX_LINES]),
    )


def hot_lines(rows: pl.DataFrame, role: str, mean_ms: float | None, prefix: str = "user") -> list[HotLine]:
    """The lines under `prefix` ("user", "entry" or "inner") of these rows, most samples first.

    Shares are of all samples in `rows`, those without a user frame included.
    """
    total = int(rows["samples"].sum())
    if not total:
        return []
    file, line, function = (f"{prefix}_{part}" for part in ("file", "line", "function"))
    own = rows.filter(pl.col(file).is_not_null() & pl.col(line).is_not_null())
    key = [file, line, function, "phase"]
    leaf = pl.format("{}:{}", pl.col("leaf_file").fill_null("?"), pl.col("leaf_function").fill_null("?"))
    leaves = (
        own.filter(pl.col("leaf_position") > pl.col("user_position"))
        .with_columns(leaf.alias("leaf"))
        .group_by([*key, "leaf"])
        .agg(n=pl.col("samples").sum())
        .sort("n", "leaf", descending=[True, False])
        .group_by(key, maintain_order=True)
        .agg(pl.col("leaf").first())
    )
    grouped = (
        own.group_by(key)
        .agg(n=pl.col("samples").sum(), waiting=pl.col("samples").filter(pl.col("waiting")).sum())
        .join(leaves, on=key, how="left", nulls_equal=True)
        .sort(["n", file, line, function, "phase"], descending=[True, False, False, False, False])
    )
    return [
        HotLine(
            file=row[file],
            line=row[line],
            function=row[function] or "?",
            role=role,
            phase=row["phase"] or "other",
            self_samples=row["n"],
            share=row["n"] / total,
            ms_per_step=row["n"] / total * mean_ms if mean_ms is not None else None,
            waiting_share=row["waiting"] / row["n"],
            library_leaf=row["leaf"],
        )
        for row in grouped.iter_rows(named=True)
    ]


SHARE = 0.5  # of the inner line's samples: with fewer the line is mostly another caller's
SAMPLES = 3  # fewer are chance
MAX_NODES = 2_000  # paths looked at, the most sampled first
MAX_CALLERS = 100


def callers(loop: SampledLoop, users: UserPaths) -> tuple[CallerLine, ...]:
    """Pairs of lines, the most sampled first."""
    nodes = at(users.innermost, rows_of(loop.rows["node"]), NONE)
    counted = (
        pl.DataFrame({"node": nodes, "samples": loop.rows["samples"]})
        .filter(pl.col("node") >= 0)
        .group_by("node")
        .agg(pl.col("samples").sum())
        .sort(["samples", "node"], descending=[True, False])
        .head(MAX_NODES)
    )
    own: Counter[int] = Counter()
    below: Counter[tuple[int, int]] = Counter()
    for node, samples in counted.iter_rows():
        inner = int(users.line[node])
        own[inner] += samples
        above = set()  # the user's other lines on the path to the node
        while (node := int(users.tree.parent[node])) != NONE:
            if users.user[node]:
                above.add(int(users.line[node]))
        below.update({(outer, inner): samples for outer in above - {inner}})
    found = []
    for (outer, inner), samples in sorted(below.items(), key=lambda pair: (-pair[1], pair[0])):
        caller, callee = users.place(outer), users.place(inner)
        if caller is not None and callee is not None and samples >= max(SAMPLES, SHARE * own[inner]):
            found.append(CallerLine(caller, callee, samples, samples / own[inner]))
    found.sort(key=lambda pair: (-pair.samples, pair.caller.file, pair.caller.line or 0, pair.callee.line or 0))
    return tuple(found[:MAX_CALLERS])
