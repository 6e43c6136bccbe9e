"""All curves of a run: what the table of metrics holds, and what follows from steps, telemetry and memory.

What follows is stored nowhere and made when it is asked for: `perf/step_ms`, `perf/forward_ms`, `perf/samples_per_s`
of the steps that timings stand on (`timed`), `sys/busy_cores`, `sys/gpu.0.power_w` of telemetry, `sys/private_bytes`,
`sys/cuda.0.peak_allocated_bytes` of memory. A name that is stored is not made again. Telemetry has times alone; it is
put on the steps of the first training process. A GPU is `gpu.N` as NVML counts, and `cuda.N` as the process does.

Curves as a page draws them: on one axis, thinned to what a screen can show, smoothed, and what happened meanwhile.

On the axis of steps a step has one value: of several the last, of telemetry the mean, and one that is not finite before
all others. On the axis of time every value is drawn. What is not finite is a mark of its own: thinning keeps the first
of each stretch, as it keeps the lowest and the highest value. A smoothed curve is made of all values, not of those that
are drawn.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from stepscope.analyze.happenings import Happenings
from stepscope.analyze.pictures.series import OTHERS, WORKERS, by_subject, positions
from stepscope.engine.journal import event_data
from stepscope.engine.step_labels import EDGE, INCOMPLETE, MONITOR, LabelledSteps
from stepscope.errors import UsageError
from stepscope.model import PHASES
from stepscope.model.metrics import CurveSummary
from stepscope.read.text import integer, string
from stepscope.tables.arrays import NONE, Bools, Floats, Int64
from stepscope.tables.journal import step_at
from stepscope.tables.metrics import FOUND
from stepscope.tables.schema import SCHEMAS, Tables, empty

STEPS, TELEMETRY, ALLOCATOR, KERNEL = "steps", "telemetry", "allocator", "kernel"  # sources of what is not stored
PERFORMANCE, SYSTEM, WATCHED, TRAINING = "perf", "sys", "watch", "train"  # first words of names
RATES, TOKENS = "train/lr", "perf/batch_tokens"  # kept when they change
LEFT_OUT = ("window", EDGE, INCOMPLETE, MONITOR)  # why a step counts for no timing
PRIVATE, ALLOCATED = "private_bytes", "allocated_bytes"
OF_DEVICE = (ALLOCATED, "peak_allocated_bytes", "peak_reserved_bytes")
_SHORT = {WORKERS: "workers", OTHERS: "others"}
_LAST = (PERFORMANCE, SYSTEM, WATCHED)  # groups behind what was learned


class Curve(NamedTuple):
    """The values of one name in order of time.

    `steps` are those that a value was read in, or else the ones begun last before it; `NONE` before the first.
    """

    name: str
    source: str
    rank: int | None
    process: str | None
    steps: Int64
    times_ns: Int64
    values: Floats

    def step(self, at: int) -> int | None:
        return int(self.steps[at]) if self.steps[at] != NONE else None

    def where(self, chosen: Bools) -> Curve:
        return self._replace(steps=self.steps[chosen], times_ns=self.times_ns[chosen], values=self.values[chosen])


def rows(tables: Tables, labelled: LabelledSteps) -> pl.DataFrame:
    """Every value of every rank, as rows of the table of metrics; the process is null where it is the machine's."""
    return beside(tables.metrics, performance(timed(labelled), tables.metrics), _machine(tables), memory(tables))


def beside(stored: pl.DataFrame, *made: pl.DataFrame) -> pl.DataFrame:
    """What is stored, and of what is made the names that are not."""
    known = stored["name"].unique().to_list()
    parts = (part.filter(~pl.col("name").is_in(known)) if known else part for part in made if part.height)
    return pl.concat([stored, *parts])


def timed(labelled: LabelledSteps) -> pl.LazyFrame:
    """The steps that timings stand on: not those in profiler windows, cut off by a trace, or with a monitor of ours."""
    return labelled.frame.lazy().filter(~pl.col("reason").is_in(LEFT_OUT))


