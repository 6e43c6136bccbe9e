"""Which steps a measure stands on: all after warm-up, as a user pays for them, without those in profiler windows and
those that carried a monitor.

Warm-up is compilation, allocators that grow, caches that fill, clocks that settle. Stalls, first batches of epochs and
collections of garbage stay in. Ranks are measured over the same steps, so that a window on one of them takes its steps,
which slow all, from every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from stepscope.comparison import thresholds
from stepscope.engine.journal import event_data
from stepscope.engine.step_labels import monitored
from stepscope.read.text import integer
from stepscope.tables.schema import Tables

TRAIN = "train"
LEAST = 3  # steps of a process from which the first one is always warm-up
ENDING = 1.5  # of the time to start a loader's workers: the most that ending the old ones is counted with

_KEY = ("attempt", "step", "occurrence")
_MAD = 1.4826  # makes the median absolute deviation a standard deviation, for normal noise
_ORDINARY = 0.95  # of the later steps are ordinary; the rest are stalls


class MeasuredSteps(Struct, frozen=True):
    """`rows` of table `steps`, one for each measured step of each process, with `attempt` and `occurrence`.

    A step is the same on several ranks where these two and `step` are equal. `attempt` tells processes apart that
    trained one after the other on a rank, `occurrence` steps of one number.
    """

    rows: pl.DataFrame
    kind: str
    dropped: int  # steps of warm-up
    warmup_s: float | None  # how much longer they took than as many measured ones; None where none was dropped
    profiled: bool  # in every step some rank was in a window: these are such steps
    recorded: int  # steps of the kind that were recorded, up to the limit, of the rank with the fewest
    limit: int | None  # of --max-steps

    @property
    def count(self) -> int:
        """Measured steps, each counted once however many ranks took it."""
        return int(self.rows.select(_KEY).unique().height)

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Process -> (start of its first measured step, end of its last one), ns; only where the time is known."""
        known = self.rows.filter(pl.col("start_ns").is_not_null())
        ends = known.group_by("process").agg(
            start=pl.col("start_ns").min(), end=(pl.col("start_ns") + pl.col("wall_ns")).max()
        )
        return {str(process): (int(start), int(end)) for process, start, end in ends.sort("process").rows()}

    def together(self) -> pl.DataFrame:
        """One row for each measured step: `wall_ns` and the phases, means over the ranks that took it."""
        means = [pl.col(name).mean() for name in self.rows.columns if name.endswith("_ns") and name != "start_ns"]
        return self.rows.group_by(_KEY).agg(means).sort(_KEY)


def select(tables: Tables, *, warmup_limit: int | None = None) -> MeasuredSteps | None:
    """The measured steps of training, or where there is none of the first other kind; None without any step.

    Args:
        warmup_limit: the most steps that may be dropped as warm-up.
    """
    steps = tables.steps.filter((pl.col("wall_ns") > 0) & pl.col("kind").is_not_null() & pl.col("step").is_not_null())
    if steps.is_empty():
        return None
    kind = min(steps["kind"].unique().to_list(), key=lambda name: (name != TRAIN, name))
    first = ("process", "step", "start_ns", "wall_ns")
    order = [*first, *(name for name in steps.columns if name not in first)]  # all: damaged rows may be equal in some
    own = steps.filter(pl.col("kind") == kind).sort(order, nulls_last=True)
    options = (manifest.get("options") for manifest in tables.manifests)
    limits = (integer(one.get("max_steps")) for one in options if isinstance(one, dict))
    limit = next((limit for limit in limits if limit is not None and limit > 0), None)
    if limit is not None:  # the command is told to stop, and takes a few more steps until it does
        own = own.filter(pl.int_range(pl.len()).over("process") < limit)
    own = own.with_columns(
        pl.col("process").fill_null("").str.extract(r"\.(\d+)$", 1).fill_null("").alias("attempt"),
        pl.int_range(pl.len()).over("process", "step").alias("occurrence"),
    )
    windows = own.filter(pl.col("in_window").fill_null(False)).select(_KEY).unique()
    ours = own.join(monitored(tables), on=["process", "step"], how="semi").select(_KEY).unique()
    profiled = own.join(windows, on=_KEY, how="anti").is_empty()
    taken = ours if profiled else pl.concat([windows, ours])
    outside = own.join(taken, on=_KEY, how="anti", maintain_order="left")  # they slow the other ranks too
    counted = own if outside.is_empty() else outside
    kept, dropped, seconds = [], 0, 0.0
    for attempt in counted.partition_by("attempt", maintain_order=True):
        rows, count, longer = _after_warmup(attempt, warmup_limit)
        kept.append(rows)
        dropped += count
        seconds += longer
    return MeasuredSteps(
        rows=pl.concat(kept),
        kind=str(kind),
        dropped=dropped,
        warmup_s=seconds if dropped else None,
        profiled=profiled,
        recorded=min(part.height for part in own.partition_by("process")),
        limit=limit,
    )


