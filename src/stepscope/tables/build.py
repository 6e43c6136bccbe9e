"""Rows to typed tables: joins processes to ranks, slices to steps, stacks to phases; decides nothing else."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.read.raw import RawRun
from stepscope.tables import compiles, facts, journal
from stepscope.tables.arrays import return_freed_memory
from stepscope.tables.cache import BuildOptions
from stepscope.tables.events import EventsTable, events_table
from stepscope.tables.foreign import foreign_processes
from stepscope.tables.processes import HostProcesses, host_processes, processes_table
from stepscope.tables.quality import quality
from stepscope.tables.schema import Tables
from stepscope.tables.stacks import StackRows
from stepscope.tables.steps import steps_table


def build(raw: RawRun, options: BuildOptions | None = None) -> Tables:
    """The tables of a run. Every frame has the columns of `SCHEMAS`; what was lost is in `quality`.

    Raises UnreadableInputError when the run is made of traces alone and none of them can be read.
    """
    options = options or BuildOptions()
    traces = events_table(raw.ranks, options)
    return_freed_memory(traces.events.height)
    _check(raw, traces)
    raw = _with_trace_steps(raw, traces, options)
    rows = StackRows(raw.hosts, raw.losses, options.progress)
    raw, processes = _with_processes(raw, rows)
    ranks = facts.rank_infos(raw.ranks, processes, traces.read)
    stacks = rows.tables(processes, raw.ranks)
    steps = steps_table(raw.ranks)
    return Tables(
        run=facts.run_facts(raw, ranks),
        quality=quality(raw, processes, traces, stacks),
        ranks=ranks,
        manifests=tuple(host.manifest for host in raw.hosts if host.manifest is not None),
        steps=steps,
        journal=journal.journal_table(raw.ranks),
        events=traces.events,
        links=traces.links,
        traces=traces.traces,
        segments=stacks.segments,
        stacks=stacks.stacks,
        stretches=stacks.stretches,
        nodes=stacks.nodes,
        frames=stacks.frames,
        system=journal.system_table(raw.hosts),
        processes=processes_table(processes),
        compiles=compiles.compiles_table(raw.ranks, steps, traces),
        counters=journal.counters_table(raw.ranks),
        memory=traces.memory,
        scalars=journal.scalars_table(raw.ranks),
    )


def _with_processes(raw: RawRun, rows: StackRows) -> tuple[RawRun, list[HostProcesses]]:
    """The processes of every host. Files of stacks that others recorded have no ranks but those found in them."""
    found: list[HostProcesses] = []
    for host, taken in zip(raw.hosts, rows.taken, strict=True):
        if host.name:
            found.append(host_processes(host, raw.ranks, only_host=len(raw.hosts) == 1))
            continue
        processes, ranks = foreign_processes(host, taken, first_rank=len(raw.ranks))
        found.append(processes)
        raw = replace(raw, ranks=(*raw.ranks, *ranks))
    return raw, found


def _check(raw: RawRun, traces: EventsTable) -> None:
    alone = not raw.hosts and not any(rank.steps or rank.journal or rank.info for rank in raw.ranks)
    if alone and traces.unreadable and not traces.read:
        raise UnreadableInputError(next(iter(traces.unreadable.values())))


def _with_trace_steps(raw: RawRun, traces: EventsTable, options: BuildOptions) -> RawRun:
    """Ranks without a journal get the steps of their traces; steps nobody asked for are left out."""
    ranks = []
    for rank in raw.ranks:
        steps = rank.steps
        if not steps and rank.name in traces.steps:
            rows = sorted(traces.steps[rank.name], key=lambda row: int(row["start_ns"]))
            steps = tuple({"device_ns": None, **row} for row in rows)
        elif options.steps is not None:
            steps = tuple(row for row in steps if options.steps[0] <= row["step"] <= options.steps[1])
        ranks.append(replace(rank, steps=steps))
    return replace(raw, ranks=tuple(ranks))