class Gap(NamedTuple):
    """Steps that follow each other and count for no timing, by the same `reason`."""

    reason: str
    length: int
    steps: tuple[int, int]  # the first and the last
    times_ns: tuple[int, int]


def gaps(labelled: LabelledSteps, process: str | None) -> list[Gap]:
    """What `timed` leaves out of the curves of a process, in order of time."""
    own = labelled.frame.filter(pl.col("process").eq_missing(process)).drop_nulls("start_ns").sort("start_ns")
    stretches = own.group_by(pl.col("reason").rle_id().alias("stretch"), maintain_order=True).agg(
        pl.col("reason").first(),
        pl.len(),
        pl.col("step").first().alias("first"),
        pl.col("step").last().alias("last"),
        pl.col("start_ns").first(),
        (pl.col("start_ns") + pl.col("wall_ns")).last().alias("end_ns"),
    )
    kept = stretches.filter(pl.col("reason").is_in(LEFT_OUT)).drop("stretch")
    return [Gap(reason, length, (first, last), (start, end)) for reason, length, first, last, start, end in kept.rows()]


def processes(tables: Tables) -> list[str]:
    """The processes with steps or metrics, in order of ranks: the first is the one that telemetry is laid beside."""
    parts = [frame.select("rank", "process").unique() for frame in (tables.steps, tables.metrics) if frame.height]
    return pl.concat(parts).unique().sort("rank", "process")["process"].to_list() if parts else []


def curves(tables: Tables, labelled: LabelledSteps, process: str | None, *, narrow: bool) -> dict[str, Curve]:
    """By name, those of a process and of the machine: what was learned first, then performance, system and layers.

    `narrow`: of a run of which few steps were read, what was measured while these ran.
    """
    own = pl.col("process").is_null() | pl.col("process").eq_missing(process)
    values = rows(tables, labelled).filter(own).drop_nulls("value")
    if narrow:
        starts, ends, _ = _steps(tables, process)
        values = _between(values, int(starts[0]), int(ends.max())) if len(starts) else values.clear()
    found = sorted(made(tables, values), key=lambda curve: (_place(curve.name), curve.process is None))
    return {curve.name: curve for curve in found}


def _between(values: pl.DataFrame, first_ns: int, last_ns: int) -> pl.DataFrame:
    """What lies between two moments; what holds from before stands at the first of them."""
    names = [name for name in values["name"].unique().to_list() if holds(name)]
    before = values.filter((pl.col("time_ns") < first_ns) & pl.col("name").is_in(names))
    held = before.group_by("name", maintain_order=True).last().select(values.columns)
    still = held.with_columns(time_ns=pl.lit(first_ns, pl.Int64), step=pl.lit(None, pl.Int64))
    return pl.concat([still, values.filter(pl.col("time_ns").is_between(first_ns, last_ns))])


def made(tables: Tables, values: pl.DataFrame) -> list[Curve]:
    """The curves that `values` are of, which are some of `rows`: by process, and within it by group.

    A name under which several tools log is of the first of them, and of what stepscope found before all; the curves of
    the others have the tool behind it.
    """
    found: list[Curve] = []
    for own in values.partition_by("process", maintain_order=True):
        process, of_process = own["process"][0], []
        starts, _, numbers = _steps(tables, process or next(iter(processes(tables)), None))
        parts = own.partition_by("name", "source", maintain_order=True)
        keys = [(str(part["name"][0]), str(part["source"][0])) for part in parts]
        owners = {**dict(reversed(keys)), **{name: source for name, source in keys if source in FOUND}}
        for (name, source), part in zip(keys, parts, strict=True):
            times, steps = part["time_ns"].to_numpy(), part["step"].fill_null(NONE).to_numpy()
            before = np.append(NONE, numbers)[np.searchsorted(starts, times, side="right")]
            steps = np.where(steps == NONE, before, steps)
            called = name if owners[name] == source else f"{name} ({source})"
            of_process.append(Curve(called, source, part["rank"][0], process, steps, times, part["value"].to_numpy()))
        found += sorted(of_process, key=lambda curve: _place(curve.name))
    return found


