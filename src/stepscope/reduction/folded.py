"""Tables of which not every row is kept: blocks of steps, stretches of time, lines, and what happened once.

Means are summed in the order of time by one thread, so that the same recording gives the same bytes wherever it is
reduced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.host.sampled_time import whole_by_weight
from stepscope.analyze.ranks.durations import may_wait
from stepscope.engine import intervals
from stepscope.engine.call_tree import UserPaths, at, rows_of
from stepscope.engine.journal import event_data
from stepscope.read.raw import Frame, RawHost
from stepscope.read.text import integer, string
from stepscope.schema import PHASES
from stepscope.tables.arrays import NONE, Floats
from stepscope.tables.journal import system_table
from stepscope.tables.phases import DATA_WAIT, OTHER
from stepscope.tables.reduced import BUCKET_NS, SCHEMAS, STEPS_OF_BLOCK, sketch
from stepscope.tables.schema import RankInfo, Tables, empty

LINES_OF_RANK = 200
LEAST_GC_NS = 10_000_000  # collections shorter than this are in their steps' sum alone
CLOCK_STEP_NS = 100_000  # two clocks cannot be read at the very same moment; on a busy host that is some microseconds
MAX_EVENTS = 20_000  # of a rank; the longest stay
MAX_TEXT = 500  # characters
# Of processes; all that is read of the host and of its devices is kept, but for who computes on a device.
_OF_RANKS = ("cpu_pct", "rss_bytes", "run_delay_ns", "major_faults")
_COMPUTES = "gpu_process"
_CLOCK_SET = "clock_set_ns"
_DIGITS = 6  # of a mean of telemetry
_COMPILING = ("compile", "recompile", "limit_hit", "failure")
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/|.*/lib/python3\.\d+/")


def _sums(keys: pl.DataFrame, values: pl.Series) -> tuple[pl.DataFrame, Floats]:
    """Of keys in order the distinct ones, and the sum of the values of each, added from the first to the last."""
    number = keys.select(pl.struct(pl.all()).rle_id()).to_series().to_numpy().astype(np.int64)
    distinct = keys.unique(maintain_order=True)
    sums = np.bincount(number, values.cast(pl.Float64).to_numpy(), minlength=distinct.height)
    return distinct, sums.astype(np.float64)


def collectives(found: pl.DataFrame) -> pl.DataFrame:
    """Collectives of steps by block, group and kind."""
    key = ("rank", "block", "group", "kind")
    frame = found.filter(pl.col("step").is_not_null()).with_columns(
        block=pl.col("step") // STEPS_OF_BLOCK, us=(pl.col("end_ns") - pl.col("start_ns")) // 1000
    )
    rows = []
    for (rank, block, group, kind), part in frame.group_by(key, maintain_order=True):
        lengths = part["us"].to_numpy()
        bins = sketch(lengths)
        rows.append(
            {
                "rank": rank,
                "block": block,
                "group": group,
                "kind": kind,
                "count": len(lengths),
                "bytes": None if part["bytes"].null_count() else part["bytes"].sum(),
                "sum_us": int(lengths.sum()),
                "least_us": int(lengths.min()),
                "most_us": int(lengths.max()),
                "bins": bins.bins.tolist(),
                "counts": bins.counts.tolist(),
            }
        )
    return pl.DataFrame(rows, schema=SCHEMAS["folded"]).sort(key, nulls_last=True)


def lines(context: Context) -> pl.DataFrame:
    """Where the main threads of ranks stood in steady steps: the user's innermost lines, and whether they waited."""
    if context.sampled is None:
        return pl.DataFrame(schema=SCHEMAS["lines"])
    users = UserPaths(context.calls, context.code)
    rows = _as_the_journal(context.sampled.rank_steps().filter(pl.col("rank").is_not_null()), context)
    nodes = rows_of(rows["node"])
    waits = pl.Series(at(users.marked(may_wait), nodes, False))
    of_user = pl.Series(at(users.user, nodes, False))
    leaves = pl.Series([_leaf(frame) for frame in context.calls.frames], dtype=pl.String)
    leaf = leaves.gather(pl.Series(at(context.calls.frame, nodes, NONE)).replace(NONE, None))
    key = ("phase", "file", "line", "function", "leaf", "waiting")
    counted = (
        rows.select(
            "rank",
            "phase",
            "samples",
            file="user_file",
            line="user_line",
            function="user_function",
            leaf=leaf.set(of_user, None),
            # what a loader does while the next batch is waited for is the rank's own affair
            waiting=waits & (pl.col("phase") != DATA_WAIT),
        )
        .group_by("rank", *key)
        .agg(pl.col("samples").sum())
        .sort("rank", pl.col("samples"), *key, descending=[False, True, *[False] * len(key)], nulls_last=True)
        .with_columns(
            place=pl.when(pl.col("file").is_not_null()).then(
                pl.int_range(pl.len()).over("rank", pl.col("file").is_not_null())
            )
        )
    )
    shown = pl.col("place") < LINES_OF_RANK
    rest = counted.filter(~shown.fill_null(False)).group_by("rank").agg(pl.col("samples").sum())
    columns = SCHEMAS["lines"]
    both = pl.concat([counted.filter(shown).select(*columns), rest], how="diagonal")
    both = both.sort("rank", "samples", *key, descending=[False, True, *[False] * len(key)], nulls_last=True)
    return both.select(pl.col(name).cast(kind) for name, kind in columns.items())


