"""The reduced tables of a machine, from its journals, stacks and telemetry and what its traces were reduced to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from msgspec.structs import replace

from stepscope import __version__
from stepscope.analyze import sites
from stepscope.analyze.context import Context
from stepscope.analyze.curves import with_tokens
from stepscope.analyze.ranks.durations import exchange_phases
from stepscope.engine import step_labels
from stepscope.errors import UnreadableInputError
from stepscope.read.raw import Losses, RawRank, RawRun
from stepscope.read.run_folder import read_parts, read_telemetry
from stepscope.read.text import moment_ns
from stepscope.reduction import folded
from stepscope.reduction.plan import HostPlan, in_words
from stepscope.reduction.trace import TraceRows, nothing
from stepscope.schema import PHASES, REDUCED_SCHEMA
from stepscope.tables import build
from stepscope.tables.reduced import LABELS, MAX_RANK, SCHEMAS, Index, ReducedRank
from stepscope.tables.schema import Tables

MAX_US = 2**32 - 1  # of a part of a step, more than an hour; what is longer is null
MAX_LEFT_OUT = 200  # lines; how many more there are is said
_FROM_MANIFEST = ("name", "tags", "command", "cwd", "script", "user_roots", "scheduler", "recorder_version", "options")


def reduce_host(plan: HostPlan, traces: Sequence[tuple[str, TraceRows]]) -> tuple[Index, dict[str, pl.DataFrame]]:
    """The index of the machine's reduced tables, but for its files, and the tables.

    Raises UnreadableInputError where nothing of its files can be read.

    Args:
        traces: each with the folder of its rank, in the order of the plan.
    """
    raw = _raw(plan, traces)
    first: dict[int, str] = {}  # of a number, which in a sound run all are
    for rank in raw.ranks:
        if rank.rank < MAX_RANK:
            first.setdefault(rank.rank, rank.name)
    numbers = {name: number for number, name in first.items()}
    damaged = [rank.name for rank in raw.ranks if rank.name not in numbers]
    raw = replace(raw, ranks=tuple(rank for rank in raw.ranks if rank.name in numbers))
    traces = [(process, rows) for process, rows in traces if process in numbers]
    tables = build(raw)
    read = (part for name in plan.launchers for part in read_telemetry(Path(plan.run, name), raw.losses))
    telemetry = folded.Telemetry(read)
    told = any(rank.info or rank.journal for rank in raw.ranks)
    if not told and tables.steps.is_empty() and telemetry.is_empty and tables.stacks.is_empty():
        raise UnreadableInputError(f"{plan.run}: nothing of host {plan.host} can be read")
    compiled = _of_traces("compiles", traces)
    journaled = tables.compiles.select("process").unique()
    compiled = compiled.join(journaled, on="process", how="anti", maintain_order="left")
    tables = replace(tables, compiles=pl.concat([tables.compiles, compiled]))
    context = Context(tables)
    cut = _of_traces("cut", traces).unique(["process", "start_ns"], keep="first", maintain_order=True)
    labelled = step_labels.label(tables, cut)
    context.__dict__["labelled"] = labelled
    exchange = exchange_phases(context, sites.facts(tables))
    devices = telemetry.devices(tables.ranks)
    steps, too_long = _steps(context, raw, _of_traces("step_sums", traces))
    # what two traces of a rank both hold is there once
    key = ("rank", "step", "group", "kind", "sequence", "start_ns", "end_ns")
    order = ("step", "rank", "start_ns", "end_ns", "kind", "group")
    collectives = _of_traces("collectives", traces).unique(key, keep="first", maintain_order=True)
    collectives = collectives.sort(order, nulls_last=True, maintain_order=True)
    clocks = [
        (numbers[process], rows.start_ns, -rows.offset_ns) for process, rows in traces if rows.start_ns is not None
    ]
    events, dropped = folded.events(tables, clocks, telemetry.clock_set)
    ranks = tuple(
        ReducedRank(
            rank=info.rank,
            process=info.process,
            pid=info.pid if info.pid >= 0 else None,
            device=devices.get(info.rank, info.device),
            exchange=None if exchange is None else exchange[0],
            exchange_source="" if exchange is None else exchange[1],
            samples_per_second=folded.sampling_rate(tables, info.process),
        )
        for info in sorted(tables.ranks, key=lambda info: info.rank)
    )
    sizes = [*(info.world_size for info in tables.ranks), *(rows.world_size for _, rows in traces)]
    groups = {group.id: group for _, rows in traces for group in rows.groups}
    problems = [*plan.left_out, *(text for _, rows in traces for text in rows.left_out), *in_words(raw.losses)]
    problems += [f"{too_long:,} parts of steps longer than {MAX_US / 6e7:.0f} minutes"] if too_long else []
    problems += dropped
    problems += [f"{name}: the number of its rank is damaged, or another's too" for name in damaged]
    if len(problems) > MAX_LEFT_OUT:
        problems[MAX_LEFT_OUT:] = [f"{len(problems) - MAX_LEFT_OUT:,} more"]
    index = Index(
        schema=REDUCED_SCHEMA,
        version=__version__,
        host=plan.host,
        world_size=max((size for size in sizes if size is not None and 0 < size <= MAX_RANK), default=None),
        ranks=ranks,
        groups=tuple(groups[name] for name in sorted(groups)),
        tables={},
        source=plan.source,
        run=_run_facts(tables),
        left_out=tuple(problems),
    )
    return index, {
        "steps": steps,
        "collectives": collectives,
        "folded": folded.collectives(collectives),
        "work": _work(_of_traces("work", traces), tables, steps),
        "lines": folded.lines(context),
        "telemetry": telemetry.table(tables.ranks, devices),
        "metrics": folded.metrics(tables),
        "events": events,
    }


def _raw(plan: HostPlan, traces: Sequence[tuple[str, TraceRows]]) -> RawRun:
    """The machine's part of the run without its traces; a rank without a journal has the steps its traces mark."""
    if plan.recorded:
        raw = read_parts(Path(plan.run), (*plan.launchers, *plan.processes))
    else:
        ranks = {trace.process: RawRank(trace.process, trace.rank) for trace in plan.others}
        raw = RawRun(Path(plan.run), (), tuple(ranks.values()), Losses())
    ranks_read = []
    for rank in raw.ranks:
        own = [rows for name, rows in traces if name == rank.name]
        steps = sorted((row for rows in own for row in rows.steps), key=lambda row: int(row["start_ns"]))
        info = rank.info or next(({"world_size": rows.world_size, "device": rows.device} for rows in own), None)
        ranks_read.append(replace(rank, traces=(), steps=rank.steps or tuple(steps), info=info))
    return replace(raw, ranks=tuple(ranks_read))