def _place(name: str) -> tuple[int, bool]:
    """By group; of the system, devices before all else."""
    first, _, rest = name.partition("/")
    group = _LAST.index(first) + 2 if first in _LAST else int(first != TRAINING)
    return group, first == SYSTEM and not rest.startswith(("gpu.", "cuda."))


def charts(names: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """By group and chart the names whose curves stand in it.

    A chart is of one name. In one chart stand a name and those below it (`train/loss`, `train/loss/train.py:30`), those
    of one group within a group (`train/lr/0`, `train/lr/1`), and one reading of several devices or processes.
    """
    known = list(names)
    found: dict[str, dict[str, list[str]]] = {}
    for name in known:
        group, _, last = name.rpartition("/")
        key = name
        if group == SYSTEM:
            key = f"{SYSTEM}/{last.rpartition('.')[2]}"
        elif group in known or "/" in group:
            key = group
        found.setdefault(key.rpartition("/")[0], {}).setdefault(key, []).append(name)
    return found


def holds(name: str) -> bool:
    """Whether a value of the curve stands until the next."""
    return name == TOKENS or name.startswith(f"{RATES}/")


def layers(found: Mapping[str, Curve]) -> dict[str, dict[str, Curve]]:
    """By what is watched the curves of parameters or modules, in their order."""
    made: dict[str, dict[str, Curve]] = {}
    for name, curve in found.items():
        first, _, rest = name.partition("/")
        what, slash, layer = rest.partition("/")
        if first == WATCHED and slash:
            made.setdefault(what, {})[layer] = curve
    return made


def summary(curve: Curve) -> CurveSummary:
    """The curve in one line."""
    finite = np.isfinite(curve.values)
    known, odd, steps = curve.values[finite], curve.steps[~finite], curve.steps[curve.steps != NONE]
    return CurveSummary(
        name=curve.name,
        source=curve.source,
        rank=curve.rank,
        process=curve.process,
        points=len(curve.values),
        first=float(known[0]) if len(known) else None,
        last=float(known[-1]) if len(known) else None,
        lowest=float(known.min()) if len(known) else None,
        median=float(np.median(known)) if len(known) else None,
        highest=float(known.max()) if len(known) else None,
        not_finite=len(odd),
        not_finite_step=int(odd[0]) if len(odd) and odd[0] != NONE else None,
        first_step=int(steps[0]) if len(steps) else None,
        last_step=int(steps[-1]) if len(steps) else None,
    )


def matching(found: pl.DataFrame, pattern: str) -> pl.DataFrame:
    """The rows whose name matches a regular expression, its case ignored; raises `UsageError` for one that is none."""
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"--filter {pattern}: not a regular expression ({error}); put \\ before ( [ + * ?") from None
    names = found["name"].unique().to_list()
    return found.filter(pl.col("name").is_in([name for name in names if wanted.search(name)]))


# ---- what is stored nowhere ------------------------------------------------------------------------------------------


def _steps(tables: Tables, process: str | None) -> tuple[Int64, Int64, Int64]:
    """Starts, ends and numbers of the steps of a process, in order of time."""
    every = tables.steps.lazy().filter(pl.col("process").eq_missing(process))
    own = every.drop_nulls(["start_ns", "wall_ns"]).sort("start_ns").collect()
    starts, walls, numbers = (own[name].to_numpy() for name in ("start_ns", "wall_ns", "step"))
    return starts, starts + walls, numbers


