"""A trace as far as nesting and linking need it: all chunks taken, a few numbers per slice and arrow in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepscope.read.trace import Flows, MemoryEvents, Slices, TraceSource, TraceSummary
from stepscope.tables import categories, forward, links
from stepscope.tables.columns import Columns, Int32, Int64, TextCodes
from stepscope.tables.parts import PartWriter
from stepscope.tables.trace_memory import NUMBERS

Bools: TypeAlias = npt.NDArray[np.bool_]

LAUNCH_ARROWS = ("ac2g", "async")  # the second is what writers of 2021 called it
FORWARD_ARROWS = ("fwdbwd",)

_TEXTS = ("category", "name", "track")
_SPARSE = ("correlation", "external_id", "sequence", "forward_thread")


class Taken(Struct, frozen=True):
    """What is kept of all chunks; the rest went to the writer of the parts."""

    slices: Columns
    flows: Columns
    memory: Columns
    texts: dict[str, TextCodes]
    summary: TraceSummary

    def whole(self, name: str, dtype: type[np.generic]) -> Any:
        """A column that every slice has."""
        return self.slices.dense(name).astype(dtype, copy=False)

    def sparse(self, name: str) -> tuple[Int64, Int64]:
        """The rows and values of a column that some slices have."""
        rows, values = self.slices.sparse(name)
        return rows, values.astype(np.int64, copy=False)


def take(source: TraceSource, writer: PartWriter) -> Taken:
    """Take all of `source`; its slices go on to `writer`."""
    slices, flows, memory = Columns(), Columns(), Columns()
    texts = {name: TextCodes() for name in (*_TEXTS, "flow_kind")}
    for chunk in source.chunks():
        writer.add(chunk.slices)
        _take_slices(chunk.slices, slices, texts)
        _take_flows(chunk.flows, flows, texts)
        _take_memory(chunk.memory, memory, texts)
    writer.finish()
    return Taken(slices, flows, memory, texts, source.summary())


def _take_slices(chunk: Slices, columns: Columns, texts: dict[str, TextCodes]) -> None:
    if len(chunk):
        dense: dict[str, Any] = {name: texts[name].add(getattr(chunk, name)) for name in _TEXTS}
        dense |= {"start_ns": chunk.start_ns, "duration_ns": chunk.duration_ns}
        columns.append(dense, {name: getattr(chunk, name) for name in _SPARSE})


def _take_flows(chunk: Flows, columns: Columns, texts: dict[str, TextCodes]) -> None:
    if len(chunk):
        dense: dict[str, Any] = {"kind": texts["flow_kind"].add(chunk.kind), "track": texts["track"].add(chunk.track)}
        columns.append({**dense, "id": chunk.id, "finish": chunk.finish, "time_ns": chunk.time_ns}, {})


def _take_memory(chunk: MemoryEvents, columns: Columns, texts: dict[str, TextCodes]) -> None:
    if len(chunk):
        dense: dict[str, Any] = {name: getattr(chunk, name) for name in NUMBERS}
        columns.append({**dense, "track": texts["track"].add(chunk.track)}, {})


class Flags:
    """What kind each slice is, from its category and name."""

    def __init__(self, taken: Taken) -> None:
        category = taken.whole("category", np.int32)
        names = taken.texts["category"].values
        self.function = _each(category, (name == categories.FUNCTION for name in names))
        self.annotation = _each(category, (name == categories.ANNOTATION for name in names))
        self.device = _each(category, (name in categories.DEVICE for name in names))
        self.runtime = _each(category, (categories.is_runtime(name) for name in names))
        self.operator = _each(category, (name in categories.OPERATORS for name in names))
        self.precedence = np.array([*map(categories.precedence, names), 0], np.int8)[category]
        graph = (categories.is_graph_launch(name) for name in taken.texts["name"].values)
        self.graph_launch = self.runtime & _each(taken.whole("name", np.int32), graph)


def _each(codes: Int32, values: Iterable[bool]) -> Bools:
    return np.array([*values, False], dtype=bool)[codes]


def arrows(taken: Taken, kinds: tuple[str, ...]) -> links.Arrows:
    """Pairs of ends with the same id; where one came several times, the last."""
    codes = [code for code, kind in enumerate(taken.texts["flow_kind"].values) if kind in kinds]
    columns = taken.flows
    mine = np.isin(columns.dense("kind"), codes)
    ids, finish = columns.dense("id")[mine], columns.dense("finish")[mine].astype(np.bool_, copy=False)
    track = columns.dense("track")[mine].astype(np.int32, copy=False)
    time = columns.dense("time_ns")[mine].astype(np.int64, copy=False)
    heads, tails = np.flatnonzero(finish), np.flatnonzero(~finish)
    tails = tails[np.argsort(ids[tails], kind="stable")]
    place = np.searchsorted(ids[tails], ids[heads], side="right") - 1
    known = place >= 0
    known[known] = ids[tails[place[known]]] == ids[heads[known]]
    start, end = tails[place[known]], heads[known]
    return links.Arrows(track[start], time[start], track[end], time[end])


def numbered(taken: Taken, track: Int32, start: Int64, is_operator: Bools) -> forward.Numbered:
    """The operators that carry a sequence number."""
    rows, sequence = taken.sparse("sequence")
    mine = is_operator[rows]
    rows, sequence = rows[mine], sequence[mine]
    thread = np.zeros(len(rows), np.int64)
    known, values = taken.sparse("forward_thread")
    if len(known):
        place = np.minimum(np.searchsorted(known, rows), len(known) - 1)
        thread = np.where(known[place] == rows, values[place], 0)
    names = taken.texts["track"].values
    numbers: dict[str, int] = {}
    process = np.array([*(numbers.setdefault(name.rpartition("/")[0], len(numbers)) for name in names), 0], np.int64)
    return forward.Numbered(rows, process[track[rows]], track[rows], start[rows], sequence, thread)
