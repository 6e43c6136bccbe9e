"""Rows to typed tables: joins processes to ranks, slices to steps, stacks to phases; decides nothing else.

What ran, from manifests and rank.json files; a field no one recorded is None or empty. `write` keeps the tables as
Parquet files (zstd) in RUN/tables: derived, safe to delete, readable by anything. `tables.json` beside them holds the
version and what is no table. It is removed first and written last, so an interrupted write never looks whole.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.model import RunFacts, SourceFiles
from stepscope.read.raw import RawRank, RawRun
from stepscope.read.text import integer, moment_ns, string
from stepscope.schema import TABLES_SCHEMA
from stepscope.tables import compiles, journal
from stepscope.tables.arrays import return_freed_memory
from stepscope.tables.cache import BuildOptions, EventsTable, events_table
from stepscope.tables.journal import chosen, steps_table
from stepscope.tables.metrics import metrics_table
from stepscope.tables.processes import HostProcesses, host_processes, job_facts, processes_table
from stepscope.tables.quality import quality
from stepscope.tables.schema import SCHEMAS, RankInfo, Tables
from stepscope.tables.stacks import StackRows, foreign_processes
from stepscope.tables.trace_entry import ReadTrace, write_parquet


def build(raw: RawRun, options: BuildOptions | None = None) -> Tables:
    """The tables of a run. Every frame has the columns of `SCHEMAS`; what was lost is in `quality`.

    Raises UnreadableInputError when the run is made of traces alone and none of them can be read.
    """
    options = options or BuildOptions()
    traces = events_table(raw.ranks, options)
    return_freed_memory(traces.events.height)
    alone = not raw.hosts and not any(rank.steps or rank.journal or rank.info for rank in raw.ranks)
    if alone and traces.unreadable and not traces.read:
        raise UnreadableInputError(next(iter(traces.unreadable.values())))
    raw = _with_trace_steps(raw, traces, options)
    rows = StackRows(raw.hosts, raw.losses, options.progress)
    raw, processes = _with_processes(raw, rows)
    ranks = rank_infos(raw.ranks, processes, traces.read)
    stacks = rows.tables(processes, raw.ranks)
    steps = steps_table(raw.ranks)
    compiled = compiles.compiles_table(raw.ranks, steps, traces)
    unknown = compiles.unknown_messages(compiled, raw.ranks)
    return Tables(
        run=run_facts(raw, ranks),
        quality=quality(raw, processes, traces, rows.counts, unknown),
        ranks=ranks,
        manifests=tuple(host.manifest for host in raw.hosts if host.manifest is not None),
        steps=steps,
        **journal.journal_tables(raw.ranks),
        metrics=metrics_table(raw.ranks),
        events=traces.events,
        links=traces.links,
        traces=traces.traces,
        **stacks,
        system=journal.system_table(raw.hosts),
        processes=processes_table(processes),
        compiles=compiled,
        memory=traces.memory,
    )


def _with_processes(raw: RawRun, rows: StackRows) -> tuple[RawRun, list[HostProcesses]]:
    found: list[HostProcesses] = []
    for host, taken in zip(raw.hosts, rows.taken, strict=True):
        if host.name:
            found.append(host_processes(host, raw.ranks, only_host=len(raw.hosts) == 1))
            continue
        processes, ranks = foreign_processes(host, taken, first_rank=len(raw.ranks))
        found.append(processes)
        raw = replace(raw, ranks=(*raw.ranks, *ranks))
    return raw, found


def _with_trace_steps(raw: RawRun, traces: EventsTable, options: BuildOptions) -> RawRun:
    """Ranks without a journal get the steps of their traces; steps nobody asked for are left out."""

    def steps_of(rank: RawRank) -> tuple[dict[str, Any], ...]:
        if rank.steps:
            return tuple(chosen(list(rank.steps), options.steps))
        rows = [row for trace in traces.read if trace.rank.name == rank.name for row in trace.steps]
        return tuple(sorted(rows, key=lambda row: int(row["start_ns"])))

    return replace(raw, ranks=tuple(replace(rank, steps=steps_of(rank)) for rank in raw.ranks))


MAX_SOURCES = 1_000_000  # hashes of all ranks together; the recorder writes at most 1,000 of a rank
_SIGNAL_BASE = 128  # a shell's exit status of a command killed by signal n is 128 + n


def run_facts(raw: RawRun, ranks: Sequence[RankInfo]) -> RunFacts:
    """One RunFacts for all hosts: the earliest start, the latest end, the first exit status that is not 0."""
    manifests = [host.manifest for host in raw.hosts if host.manifest is not None]
    first: Mapping[str, Any] = manifests[0] if manifests else {}
    starts = [time for manifest in manifests if (time := moment_ns(manifest.get("started_ns"))) is not None]
    ends = [moment_ns(manifest.get("ended_ns")) for manifest in manifests]
    known_ends = [time for time in ends if time is not None]
    statuses = [status for manifest in manifests if (status := _exit_status(manifest.get("exit"))) is not None]
    told = {"python": string(first.get("python")), "stepscope": string(first.get("recorder_version"))}
    sizes = [info.world_size for info in ranks if info.world_size is not None]
    sources = (event for rank in raw.ranks for event in rank.journal if event["kind"] == "sources")
    hashes = (pair for event in sources for pair in _texts(event.get("hashes")).items())
    return RunFacts(
        folder=str(raw.folder),
        name=string(first.get("name")) or raw.folder.name,
        tags=_strings(first.get("tags")),
        command=_strings(first.get("command")),
        cwd=string(first.get("cwd")) or "",
        started_ns=min(starts, default=None),
        ended_ns=max(known_ends, default=None) if len(known_ends) == len(manifests) else None,
        exit_status=next((status for status in statuses if status), statuses[0] if statuses else None),
        hosts=tuple(host.name for host in raw.hosts if host.name),
        ranks=tuple(sorted({info.rank for info in ranks})),
        world_size=max(sizes, default=None),
        versions={name: value for name, value in told.items() if value} | (ranks[0].versions if ranks else {}),
        hardware=_mapping(first.get("hardware")),
        noise=_mapping(first.get("noise")),
        git=_mapping(first.get("git")) or None,
        user_roots=tuple(dict.fromkeys(root for m in manifests for root in _strings(m.get("user_roots")))),
        source_hashes=SourceFiles.agreed(islice(hashes, MAX_SOURCES)),
        job=job_facts(raw),
    )


def rank_infos(
    ranks: Iterable[RawRank], hosts: Iterable[HostProcesses], traces: Iterable[ReadTrace]
) -> tuple[RankInfo, ...]:
    """One RankInfo per rank folder; the host is the one in whose agents.jsonl the folder was claimed.

    What no rank.json says, the rank's traces may: the size of the world, and the kind of device.
    """
    traced = {
        trace.rank.name: {"world_size": trace.index.world_size, "device": trace.index.device}
        for trace in reversed(list(traces))
    }
    claims = {process.claimed: (host.host, process) for host in hosts for process in host.all if process.claimed}

    def described(rank: RawRank) -> RankInfo:
        info = rank.info or traced.get(rank.name, {})
        host, process = claims.get(rank.name, (None, None))
        pid = integer(info.get("pid"))
        return RankInfo(
            rank=rank.rank,
            process=rank.name,
            pid=pid if pid is not None else process.pid if process else -1,
            host=host or string(info.get("host")) or "",
            world_size=integer(info.get("world_size")),
            device=string(info.get("device")),
            main_file=string(info.get("main_file")),
            started_ns=moment_ns(info.get("started_ns")),
            versions=_texts(info.get("versions")),
            threads=integer(info.get("threads")),
            hook=string(info.get("hook")),
        )

    return tuple(map(described, ranks))


def _exit_status(value: Any) -> int | None:
    if not isinstance(value, dict):
        return None
    shell = integer(value.get("shell_status"))
    if shell is not None:
        return shell
    signal = integer(value.get("signal"))
    return _SIGNAL_BASE + signal if signal else integer(value.get("status"))


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def _texts(value: Any) -> dict[str, str]:
    return {key: item for key, item in value.items() if isinstance(item, str)} if isinstance(value, dict) else {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


FOLDER = "tables"
TABLES_INDEX = "tables.json"


def write(tables: Tables, folder: Path) -> Path:
    """Write every table to `folder`/tables and return that folder; raises OSError, also where a link leads elsewhere.

    What lies there is not written into but exchanged: it may be a link, or a pipe, or another command may read it.
    """
    target = folder / FOLDER
    if target.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
    target.mkdir(parents=True, exist_ok=True)
    (target / TABLES_INDEX).unlink(missing_ok=True)
    for name in SCHEMAS:
        file = target / f"{name}.parquet"
        file.unlink(missing_ok=True)
        write_parquet(getattr(tables, name), file)
    index = {
        "schema": TABLES_SCHEMA,
        **{name: getattr(tables, name) for name in ("run", "quality", "ranks", "manifests")},
    }
    part = target / f"{TABLES_INDEX}.part"
    part.unlink(missing_ok=True)
    part.write_bytes(msgspec.json.encode(index))
    part.replace(target / TABLES_INDEX)
    return target