def performance(steps: pl.LazyFrame, metrics: pl.DataFrame, only: Sequence[str] = ()) -> pl.DataFrame:
    """What each of `steps` took, at the time it began; other kinds of steps stand under the name of their kind.

    `only` these names of training steps. Of what was not measured no row is made: a long run has millions of steps.
    """
    made = {f"{name}_ms": pl.col(f"{name}_ns") / 1e6 for name in ("before_forward", *PHASES, "device")}
    made = {"step_ms": pl.col("wall_ns") / 1e6, **made}
    made["samples_per_s"] = pl.col("samples") / (pl.col("wall_ns") / 1e9)
    made["tokens_per_s"] = pl.col("tokens") / (pl.col("wall_ns") / 1e9)
    kind = pl.col("kind").fill_null("train")
    below = pl.when(kind == "train").then(pl.lit("")).otherwise(pl.concat_str([kind, pl.lit("/")]))
    measured = with_tokens(steps.filter(pl.col("start_ns").is_not_null()), metrics).collect().lazy()
    series = [
        measured.select(
            *("rank", "process", "step", pl.col("start_ns").alias("time_ns")),
            pl.concat_str([pl.lit(f"{PERFORMANCE}/"), below, pl.lit(name)]).alias("name"),
            value.alias("value"),
            pl.lit(STEPS).alias("source"),
        ).drop_nulls("value")
        for name, value in made.items()
        if not only or f"{PERFORMANCE}/{name}" in only
    ]
    return pl.concat(series).collect()


def with_tokens(steps: pl.LazyFrame, metrics: pl.DataFrame) -> pl.LazyFrame:
    """With the tokens of each step: those of its batch, and of several batches where all had as many."""
    if metrics.is_empty():
        return steps.with_columns(tokens=pl.lit(None, pl.Float64))
    kept = metrics.lazy().filter(pl.col("name") == TOKENS)
    kept = kept.select("process", pl.col("time_ns").alias("until_ns"), "value").sort("until_ns")
    ends = steps.with_columns(until_ns=pl.col("start_ns") + pl.col("wall_ns")).sort("until_ns")
    known = ends.join_asof(kept, on="until_ns", by="process", check_sortedness=False).drop("until_ns")
    before = kept.rename({"value": "before", "until_ns": "start_ns"})
    both = known.sort("start_ns").join_asof(before, on="start_ns", by="process", check_sortedness=False)
    same = (pl.col("fetches") == 1) | (pl.col("value") == pl.col("before"))
    return both.with_columns(tokens=pl.when(same).then(pl.col("value") * pl.col("fetches")))


def _machine(tables: Tables) -> pl.DataFrame:
    """Telemetry on the steps of the first process."""
    readings = tables.system.drop_nulls(["value", "time_ns"])
    found = by_subject(readings, tables) if readings.height else readings
    if found.is_empty():
        return empty("metrics")
    ranks = {rank.process: rank.rank for rank in tables.ranks}
    hosts = set(tables.system["host"].unique().to_list())
    names = []
    for metric, subject in found.select("metric", "subject").unique().rows():
        whose = _SHORT.get(subject, subject)
        if (subject in hosts and len(hosts) == 1) or (subject in ranks and len(ranks) == 1):
            whose = ""
        whose = re.sub(r"[:\s/]+", ".", whose)
        name = ".".join(part for part in (whose, metric.removeprefix("gpu_")) if part)
        process = subject if subject in ranks else None
        names.append((metric, subject, f"{SYSTEM}/{name}", ranks.get(subject), process))
    schema = {"metric": pl.String, "subject": pl.String, "name": pl.String, "rank": pl.Int32, "process": pl.String}
    named = found.join(pl.DataFrame(names, schema=schema, orient="row"), on=["metric", "subject"]).sort(
        "time_ns", "name"
    )
    first = next(iter(processes(tables)), None)
    starts, ends, numbers = _steps(tables, first)
    steps = step_at(named["time_ns"].to_numpy(), starts, ends - starts, numbers)
    return named.select(
        "rank",
        "process",
        pl.Series("step", steps).set(pl.Series(steps == NONE), None),
        *("time_ns", "name", "value"),
        pl.lit(TELEMETRY).alias("source"),
    )


