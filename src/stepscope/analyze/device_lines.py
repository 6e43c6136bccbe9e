"""Device time by line of the user's code, exclusively: every device slice counts for one line or one reason.

A slice goes to the innermost user line around its launch; one of the backward pass goes to the line of its forward
operator. Where traces hold no device slices, the self time of operators is attributed the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from stepscope.analyze import origins
from stepscope.analyze.device import BEFORE_RECORDING, GRAPH, Int64, positions
from stepscope.analyze.lines import Lines
from stepscope.analyze.origins import NONE, Origin, Origins
from stepscope.analyze.places import UserCode
from stepscope.analyze.trace import ANNOTATIONS, callee_name
from stepscope.model import DeviceLine, DeviceLines, Place
from stepscope.tables.categories import OPERATORS
from stepscope.tables.schema import Tables

DIRECT, SEQUENCE = "direct", "sequence"
DEVICE, HOST = "device", "cpu_op"
TOP = 3  # kernels named for each line
EARLY = "launched before the recording began"
REPLAYED = "replayed by a CUDA graph, which keeps no link to operators"
NO_LAUNCH = "neither launch nor operator found"
NO_STACKS = "the trace holds no Python stacks (record it with with_stack=True)"
NO_FORWARD = "operators of the backward pass whose forward operator is not in the trace"
ENGINE = "the autograd engine's own work on its thread, such as sums of gradients"
LIBRARIES = "only library code around the launch"


@dataclass(frozen=True)
class _Work:
    """What is to be attributed. `rows`: process, trace, step, name, state, duration_ns, and `forward_way`, how a
    forward operator was found. The rest are rows of `events`, -1 for none: for each of `rows`, where its walk starts
    and where it may start instead; and `forward`, which for the backward operators that walks met, one for each of
    `rows`, gives their forward operators.
    """

    rows: pl.DataFrame
    start: Int64
    other: Int64
    forward: Callable[[Int64], Int64]


def facts(tables: Tables, device: pl.DataFrame, code: UserCode, lines: Lines) -> DeviceLines | None:
    """None without device slices and operators. `device` as `device.slices` makes them."""
    work = _device_work(tables, device) if device.height else _host_work(tables)
    if work.rows.is_empty():
        return None
    tree = origins.prepare(tables, code)
    rows = _attributed(work, tree)
    total = int(rows["duration_ns"].sum())
    steps = _steps(tables, rows)
    missed = rows.filter(pl.col("place") < 0).group_by("reason").agg(pl.col("duration_ns").sum())
    reasons = {str(why): int(ns) for why, ns in missed.sort("duration_ns", "reason", descending=True).rows()}
    found = tuple(_lines(rows.filter(pl.col("place") >= 0), tables, tree.places, lines, total, steps))
    return DeviceLines(
        basis=DEVICE if device.height else HOST,
        total_ns=total,
        lines=found,
        unattributed=reasons,
        unattributed_shares={why: ns / total for why, ns in reasons.items()} if total else {},
        attributed_share=sum(line.ns for line in found) / total if total else None,
        guessed_share=sum(line.ns for line in found if line.guess) / total if total else None,
        steps=steps,
    )


def _steps(tables: Tables, rows: pl.DataFrame) -> int | None:
    """Profiled steps the rows lie in; those that the recording holds whole, where that is known."""
    seen = rows.select("process", "trace", "step").drop_nulls().unique()
    whole = tables.steps.filter(pl.col("in_window").fill_null(False)).select("process", "step")
    complete = seen.join(whole, on=["process", "step"], how="semi").height
    return complete or seen.height or None


def _device_work(tables: Tables, device: pl.DataFrame) -> _Work:
    ids = tables.events["id"]
    launch = positions(ids, device["launch"])
    start = np.where(launch >= 0, launch, positions(ids, device["operator"]))
    forward = positions(ids, device["forward"])
    # the step that launched the work: the device may run it in the next one
    step = tables.events["step"][np.maximum(start, 0)].set(pl.Series(start < 0), None)
    rows = device.select(
        "process",
        "trace",
        "name",
        "state",
        "duration_ns",
        pl.Series("step", step),
        pl.col("forward_method").fill_null(SEQUENCE).alias("forward_way"),
    )
    return _Work(rows, start, positions(ids, device["frame"]), lambda _: forward)


def _host_work(tables: Tables) -> _Work:
    """Operators of the host with their self time."""
    rows = (
        tables.events.select("process", "trace", "name", "category", "step", "stream", duration_ns="self_ns")
        .with_row_index("row")
        .filter(
            pl.col("category").is_in(OPERATORS)
            & pl.col("stream").is_null()
            & (pl.col("duration_ns") > 0)
            & ((pl.col("category") == "cpu_op") | ~pl.col("name").str.contains(ANNOTATIONS))
        )
    )
    start = rows["row"].cast(pl.Int64).to_numpy()
    forward = origins.forward_rows(tables)
    rows = rows.select(
        "process",
        "trace",
        "name",
        pl.lit(None, pl.String).alias("state"),
        "duration_ns",
        "step",
        pl.lit(SEQUENCE).alias("forward_way"),
    )
    return _Work(
        rows,
        start,
        np.full(len(start), NONE, np.int64),
        lambda met: np.where(met >= 0, forward[np.maximum(met, 0)], NONE),
    )


def _attributed(work: _Work, tree: Origins) -> pl.DataFrame:
    """`work.rows` with `place` (index of the origin or -1), `below` (the row called there), `way` and `reason`."""
    first = tree.walk(work.start)
    backward = first.backward >= 0
    forward = np.where(backward, work.forward(first.backward), NONE)
    place = _entry(tree.user, first.stop)
    below = first.below
    by_forward = np.zeros(len(place), bool)

    def fill(start: Int64, *, library: bool, ahead: bool) -> None:
        """Walk on from `start` for what has no place yet."""
        rest = np.flatnonzero((place < 0) & (start >= 0))
        again = tree.walk(start[rest], library=library, boundary=False)
        hit = again.stop >= 0
        at = rest[hit]
        place[at] = _entry(tree.library if library else tree.user, again.stop[hit])
        below[at], by_forward[at] = again.below[hit], ahead

    engine = np.where(work.start >= 0, tree.engine[np.maximum(work.start, 0)], False)
    for library in (False, True):
        fill(forward, library=library, ahead=True)
        # what no forward operator explains belongs to the call of backward()
        fill(work.start, library=library, ahead=False)
        fill(work.other, library=library, ahead=False)
    return work.rows.with_columns(
        pl.Series("place", place),
        pl.Series("below", below),
        pl.when(pl.Series(by_forward)).then("forward_way").otherwise(pl.lit(DIRECT)).alias("way"),
        _reason(pl.lit(tree.any_frames), pl.Series(backward), pl.Series(work.start < 0), pl.Series(engine)),
    )


def _entry(places: origins.Int32, rows: Int64) -> Int64:
    """The index of the place at each row, -1 where there is no row."""
    return np.where(rows >= 0, places[np.maximum(rows, 0)], NONE).astype(np.int64)


def _reason(any_frames: pl.Expr, backward: pl.Series, lost: pl.Series, engine: pl.Series) -> pl.Expr:
    """Why a slice has no line, the most telling reason first."""
    return (
        pl.when(pl.col("state") == BEFORE_RECORDING)
        .then(pl.lit(EARLY))
        .when(pl.col("state") == GRAPH)
        .then(pl.lit(REPLAYED))
        .when(lost)
        .then(pl.lit(NO_LAUNCH))
        .when(~any_frames)
        .then(pl.lit(NO_STACKS))
        .when(backward)
        .then(pl.lit(NO_FORWARD))
        .when(engine)
        .then(pl.lit(ENGINE))
        .otherwise(pl.lit(LIBRARIES))
        .alias("reason")
    )


def _lines(
    placed: pl.DataFrame,
    tables: Tables,
    places: tuple[Origin, ...],
    lines: Lines,
    total_ns: int,
    steps: int | None,
) -> Iterator[DeviceLine]:
    """The lines of all attributed rows, costliest first."""
    below = placed["below"].to_numpy()
    called = tables.events["name"][np.maximum(below, 0)].set(pl.Series(below < 0), None)
    rows = placed.with_columns(called.alias("callee"))
    pairs = rows.select("place", "callee").unique()
    resolved = [_resolved(places[place], callee, lines) for place, callee in pairs.rows()]
    # numbered by name, so that equal costs always come in the same order
    keys = {
        key: number
        for number, key in enumerate(
            sorted(set(resolved), key=lambda key: (key.file, key.line or 0, key.function, key.exact))
        )
    }
    pairs = pairs.with_columns(pl.Series("line", [keys[key] for key in resolved], dtype=pl.Int64))
    rows = rows.join(pairs, on=["place", "callee"], nulls_equal=True)
    sums = rows.group_by("line").agg(ns=pl.col("duration_ns").sum(), events=pl.len())
    ways = _nested(rows, "way")
    tops = _nested(rows, "name")
    by_number = list(keys)
    for number, ns, events in sums.sort(["ns", "line"], descending=[True, False]).rows():
        origin = by_number[number]
        yield DeviceLine(
            place=Place(origin.file, origin.line, origin.function),
            ns=int(ns),
            share=ns / total_ns if total_ns else 0.0,
            ms_per_step=ns / 1e6 / steps if steps else None,
            events=events,
            via=dict(ways[number]),
            top=tuple(tops[number][:TOP]),
            exact_line=origin.exact,
            guess=origin.guess,
        )


def _nested(rows: pl.DataFrame, column: str) -> dict[int, list[tuple[str, int]]]:
    """line -> (value of `column`, ns), costliest first."""
    grouped = rows.group_by("line", column).agg(ns=pl.col("duration_ns").sum())
    result: dict[int, list[tuple[str, int]]] = {}
    for line, value, ns in grouped.sort(["ns", column], descending=[True, False]).rows():
        result.setdefault(line, []).append((str(value), int(ns)))
    return result


def _resolved(origin: Origin, callee: str | None, lines: Lines) -> Origin:
    """The line in the function that makes the call, where its source tells which; else the definition's."""
    if origin.exact or origin.guess or callee is None:
        return origin
    line = lines.only_line(origin.file, origin.function, origin.line, callee_name(callee))
    return origin._replace(line=line, exact=True) if line is not None else origin
