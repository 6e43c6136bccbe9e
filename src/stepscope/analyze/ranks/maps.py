"""How much longer each rank works than its peers, along the run: what a map of ranks and steps draws."""

from __future__ import annotations

import numpy as np

from stepscope.analyze.context import Context
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.durations import own_together
from stepscope.analyze.ranks.layout import layout_of
from stepscope.analyze.ranks.own_work import Matrix, beyond, block_means, middle, own_steps
from stepscope.model.machine import RanksFacts
from stepscope.model.ranks import RankMap
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import Reduced

COLUMNS = 80  # wide enough to be pointed at on a screen; a file of a thousand ranks stays small
_TITLES = {"host": "Work of the host in every step", "device": "Work of the device in windows"}
_SOURCE = "phases in which no rank waits for another ({}), steady steps"


def rank_maps(reduced: Reduced) -> tuple[RankMap, ...]:
    """The map of every step, by what hosts recorded, and that of windows, by their devices; those that there are."""
    layout = layout_of(reduced)
    steps = own_steps(reduced, layout)
    hosts = [layout.hosts[host] for host in layout.host.tolist()]
    known = layout.stages > 0 and bool((layout.pp >= 0).all())
    rows = layout.ranks.tolist(), hosts, layout.pp.tolist() if known else None
    counted = steps.steady if len(steps.steady) else steps.windows
    notable_ms = at.LEAST_SHARE * float(np.nanmean(steps.wall[counted])) if len(counted) else None
    parts = []
    if len(steps.steady) and steps.phases:
        source = _SOURCE.format(", ".join(steps.phases).replace("_", " "))
        parts.append(("host", source, steps.steady, steps.own[steps.steady]))
    if steps.compute is not None and len(steps.windows):
        parts.append(("device", "device slices of windows", steps.windows, steps.compute))
    return tuple(
        _map(of, source, rows, steps.numbers[chosen], beyond(values, layout), notable_ms)
        for of, source, chosen, values in parts
    )


def map_of_steps(context: Context, facts: RanksFacts | None) -> tuple[RankMap, ...]:
    """The same of ranks that were all read in full: the map of every step, where their steps stand side by side."""
    if facts is None:
        return ()
    numbers, own = own_together(context.labelled, facts.exchange)
    values = own.T.astype(np.float32)
    host_of = {rank.rank: rank.host or "" for rank in context.tables.ranks}
    ranks = [work.rank for work in facts.ranks]
    phases = ", ".join(facts.excess_by_phase_ms).replace("_", " ")
    rows = ranks, [host_of.get(rank, "") for rank in ranks], None
    notable_ms = at.LEAST_SHARE * sum(work.wall_ms for work in facts.ranks) / len(facts.ranks)
    return (_map("host", _SOURCE.format(phases), rows, numbers, values - middle(values)[:, None], notable_ms),)


_Rows = tuple[list[int], list[str], list[int] | None]  # number, host and stage of each rank


def _map(of: str, source: str, rows: _Rows, numbers: Int64, values: Matrix, notable_ms: float | None) -> RankMap:
    edges = np.unique(np.linspace(0, len(values), min(COLUMNS, len(values)) + 1).astype(np.int64))[:-1]
    rounded = np.round(block_means(values, COLUMNS).T.astype(np.float64), 3)
    cells = [[None if cell != cell else cell for cell in row] for row in rounded.tolist()]
    ranks, hosts, stages = rows
    return RankMap(
        of=of,
        title=_TITLES[of],
        source=source,
        ranks=tuple(ranks),
        hosts=tuple(hosts),
        stages=None if stages is None else tuple(stages),
        steps=tuple(numbers[edges].tolist()),
        excess_ms=tuple(map(tuple, cells)),
        notable_ms=notable_ms,
    )