def memory(tables: Tables) -> pl.DataFrame:
    """What each process held now and then, and the allocator of its device held and has held at most."""
    found = []
    for row, data in event_data(tables, "memory"):
        device = re.sub(r"[:/]", ".", string(data.get("device")) or "")
        names = {key: (f"{SYSTEM}/{device}.{key}", ALLOCATOR) for key in OF_DEVICE if device}
        for key, (name, source) in {PRIVATE: (f"{SYSTEM}/{PRIVATE}", KERNEL), **names}.items():
            value = integer(data.get(key))
            if value is not None and value >= 0 and row["time_ns"] is not None:
                found.append((row["rank"], row["process"], row["step"], row["time_ns"], name, float(value), source))
    return pl.DataFrame(found, schema=SCHEMAS["metrics"], orient="row")


SECOND = 1e9


class Points(NamedTuple):
    """`x` ascends and holds nothing twice; steps are whole numbers."""

    x: Floats | Int64
    values: Floats


class Line(NamedTuple):
    """Values at the x of all lines, None where this one has none; `odd`: position and word of those not finite."""

    values: list[float | None]
    odd: list[tuple[int, str]]


class Lines(NamedTuple):
    """`lines` in the order of the curves, `smooth` the same smoothed, empty where that was not asked for."""

    x: list[float]
    lines: list[Line]
    smooth: list[Line]


class Moment(NamedTuple):
    """What happened, and where: `step` is the one in which or after which it did."""

    kind: str
    label: str
    step: int
    time_ns: int


def on_steps(curve: Curve) -> Points:
    """One value for each step."""
    known = curve.steps != NONE
    steps, values = curve.steps[known], curve.values[known]
    order = np.lexsort((np.arange(len(steps)), ~np.isfinite(values), steps))
    steps, values = steps[order], values[order]
    ends = np.flatnonzero(np.append(steps[1:] != steps[:-1], True)) if len(steps) else steps
    if curve.source == TELEMETRY and len(steps):
        firsts = np.append(0, ends[:-1] + 1)
        return Points(steps[ends], np.add.reduceat(values, firsts) / (ends - firsts + 1))
    return Points(steps[ends], values[ends])


def over_time(curve: Curve, origin_ns: int) -> Points:
    """Every value, in seconds since `origin_ns`."""
    last = np.append(curve.times_ns[1:] != curve.times_ns[:-1], True)
    return Points((curve.times_ns[last] - origin_ns) / SECOND, curve.values[last])


def held(points: Points, end: float) -> Points:
    """With its last value once more at `end`, of a curve that is kept when it changes."""
    if not len(points.x) or points.x[-1] >= end:
        return points
    return Points(np.append(points.x, end), np.append(points.values, points.values[-1]))


