"""The main process's time in its loader, taken apart into what workers and helper threads did meanwhile.

Where the sampler told times, and a wait lasts longer than the time between samples, worker and main process are
compared at the same moments of steady steps. Elsewhere the workers' samples of the same period stand for them
(`wait_parts`): every process has a sampler of its own, so a shorter wait cannot be laid beside what a worker did just
then. Parts exclude each other and sum to the wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.sampled import loader_states as states
from stepscope.analyze.sampled import wait_parts
from stepscope.analyze.sampled.loader_states import LoaderStates
from stepscope.analyze.sampled.loop import SampledLoop
from stepscope.analyze.sampled.user_paths import UserPaths, rows_of
from stepscope.analyze.sampled.wait_parts import Parts, Threads
from stepscope.model import PHASES, StepFacts
from stepscope.model.sampled import LoaderWait, WaitPart
from stepscope.tables.schema import Tables

MAX_LINES = 4  # of a kind that are named; a fifth hardly changes what to do, and the rest is one part
KINDS = {
    states.HERE: "loading_here",
    states.TRANSFER: "transfer",
    states.PINNING: "pinning",
    states.BUSY: "worker_busy",
    states.START: "worker_start",
    states.IDLE: "workers_idle",
    states.NOTHING: "unknown",
}
_USUAL_RATE_HZ = 20.0  # of our own recordings, where a file does not tell
_SAME_MOMENTS = "sampled stacks of the main process and its workers at the same moments, "
_SAME_PERIOD = "sampled stacks of the main process, and of its workers in the same period, "


def facts(
    context: Context, loop: SampledLoop, users: UserPaths, idle: bool | None, train: StepFacts | None
) -> tuple[LoaderWait, ...]:
    """One per rank that was sampled in its loader, by rank; empty without any.

    Args:
        idle: whether waiting threads were sampled (`hotspot_idle`).
        train: the steady steps of all ranks, for a rank whose own do not tell their data wait.
    """
    by_path = LoaderStates(users)
    tables = context.tables
    sampled = wait_parts.threads(loop.rows, tables.stacks, by_path)
    in_loader = sampled.mains.filter(pl.col("state").is_not_null())
    if in_loader.is_empty():
        return ()
    timed = _timed(context, loop, by_path)
    known = [] if timed is None else timed.weights["process"].unique().to_list()
    counted = wait_parts.in_the_same_period(_without(sampled, known))
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
                parts=_parts(weights, samples, wait_ms, leaves, users),
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
    parts = wait_parts.at_the_same_time(wait_parts.threads(mains, stretches, by_path), loop)
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


def _parts(
    weights: pl.DataFrame, samples: int, wait_ms: float | None, leaves: dict[tuple[int, int], str], users: UserPaths
) -> tuple[WaitPart, ...]:
    rows = sorted(_folded(weights), key=lambda row: (-row["weight"], row["state"], row["order"]))
    total = sum(row["weight"] for row in rows)
    shares = [row["weight"] / total for row in rows]
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
        for row, share, count in zip(rows, shares, _apportioned(shares, samples), strict=True)
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


def _apportioned(shares: list[float], samples: int) -> list[int]:
    """`samples` by these shares, whole and in sum."""
    exact = np.array(shares) * samples
    whole = np.floor(exact).astype(np.int64)
    left = samples - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    return [int(count) for count in whole]


def _leaves(sampled: Threads, users: UserPaths) -> dict[tuple[int, int], str]:
    """(state, line) -> the function most often on top of it, where that is another one than the line's own."""
    both = pl.concat([rows.select("state", "line", "node", "samples") for rows in sampled]).filter(
        pl.col("state").is_in([states.HERE, states.BUSY])
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
