"""The rows of the table `compiles` made ready for questions: in order, with the step each lies in.

Three things are settled here once. `at`: the row of the steps table an event lies in, by its time where that agrees
with its step number, else by the number. `owner`: a backward pass compiled later belongs to the latest forward
compilation of the same graph id, so that it counts as time, not as a compilation of its own. And a limit hit without
a line gets what the recompilations before it say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.compilers.constants import COMPILATIONS, TRACE
from stepscope.engine.step_labels import LabelledSteps
from stepscope.tables.arrays import Int64
from stepscope.tables.schema import Tables

_NONE = -1
_OF_FRAME = ("function", "def_file", "def_line", "call_file", "call_line")
_FILLED = ("file", "line", "subject", *_OF_FRAME)
_Row = Mapping[str, Any]
_Frame = tuple[tuple[str, str, str], "str | None"]  # process, backend and name of a frame; a cause, or None for any


class Prepared(Struct, frozen=True):
    """The rows of `compiles` and the steps they lie in.

    `rows`: the columns of `compiles`, and `pos` (its row number here), `at` (row of `steps` or null), `owner` (the
    `pos` that it belongs to, usually its own), `step_kind`. `steps`: the labelled steps, and `row`, `index` (its
    number within process and kind, from 0), and `traced` (a trace has slices of it).
    """

    rows: pl.DataFrame
    steps: pl.DataFrame

    def of(self, backend: str) -> Prepared:
        """The same with the rows of one backend alone; `pos` and `owner` stay what they are."""
        return Prepared(self.rows.filter(pl.col("backend") == backend), self.steps)


def prepare(tables: Tables, labelled: LabelledSteps) -> Prepared:
    """Rows in order of process, step and time."""
    steps = labelled.frame.select(
        "rank", "process", "step", "kind", "start_ns", "wall_ns", "first_batch", "in_window", "reason"
    ).with_columns(
        pl.col("kind").fill_null("train"),
        pl.col("first_batch").fill_null(False),
        pl.col("in_window").fill_null(False),
    )
    steps = steps.join(_traced(tables), on=["process", "step"], how="left", maintain_order="left")
    steps = steps.with_row_index("row").with_columns(
        pl.col("traced").fill_null(False),
        pl.col("row").cast(pl.Int64),
        index=pl.int_range(pl.len()).over("process", "kind"),
    )
    rows = tables.compiles.with_columns(
        pl.col("process").fill_null(""), pl.col("count").fill_null(1), counted=pl.col("count").is_not_null()
    )
    rows = _ordered(_located(rows, steps))
    kinds = steps["kind"].gather(rows["at"]) if steps.height else pl.Series([None] * rows.height, dtype=pl.String)
    rows = rows.with_columns(
        kinds.alias("step_kind"),
        pl.Series("owner", _owners(rows), dtype=pl.Int64),
    )
    return Prepared(_with_limits(rows), steps)


def _traced(tables: Tables) -> pl.DataFrame:
    """(process, step) of which a trace has slices; only looked for where events come from traces."""
    events = tables.events.lazy()
    if not tables.compiles["source"].str.starts_with(TRACE).any():
        events = events.clear()
    return events.select("process", "step").drop_nulls().unique().with_columns(traced=pl.lit(True)).collect()


def counted(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows that are compilations of their own: compiles and recompiles, later backward passes left out."""
    return rows.filter(pl.col("kind").is_in(COMPILATIONS) & (pl.col("owner") == pl.col("pos")))


