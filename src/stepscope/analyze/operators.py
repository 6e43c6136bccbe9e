"""Which torch operators the window's steps call, how often, and from which of the user's lines."""

from __future__ import annotations

import polars as pl

from stepscope.analyze.trace import OPERATOR, Window
from stepscope.engine.source_lines import Lines
from stepscope.model import OperatorFacts, Place

MAX_OPERATORS = 100
MAX_PLACES = 40  # a place costs a look through the syntax tree; the operators below these cost next to nothing
_ENGINE = "autograd::engine::evaluate_function"


def facts(window: Window | None, lines: Lines) -> tuple[OperatorFacts, ...] | None:
    """Operators by host time per step of the window; times are the window's own, not scaled to the steady step."""
    if window is None:
        return None
    columns = ("name", "above", "self_ns", "duration_ns")
    operators = window.slices.filter(pl.col("what") == OPERATOR).select(columns).collect()
    if operators.is_empty():
        return ()
    # a call inside a call of the same name is one of the two calls, but its time is already in the outer one
    outer = operators.join(
        window.slices.select(pl.col("row").alias("above"), pl.col("name").alias("outer_name")).collect(),
        on="above",
        how="left",
    )
    grouped = (
        outer.filter(~pl.col("name").str.starts_with(_ENGINE))
        .group_by("name")
        .agg(
            calls=pl.len(),
            own=pl.col("self_ns").fill_null(pl.col("duration_ns")).sum(),
            total=pl.col("duration_ns").filter(pl.col("outer_name").fill_null("") != pl.col("name")).sum(),
        )
        .sort(["total", "name"], descending=[True, False])
        .head(MAX_OPERATORS)
    )
    places = _places(window, lines, grouped["name"].head(MAX_PLACES).to_list())
    return tuple(
        OperatorFacts(
            name=name,
            calls_per_step=calls / window.steps,
            host_self_ms_per_step=own / window.steps / 1e6,
            host_total_ms_per_step=total / window.steps / 1e6,
            place=places.get(name),
        )
        for name, calls, own, total in grouped.rows()
    )


def _places(window: Window, lines: Lines, names: list[str]) -> dict[str, Place]:
    """The user's call an operator's time comes from most; its line is exact where stacks or the source tell it."""
    called = window.slices.filter((pl.col("what") == OPERATOR) & pl.col("name").is_in(names))
    own = called.select("name", "caller", "via", "duration_ns").collect()
    via = window.all_slices.select(pl.col("row").alias("via"), pl.col("label").alias("via_label"))
    best = (
        own.join(window.callers(), on="caller")
        .join(via, on="via", how="left")
        .group_by("name", "caller_file", "caller_line", "caller_function", "via_label")
        .agg(total=pl.col("duration_ns").sum())
        .sort(["total", "caller_file", "caller_line"], descending=[True, False, False])
        .group_by("name", maintain_order=True)
        .first()
    )
    sums = own.group_by("name").agg(everything=pl.col("duration_ns").sum())
    found = {}
    for row in best.join(sums, on="name").iter_rows(named=True):
        site = lines.call_site(
            row["caller_file"], row["caller_function"], row["caller_line"], row["via_label"] or "", loop=False
        )
        share = row["total"] / row["everything"] if row["everything"] else None
        line = site.line if site else row["caller_line"]
        found[row["name"]] = Place(row["caller_file"], line, row["caller_function"], share)
    return found