_UNMARKED = ("data_wait", "before_forward", "forward", "other")  # phases that frames need not show
_OF_STEPS = ("file", "pid", "thread", "node")  # of a stack and of the stretches in which it was met


def _as_the_journal(rows: pl.DataFrame, context: Context) -> pl.DataFrame:
    """Stacks outside of torch's own phases, parted by the phase of the journal that they were met in.

    The table of stacks does so where a step is long beside the time between two samples. In shorter ones a sample
    tells little, but many of a line together do. Between a fetch and the backward pass all is the journal's forward
    pass, whatever the frames of a stack say. (The backward pass and optimizers show in frames: what shows neither was
    met in neither, however late a sampler noticed.) In steps with several fetches phases follow each other more than
    once: there the stack's word is kept.
    """
    unmarked = (pl.col("phase") == OTHER).fill_null(False)
    met = context.tables.stretches.filter(unmarked & pl.col("main_thread").fill_null(False))
    steps = context.labelled.frame.filter(pl.col("start_ns").is_not_null() & (pl.col("fetches").fill_null(0) <= 1))
    if met.is_empty() or steps.is_empty():
        return rows
    weights = []
    for (process,), own in met.partition_by("process", as_dict=True).items():
        mine = steps.filter(pl.col("process") == process).sort("start_ns")
        lengths = [mine[f"{phase}_ns"].fill_null(0).to_numpy() for phase in PHASES]
        edges = mine["start_ns"].to_numpy() + np.cumsum([np.zeros(mine.height, np.int64), *lengths], axis=0)
        spans = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
        covered = {
            phase: intervals.covered(intervals.union(edges[i], edges[i + 1]), *spans)
            for i, phase in enumerate(PHASES)
            if phase in _UNMARKED
        }
        weights.append(own.select(_OF_STEPS).with_columns(pl.Series(name, ns) for name, ns in covered.items()))
    by_stack = pl.concat(weights).group_by(_OF_STEPS).agg(pl.col(_UNMARKED).sum())
    timed = rows.filter(unmarked).join(by_stack, on=_OF_STEPS, nulls_equal=True, maintain_order="left")
    timed = timed.filter(pl.sum_horizontal(_UNMARKED) > 0)
    samples = timed["samples"].to_numpy().astype(np.int64)
    parts = whole_by_weight(samples, timed.select(_UNMARKED).cast(pl.Float64).to_numpy())
    parted = [
        timed.drop(_UNMARKED).with_columns(phase=pl.lit(phase), samples=pl.Series(parts[:, i]))
        for i, phase in enumerate(_UNMARKED)
    ]
    rest = rows.join(timed.select("row"), on="row", how="anti", maintain_order="left")
    return pl.concat([rest, *(part.filter(pl.col("samples") > 0) for part in parted)], how="vertical_relaxed")


def _leaf(frame: Frame) -> str:
    line = "" if frame.line is None else f":{frame.line}"
    return f"{frame.function} ({_PACKAGES.sub('', frame.file) or '?'}{line})"[:MAX_TEXT]


def sampling_rate(tables: Tables, process: str) -> float | None:
    """How often a second the stacks of a process were taken; None where they were not."""
    rates = tables.stacks.filter(pl.col("process") == process)["rate_hz"].drop_nulls()
    return None if rates.is_empty() else float(rates.max())  # type: ignore[arg-type]