def lines(drawn: Sequence[Points], limit: int, window: int = 0) -> Lines:
    """Curves on one axis, of each at most about `limit` points of its own; smoothed over `window` values."""
    kept = []
    for points in drawn:
        finite = np.where(np.isfinite(points.values), points.values, np.nan)
        odd = np.flatnonzero(np.isnan(finite))
        first = np.unique(odd * limit // max(len(finite), 1), return_index=True)[1]  # of each stretch
        kept.append(points.x[sorted({*positions(finite, limit), *odd[first].tolist()})])
    x = np.unique(np.concatenate(kept)) if kept else np.empty(0)
    made: list[Line] = []
    smooth: list[Line] = []
    for points in drawn:
        at = np.minimum(np.searchsorted(points.x, x), len(points.x) - 1)
        there = np.flatnonzero(points.x[at] == x)
        made.append(_line(len(x), there, points.values[at[there]]))
        if window:
            # the mean of the last finite values; where the value itself is none, its mark says so
            finite = np.flatnonzero(np.isfinite(points.values))
            ends, known = np.searchsorted(finite, at[there], side="right"), points.values[finite]
            means = [known[max(0, end - window) : end].mean() if end else np.nan for end in ends.tolist()]
            shown = np.where(np.isfinite(points.values[at[there]]), np.array(means, np.float64), np.nan)
            smooth.append(_line(len(x), there, shown)._replace(odd=[]))
    return Lines(x.tolist(), made, smooth)


def _line(length: int, there: Any, values: Floats) -> Line:
    known: list[float | None] = [None] * length
    odd = []
    for position, value in zip(there.tolist(), values.tolist(), strict=True):
        if np.isfinite(value):
            known[position] = value
        else:
            odd.append((position, word(value)))
    return Line(known, odd)


def word(value: float) -> str:
    """What a value that is not finite is called."""
    return "NaN" if np.isnan(value) else "inf" if value > 0 else "-inf"


def heat(found: Mapping[str, Curve], limit: int) -> Lines:
    """Layers beside each other on the steps, at most `limit` columns: each the highest of its stretch of steps."""
    drawn = [on_steps(curve) for curve in found.values()]
    x = np.unique(np.concatenate([points.x for points in drawn]))
    stretch = np.arange(len(x)) * min(limit, len(x)) // max(len(x), 1)
    firsts = np.flatnonzero(np.append(True, stretch[1:] != stretch[:-1]))
    lowest = np.finfo(np.float64).min
    made = []
    for points in drawn:
        column = np.full(len(x), -np.inf)  # what is missing
        at = np.searchsorted(x, points.x)
        column[at] = np.where(points.values == -np.inf, lowest, points.values)
        most = np.maximum.reduceat(column, firsts)  # NaN comes before all
        there = np.flatnonzero(most != -np.inf)
        made.append(_line(len(firsts), there, np.where(most[there] == lowest, -np.inf, most[there])))
    return Lines(x[firsts].tolist(), made, [])


def moments(tables: Tables, labelled: LabelledSteps, process: str | None) -> list[Moment]:
    """Epochs, evaluations, checkpoints, recompilations and jumps of learning rates, each kind once a step."""
    own = (
        tables.steps.filter(pl.col("process").eq_missing(process)).drop_nulls(["start_ns", "wall_ns"]).sort("start_ns")
    )
    if own.is_empty():
        return []
    starts, numbers = own["start_ns"].to_numpy(), own["step"].to_numpy()
    end = int((own["start_ns"] + own["wall_ns"]).max())
    made: dict[tuple[str, int], Moment] = {}
    for time_ns, happening, mark in Happenings(tables, labelled, process).all:
        at = int(np.searchsorted(starts, time_ns, side="right")) - 1
        if mark and at >= 0 and time_ns <= end:
            step = int(numbers[at])
            made.setdefault((happening.kind, step), Moment(happening.kind, mark, step, time_ns))
    return list(made.values())


Place = tuple[float, float]  # column and row, from 0 on


def contour(rows: Sequence[Sequence[float]], level: float) -> Iterator[tuple[Place, Place]]:
    """The pieces of the lines on which the grid reaches `level`, each within a cell of four neighbours."""
    for y, (upper, lower) in enumerate(itertools.pairwise(rows)):
        for x in range(len(upper) - 1):
            corners = [upper[x], upper[x + 1], lower[x + 1], lower[x]]  # clockwise
            ends = [end for side in range(4) if (end := _crossing(side, corners, level, x, y)) is not None]
            if len(ends) == 4 and (corners[0] > level) != (sum(corners) / 4 > level):  # a saddle: by its middle
                ends = [*ends[1:], ends[0]]
            yield from zip(ends[::2], ends[1::2], strict=True)


_SIDES = (((0, 0), (1, 0)), ((1, 0), (1, 1)), ((1, 1), (0, 1)), ((0, 1), (0, 0)))


def _crossing(side: int, corners: Sequence[float], level: float, x: int, y: int) -> Place | None:
    start, end = corners[side], corners[(side + 1) % 4]
    if (start > level) == (end > level):
        return None
    share = (level - start) / (end - start)
    (x0, y0), (x1, y1) = _SIDES[side]
    return x + x0 + share * (x1 - x0), y + y0 + share * (y1 - y0)
