"""All curves of a run: what the table of metrics holds, and what follows from steps, telemetry and memory.

What follows is stored nowhere and made when it is asked for: `perf/step_ms`, `perf/forward_ms`, `perf/samples_per_s`
of the steps that timings stand on (`timed`), `sys/busy_cores`, `sys/gpu.0.power_w` of telemetry, `sys/private_bytes`,
`sys/cuda.0.peak_allocated_bytes` of memory. A name that is stored is not made again. Telemetry has times alone; it is
put on the steps of the first training process. A GPU is `gpu.N` as NVML counts, and `cuda.N` as the process does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import polars as pl

from stepscope.analyze.pictures.series import OTHERS, WORKERS, by_subject
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
        """The step of a value."""
        return int(self.steps[at]) if self.steps[at] != NONE else None

    def where(self, chosen: Bools) -> Curve:
        """Some of the values."""
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


def performance(steps: pl.LazyFrame, metrics: pl.DataFrame) -> pl.DataFrame:
    """What each of `steps` took, at the time it began; other kinds of steps stand under the name of their kind."""
    parts = ("wall", "before_forward", *PHASES, "device")
    columns = {"step" if name == "wall" else name: pl.col(f"{name}_ns") / 1e6 for name in parts}
    made = {f"{name}_ms": value for name, value in columns.items()}
    made["samples_per_s"] = pl.col("samples") / (pl.col("wall_ns") / 1e9)
    made["tokens_per_s"] = pl.col("tokens") / (pl.col("wall_ns") / 1e9)
    kind = pl.col("kind").fill_null("train")
    below = pl.when(kind == "train").then(pl.lit("")).otherwise(pl.concat_str([kind, pl.lit("/")]))
    return (
        with_tokens(steps.filter(pl.col("start_ns").is_not_null()), metrics)
        .select("rank", "process", "step", pl.col("start_ns").alias("time_ns"), below.alias("below"), **made)
        .collect()
        .unpivot(list(made), index=["rank", "process", "step", "time_ns", "below"], variable_name="name")
        .lazy()
        .drop_nulls("value")
        .select(
            *("rank", "process", "step", "time_ns"),
            pl.concat_str([pl.lit(f"{PERFORMANCE}/"), "below", "name"]).alias("name"),
            "value",
            pl.lit(STEPS).alias("source"),
        )
        .collect()
    )


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
