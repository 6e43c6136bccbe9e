"""All that the verdict over many ranks looks at, gathered once."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.ranks.arrivals import Arrivals, arrivals
from stepscope.analyze.ranks.causes import Recorded
from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.links import LateGroup, SlowLink, slow_links
from stepscope.analyze.ranks.own_work import Matrix, Steps, beyond
from stepscope.analyze.ranks.pieces import pieces
from stepscope.analyze.ranks.pipeline import Pipelines, pipelines
from stepscope.analyze.ranks.windows import beyond_in_windows, by_passes
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.reduced import Reduced


class Case(Struct, frozen=True):
    """`host`: beyond the peers on the host, steady steps; `device`: with devices, in windows. Milliseconds."""

    reduced: Reduced
    layout: Layout
    steps: Steps
    rows: Int64  # of steps that are judged
    host: Matrix
    device: Matrix | None  # rows: those of `steps.windows`
    host_in_windows: Matrix  # `host` of these
    arrivals: Arrivals | None
    recorded: Recorded
    step_ms: float
    pipes: Pipelines | None
    has_pieces: bool  # what hosts did inside passes is known
    links: list[SlowLink]
    awaited: list[LateGroup]  # whose absent members may be late
    passes: tuple[Matrix, ...]  # `device` by passes, where ranks wait for each other in each and nothing is played


def gather(reduced: Reduced, layout: Layout, steps: Steps, rows: Int64, step_ms: float) -> Case:
    recorded = Recorded(reduced, layout)
    found, work = arrivals(reduced, layout), pieces(reduced, layout)
    device, partial = beyond_in_windows(steps, layout, work, found, step_ms, reduced.missing or ())
    host, in_windows = beyond(steps.own[rows], layout), beyond(steps.own[steps.windows], layout)
    events = recorded.events("retry")
    if events.height:  # retries of the allocator are a rank's own work in whatever phase
        for excess, numbers in ((host, rows), (in_windows, steps.windows), (device, steps.windows)):
            if excess is not None and len(numbers):
                row, column, ms = cells_of(events, steps.numbers[numbers])
                known = np.nan_to_num(excess[row, column])
                excess[row, column] = np.maximum(known, ms)
    pipes = None if work is None else pipelines(reduced, layout, steps, work)
    passes = by_passes(work, steps, layout) if work is not None and pipes is None and steps.waits_inside else ()
    slow, awaited = ([], []) if found is None else slow_links(found.calls, layout, step_ms)
    return Case(
        reduced, layout, steps, rows, host, device, in_windows, found, recorded, step_ms, pipes, work is not None,
        slow, [*awaited, *partial], passes,
    )  # fmt: skip


def cells_of(events: pl.DataFrame, numbers: Int64) -> tuple[Int64, Int64, Floats]:
    """Positions (step, rank) and lengths (ms) of events in these steps."""
    step = events["step"].to_numpy()
    row = np.minimum(np.searchsorted(numbers, step), len(numbers) - 1)
    kept = numbers[row] == step
    return row[kept], events["column"].to_numpy()[kept], events["ms"].to_numpy()[kept]
