"""How much longer each rank works than its peers, along the run: what a map of ranks and steps draws."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope.analyze.ranks.layout import Layout, layout_of
from stepscope.analyze.ranks.own_work import Matrix, beyond, block_means, own_steps
from stepscope.model.ranks import RankMap
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import Reduced

COLUMNS = 100  # more are narrower than a screen shows


def rank_maps(reduced: Reduced, columns: int = COLUMNS) -> tuple[RankMap, ...]:
    """The map of every step, by what hosts recorded, and that of windows, by their devices; those that there are."""
    layout = layout_of(reduced)
    return tuple(_maps(reduced, layout, columns))


def _maps(reduced: Reduced, layout: Layout, columns: int) -> Iterator[RankMap]:
    steps = own_steps(reduced, layout)
    if len(steps.steady) and steps.phases:
        phases = ", ".join(steps.phases)
        source = f"phases in which no rank waits for another ({phases.replace('_', ' ')}), steady steps"
        values = beyond(steps.own[steps.steady], layout)
        yield _map("Work of the host in every step", source, layout, steps.numbers[steps.steady], values, columns)
    if steps.compute is not None and len(steps.windows):
        values = beyond(steps.compute, layout)
        numbers = steps.numbers[steps.windows]
        yield _map("Work of the device in windows", "device slices of windows", layout, numbers, values, columns)


def _map(title: str, source: str, layout: Layout, numbers: Int64, values: Matrix, columns: int) -> RankMap:
    edges = np.unique(np.linspace(0, len(values), min(columns, len(values)) + 1).astype(np.int64))[:-1]
    means = block_means(values, columns).T
    rounded = np.round(means.astype(np.float64), 3)
    cells = [[None if cell != cell else cell for cell in row] for row in rounded.tolist()]
    known = layout.stages > 0 and bool((layout.pp >= 0).all())
    return RankMap(
        title=title,
        source=source,
        ranks=tuple(layout.ranks.tolist()),
        hosts=tuple(layout.hosts[host] for host in layout.host.tolist()),
        stages=tuple(layout.pp.tolist()) if known else None,
        steps=tuple(numbers[edges].tolist()),
        excess_ms=tuple(map(tuple, cells)),
    )
