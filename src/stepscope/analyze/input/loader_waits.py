"""The main process's time in its loader, taken apart into what workers and helper threads did meanwhile.

Where the sampler told times, and a wait lasts longer than the time between samples, worker and main process are
compared at the same moments of steady steps (`_at_the_same_time`). Elsewhere the workers' samples of the same period
stand for them (`_in_the_same_period`): every process has a sampler of its own, so a shorter wait cannot be laid beside
what a worker did just then. Parts exclude each other and sum to the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.host.sampled_time import SampledLoop, is_fetch, whole_by_weight
from stepscope.analyze.step_times import partition
from stepscope.engine.call_tree import UserPaths, at, is_worker_loop, rows_of
from stepscope.engine.intervals import EMPTY, Intervals, covered, intersect, subtract, total, union
from stepscope.model import StepFacts
from stepscope.model.sampled import LoaderWait, WaitPart
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE, Bools, Floats, Int64, unique
from stepscope.tables.phases import DATA_WAIT, in_file, is_wait, last_part
from stepscope.tables.schema import Tables

# The main thread WAITS for others, or does one of the next three itself; workers and helper threads are in the others.
NOTHING, WAITS, HERE, TRANSFER, PINNING, BUSY, START, IDLE = range(8)
LOOP = 8  # all of the main thread's loop
MAIN, WORKER, HELPER = "main", "worker", "helper"  # whose a thread is; a worker's main thread is the worker
SEGMENT = ["process", "host", "file"]
_SCHEMA = {"process": pl.String, "state": pl.Int8, "line": pl.Int32, "weight": pl.Float64}
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
        idle: whether waiting threads were sampled (`hotspots.idle_sampled`).
        train: the steady steps of all ranks, for a rank whose own do not tell their data wait.
    """
    by_path = LoaderStates(users)
    sampled = _threads(loop.rows, context.tables.stacks, by_path)
    in_loader = sampled.filter((pl.col("who") == MAIN) & pl.col("state").is_not_null())
    if in_loader.is_empty():
        return ()
    timed = _at_the_same_time(context, loop, by_path)
    known = timed["process"].unique().to_list()
    counted = _in_the_same_period(sampled.filter(~pl.col("process").is_in(known)))
    weights = pl.concat([counted, timed]).group_by("process", "state", "line").agg(pl.col("weight").sum())
    weights = weights.filter(pl.col("weight") > 0).sort("process", "state", "line")
    loops = dict(weights.filter(pl.col("state") == LOOP).select("process", "weight").rows())
    by_process = weights.filter(pl.col("state") != LOOP).partition_by("process", as_dict=True)
    leaves = _leaves(sampled, users)
    counts = in_loader.group_by("process").agg(pl.col("samples").sum())
    processes = loop.rows.group_by("process").agg(pl.col("rank").first(), loop=pl.col("samples").sum())
    found = []
    for process, rank, loop_samples, samples in (
        processes.join(counts, on="process").sort("rank", "process").iter_rows()
    ):
        if (process,) not in by_process or process not in loops:
            continue  # its samples have no weight: in a damaged file their times lie elsewhere
        simultaneous, own = process in known, by_process[process,]
        measured = partition(loop.steady.filter(pl.col("process") == process))
        parts = (*measured, *(train.partition if train else ()))
        wait_ms = next((part.ms for part in parts if part.category == DATA_WAIT), None)
        found.append(
            LoaderWait(
                rank=rank,
                process=process,
                wait_ms_per_step=wait_ms,
                wait_share=min(1.0, float(own["weight"].sum()) / loops[process]),
                simultaneous=simultaneous,
                parts=_wait_parts(own, samples, wait_ms, leaves, users),
                source=(_SAME_MOMENTS if simultaneous else _SAME_PERIOD) + loop.basis,
                samples=samples,
                loop_samples=loop_samples,
                idle_sampled=idle,
            )
        )
    return tuple(found)


def sample_gap_ns(tables: Tables) -> float:
    """The usual time between two samples of a thread, where they have times."""
    rate = tables.segments.filter("timed")["rate_hz"].drop_nulls().median()
    return 1e9 / (float(rate) if isinstance(rate, int | float) and rate > 0 else _USUAL_RATE_HZ)


