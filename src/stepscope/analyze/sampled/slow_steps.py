"""Which lines make slow steps slow: the main thread's sampled time in slow steps against that in typical ones.

Needs the times of samples: a file of counts cannot tell in which step a line was met. When a line ran is known to about
the time between samples, so what a line takes more must be more than that leaks between neighbouring steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.sampled.user_paths import UserPaths, at, rows_of
from stepscope.analyze.sampled.waits import sample_gap_ns
from stepscope.model.sampled import SlowLine, SlowSteps
from stepscope.tables.arrays import Bools, Int64

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
MAX_LINES = 20


class _Overlaps(NamedTuple):
    """The time that stretches and steps have in common; one entry per pair of them."""

    stretch: Int64
    step: Int64
    ns: Int64


def facts(context: Context, users: UserPaths) -> tuple[SlowSteps | None, str]:
    """The slow steps, or None and why there are none to speak of."""
    tables = context.tables
    if tables.stretches.is_empty():
        return None, "the samples of this run carry no time" if tables.stacks.height else "no stack was sampled"
    steps = context.labelled.steady().filter(pl.col("start_ns").is_not_null()).sort("process", "start_ns")
    if steps.is_empty():
        return None, "no steady training step is known"
    wall = steps["wall_ns"].to_numpy()
    median = float(np.median(wall))
    threshold = slow_from(wall)
    stretches = tables.stretches.filter(
        (pl.col("role") == "rank") & pl.col("main_thread").fill_null(False) & pl.col("process").is_not_null()
    )
    overlaps = _overlaps(stretches, steps)
    seen = np.zeros(len(wall), bool)
    seen[overlaps.step] = True
    slow, typical = seen & (wall > threshold), seen & (wall <= threshold)
    if slow.sum() < MIN_SLOW_STEPS:
        return None, (
            f"{slow.sum()} of {seen.sum()} sampled steady steps are slow (above {threshold / 1e6:.3g} ms, "
            f"the median is {median / 1e6:.3g} ms); {MIN_SLOW_STEPS} are needed"
        )
    if typical.sum() < MIN_TYPICAL_STEPS:
        return None, f"only {typical.sum()} typical steps were sampled; {MIN_TYPICAL_STEPS} are needed"
    means = float(wall[slow].mean()) / 1e6, float(wall[typical].mean()) / 1e6
    gap_ns = sample_gap_ns(tables)
    least_ms = max(MIN_EXTRA * (means[0] - means[1]), RESOLUTION * gap_ns / 1e6)
    if means[0] - means[1] < least_ms:
        return None, (
            f"slow steps take {means[0] - means[1]:.3g} ms more than typical ones, "
            f"and samples are {gap_ns / 1e6:.3g} ms apart: too coarse to tell the lines"
        )
    lines = _lines(_by_line(stretches, overlaps, slow, typical, users, gap_ns), means, least_ms, users)
    return SlowSteps(
        slow_steps=int(slow.sum()),
        typical_steps=int(typical.sum()),
        threshold_ms=threshold / 1e6,
        median_ms=median / 1e6,
        slow_mean_ms=means[0],
        typical_mean_ms=means[1],
        lines=lines,
        source="sampled stacks of main threads with their times, in steady steps",
    ), ""


def slow_from(wall_ns: Int64) -> float:
    """The wall time above which a step is slow, ns.

    The spread is that of the faster half, which slow steps cannot widen.
    """
    median = float(np.median(wall_ns))
    below = median - wall_ns[wall_ns <= median]
    return max(SLOW_RATIO * median, median + SLOW_SPREADS * SPREAD * float(np.median(below)))


def _overlaps(stretches: pl.DataFrame, steps: pl.DataFrame) -> _Overlaps:
    """Of all processes; `steps` are sorted by process and start, those of one process do not overlap."""
    parts = []
    bounds = _bounds(steps["process"])
    numbered = stretches.with_row_index("row").partition_by("process", as_dict=True)
    for (process,), own in numbered.items():
        if process not in bounds:
            continue
        first, last = bounds[process]
        starts = steps["start_ns"][first:last].to_numpy()
        ends = starts + steps["wall_ns"][first:last].to_numpy()
        begin, end = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
        lowest = np.searchsorted(ends, begin, side="right")
        count = np.maximum(np.searchsorted(starts, end, side="left") - lowest, 0)
        which = np.repeat(np.arange(len(begin)), count)
        step = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count) + lowest[which]
        common = np.minimum(end[which], ends[step]) - np.maximum(begin[which], starts[step])
        kept = common > 0
        row = own["row"].to_numpy().astype(np.int64)
        parts.append(_Overlaps(row[which][kept], first + step[kept], common[kept]))
    if not parts:
        none = np.empty(0, np.int64)
        return _Overlaps(none, none, none)
    return _Overlaps(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _bounds(processes: pl.Series) -> dict[str, tuple[int, int]]:
    """process -> (first row, behind its last row) of a sorted column."""
    found: dict[str, tuple[int, int]] = {}
    first = 0
    for process, count in processes.rle().struct.unnest().select("value", "len").iter_rows():
        found[process] = (first, first + count)
        first += count
    return found


def _by_line(
    stretches: pl.DataFrame, overlaps: _Overlaps, slow: Bools, typical: Bools, users: UserPaths, gap_ns: float
) -> pl.DataFrame:
    """(line, phase, slow, typical, samples, leaf): shares of the sampled time of slow and of typical steps."""
    nodes = rows_of(stretches["node"])
    line = at(users.line, at(users.innermost, nodes, -1), -1)
    leaf = users.leaf_names(stretches["node"]).set(pl.Series(at(users.user, nodes, False)), None)
    rows = pl.DataFrame({"line": line, "phase": stretches["phase"], "leaf": leaf})[overlaps.stretch]
    rows = rows.with_columns(
        slow_ns=pl.Series(np.where(slow[overlaps.step], overlaps.ns, 0)),
        typical_ns=pl.Series(np.where(typical[overlaps.step], overlaps.ns, 0)),
    )
    of_slow, of_typical = max(1, int(rows["slow_ns"].sum())), max(1, int(rows["typical_ns"].sum()))
    keys = ["line", "phase"]
    leaves = (
        rows.group_by(*keys, "leaf")
        .agg(pl.col("slow_ns").sum())
        .sort(["slow_ns", "leaf"], descending=[True, False])
        .unique(keys, keep="first", maintain_order=True)
        .select(*keys, "leaf")
    )
    return (
        rows.group_by(keys)
        .agg(pl.col("slow_ns", "typical_ns").sum())
        .join(leaves, on=keys, nulls_equal=True)
        .with_columns(
            slow=pl.col("slow_ns") / of_slow,
            typical=pl.col("typical_ns") / of_typical,
            samples=(pl.col("slow_ns") / gap_ns).round().cast(pl.Int64),
        )
    )


def _lines(found: pl.DataFrame, means: tuple[float, float], least_ms: float, users: UserPaths) -> tuple[SlowLine, ...]:
    """`means`: wall time of a slow and of a typical step, ms; `least_ms`: what a line must take more in a slow one."""
    slow_ms, typical_ms = means
    named = (
        found.filter((pl.col("line") >= 0) & (pl.col("samples") >= MIN_SAMPLES))
        .with_columns(slow_ms=pl.col("slow") * slow_ms, typical_ms=pl.col("typical") * typical_ms)
        .with_columns(extra=pl.col("slow_ms") - pl.col("typical_ms"))
        .filter(pl.col("extra") >= least_ms)
        .sort(["extra", "line", "phase"], descending=[True, False, False])
    )
    lines = []
    for row in named.head(MAX_LINES).iter_rows(named=True):
        place = users.place(row["line"])
        if place is None:
            continue
        lines.append(
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
        )
    return tuple(lines)