def _of_traces(name: str, traces: Sequence[tuple[str, TraceRows]]) -> pl.DataFrame:
    frames = [rows.frame(name) for _, rows in traces]
    return pl.concat(frames) if frames else nothing(name)


def _run_facts(tables: Tables) -> dict[str, Any]:
    """What manifests say of the run: the first start, the last end where all have one, the first bad status."""
    manifests = tables.manifests
    if not manifests:
        return {}
    first = manifests[0]
    starts = [time for one in manifests if (time := moment_ns(one.get("started_ns"))) is not None]
    ends = [time for one in manifests if (time := moment_ns(one.get("ended_ns"))) is not None]
    exits = [one["exit"] for one in manifests if isinstance(one.get("exit"), dict)]
    bad = [one for one in exits if one.get("shell_status")]
    told = first.get("hardware")
    hardware: dict[str, Any] = told if isinstance(told, dict) else {}
    kept = ("cpu_model", "logical_cores", "physical_cores", "memory_bytes", "gpus")
    return {
        **{name: first[name] for name in _FROM_MANIFEST if name in first},
        "started_ns": min(starts, default=None),
        "ended_ns": max(ends) if ends and len(ends) == len(manifests) else None,
        "exit": next(iter(bad or exits), None),
        "hardware": {name: hardware[name] for name in kept if name in hardware},
    }


