"""Device time by line of the user's code, exclusively: every device slice counts for one line or one reason.

A slice goes to the innermost user line around its launch; one of the backward pass goes to the line of its forward
operator. Where traces hold no device slices, the self time of operators is attributed the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from stepscope.analyze.device import BEFORE_RECORDING, GRAPH, is_one_trace
from stepscope.engine import origins
from stepscope.engine.origins import Origin, Origins
from stepscope.engine.slice_names import callee_name
from stepscope.engine.source_lines import Lines
from stepscope.model import DeviceLine, DeviceLines, Place
from stepscope.tables.arrays import NONE, Bools, Int32, Int64, Rows, positions
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
    """What is to be attributed, each field with one value for each piece of work.

    `start`, `other` and `forward` are rows of `events`, -1 for none: where the walk starts, where it may start instead,
    and `forward` gives the forward operators of the backward operators that walks met. `forward_way` is how those were
    found. `early` was launched before the recording, `replayed` by a graph.
    """

    whose: pl.DataFrame  # process, trace
    step: pl.Series
    name: pl.Series
    duration_ns: Int64
    start: Rows
    other: Rows
    forward: Callable[[Int64], Rows]
    forward_way: pl.Series
    early: Bools
    replayed: Bools


@dataclass(frozen=True)
class _Placed:
    """For each piece of work `place` (index of the origin or -1), `below` (the row called there), and `ahead`: through
    its forward operator. `backward`: the walk met an operator of the backward pass.
    """

    place: Int64
    below: Int64
    ahead: Bools
    backward: Bools


def facts(tables: Tables, device: pl.DataFrame, tree: Origins, lines: Lines) -> DeviceLines | None:
    """None without device slices and operators. `device` as `device.slices` makes them."""
    work = _device_work(tables, device) if device.height else _host_work(tables)
    if not len(work.duration_ns):
        return None
    placed = _attributed(work, tree) if tree.any_frames else None
    total = int(work.duration_ns.sum())
    steps = _steps(tables, work)
    reasons = _reasons(tables, work, placed)
    found = tuple(_lines(work, placed, tables, tree.places, lines, total, steps)) if placed else ()
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


def _steps(tables: Tables, work: _Work) -> int | None:
    """Profiled steps the work lies in; those that the recording holds whole, where that is known."""
    keys = ["process", "trace"]
    if is_one_trace(work.whose):
        seen = work.whose.head(1).join(work.step.unique().alias("step").to_frame(), how="cross")
    else:
        codes = [work.whose[key].cast(pl.Categorical) for key in keys]
        seen = pl.DataFrame([*codes, work.step.alias("step")]).unique().with_columns(pl.col(keys).cast(pl.String))
    seen = seen.drop_nulls()
    whole = tables.steps.filter(pl.col("in_window").fill_null(False)).select("process", "step")
    complete = seen.join(whole, on=["process", "step"], how="semi").height
    return complete or seen.height or None


def _device_work(tables: Tables, device: pl.DataFrame) -> _Work:
    ids = tables.events["id"]
    launch = positions(ids, device["launch"])
    start = np.where(launch >= 0, launch, positions(ids, device["operator"]))
    forward = positions(ids, device["forward"])
    state = device["state"]
    return _Work(
        whose=device[["process", "trace"]],
        # the step that launched the work: the device may run it in the next one
        step=tables.events["step"][np.maximum(start, 0)].set(pl.Series(start < 0), None),
        name=device["name"],
        duration_ns=device["duration_ns"].to_numpy(),
        start=start,
        other=positions(ids, device["frame"]),
        forward=lambda _: forward,
        forward_way=device["forward_method"].fill_null(SEQUENCE),
        early=(state == BEFORE_RECORDING).fill_null(False).to_numpy(),
        replayed=(state == GRAPH).fill_null(False).to_numpy(),
    )


def _host_work(tables: Tables) -> _Work:
    """Operators of the host with their self time."""
    category = pl.col("category")
    wanted = tables.events.select(
        (
            category.is_in(OPERATORS)
            & pl.col("stream").is_null()
            & (pl.col("self_ns") > 0)
            & (
                (category == "cpu_op")
                | ~pl.col("name").str.contains(r"^(ProfilerStep#|enumerate\(DataLoader\)#|Optimizer\.)")
            )
        ).fill_null(False)
    ).to_series()
    rows = tables.events.select("process", "trace", "name", "step", "self_ns").filter(wanted)
    forward = origins.forward_rows(tables.events)
    nothing = np.zeros(rows.height, bool)
    return _Work(
        whose=rows[["process", "trace"]],
        step=rows["step"],
        name=rows["name"],
        duration_ns=rows["self_ns"].to_numpy(),
        start=wanted.arg_true().to_numpy().astype(np.int32),
        other=np.full(rows.height, NONE, np.int32),
        forward=lambda met: np.where(met >= 0, forward[np.maximum(met, 0)], NONE),
        forward_way=pl.Series([SEQUENCE]).new_from_index(0, rows.height),
        early=nothing,
        replayed=nothing,
    )


def _attributed(work: _Work, tree: Origins) -> _Placed:
    first = tree.walk(work.start)
    backward = first.backward >= 0
    forward = np.where(backward, work.forward(first.backward), NONE)
    place = _entry(tree.user, first.stop)
    below = first.below
    ahead = np.zeros(len(place), bool)

    def fill(start: Rows, *, library: bool, forwards: bool) -> None:
        """Walk on from `start` for what has no place yet."""
        rest = np.flatnonzero((place < 0) & (start >= 0))
        again = tree.walk(start[rest], library=library, boundary=False)
        hit = again.stop >= 0
        at = rest[hit]
        place[at] = _entry(tree.library if library else tree.user, again.stop[hit])
        below[at], ahead[at] = again.below[hit], forwards

    for library in (False, True):
        fill(forward, library=library, forwards=True)
        # what no forward operator explains belongs to the call of backward()
        fill(work.start, library=library, forwards=False)
        fill(work.other, library=library, forwards=False)
    return _Placed(place, below, ahead, backward)


def _entry(places: Int32, rows: Int64) -> Int64:
    """The index of the place at each row, -1 where there is no row."""
    return np.where(rows >= 0, places[np.maximum(rows, 0)], NONE).astype(np.int64)


def _reasons(tables: Tables, work: _Work, placed: _Placed | None) -> dict[str, int]:
    """Nanoseconds without a line by the reason, the costliest first. `placed` None: no slice has Python frames."""
    left = np.ones(len(work.start), bool) if placed is None else placed.place < 0
    result: dict[str, int] = {}

    def take(reason: str, mine: Bools) -> None:
        mine = mine & left
        if mine.any():
            result[reason] = int(work.duration_ns[mine].sum())
            left[mine] = False

    take(EARLY, work.early)
    take(REPLAYED, work.replayed)
    take(NO_LAUNCH, work.start < 0)
    if placed is None:
        take(NO_STACKS, left)
    else:
        take(NO_FORWARD, placed.backward)
        rest = np.flatnonzero(left)
        if len(rest):
            engine = np.zeros(len(left), bool)
            engine[rest] = origins.in_engine(tables.events, work.start[rest])
            take(ENGINE, engine)
            take(LIBRARIES, left)
    return dict(sorted(result.items(), key=lambda pair: (pair[1], pair[0]), reverse=True))


def _lines(
    work: _Work,
    placed: _Placed,
    tables: Tables,
    places: tuple[Origin, ...],
    lines: Lines,
    total_ns: int,
    steps: int | None,
) -> Iterator[DeviceLine]:
    """The lines of all attributed work, costliest first."""
    sums = _sums(work, placed, tables.events["name"])
    pairs = sums.select("place", "callee").unique()
    resolved = [_resolved(places[place], callee, lines) for place, callee in pairs.rows()]
    # numbered by name, so that equal costs always come in the same order
    keys = {
        key: number
        for number, key in enumerate(
            sorted(set(resolved), key=lambda key: (key.file, key.line or 0, key.function, key.exact))
        )
    }
    pairs = pairs.with_columns(pl.Series("line", [keys[key] for key in resolved], dtype=pl.Int64))
    sums = sums.join(pairs, on=["place", "callee"], nulls_equal=True)
    ways = _nested(sums, "way")
    tops = _nested(sums, "name")
    by_line = sums.group_by("line").agg(pl.col("ns", "events").sum())
    by_number = list(keys)
    for number, ns, events in by_line.sort(["ns", "line"], descending=[True, False]).rows():
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


def _sums(work: _Work, placed: _Placed, names: pl.Series) -> pl.DataFrame:
    """(place, callee, way, name, ns, events): attributed work summed up; `callee` is the name of what the place called.

    Texts are codes until they are few.
    """
    known = np.flatnonzero(placed.place >= 0)
    mask = pl.Series(placed.place >= 0)
    way = pl.when(pl.Series(placed.ahead[known])).then(work.forward_way.filter(mask)).otherwise(pl.lit(DIRECT))
    rows = pl.DataFrame(
        [
            pl.Series("place", placed.place[known]),
            _texts(names, placed.below[known]).alias("callee"),
            pl.select(way.cast(pl.Categorical).alias("way")).to_series(),
            work.name.filter(mask).cast(pl.Categorical).alias("name"),
            pl.Series("ns", work.duration_ns[known]),
        ]
    )
    grouped = rows.group_by("place", "callee", "way", "name").agg(pl.col("ns").sum(), events=pl.len())
    return grouped.with_columns(pl.col("callee", "way", "name").cast(pl.String))


def _texts(texts: pl.Series, rows: Int64) -> pl.Series:
    """The texts at these rows, -1 for none, as codes; only the texts asked for are looked at."""
    asked, where = np.unique(rows, return_inverse=True)
    wanted = np.zeros(len(texts), bool)
    wanted[asked[asked >= 0]] = True
    own = texts.filter(pl.Series(wanted)).cast(pl.Categorical)
    at = pl.Series(where - (len(asked) - len(own)))  # -1 where the row is -1, which comes first of those asked for
    texts_at: pl.Series = own.gather(at.set(at < 0, None))
    return texts_at


def _nested(sums: pl.DataFrame, column: str) -> dict[int, list[tuple[str, int]]]:
    """line -> (value of `column`, ns), costliest first."""
    grouped = sums.group_by("line", column).agg(pl.col("ns").sum())
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