def _wait_parts(
    weights: pl.DataFrame, samples: int, wait_ms: float | None, leaves: dict[tuple[int, int], str], users: UserPaths
) -> tuple[WaitPart, ...]:
    """The largest lines of every state, and all others of it as one."""
    rows: list[tuple[float, int, int, int, int]] = []  # weight, state, order among equals, line, lines
    for (state,), own in weights.partition_by("state", as_dict=True, maintain_order=True).items():
        named = own.filter(pl.col("line") >= 0).sort(["weight", "line"], descending=[True, False])
        few = named if named.height <= MAX_LINES + 1 else named.head(MAX_LINES)
        rest = named[few.height :]
        rows += [(weight, state, at, line, 1) for at, (line, weight) in enumerate(few.select("line", "weight").rows())]
        if rest.height:
            rows.append((float(rest["weight"].sum()), state, MAX_LINES, -1, rest.height))
        rows += [(weight, state, MAX_LINES + 1, -1, 0) for weight in own.filter(pl.col("line") < 0)["weight"]]
    rows.sort(key=lambda row: (-row[0], *row[1:3]))
    shares = np.array([weight for weight, *_ in rows])
    shares = shares / shares.sum()
    counts = whole_by_weight(np.array([samples]), shares[None, :])[0].tolist() if rows else []
    return tuple(
        WaitPart(
            kind=KINDS[state],
            place=users.place(line),
            ms_per_step=None if wait_ms is None else share * wait_ms,
            share=share,
            samples=count,
            lines=lines,
            leaf=leaves.get((state, line)) if lines < 2 else None,
        )
        for (_, state, _, line, lines), share, count in zip(rows, shares.tolist(), counts, strict=True)
    )


def _leaves(sampled: pl.DataFrame, users: UserPaths) -> dict[tuple[int, int], str]:
    """(state, line) -> the function most often on top of it, where that is another one than the line's own."""
    key = ["state", "line"]
    at_work = sampled.filter(pl.col("state").is_in([HERE, BUSY]))
    own = pl.Series(users.user[rows_of(at_work["node"])], dtype=pl.Boolean)
    most = (
        at_work.with_columns(leaf=users.leaf_names(at_work["node"]).set(own, None))
        .group_by(*key, "leaf")
        .agg(pl.col("samples").sum())
        .with_columns(all=pl.col("samples").sum().over(key))
        .drop_nulls("leaf")
        .sort(["samples", "leaf"], descending=[True, False])
        .unique(key, keep="first", maintain_order=True)
        .filter(2 * pl.col("samples") >= pl.col("all"))
    )
    return {(state, line): leaf for state, line, leaf in most.select(*key, "leaf").iter_rows()}


def _threads(mains: pl.DataFrame, rows: pl.DataFrame, by_path: LoaderStates) -> pl.DataFrame:
    """Rows of `stacks` or `stretches`: main threads of ranks in their loop (`mains`), and all others of the same
    processes in the same segments, with `who`, `state` and `line`; the state of a main thread outside its loader is
    null."""
    is_main, of_worker = pl.col("main_thread").fill_null(False), pl.col("role") == "loader_worker"
    beside = rows.filter(pl.col("node").is_not_null() & (of_worker | ((pl.col("role") == "rank") & ~is_main)))
    beside = beside.join(mains.select(SEGMENT).unique(), on=SEGMENT, how="semi")
    who = pl.when(of_worker & is_main).then(pl.lit(WORKER)).otherwise(pl.lit(HELPER))
    columns = [name for name in (*SEGMENT, "node", "phase", "samples", "start_ns", "end_ns") if name in rows.columns]
    threads = pl.concat([mains.select(*columns, who=pl.lit(MAIN)), beside.select(*columns, who=who)])
    nodes, whose = rows_of(threads["node"]), threads["who"].to_numpy()
    state = at(by_path.helper, nodes, 0)
    for name, states in ((MAIN, by_path.main), (WORKER, by_path.worker)):
        state = np.where(whose == name, at(states, nodes, 0), state)
    threads = threads.with_columns(state=pl.Series(state), line=pl.Series(at(by_path.line, nodes, -1)))
    in_loader = (pl.col("who") != MAIN) | (pl.col("phase") == DATA_WAIT)
    return threads.with_columns(state=pl.when(in_loader).then("state"))


# ---- at the same moments: weights are ns -----------------------------------------------------------------------------


