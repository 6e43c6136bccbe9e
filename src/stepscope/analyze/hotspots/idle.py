"""Whether a sampler took waiting threads too, which py-spy's raw format does not say.

The evidence is threads that only ever wait: queue feeders, socket servers, keep-alive timers. A sampler that takes
waiting threads meets them as often as the busiest thread of their process; one that leaves them out meets them only in
the few per cent of cases in which it takes a wait for work. On recordings of loops with fork, spawn and forkserver
workers, pinned memory and torchrun such threads have 39 to 99 % of the busiest thread's samples with `--idle` (less
than all where they start late), 0.4 to 6 % without. Where no such thread was sampled, or the figures lie between, the
answer is unknown.
"""

from __future__ import annotations

import polars as pl
from msgspec import Struct

from stepscope.tables.schema import Tables

MOSTLY_WAITING = 0.5  # of a thread's samples: then it is a thread that serves others and waits for them
BUSY = 0.5  # at most so much waiting in the thread that others are held against, or both may be hidden alike
SAMPLED_ALL = 0.6  # of a busy thread's samples: waiting threads are sampled like working ones
SAMPLED_MOST = 0.35  # the same over all such threads of a file together, some of which start late or end early
SAMPLED_FEW = 0.2  # below that waiting threads are left out: six times what was seen
ENOUGH = 50  # samples of the busiest thread: with fewer, a share says nothing
MERGED = 2.0  # threads that the file does not tell apart are several, so their sum must be more

RECORDED, INFERRED = "recorded", "inferred"
_PROCESS = ["host", "file", "pid"]


class IdleMode(Struct, frozen=True):
    """`idle`: whether waiting threads were sampled; None where nothing tells. `source`: "recorded" or "inferred"."""

    idle: bool | None
    source: str | None


def idle_sampled(tables: Tables) -> bool | None:
    """Whether waiting threads were sampled too, in all files; False if they are missing in any, None if unknown."""
    return idle_mode(tables).idle


def idle_mode(tables: Tables) -> IdleMode:
    """The same with how it is known: from what the recorder noted, else from the threads that only ever wait."""
    known = tables.segments.select("host", "file", "idle", "unit")
    silent = known.filter(pl.col("idle").is_null() & (pl.col("unit") != "bytes"))
    answers: list[bool | None] = known["idle"].drop_nulls().unique().to_list()
    if silent.height:
        rows = tables.stacks.join(silent.select("host", "file").unique(), on=["host", "file"], how="semi")
        inferred = _by_file(rows)
        answers += [inferred.get((host, file)) for host, file in silent.select("host", "file").iter_rows()]
    if not answers:
        return IdleMode(None, None)
    idle = False if False in answers else None if None in answers else True
    return IdleMode(idle, None if idle is None else INFERRED if silent.height else RECORDED)


def _by_file(rows: pl.DataFrame) -> dict[tuple[str, str], bool]:
    """(host, file) -> the answer, where there is one."""
    threads = _threads(rows)
    busiest = (
        threads.sort("samples", "key", descending=[True, False])
        .group_by(_PROCESS, maintain_order=True)
        .agg(
            most=pl.col("samples").first(),
            most_waiting=pl.col("waiting").first(),
            busiest_thread=pl.col("key").first(),
        )
        .filter(pl.col("most") >= ENOUGH)
    )
    waiting = threads.filter(pl.col("waiting") >= MOSTLY_WAITING * pl.col("samples")).join(
        busiest, on=_PROCESS, nulls_equal=True
    )
    waiting = waiting.filter(pl.col("key") != pl.col("busiest_thread")).with_columns(
        share=pl.col("samples") / pl.col("most") / pl.when("merged").then(MERGED).otherwise(1.0),
        against_busy=pl.col("most_waiting") <= BUSY * pl.col("most"),
    )
    files = waiting.group_by("host", "file").agg(
        all_together=(pl.col("share") * pl.col("most")).sum() / pl.col("most").sum(),
        highest=pl.col("share").filter("against_busy").max(),
    )
    found: dict[tuple[str, str], bool] = {}
    for host, file, together, highest in files.iter_rows():
        if together >= SAMPLED_MOST or (highest or 0.0) >= SAMPLED_ALL:
            found[(host, file)] = True
        elif together <= SAMPLED_FEW:
            found[(host, file)] = False
    return found


def _threads(rows: pl.DataFrame) -> pl.DataFrame:
    """(host, file, pid, key, merged, samples, waiting) by thread, or by main thread and others where none is named."""
    merged = pl.col("thread").is_null()
    role_of_thread = pl.when(pl.col("main_thread").fill_null(True)).then(pl.lit("main")).otherwise(pl.lit("others"))
    keyed = rows.with_columns(key=pl.when(merged).then(role_of_thread).otherwise("thread"), merged=merged)
    return keyed.group_by(*_PROCESS, "key", "merged", maintain_order=True).agg(
        pl.col("samples").sum(),
        waiting=pl.col("samples").filter(pl.col("waiting").fill_null(False)).sum(),
    )
