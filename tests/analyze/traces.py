"""Tables of traces for the tests of device time and lines: slices and their links written out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from stepscope.analyze.context import Context
from stepscope.engine.spans import Base
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


class Nested(Slices):
    """Slices that lie in each other. Times are µs; a slice begins where its parent names it."""

    def module(self, name: str, start_us: float, duration_us: float, parent: int | None = None, **more: Any) -> int:
        """A call of a module; `name` is that of the instance: "Conv2d_0"."""
        return self.add("python_function", f"nn.Module: {name}", start_us, duration_us, parent=parent, **more)

    def operator(self, name: str, start_us: float, duration_us: float, parent: int | None = None, **more: Any) -> int:
        return self.add("cpu_op", name, start_us, duration_us, parent=parent, **more)

    def backward(
        self,
        name: str,
        start_us: float,
        duration_us: float,
        forward: int | None,
        parent: int | None = None,
        **more: Any,
    ) -> int:
        """An operator of the backward pass, whose forward operator is `forward`."""
        whole = {"forward": forward, "forward_thread": BACK_THREAD, **more}
        return self.operator(f"autograd::engine::evaluate_function: {name}", start_us, duration_us, parent, **whole)

    def annotation(self, name: str, start_us: float, duration_us: float, parent: int | None = None) -> int:
        return self.add("user_annotation", name, start_us, duration_us, parent=parent)

    def launch(self, kernel: str, start_us: float, duration_us: float, below: int | None) -> int:
        """A kernel whose launch takes no time; `below` None: launched before the recording."""
        number = self.kernel(start_us, duration_us, kernel, below=below)
        if below is not None:
            operator = below if self.events[below]["category"] == "cpu_op" else None
            self.events[self.links[-1]["launch"]]["duration_ns"] = 0
            self.links[-1]["operator"] = operator
        return number

    def tables(self, steps_us: list[tuple[float, float]] | None = None) -> Tables:
        """The tables, with self times; steps are (start, duration)."""
        for row in self.events:
            row["self_ns"] = row["duration_ns"]
        for row in self.events:
            if row.get("parent") is not None:
                self.events[row["parent"]]["self_ns"] -= row["duration_ns"]
        rows = [
            {"step": number, "start_ns": T0 + round(start * US), "wall_ns": round(length * US), "in_window": True}
            for number, (start, length) in enumerate(steps_us or [])
        ]
        return tables(self, steps=rows)


def base_of(made: Tables, sources: dict[str, str] | None = None) -> Base:
    """The base of the views, as the analysis makes it; `sources` are texts by file."""
    return Context(made, sources or {}).base


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