def _located(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """`rows` with `at` and `order`: the step they are in, or behind."""
    rows = rows.with_row_index("input")
    at = np.full(rows.height, _NONE, np.int64)
    order = rows["step"].fill_null(_NONE).to_numpy().copy()
    for (process,), own in rows.partition_by("process", as_dict=True).items():
        mine = steps.filter(pl.col("process") == process)
        if mine.height:
            where = own["input"].to_numpy()
            at[where], order[where] = _find(own, mine)
    return rows.with_columns(
        pl.Series("at", at).replace(_NONE, None),
        pl.Series("order", order).replace(_NONE, None),
        step=pl.col("step"),
    )


def _find(rows: pl.DataFrame, steps: pl.DataFrame) -> tuple[Int64, Int64]:
    """For each row of one process its row of the steps table and its number in the order of steps; -1 for none."""
    numbers = rows["step"].fill_null(_NONE).to_numpy()
    firsts = steps.unique("step", keep="first", maintain_order=True).sort("step")
    by_number = _lookup(firsts["step"].to_numpy(), firsts["row"].to_numpy(), numbers)
    timed = steps.drop_nulls("start_ns").sort("start_ns")
    if timed.is_empty():
        return by_number, numbers
    starts, walls = timed["start_ns"].to_numpy(), timed["wall_ns"].to_numpy()
    times = rows["time_ns"].fill_null(_NONE).to_numpy()
    last = np.searchsorted(starts, times, side="right") - 1
    known = (times >= 0) & (last >= 0)
    last = np.maximum(last, 0)
    inside = known & (times < starts[last] + walls[last])
    named = timed["step"].to_numpy()[last]
    agrees = inside & ((numbers == _NONE) | (named == numbers) | (by_number == _NONE))
    at = np.where(agrees, timed["row"].to_numpy()[last], by_number)
    return at, np.where((numbers == _NONE) & known, named, numbers)


def _lookup(keys: Int64, values: Int64, wanted: Int64) -> Int64:
    """The value of each wanted key, -1 where `keys` (ascending) lacks it."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], _NONE)


def _ordered(rows: pl.DataFrame) -> pl.DataFrame:
    rows = rows.sort("process", "order", "time_ns", "input", nulls_last=True)
    return rows.drop("input", "order").with_row_index("pos").with_columns(pl.col("pos").cast(pl.Int64))


def _owners(rows: pl.DataFrame) -> list[int]:
    """`pos` of the forward compilation each backward pass belongs to; a row's own for all else."""
    owners = list(range(rows.height))
    latest: dict[tuple[str, str, str], int] = {}
    names = ("process", "backend", "graph", "kind", "direction")
    for pos, (process, backend, graph, kind, direction) in enumerate(rows.select(names).iter_rows()):
        if graph is None or kind not in COMPILATIONS:
            continue
        if direction == "backward":
            owners[pos] = latest.get((process, backend, graph), pos)
        else:
            latest[(process, backend, graph)] = pos
    return owners


def _with_limits(rows: pl.DataFrame) -> pl.DataFrame:
    """Limit hits that lack a line, a subject or the function take them from the compilations before them."""
    lacking = pl.any_horizontal(pl.col(name).is_null() for name in _FILLED)
    if rows.filter((pl.col("kind") == "limit_hit") & lacking).is_empty():
        return rows
    columns = ("pos", "process", "backend", "kind", "direction", "graph", "cause", *_FILLED)
    latest: dict[_Frame, _Row] = {}
    changes: dict[str, dict[int, Any]] = {name: {} for name in _FILLED}
    for row in rows.select(columns).iter_rows(named=True):
        if row["kind"] == "limit_hit":
            for name, value in _filled(row, latest):
                changes[name][row["pos"]] = value
        elif row["kind"] in COMPILATIONS and row["direction"] != "backward":
            for frame in _frames(row):
                latest[frame, None] = latest[frame, row["cause"]] = row
    return rows.with_columns(
        pl.Series(name, [new.get(pos, old) for pos, old in enumerate(rows[name])], dtype=rows.schema[name])
        for name, new in changes.items()
        if new
    )


def _filled(limit: _Row, latest: Mapping[_Frame, _Row]) -> Iterator[tuple[str, Any]]:
    """What a limit hit lacks: all from a compilation of the same cause; of another cause, what is of the frame."""
    frame = next(iter(_frames(limit)), None)
    cause = None if limit["cause"] == "unknown" else limit["cause"]
    found = None if frame is None else latest.get((frame, cause)) or latest.get((frame, None))
    if found is None:
        return
    names = _FILLED if cause in (None, found["cause"]) else _OF_FRAME
    for name in names:
        # a line of one row is never put beside the file of another
        partner = name.replace("line", "file")
        if limit[name] is None and found[name] is not None and (partner == name or limit[partner] is None):
            yield name, found[name]


def _frames(row: _Row) -> list[tuple[str, str, str]]:
    """Names of the compiled frame: the first number of its graph id, and its function."""
    prefix, slash, _ = (row["graph"] or "").partition("/")
    names = [f"graph {prefix}"] if slash else []
    names += [f"function {row['function']}"] if row["function"] is not None else []
    return [(row["process"], row["backend"] or "", name) for name in names]
