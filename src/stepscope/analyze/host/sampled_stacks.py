"""What sampled stacks say of a run beyond a table of functions: stages, hot lines, callers, slow steps and drift.

Which lines make slow steps slow is told by the main thread's sampled time in slow steps against that in typical ones.
That needs the times of samples: a file of counts cannot tell in which step a line was met. When a line ran is known to
about the time between samples, so what a line takes more must be more than that leaks between neighbouring steps.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.host.hotspots import idle_sampled
from stepscope.analyze.host.sampled_time import (
    PLACE_COLUMNS,
    Calls,
    SampledLoop,
    place_of,
    sampled_loop,
    whole_by_weight,
)
from stepscope.analyze.input import loader_waits
from stepscope.analyze.input.loader_waits import sample_gap_ns
from stepscope.analyze.machine.readings import average, growths, rank_pids, training_readings
from stepscope.analyze.ranks import durations
from stepscope.analyze.step_times import theil_sen, with_all_phases
from stepscope.engine import intervals
from stepscope.engine.call_tree import UserPaths, at, rows_of
from stepscope.engine.intervals import Intervals
from stepscope.engine.samples import Samples, frames_of_interest
from stepscope.engine.step_labels import STEADY as STEADY_STEP
from stepscope.model import PHASES, HotLine, Place, StackFacts, StepFacts
from stepscope.model.counted import short
from stepscope.model.machine import DriftFacts, DriftLine
from stepscope.model.sampled import CallerLine, SampledViews, SlowLine, SlowSteps, StageTime
from stepscope.tables import phases
from stepscope.tables.arrays import NONE, Bools, Floats, Int64, expanded
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
    slow, no_slow = slow_steps(context, users)
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


# ---- slow steps, and steps that grow slower ----


SLOW_RATIO = 1.5  # of the median: half a step more is what one sees as a hiccup in a log of step times
SLOW_SPREADS = 5.0  # and so many spreads above it: in a run whose steps all vary that much, none of them is special
SPREAD = 1.4826  # the median distance below the median, as a standard deviation (of a normal distribution)
MIN_SLOW_STEPS = 3  # what one or two slow steps have in common may be chance
MIN_TYPICAL_STEPS = 10
MIN_SAMPLES = 10  # of a line in slow steps: its share is known to a third then
MIN_EXTRA = 0.02  # of what a slow step takes more: lines below are left out
ONLY_SLOW = 0.1  # of its time in slow steps: with less than that in typical ones a line is hot in slow steps only
HARDLY = 0.02  # of a typical step: and at most so much of it
RESOLUTION = 0.5  # of the time between samples: a sample says of a line when it ran no more exactly than that
MAX_SLOW_LINES = 20


def slow_steps(context: Context, users: UserPaths) -> tuple[SlowSteps | None, str]:
    """The slow steps, or None and why there are none to speak of."""
    tables = context.tables
    if tables.stretches.is_empty():
        return None, "the samples of this run carry no time" if tables.stacks.height else "no stack was sampled"
    steps = context.labelled.steady().filter(pl.col("start_ns").is_not_null()).sort("process", "start_ns")
    if steps.is_empty():
        return None, "no steady training step is known"
    wall = steps["wall_ns"].to_numpy()
    median = float(np.median(wall))
    below = median - wall[wall <= median]  # the spread is that of the faster half, which slow steps cannot widen
    threshold = max(SLOW_RATIO * median, median + SLOW_SPREADS * SPREAD * float(np.median(below)))
    stretches = tables.stretches.filter(
        (pl.col("role") == "rank") & pl.col("main_thread").fill_null(False) & pl.col("process").is_not_null()
    )
    overlaps = overlaps_of(stretches, steps)
    seen = np.zeros(len(wall), bool)
    seen[overlaps["step"].to_numpy()] = True
    slow, typical = seen & (wall > threshold), seen & (wall <= threshold)
    if slow.sum() < MIN_SLOW_STEPS:
        return None, (
            f"{slow.sum()} of {seen.sum()} sampled steady steps are slow (above {short(threshold / 1e6)} ms, "
            f"the median is {short(median / 1e6)} ms); {MIN_SLOW_STEPS} are needed"
        )
    if typical.sum() < MIN_TYPICAL_STEPS:
        return None, f"only {typical.sum()} typical steps were sampled; {MIN_TYPICAL_STEPS} are needed"
    means = float(wall[slow].mean()) / 1e6, float(wall[typical].mean()) / 1e6
    gap_ns = sample_gap_ns(tables)
    least_ms = max(MIN_EXTRA * (means[0] - means[1]), RESOLUTION * gap_ns / 1e6)
    if means[0] - means[1] < least_ms:
        return None, (
            f"slow steps take {short(means[0] - means[1])} ms more than typical ones, "
            f"and samples are {short(gap_ns / 1e6)} ms apart: too coarse to tell the lines"
        )
    return SlowSteps(
        slow_steps=int(slow.sum()),
        typical_steps=int(typical.sum()),
        threshold_ms=threshold / 1e6,
        median_ms=median / 1e6,
        slow_mean_ms=means[0],
        typical_mean_ms=means[1],
        lines=_lines(stretches, overlaps, slow, users, gap_ns, means, least_ms),
        source="sampled stacks of main threads with their times, in steady steps",
    ), ""


def overlaps_of(stretches: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """(stretch, step, ns): the time that stretches and steps have in common, one row per pair of them.

    Of all processes; `steps` are sorted by process and start, those of one process do not overlap.
    """
    parts = [pl.DataFrame(schema={"stretch": pl.Int64, "step": pl.Int64, "ns": pl.Int64})]
    own_steps = steps.with_row_index("row").partition_by("process", as_dict=True)
    for process, own in stretches.with_row_index("row").partition_by("process", as_dict=True).items():
        if process not in own_steps:
            continue
        these = own_steps[process]
        starts = these["start_ns"].to_numpy()
        ends = starts + these["wall_ns"].to_numpy()
        begin, end = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
        lowest = np.searchsorted(ends, begin, side="right")
        count = np.maximum(np.searchsorted(starts, end, side="left") - lowest, 0)
        which, (step, _) = np.repeat(np.arange(len(begin)), count), expanded(lowest, count)
        common = np.minimum(end[which], ends[step]) - np.maximum(begin[which], starts[step])
        pairs = {"stretch": own["row"].to_numpy()[which], "step": these["row"].to_numpy()[step], "ns": common}
        parts.append(pl.DataFrame(pairs, schema=parts[0].schema))
    return pl.concat(parts).filter(pl.col("ns") > 0)


def _lines(
    stretches: pl.DataFrame,
    overlaps: pl.DataFrame,
    slow: Bools,
    users: UserPaths,
    gap_ns: float,
    means_ms: tuple[float, float],
    least_ms: float,
) -> tuple[SlowLine, ...]:
    """By their shares of the sampled time of slow and of typical steps.

    Args:
        slow: of each step whether it is slow.
        gap_ns: between two samples.
        means_ms: wall time of a slow and of a typical step.
        least_ms: what a line must take more in a slow one.
    """
    nodes = rows_of(stretches["node"])
    line = at(users.line, at(users.innermost, nodes, -1), -1)
    leaf = users.leaf_names(stretches["node"]).set(pl.Series(at(users.user, nodes, False)), None)
    rows = pl.DataFrame({"line": line, "phase": stretches["phase"], "leaf": leaf})[overlaps["stretch"]]
    in_slow = pl.Series(slow[overlaps["step"].to_numpy()])
    rows = rows.with_columns(slow=overlaps["ns"] * in_slow, typical=overlaps["ns"] * ~in_slow)
    of_slow, of_typical = max(1, int(rows["slow"].sum())), max(1, int(rows["typical"].sum()))
    slow_ms, typical_ms = means_ms
    grouped = (
        rows.group_by("line", "phase", "leaf")
        .agg(pl.col("slow", "typical").sum())
        .sort(["slow", "leaf"], descending=[True, False])
        .group_by("line", "phase", maintain_order=True)
        .agg(pl.col("slow", "typical").sum(), pl.col("leaf").first())
        .with_columns(
            slow_ms=pl.col("slow") / of_slow * slow_ms,
            typical_ms=pl.col("typical") / of_typical * typical_ms,
            samples=(pl.col("slow") / gap_ns).round().cast(pl.Int64),
        )
        .with_columns(extra=pl.col("slow_ms") - pl.col("typical_ms"))
        .filter((pl.col("line") >= 0) & (pl.col("samples") >= MIN_SAMPLES) & (pl.col("extra") >= least_ms))
        .sort(["extra", "line", "phase"], descending=[True, False, False])
    )
    return tuple(
        SlowLine(
            place=place,
            phase=row["phase"] or "other",
            slow_ms_per_step=row["slow_ms"],
            typical_ms_per_step=row["typical_ms"],
            extra_ms_per_step=row["extra"],
            only_slow=row["typical_ms"] <= min(ONLY_SLOW * row["slow_ms"], HARDLY * typical_ms),
            samples=row["samples"],
            leaf=row["leaf"],
        )
        for row in grouped.head(MAX_SLOW_LINES).iter_rows(named=True)
        if (place := users.place(row["line"])) is not None
    )


def beside(context: Context) -> Place | None:
    """The line at which threads beside the main one run the user's code most, with the part of the steady steps' time
    in which they run any of it.
    """
    steady = context.labelled.steady().filter(pl.col("start_ns").is_not_null()).sort("process", "start_ns")
    threads = (pl.col("role") == "rank") & ~pl.col("main_thread").fill_null(True) & ~pl.col("waiting").fill_null(False)
    others = context.tables.stretches.filter(threads & pl.col("process").is_not_null() & pl.col("node").is_not_null())
    if context.sampled is None or steady.is_empty() or others.is_empty():
        return None
    times = overlaps_of(others, steady)
    others = others.with_columns(ns=np.bincount(times["stretch"], times["ns"], minlength=others.height))
    rows = others.hstack(frames_of_interest(others, context.sampled.calls, context.sampled.code))
    rows = rows.filter(pl.col("user_file").is_not_null() & (pl.col("ns") > 0))
    place = ["user_file", "user_line", "user_function"]
    lines = rows.group_by(place).agg(pl.col("ns").sum()).sort(["ns", *place], descending=[True, False, False, False])
    if lines.is_empty():
        return None
    file, line, function, _ = lines.row(0)
    return Place(file, line, function, min(1.0, float(lines["ns"].sum()) / max(1, int(steady["wall_ns"].sum()))))


MIN_STEPS = 60  # ten in each part: their medians mean something
PARTS = 6  # medians that rise five times in a row do so by chance once in 720 runs
POINTS = 240  # medians of neighbouring steps that the line goes through; its pairs fit into memory at any length
MAX_DRIFT_LINES = 3
MIN_DRIFT_SAMPLES = 10  # of a line in the last third
THIRD = 3
UNKNOWN = 0.05  # of the steps may lack a phase, which is then told by the others


def drift(context: Context, calls: Calls | None) -> DriftFacts | None:
    """None with fewer than `MIN_STEPS` steady training steps on a rank."""
    steady = context.labelled.steady().filter(pl.col("start_ns").is_not_null()).sort("process", "start_ns")
    ranks = steady.partition_by("process", maintain_order=True)
    if any(own.height < MIN_STEPS for own in ranks) or not ranks:
        return None
    walls = [own["wall_ns"].to_numpy() / 1e6 for own in ranks]
    lines = []  # the line through the medians of neighbouring steps, of each rank: its first and its last value
    for wall in walls:
        groups = np.array_split(wall, min(POINTS, len(wall)))
        ends = np.cumsum([len(group) for group in groups])
        middles = ends - np.array([(len(group) + 1) / 2 for group in groups])  # counted from 0
        line = theil_sen(middles, np.array([np.median(group) for group in groups]), 0, len(wall) - 1)
        lines.append(np.maximum(line, wall.min()))  # growth that itself grows would begin below all steps
    early, late = (float(end) for end in np.mean(lines, axis=0))
    medians = np.array([[np.median(part) for part in np.array_split(wall, PARTS)] for wall in walls])
    # every part above the one before, and the last one's faster steps above the first one's slower ones
    edges = [(parts[0], parts[-1]) for parts in (np.array_split(wall, PARTS) for wall in walls)]
    rising = bool((np.diff(medians) > 0).all())
    rising &= all(np.quantile(last, 0.25) > np.quantile(first, 0.75) for first, last in edges)
    rising = rising and not _cores_were_taken(context, steady, early, late)
    return DriftFacts(
        steps=steady.height,
        parts=PARTS,
        rising=rising,
        early_ms=early,
        late_ms=late,
        # the usual steps over the start: growth is seldom a straight line, and single stalls are no part of it
        lost_ms_per_step=max(0.0, float(medians.mean()) - early) if late > early else 0.0,
        medians_ms=tuple(medians.mean(axis=0).tolist()),
        phases=_phases(ranks),
        lines=_drift_lines(context, steady, calls) if rising else (),
    )


def _cores_were_taken(context: Context, steady: pl.DataFrame, early: float, late: float) -> bool:
    """Whether steps grew because main threads waited longer for a core: what they worked grew less than half as much,
    by factors (chosen, untuned).
    """
    readings = training_readings(context.tables, context.labelled)
    if readings is None or not 0 < early < late:
        return False
    begin, end = (steady.select("start_ns").min().item(), steady.select("start_ns").max().item())
    edges = (begin, begin + (end - begin) // THIRD), (end - (end - begin) // THIRD, end)
    ends = [readings.filter(pl.col("time_ns").is_between(*edge)) for edge in edges]
    waits = [average(growths(rows, "run_delay_ns", rank_pids(context.tables))) for rows in ends]
    works = [max(0.0, 1.0 - wait / 1e9) for wait in waits if wait is not None]
    return len(works) == len(ends) and works[1] * late < works[0] * early * math.sqrt(late / early)


def _phases(ranks: list[pl.DataFrame]) -> dict[str, float]:
    """By how much the median of each phase grew from the first part to the last one, mean over ranks."""
    grown: dict[str, float] = {}
    for phase in PHASES:
        columns = [with_all_phases(own)[f"{phase}_ns"] for own in ranks]
        untold = all(own[f"{phase}_ns"].null_count() == own.height for own in ranks)
        if untold or any(column.null_count() > UNKNOWN * len(column) for column in columns):
            continue
        parts = [
            np.array_split(column.cast(pl.Float64).fill_null(float("nan")).to_numpy(), PARTS) for column in columns
        ]
        changes = [float(np.nanmedian(last) - np.nanmedian(first)) / 1e6 for first, *_, last in parts]
        grown[phase] = float(np.mean(changes))
    return grown


def _drift_lines(context: Context, steady: pl.DataFrame, calls: Calls | None) -> tuple[DriftLine, ...]:
    """Lines whose sampled time per step grew from the first third of the steady time to the last, most first."""
    if context.sampled is None:
        return ()
    rows = context.sampled.rank_steps() if calls is None else calls.rows
    seen = context.tables.stretches.select("process", "node", "start_ns", "end_ns")
    if seen.height:  # a segment is as long as a short run; where each stack has times of its own these hold
        length = pl.col("end_ns") - pl.col("start_ns")
        seen = seen.with_columns(samples=(length / sample_gap_ns(context.tables)).round().cast(pl.Int64))
        known = rows.unique(["process", "node"]).drop("start_ns", "end_ns", "samples")
        rows = known.join(seen, on=["process", "node"], how="inner")
    begin, end = int(min(steady["start_ns"])), int(max(steady["start_ns"] + steady["wall_ns"]))
    third = (end - begin) // THIRD
    early = _of_period(steady, rows, begin, begin + third)
    found = [
        DriftLine(place, early.get(place, (0.0, 0))[0], ms, count)
        for place, (ms, count) in _of_period(steady, rows, end - third, end).items()
        if count >= MIN_DRIFT_SAMPLES and ms > early.get(place, (0.0, 0))[0]
    ]
    found.sort(key=lambda line: (line.early_ms_per_step - line.late_ms_per_step, line.place.file, line.place.line or 0))
    return tuple(found[:MAX_DRIFT_LINES])


def _of_period(steady: pl.DataFrame, rows: pl.DataFrame, begin: int, end: int) -> dict[Place, tuple[float, int]]:
    """(ms per step, samples) by line, of stacks that have their middle in that time; {} without any.

    A line that only leads to a library's training is not told, but what of the library works below it.
    """
    middle = (pl.col("start_ns") + pl.col("end_ns")) // 2
    rows = rows.filter(middle.is_between(begin, end))
    steps = steady.filter(pl.col("start_ns").is_between(begin, end))
    total = int(rows["samples"].sum())
    if not total or steps.is_empty():
        return {}
    per_sample = float(steps["wall_ns"].sum()) / steps.height / 1e6 / total
    own = rows.filter(pl.col("user_file").is_not_null() & pl.col("user_line").is_not_null())
    columns = [column for column in PLACE_COLUMNS if column in own.columns]
    found: dict[Place, tuple[float, int]] = {}
    for row in own.group_by(columns).agg(pl.col("samples").sum()).sort(columns).iter_rows(named=True):
        place = place_of(row)
        ms, count = found.get(place, (0.0, 0))
        found[place] = (ms + row["samples"] * per_sample, count + int(row["samples"]))
    return found
