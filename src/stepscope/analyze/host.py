"""Python on the critical path: lines of the user's whose time on the main thread is Python, not torch.

A sample is torch's when the user's line called into torch, and Python's when it called any other library. Where the
line itself is on top of the stack the sampler cannot tell `x @ w` from arithmetic in Python; the window can: it knows
which part of the function's own time passed inside torch operators, and that part is taken off. Data wait and file I/O
have facts of their own.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.analyze.calls import Calls
from stepscope.analyze.io import sampled_io
from stepscope.analyze.lines import Lines
from stepscope.analyze.loops import stacks_in
from stepscope.analyze.places import is_torch
from stepscope.analyze.sampled.samples import Samples, short
from stepscope.analyze.trace import BUILTIN, OPERATOR, USER, Window
from stepscope.model import LoopFacts, Place, PythonFacts

MAX_FACTS = 60


def facts(
    samples: Samples | None,
    window: Window | None,
    lines: Lines,
    loops: tuple[LoopFacts, ...] | None,
    calls: Calls | None,
) -> tuple[PythonFacts, ...] | None:
    """None without stacks in steady steps; costliest first."""
    if samples is None or calls is None:
        return None
    everything, mean_ms = calls.time.with_ms(calls.time.rows), calls.time.mean_ms
    rows = everything.filter((pl.col("phase") != "data_wait") & pl.col("user_file").is_not_null())
    rows = rows.join(sampled_io(everything, lines).select("row"), on="row", how="anti")
    rows = _weigh(rows, window).filter(pl.col("weight").is_not_null() & (pl.col("weight") > 0))
    rows = rows.join(_in_loops(samples, loops or ()), on="row", how="left").join(calls.of_row, on="row", how="left")
    key = ["user_file", "user_line", "user_function", "phase", "loop", "call"]
    of_call = _of_calls(rows, calls)
    grouped = (
        rows.group_by(key, maintain_order=True)
        .agg(
            n=pl.col("samples").sum(),
            ms=(pl.col("ms") * pl.col("weight")).sum(),
            waiting=pl.col("samples").filter(pl.col("waiting")).sum(),
            fraction=pl.col("fraction").first(),
            leaf=pl.col("leaf_function").filter(pl.col("below_function").is_not_null()).mode().sort().first(),
        )
        .sort(["ms", *key], descending=[True, *[False] * len(key)])
        .head(MAX_FACTS)
    )
    source = "sampled stacks" if window is None else f"sampled stacks and {window.source}"
    return tuple(
        PythonFacts(
            place=Place(row["user_file"], row["user_line"], row["user_function"]),
            phase=row["phase"],
            ms_per_step=row["ms"],
            share=row["ms"] / mean_ms,
            samples=row["n"],
            waiting_share=row["waiting"] / row["n"],
            python_fraction=row["fraction"],
            library_leaf=row["leaf"],
            source=source,
            inside_loop=(loops or ())[row["loop"]].place if row["loop"] is not None else None,
            **of_call.get(row["call"], {}),
        )
        for row in grouped.iter_rows(named=True)
    )


def _of_calls(rows: pl.DataFrame, calls: Calls) -> dict[int, dict[str, Any]]:
    """The fields of the facts that are the same for all lines of a call."""
    found: dict[int, dict[str, Any]] = {}
    for (number,), own in rows.filter(pl.col("call").is_not_null()).partition_by("call", as_dict=True).items():
        blamed, whole = calls.time.share(own), calls.share(number, own["row"])
        found[number] = {
            "call": calls.place(number),
            "call_ms_per_step": whole.ms if whole is not None else None,
            "call_at_most_ms_per_step": whole.at_most_ms if whole is not None else None,
            "sampling": blamed.at_most_ms / blamed.ms if blamed.ms > 0 else 1.0,
        }
    return found


def _weigh(rows: pl.DataFrame, window: Window | None) -> pl.DataFrame:
    """Adds `weight`, the part of each sample that is Python, null where nothing can tell, and `fraction`."""
    fractions = _python_fractions(window)
    rows = rows.with_columns(short(pl.col("user_function")).alias("name")).join(
        fractions, on=["user_file", "name"], how="left"
    )
    return rows.with_columns(
        pl.when(pl.col("below_function").is_null())
        .then(pl.col("fraction"))
        .when(is_torch(pl.col("below_file").fill_null("")) | is_torch(pl.col("leaf_file").fill_null("")))
        .then(0.0)
        .otherwise(1.0)
        .alias("weight")
    )


def _python_fractions(window: Window | None) -> pl.DataFrame:
    """(user_file, name, fraction): the part of a function's own time in the window that no torch operator takes.

    Own time is what a sampler shows with the function's line on top: the line itself and the built-in functions it
    calls. A built-in function around an operator is torch's.
    """
    schema = {"user_file": pl.String, "name": pl.String, "fraction": pl.Float64}
    if window is None:
        return pl.DataFrame(schema=schema)
    slices = window.all_slices.filter(~pl.col("in_loader"))
    own = slices.filter(pl.col("what") == USER).select(pl.col("row").alias("caller"), pl.col("self_ns").alias("python"))
    operators = slices.filter((pl.col("what") == OPERATOR) & pl.col("direct") & ~pl.col("in_operator"))
    torch_builtins = operators["above"].unique()
    builtins = slices.filter((pl.col("what") == BUILTIN) & pl.col("direct")).with_columns(
        pl.col("row").is_in(torch_builtins.implode()).alias("torch")
    )
    parts = pl.concat(
        [
            own.with_columns(pl.lit(0, pl.Int64).alias("torch")),
            builtins.select(
                "caller",
                pl.when(~pl.col("torch")).then("self_ns").otherwise(0).alias("python"),
                pl.when(pl.col("torch")).then("self_ns").otherwise(0).alias("torch"),
            ),
            operators.select("caller", pl.lit(0, pl.Int64).alias("python"), pl.col("duration_ns").alias("torch")),
        ]
    )
    return (
        parts.join(window.callers(), on="caller")
        .group_by(pl.col("caller_file").alias("user_file"), short(pl.col("caller_function")).alias("name"))
        .agg(pl.col("python").fill_null(0).clip(lower_bound=0).sum(), pl.col("torch").fill_null(0).sum())
        .filter(pl.col("python") + pl.col("torch") > 0)
        .select("user_file", "name", fraction=pl.col("python") / (pl.col("python") + pl.col("torch")))
    )


def _in_loops(samples: Samples, loops: tuple[LoopFacts, ...]) -> pl.DataFrame:
    """(row, loop): the stacks that stand in an iteration of one of the loops (its index)."""
    found = [pl.DataFrame(schema={"row": pl.UInt32, "loop": pl.Int64})]
    for index, loop in enumerate(loops):
        rows = stacks_in(samples, loop)
        found.append(pl.DataFrame({"row": rows.cast(pl.UInt32)}).with_columns(pl.lit(index, pl.Int64).alias("loop")))
    return pl.concat(found).group_by("row").agg(pl.col("loop").min())
