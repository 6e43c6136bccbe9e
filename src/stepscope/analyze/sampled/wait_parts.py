"""How much of a wait for the loader goes to which state of the others: at the same moments, or by shares of samples.

A moment in which the main thread waits belongs to what is nearest to its end: pinning, else a batch on its way between
processes, else workers that make batches (in equal parts), else workers that start, else nothing (workers idle), else
to what nobody sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl

from stepscope.analyze.sampled import loader_states as states
from stepscope.analyze.sampled.loader_states import LoaderStates
from stepscope.analyze.sampled.loop import SampledLoop
from stepscope.analyze.sampled.user_paths import at, rows_of
from stepscope.engine.intervals import Intervals, covered, intersect, subtract, total, union
from stepscope.tables.arrays import Bools, Floats, Int64
from stepscope.tables.phases import DATA_WAIT

SEGMENT = ["process", "host", "file"]
_OUTSIDE = -1  # the loader
_SCHEMA = {"process": pl.String, "state": pl.Int8, "line": pl.Int32, "weight": pl.Float64}


class Threads(NamedTuple):
    """Rows of `stacks` or `stretches`: main threads of ranks in their loop, and all others of the same processes.

    Both have `state` and `line` of `LoaderStates`; the state of a main thread outside its loader is null.
    """

    mains: pl.DataFrame
    others: pl.DataFrame


class Parts(NamedTuple):
    """`weights`: process, state, line (-1 for none), weight; `loops`: process, weight of its whole loop."""

    weights: pl.DataFrame
    loops: pl.DataFrame


def threads(mains: pl.DataFrame, rows: pl.DataFrame, by_path: LoaderStates) -> Threads:
    """`mains` are in the loop; of `rows`, those of other threads in the same segments count."""
    is_main = pl.col("main_thread").fill_null(False)
    beside = rows.filter(
        pl.col("node").is_not_null() & ((pl.col("role") == "loader_worker") | ((pl.col("role") == "rank") & ~is_main))
    ).join(mains.select(SEGMENT).unique(), on=SEGMENT, how="semi")
    works = pl.Series((beside["role"] == "loader_worker") & beside["main_thread"].fill_null(False))
    nodes = rows_of(beside["node"])
    state = np.where(works.to_numpy(), at(by_path.worker, nodes, 0), at(by_path.helper, nodes, 0))
    mains = mains.with_columns(
        state=pl.Series(at(by_path.main, rows_of(mains["node"]), 0)),
        line=pl.Series(at(by_path.line, rows_of(mains["node"]), -1)),
    ).with_columns(state=pl.when(pl.col("phase") == DATA_WAIT).then("state"))
    return Threads(
        mains, beside.with_columns(state=pl.Series(state), line=pl.Series(at(by_path.line, nodes, -1)), works=works)
    )


def at_the_same_time(found: Threads, loop: SampledLoop) -> Parts:
    """From rows of `stretches`; weights are ns."""
    weights: list[tuple[str, int, int, float]] = []
    loops: list[tuple[str, float]] = []
    others = {key[0]: rows for key, rows in found.others.partition_by("process", as_dict=True).items()}
    for (process,), mains in found.mains.partition_by("process", as_dict=True, maintain_order=True).items():
        scope = loop.times(process) if loop.inside is None else _times(mains)
        loops.append((process, float(total(intersect(_times(mains), scope)))))
        beside = others.get(process, found.others.clear())
        weights.extend((process, *part) for part in _parts(mains, beside, scope))
    return Parts(
        _summed(pl.DataFrame(weights, schema=_SCHEMA, orient="row")),
        pl.DataFrame(loops, schema={"process": pl.String, "weight": pl.Float64}, orient="row"),
    )


class _Stretches(NamedTuple):
    """Rows as arrays: many small selections of them are made for every rank."""

    state: Int64
    line: Int64
    starts: Int64
    ends: Int64

    @classmethod
    def of(cls, rows: pl.DataFrame) -> _Stretches:
        return cls(*(rows[name].fill_null(_OUTSIDE).to_numpy() for name in ("state", "line", "start_ns", "end_ns")))

    def where(self, chosen: Bools) -> _Stretches:
        return _Stretches(*(column[chosen] for column in self))

    def times(self) -> Intervals:
        return union(self.starts, self.ends)

    def by_line(self, lengths: Floats | Int64) -> Iterator[tuple[int, float]]:
        """(line, sum of the lengths)."""
        lines, which = np.unique(self.line, return_inverse=True)
        sums = np.bincount(which, lengths, minlength=len(lines))
        yield from zip(lines.tolist(), sums.tolist(), strict=True)


def _parts(mains: pl.DataFrame, beside: pl.DataFrame, scope: Intervals) -> Iterator[tuple[int, int, float]]:
    """(state, line, ns) of one process."""
    main, others = _Stretches.of(mains), _Stretches.of(beside)
    for state in np.setdiff1d(main.state, (_OUTSIDE, states.WAITS)).tolist():
        own = main.where(main.state == state)
        yield from ((state, line, ns) for line, ns in own.by_line(covered(scope, own.starts, own.ends)))
    rest = intersect(main.where(main.state == states.WAITS).times(), scope)
    for state in (states.PINNING, states.TRANSFER):
        times = others.where(others.state == state).times()
        yield state, -1, float(total(intersect(rest, times)))
        rest = subtract(rest, times)
    busy = others.where(others.state == states.BUSY)
    yield from ((states.BUSY, line, ns) for line, ns in busy.by_line(_shared(busy.starts, busy.ends, rest)))
    rest = subtract(rest, busy.times())
    starting = others.where(others.state == states.START).times()
    yield states.START, -1, float(total(intersect(rest, starting)))
    rest = subtract(rest, starting)
    seen = others.where(beside["works"].to_numpy()).times()
    yield states.IDLE, -1, float(total(intersect(rest, seen)))
    yield states.NOTHING, -1, float(total(subtract(rest, seen)))


def _shared(starts: Int64, ends: Int64, within: Intervals) -> Floats:
    """What each interval gets of the time `within` when those that last at a moment share it equally, ns."""
    edges = np.unique(np.concatenate([starts, ends, within.starts, within.ends]))
    if len(edges) < 2:
        return np.zeros(len(starts))
    begins, finishes = np.searchsorted(edges, starts), np.searchsorted(edges, ends)
    change = np.zeros(len(edges), np.int64)
    np.add.at(change, begins, 1)
    np.add.at(change, finishes, -1)
    count = np.cumsum(change)[:-1]
    lengths = covered(within, edges[:-1], edges[1:])
    reached = np.concatenate([[0.0], np.cumsum(np.where(count > 0, lengths / np.maximum(count, 1), 0.0))])
    found: Floats = np.maximum(reached[finishes] - reached[begins], 0.0)
    return found


def _summed(weights: pl.DataFrame) -> pl.DataFrame:
    keys = ["process", "state", "line"]
    return weights.group_by(keys).agg(pl.col("weight").sum()).filter(pl.col("weight") > 0).sort(keys)


def _times(rows: pl.DataFrame) -> Intervals:
    return union(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())


def in_the_same_period(found: Threads) -> Parts:
    """From rows of `stacks`; weights are samples of the main thread.

    Threads count as independent of each other: n of them, each in a state a share s of the time, leave (1 - s)^n of it
    to others; n is how many there were at a time, by their samples against those of the main thread's loop. Workers
    have nothing to do when the main process has enough batches, so their idleness counts as such time first, and in the
    wait only as far as there is more of it.
    """
    groups = _sums(found)
    count = (pl.col("all") / pl.col("loop")).clip(lower_bound=1.0)
    groups = groups.with_columns(
        pinning=pl.col("waits") * _any("pins", "helpers"),
        no_busy=(1 - _ratio("busy", "all")) ** count,
        neither=(1 - _ratio("busy", "all") - _ratio("start", "all")).clip(lower_bound=0.0) ** count,
    )
    groups = groups.with_columns(transfer=(pl.col("waits") - pl.col("pinning")) * _any("moves", "helpers"))
    rest = pl.col("waits") - pl.col("pinning") - pl.col("transfer")
    surplus = pl.col("loop") * pl.col("neither") - (pl.col("loop") - pl.col("waits"))
    groups = groups.with_columns(
        rest=rest,
        idle=pl.when(pl.col("all") == 0)
        .then(0.0)
        .when(pl.col("neither") >= 1)
        .then(rest)
        .otherwise(pl.min_horizontal(surplus.clip(lower_bound=0.0), rest)),
    )
    working = pl.when(pl.col("neither") < 1).then((1 - pl.col("no_busy")) / (1 - pl.col("neither"))).otherwise(0.0)
    some = pl.when(pl.col("all") > 0).then(pl.col("rest") - pl.col("idle")).otherwise(0.0)
    groups = groups.with_columns(
        worker=some * working,
        starting=pl.when(pl.col("neither") < 1).then(some * (1 - working)).otherwise(0.0),
        unknown=pl.when(pl.col("all") > 0).then(0.0).otherwise(pl.col("rest")),
    )
    weights = pl.concat([_own(found.mains), _by_line(groups, found.others), *_by_state(groups)])
    return Parts(
        _summed(weights),
        found.mains.group_by("process").agg(weight=pl.col("samples").sum().cast(pl.Float64)),
    )


def _sums(found: Threads) -> pl.DataFrame:
    """Samples by segment of a process: of its loop, of its waits, and of the others by state."""
    waits = pl.col("samples").filter(pl.col("state") == states.WAITS).sum()
    groups = found.mains.group_by(SEGMENT).agg(loop=pl.col("samples").sum(), waits=waits)

    def of(state: int, works: bool) -> pl.Expr:
        return pl.col("samples").filter((pl.col("state") == state) & (pl.col("works") == works)).sum()

    others = found.others.group_by(SEGMENT).agg(
        all=pl.col("samples").filter("works").sum(),
        busy=of(states.BUSY, True),
        start=of(states.START, True),
        helpers=pl.col("samples").filter(~pl.col("works")).sum(),
        pins=of(states.PINNING, False),
        moves=of(states.TRANSFER, False) + of(states.TRANSFER, True),
    )
    return groups.join(others, on=SEGMENT, how="left").with_columns(
        pl.col("all", "busy", "start", "helpers", "pins", "moves").fill_null(0)
    )


def _ratio(part: str, whole: str) -> pl.Expr:
    return pl.when(pl.col(whole) > 0).then((pl.col(part) / pl.col(whole)).clip(upper_bound=1.0)).otherwise(0.0)


def _any(active: str, of: str) -> pl.Expr:
    """The probability that at least one of such threads is active."""
    return 1 - (1 - _ratio(active, of)) ** (pl.col(of) / pl.col("loop"))


def _own(mains: pl.DataFrame) -> pl.DataFrame:
    own = mains.filter(pl.col("state").is_not_null() & (pl.col("state") != states.WAITS))
    return own.select("process", "state", "line", weight=pl.col("samples").cast(pl.Float64))


def _by_line(groups: pl.DataFrame, others: pl.DataFrame) -> pl.DataFrame:
    busy = others.filter((pl.col("state") == states.BUSY) & pl.col("works")).join(groups, on=SEGMENT)
    return busy.select("process", "state", "line", weight=pl.col("worker") * pl.col("samples") / pl.col("busy"))


def _by_state(groups: pl.DataFrame) -> Iterator[pl.DataFrame]:
    columns = {
        "pinning": states.PINNING,
        "transfer": states.TRANSFER,
        "starting": states.START,
        "idle": states.IDLE,
        "unknown": states.NOTHING,
    }
    for name, state in columns.items():
        yield groups.select("process", state=pl.lit(state, pl.Int8), line=pl.lit(-1, pl.Int32), weight=name)
