"""The main process's time in its loader, taken apart into what workers and helper threads did meanwhile.

Where the sampler told times, and a wait lasts longer than the time between samples, worker and main process are
compared at the same moments of steady steps. Elsewhere the workers' samples of the same period stand for them
(`wait_parts`): every process has a sampler of its own, so a shorter wait cannot be laid beside what a worker did just
then. Parts exclude each other and sum to the wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.host.sampled_time import SampledLoop, is_fetch, whole_by_weight
from stepscope.engine.call_tree import UserPaths, at, is_worker_loop, rows_of
from stepscope.engine.intervals import Intervals, covered, intersect, subtract, total, union
from stepscope.model import PHASES, StepFacts
from stepscope.model.sampled import LoaderWait, WaitPart
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE, Bools, Floats, Int32, Int64
from stepscope.tables.phases import DATA_WAIT, in_file, is_wait, last_part
from stepscope.tables.schema import Tables

# The main thread WAITS for others, or does one of the next three itself; workers and helper threads are in the others.
NOTHING, WAITS, HERE, TRANSFER, PINNING, BUSY, START, IDLE = range(8)
MAX_LINES = 4  # of a kind that are named; a fifth hardly changes what to do, and the rest is one part
KINDS = {
    HERE: "loading_here",
    TRANSFER: "transfer",
    PINNING: "pinning",
    BUSY: "worker_busy",
    START: "worker_start",
    IDLE: "workers_idle",
    NOTHING: "unknown",
}
_USUAL_RATE_HZ = 20.0  # of our own recordings, where a file does not tell
_SAME_MOMENTS = "sampled stacks of the main process and its workers at the same moments, "
_SAME_PERIOD = "sampled stacks of the main process, and of its workers in the same period, "


def loader_waits(
    context: Context, loop: SampledLoop, users: UserPaths, idle: bool | None, train: StepFacts | None
) -> tuple[LoaderWait, ...]:
    """One per rank that was sampled in its loader, by rank; empty without any.

    Args:
        idle: whether waiting threads were sampled (`hotspot_idle`).
        train: the steady steps of all ranks, for a rank whose own do not tell their data wait.
    """
    by_path = LoaderStates(users)
    tables = context.tables
    sampled = threads(loop.rows, tables.stacks, by_path)
    in_loader = sampled.mains.filter(pl.col("state").is_not_null())
    if in_loader.is_empty():
        return ()
    timed = _timed(context, loop, by_path)
    known = [] if timed is None else timed.weights["process"].unique().to_list()
    counted = in_the_same_period(_without(sampled, known))
    shares = {name: _shares(parts) for name, parts in (("timed", timed), ("counted", counted)) if parts is not None}
    leaves = _leaves(sampled, users)
    counts = in_loader.group_by("process").agg(pl.col("samples").sum())
    processes = loop.rows.group_by("process").agg(pl.col("rank").first(), loop=pl.col("samples").sum())
    measured = _measured(loop.steady)
    usual = next((part.ms for part in train.partition if part.category == "data_wait"), None) if train else None
    found = []
    for process, rank, loop_samples, samples in (
        processes.join(counts, on="process").sort("rank", "process").iter_rows()
    ):
        simultaneous = process in known
        share, weights = shares["timed" if simultaneous else "counted"][process]
        wait_ms = measured.get(process, usual)
        found.append(
            LoaderWait(
                rank=rank,
                process=process,
                wait_ms_per_step=wait_ms,
                wait_share=share,
                simultaneous=simultaneous,
                parts=_wait_parts(weights, samples, wait_ms, leaves, users),
                source=(_SAME_MOMENTS if simultaneous else _SAME_PERIOD) + loop.basis,
                samples=samples,
                loop_samples=loop_samples,
                idle_sampled=idle,
            )
        )
    return tuple(found)


def _timed(context: Context, loop: SampledLoop, by_path: LoaderStates) -> Parts | None:
    """None where no sample's time is known."""
    stretches = context.tables.stretches
    is_main = (pl.col("role") == "rank") & pl.col("main_thread").fill_null(False) & pl.col("process").is_not_null()
    mains = loop.within(stretches.filter(is_main & pl.col("stage").is_null() & pl.col("node").is_not_null()))
    mains = mains.filter(~pl.col("process").is_in(_short_waits(loop.steady, sample_gap_ns(context.tables))))
    if mains.is_empty():
        return None
    parts = at_the_same_time(threads(mains, stretches, by_path), loop)
    return parts if parts.weights.height else None


