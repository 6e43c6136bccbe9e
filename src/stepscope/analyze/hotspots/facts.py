"""What hotspots stand on: files, processes and threads, how long was sampled, and what a reader must be warned of."""

from __future__ import annotations

import polars as pl
from msgspec import Struct

from stepscope.analyze.hotspots import idle
from stepscope.analyze.hotspots.idle import IdleMode
from stepscope.analyze.sampled.selection import Chosen
from stepscope.engine import intervals
from stepscope.model.sampled import SampledProcess
from stepscope.tables.schema import Tables

NOT_KEPT = "torn or the recorder's own"
FEW_SAMPLES = 100  # a share of p then has a standard error of up to 5 percent points
OF_STACKS = ("stacks", "stacks.jsonl")  # sources of the tables' notes that concern samples

_PROCESS = ["host", "in_file", "pid", "role", "rank"]


class SampleFacts(Struct, frozen=True):
    """The fields of `Hotspots` that do not depend on how rows are grouped."""

    samples: int
    skipped_samples: int
    left_out: dict[str, int]
    processes: tuple[SampledProcess, ...]
    files: int
    formats: tuple[str, ...]
    mode: IdleMode
    rate_hz: float | None
    wall_s: float | None
    wall_source: str | None
    warnings: tuple[str, ...]


def unit(tables: Tables) -> str:
    """What the counts are; "mixed" where files differ, so that their sum means nothing."""
    units = tables.segments["unit"].drop_nulls().unique().to_list()
    return "samples" if not units else str(units[0]) if len(units) == 1 else "mixed"


def facts(tables: Tables, chosen: Chosen, counted: str) -> SampleFacts:
    """What is known of the samples; `counted` is their unit."""
    segments = tables.segments
    kept = int(tables.stacks["samples"].sum())
    read = max(int(segments["samples"].fill_null(0).sum()), kept)
    left_out = {**chosen.left_out, **({NOT_KEPT: read - kept} if read > kept else {})}
    mode = idle.idle_mode(tables)
    rates = segments["rate_hz"].drop_nulls().unique().to_list() if segments["rate_hz"].null_count() == 0 else []
    rate = float(rates[0]) if len(rates) == 1 else None
    wall_s, wall_source = _wall(tables, rate, counted)
    found = _processes(chosen.rows)
    skipped = int(segments["skipped_samples"].fill_null(0).sum())
    return SampleFacts(
        samples=read,
        skipped_samples=skipped,
        left_out=left_out,
        processes=found,
        files=segments.select("host", "file").n_unique(),
        formats=tuple(sorted(segments["format"].drop_nulls().unique().to_list())),
        mode=mode,
        rate_hz=rate,
        wall_s=wall_s,
        wall_source=wall_source,
        warnings=tuple(_warnings(tables, chosen, found, mode, counted, skipped)),
    )


def _processes(rows: pl.DataFrame) -> tuple[SampledProcess, ...]:
    # of files that others recorded nobody knows the host, so equal process ids of two files are two processes
    named = rows.with_columns(
        pl.col("role").fill_null("other"),
        in_file=pl.when(pl.col("host").fill_null("") == "").then("file"),
    )
    found = named.group_by(_PROCESS).agg(
        threads=pl.col("thread").drop_nulls().n_unique(),
        samples=pl.col("samples").sum(),
        waiting=pl.col("samples").filter(pl.col("waiting").fill_null(False)).sum(),
    )
    ordered = found.sort(["samples", "rank", *_PROCESS[:4]], descending=[True, *[False] * 5], nulls_last=True)
    return tuple(
        SampledProcess(
            host=row["host"] or "",
            pid=row["pid"],
            role=row["role"],
            rank=row["rank"],
            threads=row["threads"] or None,
            samples=row["samples"],
            waiting_samples=row["waiting"],
        )
        for row in ordered.iter_rows(named=True)
    )


def _wall(tables: Tables, rate: float | None, counted: str) -> tuple[float | None, str | None]:
    """How long sampling lasted: of files that run side by side the longest, of segments with times their union."""
    segments = tables.segments
    timed = segments.filter(pl.col("start_ns").is_not_null() & pl.col("end_ns").is_not_null())
    if timed.height:
        sampled = intervals.union(timed["start_ns"].to_numpy(), timed["end_ns"].to_numpy())
        return intervals.total(sampled) / 1e9, idle.RECORDED
    told = segments["wall_ns"].drop_nulls()
    if len(told):
        return float(told.max() or 0) / 1e9, idle.RECORDED  # type: ignore[arg-type]
    second = {"samples": 1.0 / rate if rate else None, "us": 1e-6}.get(counted)
    one_thread = tables.stacks.filter(pl.col("thread").is_not_null())
    if second is None or one_thread.is_empty():
        return None, None
    busiest = one_thread.group_by("host", "file", "pid", "thread").agg(pl.col("samples").sum())["samples"].max()
    return float(busiest or 0) * second, "nominal"  # type: ignore[arg-type]


def _warnings(
    tables: Tables, chosen: Chosen, found: tuple[SampledProcess, ...], mode: IdleMode, counted: str, skipped: int
) -> list[str]:
    selected = int(chosen.rows["samples"].sum())
    texts = [*_on_waiting(mode, counted), *_on_processes(found)]
    if counted == "mixed":
        texts.append(
            "the files count different things (samples, time, bytes), so their sums mean little; open them apart"
        )
    elif counted == "samples" and 0 < selected < FEW_SAMPLES:
        texts.append(f"only {selected} samples: shares may be off by several percent points; sample for longer")
    broken = tables.quality.counts.get("skipped_records", 0)
    if skipped:
        texts.append(f"{skipped:,} samples could not be read and are in no row")
    elif broken:
        texts.append(f"{broken:,} record(s) are cut off or damaged, their counts too, and are in no row")
    if not selected:
        texts.append("no sample is left after selection")
    strangers = tables.quality.counts.get("foreign_files", 0)
    if strangers and (tables.segments["host"] == "").all():
        texts.append(f"{strangers} file(s) beside them hold no sampled stacks and were left out")
    return [*texts, *(note.text for note in tables.quality.notes if note.source in OF_STACKS)]


def _on_waiting(mode: IdleMode, counted: str) -> list[str]:
    how = "" if mode.source == idle.RECORDED else ", as threads that only wait are all but missing"
    if counted == "bytes":
        return []
    if mode.idle is False:
        return [
            f"waiting was not sampled{how}: time in which the program waited (for its loader, a device, another rank) "
            "is missing here; record with --idle to see it"
        ]
    if mode.idle is None:
        return [
            "whether waiting was sampled is unknown: if not (py-spy without --idle), time in which the program waited "
            "is missing here"
        ]
    return []


def _on_processes(found: tuple[SampledProcess, ...]) -> list[str]:
    if len(found) < 2:
        return []
    ranks = sum(process.role == "rank" for process in found)
    workers = sum(process.role == "loader_worker" for process in found)
    parts = [(ranks, "ranks"), (workers, "loader workers"), (len(found) - ranks - workers, "others")]
    named = ", ".join(f"{count} {name if count > 1 else name.rstrip('s')}" for count, name in parts if count)
    only = "--process main shows the ranks alone" if workers else "--rank N shows one of them"
    texts = [
        f"{len(found)} processes are summed ({named}): they run beside each other, so shares are of the time of all of "
        f"them and not of the run's; {only}"
    ]
    if ranks > 1 and all(process.host == "" for process in found):
        texts.append(
            "the files do not name ranks: they are numbered by file and process id, which may be another order"
        )
    return texts