def _steps(context: Context, raw: RawRun, sums: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """All steps with the reason why one counts or not, and how many of their parts were too long for their columns."""
    tables = context.tables
    frame = with_tokens(context.labelled.frame.filter(pl.col("start_ns").is_not_null()).lazy(), tables.metrics)
    sums = sums.unique(["process", "step"], keep="first", maintain_order=True)
    collected = tables.journal.lazy().filter((pl.col("kind") == "gc") & (pl.col("duration_ns") > 0))
    collected = collected.group_by("process", "step").agg(gc_ns=pl.col("duration_ns").sum())
    watched = [  # collections in a step of theirs would have been written down
        rank.name
        for rank in raw.ranks
        if rank.journal
        and not any(row["kind"] == "probe_error" and row.get("probe") == "collector" for row in rank.journal)
    ]
    micro = {
        "wall_us": pl.col("wall_ns"),
        **{f"{phase}_us": pl.col(f"{phase}_ns") for phase in PHASES},
        "gc_us": pl.when(pl.col("process").is_in(watched)).then(pl.col("gc_ns").fill_null(0)),
        "device_us": pl.col("device_ns"),
    }
    whole = (
        frame.join(collected, on=["process", "step"], how="left")
        .join(sums.lazy(), on=["process", "step"], how="left")
        .filter(pl.col("step").is_between(0, 2**31 - 1))
        .with_columns(
            start_us=pl.col("start_ns") // 1000,
            # a step that was evaluated is one of them, whatever else it is
            label=pl.when(pl.col("kind") == "eval")
            .then(pl.lit("eval"))
            .otherwise(pl.col("reason"))
            .replace_strict({name: number for number, name in enumerate(LABELS)}, return_dtype=pl.UInt8),
            tokens=pl.col("tokens").round().cast(pl.Int64, strict=False),
            **{name: value // 1000 for name, value in micro.items()},
        )
        .sort("step", "rank", "process")
        .collect()
    )
    columns = [name for name, kind in SCHEMAS["steps"].items() if kind == pl.UInt32]
    fits = {name: pl.col(name).is_between(0, MAX_US) for name in columns}
    too_long = int(whole.select(pl.sum_horizontal((~fits[name]).sum() for name in columns)).item())
    whole = whole.with_columns(pl.when(fits[name]).then(pl.col(name)).alias(name) for name in columns)
    return whole.select(pl.col(name).cast(kind) for name, kind in SCHEMAS["steps"].items()), too_long


def _work(found: pl.DataFrame, tables: Tables, steps: pl.DataFrame) -> pl.DataFrame:
    windows = steps.filter(pl.col("label") == LABELS.index("window")).select("rank", pl.col("step").cast(pl.Int64))
    gc = tables.journal.filter((pl.col("kind") == "gc") & (pl.col("duration_ns") > 0))
    gc = gc.join(windows, on=["rank", "step"], how="semi").select(
        "rank",
        "step",
        kind=pl.lit("gc"),
        microbatch=pl.lit(None),
        chunk=pl.lit(None),
        start_ns="time_ns",
        end_ns=pl.col("time_ns") + pl.col("duration_ns"),
    )
    columns = SCHEMAS["work"]
    both = pl.concat([found, gc.select(pl.col(name).cast(kind) for name, kind in columns.items())])
    key = ("step", "rank", "start_ns", "end_ns", "kind", "microbatch", "chunk")
    return both.unique(key, keep="first", maintain_order=True).sort(key, nulls_last=True, maintain_order=True)