def sample_gap_ns(tables: Tables) -> float:
    """The usual time between two samples of a thread, where they have times."""
    rate = tables.segments.filter("timed")["rate_hz"].drop_nulls().median()
    return 1e9 / (float(rate) if isinstance(rate, int | float) and rate > 0 else _USUAL_RATE_HZ)


def _short_waits(steady: pl.DataFrame, gap_ns: float) -> list[str]:
    """Processes in which the wait that a moment of waiting lies in is shorter than that, on average."""
    wait = pl.col("data_wait_ns").cast(pl.Float64)
    lengths = steady.group_by("process").agg(length=(wait**2).sum() / wait.sum())
    return [str(process) for process in lengths.filter(pl.col("length") < gap_ns)["process"]]


def _without(sampled: Threads, processes: list[str]) -> Threads:
    left_out = pl.col("process").is_in(processes)
    return Threads(sampled.mains.filter(~left_out), sampled.others.filter(~left_out))


def _shares(parts: Parts) -> dict[str, tuple[float, pl.DataFrame]]:
    """Of each process: the share of its loop that it waits, and the weights of the parts."""
    loops = dict(parts.loops.iter_rows())
    return {
        key[0]: (min(1.0, float(own["weight"].sum()) / loops[key[0]]), own)
        for key, own in parts.weights.partition_by("process", as_dict=True).items()
    }


def _measured(steady: pl.DataFrame) -> dict[str, float]:
    """process -> the data wait of its mean steady step, ms, as `steps.partition` has it."""
    columns = [f"{phase}_ns" for phase in PHASES]
    known = pl.col("data_wait_ns").is_not_null().any()
    means = steady.group_by("process").agg(
        known,
        pl.col("wall_ns").mean().alias("wall"),
        *(pl.col(columns).fill_null(0).clip(lower_bound=0).mean().name.prefix("mean_"),),
    )
    parts = pl.sum_horizontal(f"mean_{column}" for column in columns)
    scale = pl.min_horizontal(pl.col("wall") / parts, 1.0)
    found = means.filter("data_wait_ns").select("process", ms=pl.col("mean_data_wait_ns") * scale.fill_nan(1.0) / 1e6)
    return {str(process): float(ms) for process, ms in found.iter_rows()}


def _wait_parts(
    weights: pl.DataFrame, samples: int, wait_ms: float | None, leaves: dict[tuple[int, int], str], users: UserPaths
) -> tuple[WaitPart, ...]:
    rows = sorted(_folded(weights), key=lambda row: (-row["weight"], row["state"], row["order"]))
    total = sum(row["weight"] for row in rows)
    shares = [row["weight"] / total for row in rows]
    counts = whole_by_weight(np.array([samples]), np.array([shares]))[0].tolist() if rows else []
    return tuple(
        WaitPart(
            kind=KINDS[row["state"]],
            place=users.place(row["line"]),
            ms_per_step=None if wait_ms is None else share * wait_ms,
            share=share,
            samples=count,
            lines=row["lines"],
            leaf=leaves.get((row["state"], row["line"])) if row["lines"] < 2 else None,
        )
        for row, share, count in zip(rows, shares, counts, strict=True)
    )


