"""Kernels: calls, durations, launch configuration, delay of the launch, and who launched them.

Grouped by name, or by launch: name, operator, blocks of the grid, threads of a block, registers and shared memory.
`plugin_kernels` gives the rows of the TensorBoard plugin's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.views.kernel_names import short_names
from stepscope.analyze.views.tensor_cores import uses_tensor_cores
from stepscope.engine import attribution
from stepscope.engine.device_work import GRAPH, LINKED, in_state, work
from stepscope.engine.spans import Base, Span
from stepscope.model.trace import SpanRef
from stepscope.model.views import KernelRow
from stepscope.tables.arrays import NONE

NAME, LAUNCH = "name", "launch"
_CONFIGURATION = {
    "grid": "blocks",
    "block": "threads",
    "registers": "registers",
    "shared_memory": "shared_memory_bytes",
}


def table(
    base: Base, *, span: SpanRef | None = None, by: str = NAME, device: int | None = None
) -> tuple[KernelRow, ...]:
    """Rows of one span, or of all together, the most total time first.

    Args:
        by: "name", or "launch" for name, operator and launch configuration.
        device: only kernels of this device.
    """
    keys = ["name"] if by == NAME else ["name", "operator", *_CONFIGURATION]
    figures, operators, places = [], [], []
    for item in base.spans:
        if span is None or item.ref == span:
            kernels = _kernels(item)
            if device is not None:
                kernels = kernels.filter(pl.col("device") == device)
            if kernels.height:
                groups = kernels.select(keys).unique(maintain_order=True).with_row_index("group")
                kernels = kernels.join(groups, on=keys, how="left", nulls_equal=True, maintain_order="left")
                callers = kernels.group_by(*keys, caller="operator").agg(pl.col("duration_ns").sum())
                figures.append(_named(item, _figures(kernels, keys)))
                operators.append(_named(item, callers))
                places.append(_named(item, _places(base, item, kernels, groups)))
    if not figures:
        return ()
    joined = _joined(figures, operators, places, keys)
    everything = int(joined["total_ns"].sum())
    names = joined["name"].unique(maintain_order=True).to_list()
    short = dict(zip(names, short_names(names), strict=True))
    cores = dict(zip(names, uses_tensor_cores(names), strict=True))
    return tuple(
        _row(row, short[row["name"]], cores[row["name"]], everything, by) for row in joined.iter_rows(named=True)
    )


def plugin_kernels(rows: Sequence[KernelRow]) -> list[dict[str, Any]]:
    """The rows under the names, in the units (µs, %) and with the rounding of the plugin's kernel table."""
    return [
        {
            "Name": row.name,
            "Tensor Cores Used": "Yes" if row.tensor_cores else "No",
            "Calls": row.calls,
            "Total Duration (us)": round(row.total_ns / 1000),
            "Mean Duration (us)": round(row.mean_ns / 1000),
            "Max Duration (us)": round(row.max_ns / 1000),
            "Min Duration (us)": round(row.min_ns / 1000),
            **({} if row.blocks_per_sm is None else {"Mean Blocks Per SM": round(row.blocks_per_sm, 2)}),
            **({} if row.occupancy_pct is None else {"Mean Est. Achieved Occupancy (%)": round(row.occupancy_pct, 2)}),
        }
        for row in rows
    ]


def _kernels(span: Span) -> pl.DataFrame:
    """One row per kernel, those of collectives too: name and operator (codes of names), duration, configuration, delay
    of the launch, and `origin`, where to look up the user's line.
    """
    found = work(span)
    wanted = found.is_kernel
    rows = found.rows[wanted]
    operator = np.where(in_state(span, found, LINKED), found.operator, NONE)[wanted]
    launch = np.where(in_state(span, found, GRAPH), NONE, found.launch)[wanted]  # a graph's is no kernel's own
    origin = np.where(found.launch >= 0, found.launch, found.operator)[wanted]
    names = span.names.codes
    delay = pl.Series(found.start_ns[wanted] - span.start_ns[np.maximum(launch, 0)])
    return pl.DataFrame(
        {
            "name": names[rows],
            "operator": np.where(operator >= 0, names[operator], NONE).astype(np.int32),
            "duration_ns": found.end_ns[wanted] - found.start_ns[wanted],
            "device": found.device[wanted],
            **{name: span.series(column).gather(rows) for name, column in _CONFIGURATION.items()},
            "blocks_per_sm": span.series("blocks_per_sm").gather(rows),
            "occupancy": span.series("occupancy_percent").gather(rows),
            "delay_ns": delay.set(pl.Series(launch < 0), None),
            "origin": origin,
        }
    ).with_columns(pl.when(pl.col(name) != NONE).then(name).alias(name) for name in ("operator", "device"))