def _at_the_same_time(context: Context, loop: SampledLoop, by_path: LoaderStates) -> pl.DataFrame:
    """(process, state, line, weight), where times of samples are known, and a moment of waiting lies in a wait that
    lasts longer than the time between samples, on average."""
    stretches = context.tables.stretches
    wait = pl.col("data_wait_ns").cast(pl.Float64)
    lengths = loop.steady.group_by("process").agg(length=(wait**2).sum() / wait.sum())
    short = lengths.filter(pl.col("length") < sample_gap_ns(context.tables))["process"].to_list()
    is_main = (pl.col("role") == "rank") & pl.col("main_thread").fill_null(False)
    is_main &= pl.col("process").is_not_null() & ~pl.col("process").is_in(short)
    mains = loop.within(stretches.filter(is_main & pl.col("stage").is_null() & pl.col("node").is_not_null()))
    found = [pl.DataFrame(schema=_SCHEMA)]
    for own in _threads(mains, stretches, by_path).partition_by("process", maintain_order=True):
        inside = _times(own.filter(pl.col("who") == MAIN))
        scope = loop.times.get(str(own["process"][0]), EMPTY) if loop.inside is None else inside
        found += _moments(own, scope, inside)
    return pl.concat(found)


def _times(rows: pl.DataFrame) -> Intervals:
    return union(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())


def _moments(threads: pl.DataFrame, scope: Intervals, inside: Intervals) -> Iterator[pl.DataFrame]:
    """The ns of one process by state and line; `inside`: when its main thread was sampled in the loop."""
    process = threads["process"][0]

    def by_line(rows: pl.DataFrame, ns: Floats | Int64) -> pl.DataFrame:
        return rows.select("process", "state", "line", weight=pl.Series(ns, dtype=pl.Float64))

    def whole(state: int, times: Intervals) -> pl.DataFrame:
        return pl.DataFrame([(process, state, -1, float(total(times)))], schema=_SCHEMA, orient="row")

    yield whole(LOOP, intersect(inside, scope))
    mains, beside = threads.filter(pl.col("who") == MAIN), threads.filter(pl.col("who") != MAIN)
    own = mains.filter(pl.col("state") != WAITS)
    yield by_line(own, covered(scope, own["start_ns"].to_numpy(), own["end_ns"].to_numpy()))
    rest = intersect(_times(mains.filter(pl.col("state") == WAITS)), scope)
    # what the others did meanwhile, the first of these that holds
    for state in (PINNING, TRANSFER, BUSY, START, IDLE):
        own = beside.filter(pl.col("who") == WORKER if state == IDLE else pl.col("state") == state)
        if state == BUSY:
            yield by_line(own, _shared(own["start_ns"].to_numpy(), own["end_ns"].to_numpy(), rest))
        else:
            yield whole(state, intersect(rest, _times(own)))
        rest = subtract(rest, _times(own))
    yield whole(NOTHING, rest)


def _shared(starts: Int64, ends: Int64, within: Intervals) -> Floats:
    """What each interval gets of the time `within` when those that last at a moment share it equally, ns."""
    edges = unique(np.concatenate([starts, ends, within.starts, within.ends]))
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


# ---- in the same period: weights are samples of the main thread ------------------------------------------------------