def _folded(weights: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """(state, line, lines, weight, order): the largest lines of every state, and all others of it as one."""
    by_state: dict[int, list[tuple[float, int]]] = {}
    for state, line, weight in weights.select("state", "line", "weight").iter_rows():
        by_state.setdefault(state, []).append((weight, line))
    for state, rows in by_state.items():
        named = sorted((row for row in rows if row[1] >= 0), key=lambda row: (-row[0], row[1]))
        few = named if len(named) <= MAX_LINES + 1 else named[:MAX_LINES]
        for order, (weight, line) in enumerate(few):
            yield {"state": state, "line": line, "lines": 1, "weight": weight, "order": order}
        rest = named[len(few) :]
        if rest:
            weight = sum(row[0] for row in rest)
            yield {"state": state, "line": -1, "lines": len(rest), "weight": weight, "order": MAX_LINES}
        for weight, _ in (row for row in rows if row[1] < 0):
            yield {"state": state, "line": -1, "lines": 0, "weight": weight, "order": MAX_LINES + 1}


def _leaves(sampled: Threads, users: UserPaths) -> dict[tuple[int, int], str]:
    """(state, line) -> the function most often on top of it, where that is another one than the line's own."""
    both = pl.concat([rows.select("state", "line", "node", "samples") for rows in sampled]).filter(
        pl.col("state").is_in([HERE, BUSY])
    )
    own = users.user[rows_of(both["node"])]
    named = both.with_columns(leaf=users.leaf_names(both["node"])).filter(~pl.Series(own, dtype=pl.Boolean))
    most = (
        named.group_by("state", "line", "leaf")
        .agg(pl.col("samples").sum())
        .sort(["samples", "leaf"], descending=[True, False])
        .unique(["state", "line"], keep="first", maintain_order=True)
    )
    sums = both.group_by("state", "line").agg(pl.col("samples").sum())
    totals = {(state, line): count for state, line, count in sums.iter_rows()}
    return {(state, line): leaf for state, line, leaf, count in most.iter_rows() if 2 * count >= totals[(state, line)]}


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
    for state in np.setdiff1d(main.state, (_OUTSIDE, WAITS)).tolist():
        own = main.where(main.state == state)
        yield from ((state, line, ns) for line, ns in own.by_line(covered(scope, own.starts, own.ends)))
    rest = intersect(main.where(main.state == WAITS).times(), scope)
    for state in (PINNING, TRANSFER):
        times = others.where(others.state == state).times()
        yield state, -1, float(total(intersect(rest, times)))
        rest = subtract(rest, times)
    busy = others.where(others.state == BUSY)
    yield from ((BUSY, line, ns) for line, ns in busy.by_line(_shared(busy.starts, busy.ends, rest)))
    rest = subtract(rest, busy.times())
    starting = others.where(others.state == START).times()
    yield START, -1, float(total(intersect(rest, starting)))
    rest = subtract(rest, starting)
    seen = others.where(beside["works"].to_numpy()).times()
    yield IDLE, -1, float(total(intersect(rest, seen)))
    yield NOTHING, -1, float(total(subtract(rest, seen)))


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
    waits = pl.col("samples").filter(pl.col("state") == WAITS).sum()
    groups = found.mains.group_by(SEGMENT).agg(loop=pl.col("samples").sum(), waits=waits)

    def of(state: int, works: bool) -> pl.Expr:
        return pl.col("samples").filter((pl.col("state") == state) & (pl.col("works") == works)).sum()

    others = found.others.group_by(SEGMENT).agg(
        all=pl.col("samples").filter("works").sum(),
        busy=of(BUSY, True),
        start=of(START, True),
        helpers=pl.col("samples").filter(~pl.col("works")).sum(),
        pins=of(PINNING, False),
        moves=of(TRANSFER, False) + of(TRANSFER, True),
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
    own = mains.filter(pl.col("state").is_not_null() & (pl.col("state") != WAITS))
    return own.select("process", "state", "line", weight=pl.col("samples").cast(pl.Float64))


def _by_line(groups: pl.DataFrame, others: pl.DataFrame) -> pl.DataFrame:
    busy = others.filter((pl.col("state") == BUSY) & pl.col("works")).join(groups, on=SEGMENT)
    return busy.select("process", "state", "line", weight=pl.col("worker") * pl.col("samples") / pl.col("busy"))


def _by_state(groups: pl.DataFrame) -> Iterator[pl.DataFrame]:
    columns = {
        "pinning": PINNING,
        "transfer": TRANSFER,
        "starting": START,
        "idle": IDLE,
        "unknown": NOTHING,
    }
    for name, state in columns.items():
        yield groups.select("process", state=pl.lit(state, pl.Int8), line=pl.lit(-1, pl.Int32), weight=name)


States = npt.NDArray[np.int8]

_FETCHER = "torch/utils/data/_utils/fetch.py"
_PIN = "torch/utils/data/_utils/pin_memory.py"
_QUEUES = "multiprocessing/queues.py"
_SHARER = "multiprocessing/resource_sharer.py"
_PACKING = ("torch/multiprocessing/reductions.py", "multiprocessing/reduction.py", _SHARER)
_CONNECTION = "multiprocessing/connection.py"
_MESSAGES = (
    *("recv_bytes", "_recv_bytes", "recv", "_recv", "send_bytes", "_send_bytes", "send", "_send"),
    *("Client", "answer_challenge", "deliver_challenge"),
)


class LoaderStates:
    """States by node, for a thread whose innermost frame that is. `line` is the user's line below the loader, or -1."""

    def __init__(self, users: UserPaths) -> None:
        self._users = users
        self._fetches = users.passes(is_fetch)
        self._makes = users.passes(_is_fetcher)
        self._parked = users.marked(_is_parked) | users.passes(_polls)
        # an innermost `get` takes a message apart in C
        self._unpacks = users.passes(_moves) | users.marked(_gets)
        self._pins = users.passes(_is_pinning)

    @cached_property
    def main(self) -> States:
        """Of the main thread of a rank below its loader's `__next__`."""
        return _first(
            ((self.line >= 0) | self._makes, HERE),
            (self._pins, PINNING),
            (self._unpacks | self._users.passes(_puts), TRANSFER),
            (self._parked | self._users.passes(_takes), WAITS),
            (self._fetches, HERE),
        )

    @cached_property
    def worker(self) -> States:
        """Of the main thread of a loader worker."""
        in_loop, gets = self._users.passes(is_worker_loop), self._users.passes(_gets)
        return _first(
            (self._makes, BUSY),
            (self._parked & (gets | ~in_loop), IDLE),
            (~in_loop | (self._users.innermost >= 0), START),
            (self._unpacks | self._users.passes(_puts), TRANSFER),
            (in_loop, BUSY),
        )

    @cached_property
    def helper(self) -> States:
        """Of other threads of ranks and workers. One that hands out descriptors works while another unpacks."""
        unpacks_here = self._pins & self._unpacks
        return _first(
            (self._parked | (self._users.passes(_hands_out) & ~unpacks_here), NOTHING),
            (self._pins & ~self._unpacks, PINNING),
            (self._pins | self._users.passes(_feeds), TRANSFER),
        )

    @cached_property
    def line(self) -> Int32:
        """The number of the user's innermost line below the loader's fetcher, else below its `__next__`."""
        users = self._users
        fetcher = users.tree.outermost(users.marked(_is_fetcher))
        entry = np.where(fetcher >= 0, fetcher, users.tree.outermost(users.marked(is_fetch)))
        below = users.is_below(users.innermost, entry) & (entry >= 0)
        return np.where(below, at(users.line, users.innermost, NONE), np.int32(NONE))


def _first(*choices: tuple[Bools, int]) -> States:
    """The first state that holds, by node."""
    found: States = np.select([held for held, _ in choices], [state for _, state in choices], NOTHING).astype(np.int8)
    return found


def _is_parked(frame: Frame) -> bool:
    """Whether a thread waits here for something to begin, rather than for the rest of a message on its way."""
    return is_wait(frame, on_device=False) and not _gets(frame) and last_part(frame.function) != "_recv"


def _polls(frame: Frame) -> bool:
    """Whether all that is called here belongs to waiting, too."""
    return _is_parked(frame) and last_part(frame.function) in ("wait", "select", "poll", "_poll")


def _gets(frame: Frame) -> bool:
    return last_part(frame.function) == "get" and in_file(frame.file, _QUEUES)


def _takes(frame: Frame) -> bool:
    """Whether a batch is taken that the pin thread hands over."""
    return last_part(frame.function) == "get" and in_file(frame.file, "queue.py")


def _puts(frame: Frame) -> bool:
    return last_part(frame.function) == "put" and in_file(frame.file, _QUEUES)


def _feeds(frame: Frame) -> bool:
    return last_part(frame.function) == "_feed" and in_file(frame.file, _QUEUES)


def _hands_out(frame: Frame) -> bool:
    return in_file(frame.file, _SHARER)


def _moves(frame: Frame) -> bool:
    if in_file(frame.file, _CONNECTION):
        return last_part(frame.function) in _MESSAGES
    return any(in_file(frame.file, ending) for ending in _PACKING)


def _is_fetcher(frame: Frame) -> bool:
    return in_file(frame.file, _FETCHER)


def _is_pinning(frame: Frame) -> bool:
    return in_file(frame.file, _PIN)