def _named(span: Span, frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with names in place of their codes, where it has such columns."""
    names = pl.Series([*span.names.values, ""], dtype=pl.String)  # the last for NONE
    columns = [name for name in ("name", "operator", "caller") if name in frame.columns]
    return frame.with_columns(names.gather(frame[name]).alias(name) for name in columns)


def _figures(kernels: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """What adds up: of each group's kernels in one span."""
    weight = pl.col("duration_ns")
    return kernels.group_by(keys).agg(
        calls=pl.len().cast(pl.Int64),
        total_ns=weight.sum(),
        min_ns=weight.min(),
        max_ns=weight.max(),
        blocks=_weighted("blocks_per_sm"),
        occupied=_weighted("occupancy"),
        delay_ns=pl.when(pl.col("delay_ns").is_not_null().any()).then(pl.col("delay_ns").sum()),
        launches=pl.col("delay_ns").count().cast(pl.Int64),
        device=pl.when(pl.col("device").n_unique() == 1).then(pl.col("device").first()),
        devices=pl.col("device").n_unique().cast(pl.Int64),
    )


def _weighted(column: str) -> pl.Expr:
    """Sum of the column times duration in µs, as the plugin does with 0 for what is missing; null where all is."""
    some = pl.col(column).is_not_null().any()
    return pl.when(some).then((pl.col(column).fill_null(0) * (pl.col("duration_ns") / 1000)).sum())


def _places(base: Base, span: Span, kernels: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    number = kernels["group"].cast(pl.Int64).to_numpy()
    sums = attribution.place_sums(base, span, number, kernels["origin"].to_numpy(), kernels["duration_ns"].to_numpy())
    return sums.join(groups.with_columns(pl.col("group").cast(pl.Int64)), on="group").drop("group")


def _joined(
    figures: list[pl.DataFrame], operators: list[pl.DataFrame], places: list[pl.DataFrame], keys: list[str]
) -> pl.DataFrame:
    """All spans together: one row per group, with its main operator (`caller`) and place."""
    total = (
        pl.concat(figures)
        .group_by(keys)
        .agg(
            pl.col("calls", "total_ns", "launches").sum(),
            pl.col("min_ns").min(),
            pl.col("max_ns").max(),
            *(
                pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)
                for name in ("blocks", "occupied", "delay_ns")
            ),
            device=pl.when((pl.col("devices").max() == 1) & (pl.col("device").n_unique() == 1)).then(
                pl.col("device").first()
            ),
        )
    )
    callers = (
        pl.concat(operators)
        .filter(pl.col("caller").is_not_null())
        .group_by(*keys, "caller")
        .agg(pl.col("duration_ns").sum())
        .sort("duration_ns", "caller", descending=[True, False])
        .unique(keys, keep="first", maintain_order=True)
        .drop("duration_ns")
    )
    best = attribution.heaviest(pl.concat(places), keys)
    return (
        total.join(callers, on=keys, how="left", nulls_equal=True)
        .join(best, on=keys, how="left", nulls_equal=True)
        .sort("total_ns", *keys, descending=[True, *(False for _ in keys)])
    )


def _row(row: dict[str, Any], short: str, cores: bool, everything: int, by: str) -> KernelRow:
    place, exact = attribution.place_of_row(row) if row["file"] is not None else (None, False)
    total = row["total_ns"]
    configuration = row if by == LAUNCH else {}
    return KernelRow(
        name=row["name"],
        short_name=short,
        operator=row["caller"],
        grid=configuration.get("grid"),
        block=configuration.get("block"),
        registers=configuration.get("registers"),
        shared_memory_bytes=configuration.get("shared_memory"),
        calls=row["calls"],
        total_ns=total,
        mean_ns=total / row["calls"],
        min_ns=row["min_ns"],
        max_ns=row["max_ns"],
        share=total / everything if everything else 0.0,
        blocks_per_sm=_mean(row["blocks"], total),
        occupancy_pct=_mean(row["occupied"], total),
        tensor_cores=cores,
        launch_delay_ns=row["delay_ns"] / row["launches"] if row["launches"] else None,
        device=row["device"],
        place=place,
        place_exact=exact,
    )


def _mean(weighted: float | None, total_ns: int) -> float | None:
    if weighted is None:
        return None
    return weighted / (total_ns / 1000) if total_ns else 0.0
