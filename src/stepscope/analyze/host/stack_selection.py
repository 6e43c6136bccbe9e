"""Which sampled stacks a view is made of, and how many samples were left out, by reason.

Launchers (torchrun, srun) and helper processes (resource tracker, fork server) train nothing, and a thread that is
parked in a wait says nothing of the run: with waiting sampled, such threads are three of four samples. Everything else
is kept unless the reader asks for a part of it.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl
from msgspec import Struct

from stepscope.errors import UsageError
from stepscope.tables.schema import Tables

PROCESSES = ("main", "workers", "all")
PARKED = "parked threads"


class StackSelection(Struct, frozen=True):
    """What the reader asked for. `process`: "main" (ranks), "workers" (loader workers) or "all".

    `phase` keeps main threads of ranks in that phase only, as no other thread stands in one. `parked` keeps threads
    other than the main one that are in a known wait. Where the file does not tell threads apart all of them stay.
    """

    phase: str | None = None
    rank: int | None = None
    process: str = "all"
    parked: bool = False


class Chosen(Struct, frozen=True):
    """`rows` of the table `stacks`, in its order; `left_out` gives the samples of all other rows by reason."""

    rows: pl.DataFrame
    left_out: dict[str, int]


def choose(tables: Tables, selection: StackSelection) -> Chosen:
    """The stacks of `selection`.

    Every sample is in `rows` or under exactly one reason of `left_out`, which holds no zeros.
    """
    reasons = _reasons(tables.stacks, selection)
    first = pl.coalesce(pl.when(holds).then(pl.lit(name)) for name, holds in reasons.items())
    labelled = tables.stacks.with_columns(reason=first)
    counts = dict(labelled.group_by("reason").agg(pl.col("samples").sum()).iter_rows())
    return Chosen(
        rows=labelled.filter(pl.col("reason").is_null()).drop("reason"),
        left_out={name: counts[name] for name in reasons if counts.get(name)},
    )


def check(tables: Tables, selection: StackSelection) -> None:
    """Raise `UsageError` for a rank, phase or kind of process of which there is no sample, naming those there are."""
    if selection.process not in PROCESSES:
        raise UsageError(f"--process {selection.process}: unknown; use {', '.join(PROCESSES)}")
    for option, wanted, what, none in (
        ("rank", selection.rank, "ranks", "no samples of it"),
        ("phase", selection.phase, "phases", "no samples in it"),
    ):
        known = tables.stacks[option].drop_nulls().unique().sort().to_list()
        if wanted is not None and wanted not in known:
            shown = ", ".join(map(str, known[:20])) + (" …" if len(known) > 20 else "")
            there = f"{what} with samples: {shown}" if known else f"no {what} are known here, leave the option out"
            raise UsageError(f"--{option} {wanted}: {none}; {there}")


def main_roles(stacks: pl.DataFrame) -> tuple[str, ...]:
    """Roles that count as the main process: where no rank was told apart, whatever is no launcher, helper or worker."""
    return ("rank",) if (stacks["role"] == "rank").any() else ("rank", "other")


def _reasons(stacks: pl.DataFrame, selection: StackSelection) -> dict[str, pl.Expr]:
    """When a row is left out, by reason; the first reason that holds is the one that counts."""
    role = pl.col("role").fill_null("other")
    wanted = {"main": main_roles(stacks), "workers": ("loader_worker",)}.get(selection.process)
    found = {"launchers": role == "launcher", "helper processes": role == "helper"}
    if selection.rank is not None:
        found["other ranks"] = pl.col("rank").ne_missing(selection.rank)
    if wanted is not None:
        found["other processes"] = ~role.is_in(wanted)
    if selection.phase is not None:
        found["other phases"] = pl.col("phase").ne_missing(selection.phase)
    if not selection.parked:
        # a file without threads holds one sum for all of them, which is not taken apart by guessing
        other_thread = pl.col("thread").is_not_null() & ~pl.col("main_thread").fill_null(True)
        found[PARKED] = other_thread & pl.col("waiting").fill_null(False)
    return found


MOSTLY_WAITING = 0.5  # of a thread's samples: then it is a thread that serves others and waits for them
BUSY = 0.5  # at most so much waiting in the thread that others are held against, or both may be hidden alike
SAMPLED_ALL = 0.6  # of a busy thread's samples: waiting threads are sampled like working ones
SAMPLED_MOST = 0.35  # the same over all such threads of a file together, some of which start late or end early
SAMPLED_FEW = 0.2  # below that waiting threads are left out: six times what was seen
ENOUGH = 50  # samples of the busiest thread: with fewer, a share says nothing
MERGED = 2.0  # threads that the file does not tell apart are several, so their sum must be more

RECORDED, INFERRED = "recorded", "inferred"
_PROCESS = ["host", "file", "pid"]


class IdleMode(NamedTuple):
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
    # by thread, or by main thread and others where none is named
    merged = pl.col("thread").is_null()
    of_role = pl.when(pl.col("main_thread").fill_null(True)).then(pl.lit("main")).otherwise(pl.lit("others"))
    threads = (
        rows.with_columns(key=pl.when(merged).then(of_role).otherwise("thread"), merged=merged)
        .group_by(*_PROCESS, "key", "merged", maintain_order=True)
        .agg(pl.col("samples").sum(), waiting=pl.col("samples").filter(pl.col("waiting").fill_null(False)).sum())
    )
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
        highest=pl.col("share").filter("against_busy").max().fill_null(0.0),
    )
    sure = (pl.col("all_together") >= SAMPLED_MOST) | (pl.col("highest") >= SAMPLED_ALL)
    told = files.filter(sure | (pl.col("all_together") <= SAMPLED_FEW)).select("host", "file", sure.alias("sampled"))
    return {(host, file): sampled for host, file, sampled in told.iter_rows()}
