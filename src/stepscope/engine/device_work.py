"""What the devices of a trace did: every slice that is work, with its kind, its device and the call that launched it.

Kernels, fills and copies are work; an accelerator's waits on its own streams are none, nor are copies of named ranges.
Kernels of collectives, told by name, are communication. Where a writer gives no number of the device, the trace's
process of that track is the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from stepscope.engine import intervals
from stepscope.engine.collective_names import is_collective_kernel
from stepscope.engine.intervals import Intervals
from stepscope.engine.spans import Span
from stepscope.tables.arrays import NONE, Bools, Int64, unique

KERNEL, FILL, COMMUNICATION, COPY = range(4)
LINKED, BEFORE_RECORDING, GRAPH = "linked", "before_recording", "graph"  # states of links
_MTIA = "mtia_ccp_events"
_MTIA_COPY = frozenset({"dma_request"})
_MTIA_WAITS = frozenset({"event_wait", "event_record"})


class Work(Struct, frozen=True, dict=True):
    """Slices of work in order of the trace; `rows` are rows of the span. `device` is -1 where it cannot be told."""

    rows: Int64
    start_ns: Int64
    end_ns: Int64
    kind: npt.NDArray[np.int8]
    device: Int64
    link: Int64  # row of `Span.links`, -1 where there is none
    launch: Int64  # row of the runtime or driver call, -1 where there is none
    operator: Int64  # row of the operator it was linked to, -1 where there is none

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def is_kernel(self) -> Bools:
        return np.isin(self.kind, (KERNEL, COMMUNICATION))

    def covered(self, *kinds: int) -> Intervals:
        """When any device does work of these kinds."""
        wanted = np.isin(self.kind, kinds)
        return intervals.union(self.start_ns[wanted], self.end_ns[wanted])


def work(span: Span) -> Work:
    """The work of all devices of the trace; empty where it has none."""
    if "work" not in span.kept:
        span.kept["work"] = _work(span)
    found: Work = span.kept["work"]
    return found


def _work(span: Span) -> Work:
    mtia = span.categories.where([_MTIA])
    waits = mtia & span.names.where(_MTIA_WAITS)
    copies = span.is_copy | (mtia & span.names.where(_MTIA_COPY))
    rows = np.flatnonzero((span.is_kernel | span.is_copy | span.is_fill) & ~waits)
    names = span.names
    kind = np.full(len(rows), KERNEL, np.int8)
    codes = unique(names.codes[span.is_kernel])  # only names of device slices are looked at
    collective = np.zeros(len(names.values) + 1, bool)
    collective[codes] = [code >= 0 and is_collective_kernel(names.values[code]) for code in codes.tolist()]
    kind[collective[names.codes[rows]]] = COMMUNICATION
    kind[span.is_fill[rows]] = FILL
    kind[copies[rows]] = COPY
    links = span.links
    of_row = np.full(len(span), NONE, np.int64)
    of_row[links["event"].to_numpy()] = np.arange(links.height)
    link = of_row[rows]
    launch, operator = (np.append(links[name].to_numpy(), NONE)[link] for name in ("launch", "operator"))
    return Work(rows, span.start_ns[rows], span.ends(rows), kind, _devices(span, rows), link, launch, operator)


def _devices(span: Span, rows: Int64) -> Int64:
    device = span.column("device", rows)
    if len(rows) and (device < 0).any():
        named = [track.partition("/")[0] for track in span.tracks.values]
        process = [int(text) if text.isdigit() and len(text) < 10 else NONE for text in named]
        device = np.where(device < 0, np.asarray([*process, NONE], np.int64)[span.tracks.codes[rows]], device)
    return device


def links_of(span: Span, found: Work, *columns: str) -> pl.DataFrame:
    """Columns of `Span.links` with a row for each slice of work; null where it has none."""
    link = pl.Series(found.link)
    return span.links.select(pl.col(columns).gather(link.set(link < 0, None)))


def in_state(span: Span, found: Work, state: str) -> Bools:
    """Which slices of work have a link of this state; of a trace without a launch none is known to be of before it."""
    if state == BEFORE_RECORDING and not (found.launch >= 0).any():
        return np.zeros(len(found), bool)
    return (links_of(span, found, "state").to_series() == state).fill_null(False).to_numpy()


def by_device(found: Work) -> Mapping[int, Bools]:
    """Device -> which slices are its, for devices with a number, ascending."""
    return {int(device): found.device == device for device in unique(found.device) if device >= 0}