class Telemetry:
    """The readings of a machine, folded as they are read; whose a process or a device is, is known afterwards."""

    _KEY = ("pid", "device", "metric", "unit", "start_us")

    def __init__(self, parts: Iterable[RawHost]) -> None:
        self._folded: list[pl.DataFrame] = []
        settings = [empty("system")]
        for part in parts:
            frame = system_table([part])
            if frame.height:
                self._folded.append(self._fold(frame))
                settings.append(frame.filter(pl.col("metric") == _CLOCK_SET))
        told = pl.concat(settings)
        # launchers of one machine tell the same clock
        self.clock_set = told.filter(pl.col("host") == pl.col("host").min()).sort("time_ns", "value")

    def _fold(self, frame: pl.DataFrame) -> pl.DataFrame:
        frame = (
            frame.lazy()
            .filter(pl.col("time_ns").is_not_null() & pl.col("value").is_finite())
            .filter(pl.col("pid").is_null() | pl.col("metric").is_in([*_OF_RANKS, _COMPUTES]))
            .with_columns(start_us=pl.col("time_ns") // BUCKET_NS * (BUCKET_NS // 1000))
            .sort(*self._KEY, "time_ns", "value", nulls_last=True)
            .collect()
        )
        found = frame.group_by(self._KEY, maintain_order=True).agg(
            count=pl.len(), least=pl.col("value").min(), most=pl.col("value").max()
        )
        _, sums = _sums(frame.select(self._KEY), frame["value"])
        return found.with_columns(sum=pl.Series(sums))

    @cached_property
    def _all(self) -> pl.DataFrame:
        schema = {"pid": pl.Int64, "device": pl.String, "metric": pl.String, "unit": pl.String, "start_us": pl.Int64}
        more = {"count": pl.UInt32, "least": pl.Float64, "most": pl.Float64, "sum": pl.Float64}
        return pl.concat([pl.DataFrame(schema={**schema, **more}), *self._folded], how="vertical_relaxed")

    @property
    def is_empty(self) -> bool:
        return self._all.is_empty()

    def devices(self, infos: Iterable[RankInfo]) -> dict[int, str]:
        """The device that each rank alone computes on, by the driver's list of processes.

        Where it names none of ours (in a container it may tell numbers of the host), the n-th of all devices is the
        n-th rank's if there are as many.
        """
        infos = tuple(infos)
        ranks = {info.pid: info.rank for info in infos if info.pid >= 0}
        seen = self._all.filter((pl.col("metric") == _COMPUTES) & pl.col("pid").is_in(list(ranks)))
        pairs = {(ranks[pid], device) for pid, device in seen.select("pid", "device").unique().rows() if device}
        on = {device: [rank for rank, other in pairs if other == device] for _, device in pairs}
        of = {rank: [device for other, device in pairs if other == rank] for rank, _ in pairs}
        if pairs:
            return {rank: own[0] for rank, own in of.items() if len(own) == 1 and len(on[own[0]]) == 1}
        named = self._all.filter(pl.col("device").str.contains(r"^gpu:\d{1,6}$"))["device"].unique().to_list()
        there = sorted(named, key=lambda device: int(device.partition(":")[2]))
        numbers = sorted(info.rank for info in infos if info.device not in (None, "cpu"))
        return dict(zip(numbers, there, strict=True)) if len(there) == len(numbers) else {}

    def table(self, infos: Iterable[RankInfo], devices: Mapping[int, str]) -> pl.DataFrame:
        """Readings of the machine, of its devices and of ranks' processes in stretches of ten seconds."""
        owner = {device: rank for rank, device in devices.items()}
        ranks = {info.pid: info.rank for info in infos if info.pid >= 0}
        of_process = pl.col("pid").is_not_null()
        key = ["rank", "device", "metric", "unit", "start_us"]
        frame = (
            self._all.lazy()
            .filter(pl.col("metric") != _COMPUTES)
            .with_columns(
                rank=pl.when(of_process)
                .then(pl.col("pid").replace_strict(ranks, default=None, return_dtype=pl.Int32))
                .otherwise(pl.col("device").replace_strict(owner, default=None, return_dtype=pl.Int32))
            )
            .filter(~of_process | pl.col("rank").is_not_null())
            .sort(*key, maintain_order=True, nulls_last=True)
            .collect()
        )
        found = frame.group_by(key, maintain_order=True).agg(
            pl.col("count").sum(), least=pl.col("least").min(), most=pl.col("most").max()
        )
        _, sums = _sums(frame.select(key), frame["sum"])
        found = found.with_columns(mean=(pl.Series(sums) / pl.col("count")).round_sig_figs(_DIGITS))
        return found.select(pl.col(name).cast(kind) for name, kind in SCHEMAS["telemetry"].items())


def metrics(tables: Tables) -> pl.DataFrame:
    """Metrics in blocks of steps; what belongs to no step is left out."""
    key = ["rank", "block", "name"]
    frame = (
        tables.metrics.lazy()
        .filter(pl.col("step").is_not_null() & pl.col("rank").is_not_null() & (pl.col("step") >= 0))
        .filter(pl.col("value").is_not_null())
        .with_columns(block=pl.col("step") // STEPS_OF_BLOCK)
        .filter(pl.col("block") < 2**31)
        .sort(*key, "time_ns", "step", "source", "value", nulls_last=True)
        .collect()
    )
    finite = pl.col("value").is_finite()
    known = pl.col("value").filter(finite)
    found = frame.group_by(key, maintain_order=True).agg(
        count=pl.len(),
        least=known.min(),
        most=known.max(),
        last=pl.col("value").last(),
        not_finite=(~finite).sum(),
        usual=finite.sum(),
    )
    _, sums = _sums(frame.select(key), frame.select(pl.when(finite).then("value").otherwise(0.0)).to_series())
    found = found.with_columns(mean=pl.when(pl.col("usual") > 0).then(pl.Series(sums) / pl.col("usual")))
    return found.select(pl.col(name).cast(kind) for name, kind in SCHEMAS["metrics"].items())


def events(
    tables: Tables, clocks: Iterable[tuple[int, int, int]], clock_set: pl.DataFrame
) -> tuple[pl.DataFrame, list[str]]:
    """What happened once to ranks, in order of time, and in words what of it is not kept.

    Args:
        clocks: of a window the rank, when it was recorded, and by how much the system's clock had been moved by then,
            against the journal's steady one.
        clock_set: readings (`Telemetry.clock_set`) of by how much the host's clock had been set.
    """
    none = {"rank": None, "step": None, "duration_ns": None}
    rows = list(_of_ranks(tables))
    rows += [
        _event({**none, "rank": rank, "time_ns": at_ns}, "clock", f"moved by {ns / 1e6:+.1f} ms since recording began")
        for rank, at_ns, ns in clocks
        if ns
    ]
    told = clock_set.drop_nulls("time_ns").with_columns(by_ns=pl.col("value").diff())
    rows += [
        _event({**none, "time_ns": time_ns}, "clock", f"the clock was set by {by_ns / 1e6:+.3f} ms")
        for time_ns, by_ns in told.filter(pl.col("by_ns").is_finite()).select("time_ns", "by_ns").rows()
        if abs(by_ns) >= CLOCK_STEP_NS
    ]
    frame = pl.DataFrame(rows, schema=SCHEMAS["events"]).unique(maintain_order=True)
    order = ("rank", "start_us", "kind", "step", "duration_us", "file", "line", "function", "text")
    longest = pl.col("duration_us").fill_null(0).rank("ordinal", descending=True).over("rank")
    frame = frame.sort(order, nulls_last=True).with_columns(place=longest)
    kept = frame.filter(pl.col("place") <= MAX_EVENTS).drop("place")
    dropped = frame.height - kept.height
    return kept, [f"{dropped:,} of {frame.height:,} events: the longest {MAX_EVENTS:,} of a rank are kept"] * bool(
        dropped
    )


def _event(row: Mapping[str, Any], kind: str, text: object, place: Mapping[str, Any] | None = None) -> dict[str, Any]:
    file, line, function = ((place or {}).get(name) for name in ("file", "line", "function"))
    step, number = row["step"], integer(line)
    return {
        "rank": row["rank"],
        "step": step if step is not None and 0 <= step < 2**31 else None,
        "start_us": None if row["time_ns"] is None else row["time_ns"] // 1000,
        "duration_us": None if row["duration_ns"] is None else row["duration_ns"] // 1000,
        "kind": kind,
        "file": string(file),
        "line": number if number is not None and 0 <= number < 2**31 else None,
        "function": string(function),
        "text": str(text)[:MAX_TEXT] if text is not None else None,
    }


def _of_ranks(tables: Tables) -> Iterator[dict[str, Any]]:
    for row, data in event_data(tables, "gc"):
        if (row["duration_ns"] or 0) >= LEAST_GC_NS:
            text = f"generation {data.get('generation')}, {data.get('collected')} objects collected"
            yield _event(row, "gc", text, data)
    for row in tables.compiles.filter(pl.col("kind").is_in(_COMPILING)).iter_rows(named=True):
        yield _event(row, "compile", f"{row['kind']}: {row['reason'] or row['graph'] or row['backend']}", row)
    for row, data in event_data(tables, "save"):
        yield _event(row, "checkpoint", data.get("path"), data)
    for row, data in event_data(tables, "alarm"):
        yield _event(row, "alarm", f"{data.get('series')} is {data.get('value')}", data)
    before: dict[tuple[str, str], int] = {}
    for row, data in event_data(tables, "memory"):
        # by such a reading the allocator had given its cache back and tried again; how long that took nothing tells
        count = integer(data.get("retries"))
        key = row["process"], str(data.get("device"))
        more = 0 if count is None else count - before.get(key, 0)
        before[key] = before.get(key, 0) + more
        if more > 0:
            yield _event({**row, "duration_ns": None}, "retry", f"{more} on {key[1]} since the reading before")
