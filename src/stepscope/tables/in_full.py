"""Of a run of many ranks: which of them are read in full, and what stands for those whose recording is not here.

All ranks are judged by reduced tables. Stacks, traces and telemetry are read of those alone that the verdict points at,
so that a report on a thousand ranks reads no more than one on a few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.model.ranks import RanksRead
from stepscope.read import Chosen, read_run
from stepscope.read.accounting import read_accounting
from stepscope.read.raw import RawRun
from stepscope.read.run_folder import ranks_in
from stepscope.schema import ACCOUNTING
from stepscope.tables.reduced import Reduced, as_raw

MOST_IN_FULL = 16  # ranks of a run that are read in full, verdict or not
MOST_CHOSEN = 20  # of more
READ_OF_HEALTHY = 4  # where none is a suspect


def all_are_read(folder: Path, reduced: Reduced) -> bool:
    """Whether a run is so small, and so completely here, that its reduced tables are not needed."""
    return len(reduced.ranks) <= MOST_IN_FULL and ranks_in(folder) >= set(reduced.ranks)


def chosen(reduced: Reduced, suspects: Sequence[int], asked_for: Collection[int]) -> tuple[int, ...]:
    """The ranks to look at: suspects and their peers, of a run without any a few; and those that somebody asked for."""
    ranks = reduced.ranks
    some = suspects or ranks[:: max(1, len(ranks) // READ_OF_HEALTHY)][:READ_OF_HEALTHY]
    return tuple(sorted({*some[:MOST_CHOSEN], *asked_for}))


def read(folder: Path, reduced: Reduced, ranks: Sequence[int]) -> RawRun:
    """These ranks with their hosts, the others left where they are; steps of reduced tables for ranks not in `folder`.

    Raises UnreadableInputError where nothing of the ranks can be read.
    """
    here = ranks_in(folder).intersection(ranks)
    told = as_raw(reduced, ranks)
    told = replace(told, accounting=read_accounting(folder / ACCOUNTING, told.losses))
    if not here:
        return told
    try:
        raw = read_run(folder, Chosen(here, _hosts(folder, {reduced.host_of.get(rank) for rank in here})))
    except UnreadableInputError:
        return told
    told = as_raw(reduced, set(ranks) - here)
    names = {host.name for host in raw.hosts}
    return replace(
        raw,
        hosts=(*raw.hosts, *(host for host in told.hosts if host.name not in names)),
        ranks=tuple(sorted((*raw.ranks, *told.ranks), key=lambda rank: (rank.rank, rank.name))),
    )


def _hosts(folder: Path, names: Collection[str | None]) -> frozenset[str]:
    """Those of a run folder: a node has as many as it had launchers, "node1" and "node1.2"."""
    found = (path.name.removeprefix("host-") for path in folder.glob("host-*"))
    known = {name for name in names if name is not None}
    return frozenset(
        name for name in found if not known or name in known or any(name.startswith(f"{host}.") for host in known)
    )


def stands_on(folder: Path, reduced: Reduced, ranks: Sequence[int]) -> RanksRead:
    """What a report on `ranks` beside the verdict on all of them stands on."""
    here, judged, size = ranks_in(folder), set(reduced.ranks), reduced.world_size
    absent = None if size is None else sorted(set(range(size)) - judged - here)
    left = sorted(here - judged)
    told = (f"host {host.host}: {text}" for host in reduced.hosts for text in host.left_out)
    return RanksRead(
        hosts=len(reduced.hosts),
        in_full=tuple(rank for rank in ranks if rank in here),
        by_steps=tuple(rank for rank in ranks if rank not in here),
        absent=None if absent is None else len(absent),
        absent_ranks=ranges(absent or ()),
        not_reduced=len(left),
        not_reduced_ranks=ranges(left),
        problems=(*reduced.problems, *told),
    )


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers with those that follow each other drawn together: 0-7, 12, 40-47."""
    said = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        said.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(said)
