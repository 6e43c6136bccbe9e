"""Tables of traces for the tests of device time and lines: slices and their links written out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from stepscope.tables.schema import SCHEMAS, Tables
from tests.builders import T0, make_tables
from tests.records import replace

US = 1000
TRACE = "worker0.pt.trace.json"
BACK_THREAD = 1  # "Fwd thread id" of operators of the backward pass


class Slices:
    """Rows of `events` and `links`, numbered as they are added. Times are µs from `T0`."""

    def __init__(self, *, rank: int = 0, trace: str = TRACE) -> None:
        self.events: list[dict[str, Any]] = []
        self.links: list[dict[str, Any]] = []
        self._base = {"rank": rank, "process": f"rank-{rank}", "trace": trace}

    def add(self, category: str, name: str, start_us: float = 0, duration_us: float = 1, **more: Any) -> int:
        """A slice; returns its number."""
        number = len(self.events)
        row = {**self._base, "id": number, "track": "1/1", "category": category, "name": name, "depth": 0}
        duration = round(duration_us * US)
        row |= {"start_ns": T0 + round(start_us * US), "duration_ns": duration, "self_ns": duration}
        self.events.append({**row, **more})
        return number

    def python(self, name: str, parent: int | None = None) -> int:
        """A Python function."""
        return self.add("python_function", name, parent=parent, frame=parent)

    def kernel(
        self,
        start_us: float,
        duration_us: float,
        name: str = "gemm",
        *,
        category: str = "kernel",
        below: int | None = None,
        **link: Any,
    ) -> int:
        """A device slice launched below slice `below`; without it, before the recording."""
        launch = self.add("cuda_runtime", "cudaLaunchKernel", start_us, parent=below) if below is not None else None
        number = self.add(category, name, start_us, duration_us, track="0/7", stream=7, device=0)
        state = {"method": "correlation", "state": "linked"} if below is not None else {"state": "before_recording"}
        keys = {key: self._base[key] for key in ("process", "trace")}
        self.links.append({**keys, "event": number, "launch": launch, **state, **link})
        return number


def tables(*traces: Slices, quality: Mapping[str, Any] | None = None, **more: Any) -> Tables:
    """Tables of traces; ids count on from one to the next. `quality` is set on every row of `traces`."""
    events: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    for trace in traces:
        first = len(events)
        events += [_moved(row, first, ("id", "parent", "frame")) for row in trace.events]
        links += [_moved(row, first, ("event", "launch", "operator", "frame", "forward")) for row in trace.links]
    owners = {(row["rank"], row["process"], row["trace"]) for row in events}
    files = [
        {"rank": rank, "process": process, "trace": trace, "owner": "user", "problems": [], **(quality or {})}
        for rank, process, trace in sorted(owners)
    ]
    made = make_tables(**more)
    return replace(made, events=frame("events", events), links=frame("links", links), traces=frame("traces", files))


def frame(name: str, rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """A table of `SCHEMAS` from partial rows."""
    schema = SCHEMAS[name]
    return pl.DataFrame([{column: row.get(column) for column in schema} for row in rows], schema=schema)


def _moved(row: dict[str, Any], first: int, columns: Iterable[str]) -> dict[str, Any]:
    return {**row, **{name: row[name] + first for name in columns if row.get(name) is not None}}
