"""Rows to typed tables: joins processes to ranks, slices to steps, stacks to phases; decides nothing else."""

from __future__ import annotations

from stepscope.read.raw import RawRun
from stepscope.tables import facts, journal
from stepscope.tables.events import events_table
from stepscope.tables.processes import host_processes, processes_table
from stepscope.tables.quality import quality
from stepscope.tables.schema import Tables, empty
from stepscope.tables.stacks import stacks_table
from stepscope.tables.steps import steps_table


def build(raw: RawRun) -> Tables:
    """The tables of a run. Every frame has the columns of `SCHEMAS`; what was lost is in `quality`."""
    processes = [host_processes(host, raw.ranks, only_host=len(raw.hosts) == 1) for host in raw.hosts]
    ranks = facts.rank_infos(raw.ranks, processes)
    events = events_table(raw.ranks)
    stacks = stacks_table(raw.hosts, {host.host: host for host in processes}, raw.ranks)
    return Tables(
        run=facts.run_facts(raw, ranks),
        quality=quality(raw, processes, events, stacks),
        ranks=ranks,
        manifests=tuple(host.manifest for host in raw.hosts if host.manifest is not None),
        steps=steps_table(raw.ranks),
        journal=journal.journal_table(raw.ranks),
        events=events.frame,
        stacks=stacks.frame,
        system=journal.system_table(raw.hosts),
        processes=processes_table(processes),
        compiles=journal.compiles_table(raw.ranks),
        memory=empty("memory"),
        scalars=journal.scalars_table(raw.ranks),
    )