def restarts_ns(tables: Tables, measured: MeasuredSteps) -> float:
    """Time outside of steps in which the loader of measured steps was iterated again, summed over processes.

    That is making the iterator, workers included, and before it ending the old workers. The latter is counted up to a
    time that goes by how long starting them took, since other work lies there too.
    """
    made = [row for row, _ in event_data(tables, "loader") if row["time_ns"] is not None and row["duration_ns"]]
    total = 0.0
    for process, (first, last) in measured.spans.items():
        own = [row for row in made if row["process"] == process and first < row["time_ns"] < last]
        events = [(row["time_ns"], row["duration_ns"]) for row in own]
        if not events:
            continue
        of_process = pl.col("process") == process
        known = tables.steps.filter(of_process & pl.col("start_ns").is_not_null() & (pl.col("wall_ns") > 0))
        known = known.sort("start_ns", "wall_ns")
        starts, ends = known["start_ns"].to_numpy(), (known["start_ns"] + known["wall_ns"]).to_numpy()
        counted = set(measured.rows.filter(of_process)["start_ns"].drop_nulls().to_list())
        for time, duration in events:
            after = int(np.searchsorted(starts, time, side="left"))
            if after == len(starts) or int(starts[after]) not in counted:
                continue  # evaluation comes next, or a step that is not measured
            before = int(ends[after - 1]) if after else time
            free = max(0, min(time + duration, int(starts[after])) - max(time, before))  # the rest lies in a step
            total += free + min(ENDING * free, max(0, time - before))
    return total


def _after_warmup(attempt: pl.DataFrame, limit: int | None) -> tuple[pl.DataFrame, int, float]:
    """(measured rows of processes that ran side by side, steps dropped, seconds these took longer than as many others).

    All of them drop as many as the slowest to warm up, and keep the steps that all have.
    """
    processes = attempt.partition_by("process", maintain_order=True)
    drop = 0
    for part in processes:  # at least one step is left, and of a few the first one is always dropped
        found = max(warmup_end((part["wall_ns"] / 1e6).to_list(), limit=limit), 1 if part.height >= LEAST else 0)
        drop = max(drop, min(found, part.height - 1, found if limit is None else limit))
    rows = pl.concat([part[min(drop, part.height - 1) :] for part in processes])
    shared = rows.group_by(_KEY).agg(pl.col("process").n_unique().alias("ranks"))
    common = shared.filter(pl.col("ranks") == len(processes)).drop("ranks")
    if common.height:
        rows = rows.join(common, on=_KEY, how="semi", maintain_order="left")
    usual = float(rows["wall_ns"].cast(pl.Float64).sum()) / rows.height
    longer = [
        float(part["wall_ns"][:drop].cast(pl.Float64).sum()) - usual * min(drop, part.height) for part in processes
    ]
    return rows, drop, max(0.0, sum(longer) / len(longer) / 1e9)


def warmup_end(walls: Sequence[float], *, limit: int | None = None) -> int:
    """How many first steps are warm-up: at most `limit`, and never more than a third of the run.

    The later part of the run says what its level is and how much that moves by itself, so a run that drifts or stalls
    every tenth step is taken as it is. From the front, steps are dropped while their moving median is off that level,
    then while single steps among the next ones are slower than later steps are.

    `walls` are the wall times of all steps in order, in any unit. One that is no finite number counts as the slowest.
    """
    most = int(len(walls) * thresholds.WARMUP_SHARE)
    if limit is not None:
        most = min(most, max(0, limit))
    if most == 0:
        return 0
    times = np.asarray(walls, dtype=np.float64)
    known = times[np.isfinite(times)]
    if not len(known):
        return 0
    times = np.where(np.isfinite(times), times, known.max())
    later = times[most:]
    dropped = 0
    with np.errstate(over="ignore", invalid="ignore"):
        slow = thresholds.WARMUP_SLOW_STEP * float(np.quantile(later, _ORDINARY))
        if len(later) >= 2 * thresholds.WARMUP_WINDOW:  # of fewer no level is known
            levels = _moving_median(later)
            level = float(np.median(levels))
            spread = _MAD * float(np.median(np.abs(levels - level)))
            off = max(thresholds.WARMUP_SPREADS * spread, thresholds.WARMUP_LEAST_CHANGE * abs(level))
            reached = np.flatnonzero(np.abs(_moving_median(times[: most + thresholds.WARMUP_WINDOW]) - level) <= off)
            dropped = int(reached[0]) if len(reached) else most
            # of a run that gets faster throughout, the first steps are slower than any later one
            slow = max(slow, level + off)
        for index in np.flatnonzero(times[dropped:most] > slow) + dropped:
            if index >= dropped + thresholds.WARMUP_WINDOW:
                break
            dropped = int(index) + 1
        extreme = np.flatnonzero(times[:most] > thresholds.WARMUP_EXTREME_STEP * later.max())
    return max(dropped, int(extreme[-1]) + 1) if len(extreme) else dropped


def _moving_median(times: NDArray[np.float64]) -> NDArray[np.float64]:
    windows = np.lib.stride_tricks.sliding_window_view(times, thresholds.WARMUP_WINDOW)
    return np.asarray(np.median(windows, axis=1), dtype=np.float64)