def _in_the_same_period(threads: pl.DataFrame) -> pl.DataFrame:
    """(process, state, line, weight).

    Threads count as independent of each other: n of them, each in a state a share s of the time, leave (1 - s)^n of it
    to others; n is how many there were at a time, by their samples against those of the main thread's loop. Workers
    have nothing to do when the main process has enough batches, so their idleness counts as such time first, and in the
    wait only as far as there is more of it.
    """

    def ratio(part: str, whole: str) -> pl.Expr:
        return pl.when(pl.col(whole) > 0).then((pl.col(part) / pl.col(whole)).clip(upper_bound=1.0)).otherwise(0.0)

    def any_of(active: str, of: str) -> pl.Expr:
        """The probability that at least one of such threads is active."""
        return 1 - (1 - ratio(active, of)) ** (pl.col(of) / pl.col("loop"))

    samples, who, state = pl.col("samples"), pl.col("who"), pl.col("state")
    sums = {
        "loop": who == MAIN,
        "waits": (who == MAIN) & (state == WAITS),
        "all": who == WORKER,
        "busy": (who == WORKER) & (state == BUSY),
        "start": (who == WORKER) & (state == START),
        "helpers": who == HELPER,
        "pins": (who == HELPER) & (state == PINNING),
        "moves": (who != MAIN) & (state == TRANSFER),
    }
    groups = threads.group_by(SEGMENT).agg(samples.filter(holds).sum().alias(name) for name, holds in sums.items())
    count = (pl.col("all") / pl.col("loop")).clip(lower_bound=1.0)
    groups = groups.with_columns(
        pinning=pl.col("waits") * any_of("pins", "helpers"),
        no_busy=(1 - ratio("busy", "all")) ** count,
        neither=(1 - ratio("busy", "all") - ratio("start", "all")).clip(lower_bound=0.0) ** count,
    )
    groups = groups.with_columns(transfer=(pl.col("waits") - pl.col("pinning")) * any_of("moves", "helpers"))
    some, sometimes = pl.col("all") > 0, pl.col("neither") < 1
    rest = pl.col("waits") - pl.col("pinning") - pl.col("transfer")
    surplus = pl.col("loop") * pl.col("neither") - (pl.col("loop") - pl.col("waits"))
    idle = pl.when(sometimes).then(pl.min_horizontal(surplus.clip(lower_bound=0.0), rest)).otherwise(rest)
    groups = groups.with_columns(rest=rest, idle=pl.when(some).then(idle).otherwise(0.0))
    working = pl.when(sometimes).then((1 - pl.col("no_busy")) / (1 - pl.col("neither"))).otherwise(0.0)
    at_work = pl.when(some).then(pl.col("rest") - pl.col("idle")).otherwise(0.0)
    groups = groups.with_columns(
        worker=at_work * working,
        starting=pl.when(sometimes).then(at_work * (1 - working)).otherwise(0.0),
        unknown=pl.when(some).then(0.0).otherwise(pl.col("rest")),
    )
    own = threads.filter((who == MAIN) & (state != WAITS))
    busy = threads.filter(sums["busy"]).join(groups, on=SEGMENT)
    columns = {
        "pinning": PINNING,
        "transfer": TRANSFER,
        "starting": START,
        "idle": IDLE,
        "unknown": NOTHING,
        "loop": LOOP,
    }
    weights = [
        own.select("process", "state", "line", weight=samples.cast(pl.Float64)),
        busy.select("process", "state", "line", weight=pl.col("worker") * samples / pl.col("busy")),
        *(
            groups.select("process", state=pl.lit(state, pl.Int8), line=pl.lit(-1, pl.Int32), weight=name)
            for name, state in columns.items()
        ),
    ]
    return pl.concat([frame.cast({"weight": pl.Float64}) for frame in weights])


# ---- what a thread does, by its stack --------------------------------------------------------------------------------


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
    """States by node, for a thread whose innermost frame that is. `line` is the user's line below the loader, or -1.

    `main`: of the main thread of a rank below its loader's `__next__`; `worker`: of the main thread of a worker;
    `helper`: of other threads of both. One that hands out descriptors works while another unpacks.
    """

    def __init__(self, users: UserPaths) -> None:
        makes, fetches, pins = users.passes(_is_fetcher), users.passes(is_fetch), users.passes(_in(_PIN))
        puts, gets, in_loop = users.passes(_named("put", _QUEUES)), users.passes(_gets), users.passes(is_worker_loop)
        parked = users.marked(_is_parked) | users.passes(_polls)
        # an innermost `get` takes a message apart in C
        unpacks = users.passes(_moves) | users.marked(_gets)
        # the user's innermost line below the loader's fetcher, else below its `__next__`
        fetcher = users.tree.outermost(users.marked(_is_fetcher))
        entry = np.where(fetcher >= 0, fetcher, users.tree.outermost(users.marked(is_fetch)))
        below = users.is_below(users.innermost, entry) & (entry >= 0)
        self.line = np.where(below, at(users.line, users.innermost, NONE), np.int32(NONE))
        self.main = _first(
            ((self.line >= 0) | makes, HERE),
            (pins, PINNING),
            (unpacks | puts, TRANSFER),
            (parked | users.passes(_named("get", "queue.py")), WAITS),  # a batch that the pin thread hands over
            (fetches, HERE),
        )
        self.worker = _first(
            (makes, BUSY),
            (parked & (gets | ~in_loop), IDLE),
            (~in_loop | (users.innermost >= 0), START),
            (unpacks | puts, TRANSFER),
            (in_loop, BUSY),
        )
        self.helper = _first(
            (parked | (users.passes(_in(_SHARER)) & ~(pins & unpacks)), NOTHING),
            (pins & ~unpacks, PINNING),
            (pins | users.passes(_named("_feed", _QUEUES)), TRANSFER),
        )


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


def _in(file: str) -> Callable[[Frame], bool]:
    return lambda frame: in_file(frame.file, file)


def _named(function: str, file: str) -> Callable[[Frame], bool]:
    return lambda frame: last_part(frame.function) == function and in_file(frame.file, file)


_is_fetcher, _gets = _in(_FETCHER), _named("get", _QUEUES)


def _moves(frame: Frame) -> bool:
    if in_file(frame.file, _CONNECTION):
        return last_part(frame.function) in _MESSAGES
    return any(in_file(frame.file, ending) for ending in _PACKING)
