"""Several workers of one run: what each did in its mean step, and who waited for whom in collectives.

Files of one folder are of one run, as for the TensorBoard plugin. Files of several folders are only if each says which
rank it is, no two the same, and nothing speaks against it: two runs that lie side by side both have a rank 0.

Clocks of different hosts are not compared. A collective ends on all ranks at nearly the same moment, and the rank that
came last waits for nobody: the shortest of its durations is what the transfer took, the rest of each is waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.views import communication
from stepscope.analyze.views.communication import Calls, calls, computation
from stepscope.engine import collective_names as words
from stepscope.engine import intervals
from stepscope.engine.device_work import work
from stepscope.engine.intervals import Intervals
from stepscope.engine.scene import TraceSteps, trace_steps
from stepscope.engine.spans import Base, Span
from stepscope.model.counted import things
from stepscope.model.trace import SpanRef
from stepscope.model.views import CollectiveOverWorkers, Distributed, WorkerShare
from stepscope.tables.arrays import NONE, Int64

NO_COLLECTIVES = "no worker ran a collective while recording"
_NAMED = 8  # ranks in a note
_LEAST_ENDS = 5  # collectives whose ends tell how far workers' clocks agree

# What calls of the same collective have in common on all workers.
_SAME = ("kind", "group", "sequence", "size", "span", "step")
_MATCH = (*_SAME, "nth")
_MESSAGE = {
    "kind": pl.String,
    "group": pl.String,
    "label": pl.String,
    "bytes": pl.Int64,
    "fixed": pl.Int64,
    "able": pl.Boolean,
}


class _Worker(Struct, frozen=True):
    ref: SpanRef
    found: Calls
    computation: Intervals
    windows: TraceSteps


class _Matches(Struct, frozen=True):
    """`shortest` has for each call of each span the duration of the shortest of its match, -1 where it has none.

    `table` has a row for each match: _MATCH, label (of the group), workers, bytes, length (of all), shortest, wait (of
    all), last (rank of the shortest).
    """

    shortest: tuple[Int64, ...]
    table: pl.DataFrame
    unmatched: int  # calls


def view(base: Base) -> Distributed | None:
    """The workers side by side, None where there is nothing to compare: `why_absent` says why."""
    found = peers(base)
    if isinstance(found, str):
        return None
    workers = []
    for span in (span for spans in found.workers for span in spans):
        done = work(span)
        workers.append(_Worker(span.ref, calls(span, done), computation(span, done), trace_steps(span, done)))
    if not any(len(worker.found) for worker in workers):
        return None
    matches, missing = _match(workers), _missing(found, workers)
    return Distributed(
        workers=tuple(_share(worker, matches.shortest[i]) for i, worker in enumerate(workers)),
        collectives=_collectives(matches.table),
        missing_ranks=missing,
        matched=matches.table.height,
        unmatched=matches.unmatched,
        notes=tuple(_notes(found, missing, workers, matches)),
    )


def why_absent(base: Base) -> str | None:
    """Why `view` gives None; None where it gives a view."""
    found = peers(base)
    if isinstance(found, str):
        return found
    return communication.why_absent(base) and NO_COLLECTIVES


def _share(worker: _Worker, shortest: Int64) -> WorkerShare:
    """The mean step; rounding goes to the rest, so that the parts sum to the step."""
    windows, found = worker.windows, worker.found
    steps = max(len(windows), 1)
    talking = intervals.union(found.start_ns, found.end_ns)
    matched = shortest >= 0
    ends = found.end_ns[matched]
    tails = intervals.union(ends - shortest[matched], ends)
    waits = intervals.union(found.start_ns[matched], ends)

    def mean(one: Intervals) -> int:
        return int(intervals.covered(one, windows.start_ns, windows.end_ns).sum()) // steps

    wall_ns = int((windows.end_ns - windows.start_ns).sum()) // steps
    overlap_ns = mean(intervals.intersect(worker.computation, talking))
    computation_ns = mean(intervals.subtract(worker.computation, talking))
    communication_ns = mean(intervals.subtract(talking, worker.computation))
    return WorkerShare(
        span=worker.ref,
        steps=len(windows),
        wall_ns=wall_ns,
        computation_ns=computation_ns,
        overlap_ns=overlap_ns,
        communication_ns=communication_ns,
        other_ns=wall_ns - computation_ns - overlap_ns - communication_ns,
        synchronizing_ns=mean(intervals.subtract(waits, tails)) if matched.any() else None,
        transferring_ns=mean(tails) if matched.any() else None,
    )


def _match(workers: Sequence[_Worker]) -> _Matches:
    """Calls of the same collective over workers: by group and number where these are written down, else the j-th call
    of the kind in the step.
    """
    grouped = any(message.group is not None for worker in workers for message in worker.found.messages)
    every = pl.concat([_rows(worker, grouped) for worker in workers]).with_row_index("row")
    # A kernel belongs to the step of its launch. A range of the host may begin late, in the next step on one worker and
    # not on the other: it has a step only where the workers' numbers of calls differ; else their order is better.
    kind = ("kind", "group", "sequence", "size", "span")
    count = pl.col("count")
    able = (
        every.filter("able")
        .with_columns(pl.len().over("process", *kind).alias("count"))
        .with_columns(whole=(count.min().over(kind) == count.max().over(kind)) & pl.col("on_host"))
        .with_columns(pl.when("whole").then(NONE).otherwise("step").alias("step"))
        .sort("begin", maintain_order=True)
        .with_columns(pl.int_range(pl.len()).over("process", *_SAME).alias("nth"))
    )
    table = (
        able.group_by(_MATCH, maintain_order=True)
        .agg(
            pl.col("label").first(),
            pl.col("process").n_unique().alias("workers"),
            pl.col("bytes").max(),
            pl.col("length").sum(),
            pl.col("length").min().alias("shortest"),
            (pl.col("length").sum() - pl.col("length").min() * pl.len()).alias("wait"),
            pl.col("rank").sort_by("length", "rank").first().alias("last"),
            ((pl.col("begin") + pl.col("length")).max() - (pl.col("begin") + pl.col("length")).min()).alias("apart"),
        )
        .filter(pl.col("workers") > 1)
    )
    matched = able.select("row", *_MATCH).join(table.select(*_MATCH, "shortest"), on=_MATCH)
    shortest = np.full(every.height, NONE, np.int64)
    shortest[matched["row"].to_numpy()] = matched["shortest"].to_numpy()
    edges = np.cumsum([len(worker.found) for worker in workers])[:-1]
    return _Matches(tuple(np.split(shortest, edges)), table, int((shortest < 0).sum()))


def _rows(worker: _Worker, grouped: bool) -> pl.DataFrame:
    """The calls of a span with what they are told apart by; "able" are those that can have a match.

    Messages between two ranks have none, nor do calls without a group where others (`grouped`) have one.
    """
    found, ref = worker.found, worker.ref
    messages = [
        {
            "kind": message.kind,
            "group": message.group.key if message.group is not None else "",
            "label": message.group.name if message.group is not None else None,
            "bytes": message.bytes,
            "fixed": message.bytes if message.kind in words.SAME_SIZE and message.bytes is not None else NONE,
            "able": message.kind not in words.POINT_TO_POINT and (message.group is not None or not grouped),
        }
        for message in found.messages
    ]
    numbered = found.sequence >= 0
    return pl.DataFrame(messages, schema=_MESSAGE)[found.message].with_columns(
        pl.Series("begin", found.start_ns),
        pl.Series("length", found.end_ns - found.start_ns),
        pl.Series("on_host", ~found.on_device),
        pl.Series("sequence", found.sequence),
        pl.Series("span", np.where(numbered, NONE, ref.span)),
        pl.Series("step", np.where(numbered, NONE, found.step)),
        pl.when(pl.Series(numbered)).then(NONE).otherwise(pl.col("fixed")).alias("size"),
        pl.lit(ref.process).alias("process"),
        pl.lit(ref.rank).alias("rank"),
    )


def _collectives(table: pl.DataFrame) -> tuple[CollectiveOverWorkers, ...]:
    rows = []
    totals = {key: own["length"].sum() for key, own in table.group_by("kind", "group")}
    for key, own in sorted(
        table.group_by("kind", "group", maintain_order=True), key=lambda item: (-totals[item[0]], item[0][0])
    ):
        calls_of_all = int(own["workers"].sum())
        mean_ns = int(own["length"].sum()) / calls_of_all
        transferring_ns = int((own["shortest"] * own["workers"]).sum()) / calls_of_all
        waits = own.group_by("last").agg(pl.col("wait").sum()).filter(pl.col("wait") > 0)
        last = waits.sort("wait", "last", descending=[True, False])["last"]
        rows.append(
            CollectiveOverWorkers(
                name=str(key[0]),
                group=own["label"][0],
                calls=own.height,
                workers=int(own["workers"].max()),  # type: ignore[arg-type]
                total_bytes=None if own["bytes"].null_count() else int(own["bytes"].sum()),
                mean_ns=mean_ns,
                transferring_ns=transferring_ns,
                synchronizing_ns=mean_ns - transferring_ns,
                last_rank=int(last[0]) if len(last) else None,
            )
        )
    return tuple(rows)


def _missing(found: Peers, workers: Sequence[_Worker]) -> tuple[int, ...]:
    if found.guessed:
        return ()
    known = set(found.missing)
    groups = {message.group for worker in workers for message in worker.found.messages if message.group is not None}
    known.update(rank for group in groups for rank in group.ranks or ())
    return tuple(sorted(known - {worker.ref.rank for worker in workers}))


def _notes(found: Peers, missing: tuple[int, ...], workers: Sequence[_Worker], matches: _Matches) -> Iterator[str]:
    if missing:
        named = ", ".join(map(str, missing[:_NAMED])) + (" …" if len(missing) > _NAMED else "")
        yield f"no trace of rank {named}: waiting for one of them counts as transfer on the others"
    if found.guessed:
        yield "the traces do not say which ranks they are of: numbers are guessed, and missing ranks are not known"
    silent = sorted({worker.ref.worker for worker in workers if not len(worker.found)})
    if silent:
        yield f"no collective in the trace of {', '.join(silent[:_NAMED])}"
    messages = [message for worker in workers for message in worker.found.messages]
    if any(message.group is None for message in messages):
        yield "collectives without the name of their group are matched in their order within the step"
    if matches.unmatched:
        calls_of_all = sum(len(worker.found) for worker in workers)
        yield f"{matches.unmatched} of {calls_of_all} calls have no match on another worker: neither wait nor transfer"
    apart = matches.table.filter(pl.col("kind").is_in(list(words.SAME_SIZE | {words.ALL_TO_ALL})))["apart"]
    if len(apart) >= _LEAST_ENDS:
        middle_us, most_us = float(apart.median() or 0) / 1e3, float(apart.max() or 0) / 1e3  # type: ignore[arg-type]
        yield (
            f"the workers' ends of one collective lie {middle_us:,.{int(middle_us < 10)}f} us apart at the median, "
            f"{most_us:,.{int(most_us < 10)}f} us at most: their clocks, and when they leave, differ by so much"
        )
    partial = matches.table.filter(pl.col("workers") < len(found.workers)).height
    groups = {message.group for message in messages}
    if partial and len(groups) == 1:
        yield f"{things(partial, 'collective')} found on some of the workers only"


MAX_RANKS = 1 << 16  # a size of the world beyond this is no size but damage
_APART_NS = 3600 * 10**9  # clocks of the hosts of one run do not differ by an hour

ALONE = "one worker alone: give traces of several ranks of the same run, or the folder with them"


class Peers(Struct, frozen=True):
    """The spans of workers of one run, by worker; `missing` are ranks that are known of and have no trace."""

    workers: tuple[tuple[Span, ...], ...]
    missing: tuple[int, ...]
    guessed: bool  # nothing says which ranks the files are of


def peers(base: Base) -> Peers | str:
    """The workers to compare, or why there are none."""
    by_process: dict[str, list[Span]] = {}
    for span in base.spans:
        by_process.setdefault(span.ref.process, []).append(span)
    recorded = bool(base.tables.manifests) or base.tables.journal.height > 0
    workers = list(by_process.values())
    if recorded:  # of ranks that were started several times, what ran last
        workers.sort(key=_begin)
        last = {spans[0].ref.rank: spans for spans in workers}
        workers = [last[rank] for rank in sorted(last)]
    if len(workers) < 2:
        return ALONE
    claims = {
        (process, trace): rank
        for process, trace, rank in base.tables.traces.select("process", "trace", "claimed_rank").iter_rows()
    }
    claimed = [claims.get((spans[0].ref.process, spans[0].ref.trace)) for spans in workers]
    reason = None if recorded else _not_one_run(workers, claimed)
    if reason is not None:
        return reason
    ranks = {spans[0].ref.rank for spans in workers}
    sizes = [info.world_size for info in base.tables.ranks] + [_world_size(spans) for spans in workers]
    size = max((size for size in sizes if size is not None), default=0)
    missing = tuple(rank for rank in range(size) if rank not in ranks) if size <= MAX_RANKS else ()
    return Peers(tuple(tuple(spans) for spans in workers), missing, guessed=not recorded and None in claimed)


def _not_one_run(workers: Sequence[list[Span]], claimed: Sequence[int | None]) -> str | None:
    folders = list(dict.fromkeys(spans[0].ref.run for spans in workers))
    repeated = [rank for rank, count in Counter(rank for rank in claimed if rank is not None).items() if count > 1]
    if len(folders) < 2:
        if repeated:
            named = _some(
                [spans[0].ref.worker for spans, rank in zip(workers, claimed, strict=True) if rank in repeated]
            )
            return f"two runs in one folder: {named} are all rank {min(repeated)}; give the files of one run"
    else:
        several = f"{len(workers)} workers of {len(folders)} folders ({_some(folders)})"
        if repeated:
            return f"{several}, of which two are rank {min(repeated)}: different runs; give one of them"
        if None in claimed:
            return f"{several}, and not all say which rank they are: give the folder of one run"
        times = sorted((_begin(spans), max(int(span.end_ns.max()) for span in spans)) for spans in workers)
        if any(after[0] - before[1] > _APART_NS for before, after in pairwise(times)):
            return f"{several}, recorded more than an hour apart: different runs; give one of them"
    sizes = {size for spans in workers if (size := _world_size(spans)) is not None}
    if len(sizes) > 1:
        return (
            f"workers of runs of different sizes ({_some([str(size) for size in sorted(sizes)])} ranks): give one run"
        )
    return None


def _world_size(spans: Sequence[Span]) -> int | None:
    told = (span.metadata.get("distributedInfo") for span in spans)
    sizes = (info.get("world_size") for info in told if isinstance(info, dict))
    return next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0), None)


def _begin(spans: Sequence[Span]) -> int:
    return min(int(span.start_ns.min()) for span in spans)  # no span is empty: they are made of rows


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
