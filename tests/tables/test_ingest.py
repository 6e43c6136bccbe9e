"""One trace to Parquet: columns, parts, times, memory, trees and links; however the reader cuts it.

Impossible durations are repaired and plausible ones left alone. Whatever a trace holds, taking it in neither fails nor
loses a slice, and its tables agree with each other. Traces are made of plain rows: what a reader would yield, without
any file.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.read.trace import MISSING, Flows, MemoryEvents, Slices, Text, TraceChunk, TraceQuality, TraceSummary
from stepscope.tables import trace_entry
from stepscope.tables.arrays import NONE
from stepscope.tables.ingest import LONGEST_NS, ingest, repair
from stepscope.tables.links import Nesting, nest
from stepscope.tables.schema import SCHEMAS
from stepscope.tables.trace_entry import TraceIndex

# What is known of a run and not of its trace.
RUN_COLUMNS = ("rank", "process", "trace", "step")

Row = Mapping[str, Any]


def text(values: Iterable[str | None]) -> Text:
    """A column of texts; None is missing."""
    codes: dict[str, int] = {}
    rows = [-1 if value is None else codes.setdefault(value, len(codes)) for value in values]
    return Text(list(codes), np.array(rows, np.int32))


def made_slices(rows: Sequence[Row]) -> Slices:
    """Slices of rows; category `cpu_op` on track `1/1` unless they say otherwise."""
    usual = {"category": "cpu_op", "name": "op", "track": "1/1", "start_ns": 0, "duration_ns": 0}
    full = [{**usual, **row} for row in rows]
    columns: dict[str, Any] = {}
    for name, kind in Slices.__annotations__.items():
        if kind == "Text":
            columns[name] = text(row.get(name) for row in full)
        else:
            missing, dtype = (np.nan, np.float64) if kind == "Float64" else (MISSING, np.int64)
            columns[name] = np.array([row.get(name, missing) for row in full], dtype)
    return Slices(**columns)


def flows(rows: Sequence[Row]) -> Flows:
    """Ends of arrows: kind, id, finish, track, time_ns."""
    return Flows(
        kind=text(row.get("kind", "ac2g") for row in rows),
        id=np.array([row["id"] for row in rows], np.int64),
        finish=np.array([row["finish"] for row in rows], bool),
        track=text(row["track"] for row in rows),
        time_ns=np.array([row["time_ns"] for row in rows], np.int64),
    )


def arrow(number: int, start: tuple[str, int], end: tuple[str, int], kind: str = "ac2g") -> list[Row]:
    """Both ends of an arrow from (track, time) to (track, time)."""
    return [
        {"kind": kind, "id": number, "finish": False, "track": start[0], "time_ns": start[1]},
        {"kind": kind, "id": number, "finish": True, "track": end[0], "time_ns": end[1]},
    ]


def memory(rows: Sequence[Row]) -> MemoryEvents:
    """Memory events; what a row does not say is missing."""
    names = ("time_ns", "address", "bytes", "device_type", "device", "allocated_bytes", "reserved_bytes")
    columns = {name: np.array([row.get(name, MISSING) for row in rows], np.int64) for name in names}
    return MemoryEvents(track=text(row.get("track", "1/1") for row in rows), **columns)


class FakeSource:
    """A trace of given rows, cut into chunks of `size` slices."""

    path = Path("trace.json")

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        arrows: Sequence[Row] = (),
        allocations: Sequence[Row] = (),
        size: int = 1000,
        **summary: Any,
    ) -> None:
        self._rows, self._arrows, self._allocations, self._size = rows, arrows, allocations, size
        usual: dict[str, Any] = {"base_ns": 0, "world_size": None, "threads": {}}
        self._summary = TraceSummary(**{**usual, "quality": TraceQuality(events=len(rows)), **summary})

    def chunks(self) -> Iterator[TraceChunk]:
        for first in range(0, len(self._rows), self._size):
            yield TraceChunk(made_slices(self._rows[first : first + self._size]), flows([]), memory([]))
        # Arrows and allocations may stand anywhere; here they come last, and one by one.
        for row in self._arrows:
            yield TraceChunk(made_slices([]), flows([row]), memory([]))
        yield TraceChunk(made_slices([]), flows([]), memory(self._allocations))

    def summary(self) -> TraceSummary:
        return self._summary


def take_in(folder: Path, source: FakeSource, name: str = "entry") -> tuple[TraceIndex, pl.DataFrame, pl.DataFrame]:
    """The index, slices and links of a trace that was taken in."""
    target = folder / name
    target.mkdir()
    index = ingest(source, target).index
    return index, slices_of(target), pl.read_parquet(target / "links.parquet")


def slices_of(entry: Path) -> pl.DataFrame:
    """The slices of an entry as one frame, with the columns that do not depend on a run."""
    tree = pl.read_parquet(entry / "tree.parquet").with_row_index("id").cast({"id": pl.Int64})
    parts = [pl.read_parquet(path) for path in sorted(entry.glob("events-*.parquet"))]
    frame = tree.hstack(pl.concat(parts)) if parts else tree
    return frame.select(
        pl.col(name) if name in frame.columns else pl.lit(None, dtype).alias(name)
        for name, dtype in SCHEMAS["events"].items()
        if name not in RUN_COLUMNS
    )


FULL: Row = {
    "category": "kernel",
    "name": "gemm\x1b",
    "track": "0/7",
    "start_ns": 5,
    "duration_ns": 7,
    "correlation": 1,
    "external_id": 2,
    "sequence": 3,
    "forward_thread": 4,
    "device": 0,
    "stream": -(2**40),
    "bytes": 2**40,
    "python_module": 7,
    "blocks": 8,
    "threads": 9,
    "registers": 10,
    "shared_memory": 11,
    "blocks_per_sm": 0.5,
    "warps_per_sm": 4.0,
    "occupancy": 12.5,
    "shapes": "[[1]]",
    "types": '["float"]',
    "call_stack": "a.py(1): f",
    "collective": "{}",
}


def test_every_column_arrives_and_what_is_missing_is_null(tmp_path: Path):
    _, events, _ = take_in(tmp_path, FakeSource([FULL, {"start_ns": 100, "duration_ns": 1}], base_ns=1000))
    assert events.schema == {name: dtype for name, dtype in SCHEMAS["events"].items() if name not in RUN_COLUMNS}
    first, second = events.rows(named=True)
    renamed = {"shared_memory": "shared_memory_bytes", "occupancy": "occupancy_percent"}
    expected = {renamed.get(name, name): value for name, value in FULL.items()} | {"start_ns": 1005}
    assert {name: first[name] for name in expected} == expected
    known = ("id", "category", "name", "track", "start_ns", "duration_ns", "self_ns", "depth")
    assert {name for name, value in second.items() if value is not None} == set(known)
    assert second["start_ns"] == 1100


def some_trace() -> tuple[list[Row], list[Row]]:
    chance = random.Random(3)
    rows: list[Row] = []
    for i in range(60):
        start = i * 100
        name = chance.choice(["aten::mm", "aten::add", "aten::relu"])
        rows.append({"name": name, "start_ns": start, "duration_ns": 90, "shapes": chance.choice([None, "[[1]]"])})
        call = {"category": "cuda_runtime", "name": "cudaLaunchKernel", "start_ns": start + 10, "duration_ns": 5}
        kernel = {"category": "kernel", "name": f"k{i % 7}", "track": "0/7", "start_ns": start + 50, "duration_ns": 600}
        number = {"correlation": i} if i % 3 else {}
        rows += [{**call, **number}, {**kernel, **number}]
    chance.shuffle(rows)
    arrows = [end for i in range(60) for end in arrow(i, ("1/1", i * 100 + 10), ("0/7", i * 100 + 50))]
    return rows, arrows


@pytest.mark.parametrize(("size", "per_file"), [(1, 7), (13, 1), (1000, 50)])
def test_chunks_and_files_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, per_file: int):
    rows, arrows = some_trace()
    wanted = take_in(tmp_path, FakeSource(rows, arrows=arrows), "whole")
    monkeypatch.setattr(trace_entry, "ROWS_PER_FILE", per_file)
    index, events, links = take_in(tmp_path, FakeSource(rows, arrows=arrows, size=size), "pieces")
    assert index.files == -(-len(rows) // per_file)
    assert events.equals(wanted[1])
    assert links.equals(wanted[2])
    assert links["method"].value_counts(sort=True).rows() == [("correlation", 40), ("flow", 20)]


def test_memory(tmp_path: Path):
    allocations = [
        {"time_ns": 5, "bytes": 512, "device_type": 0, "device": -1, "track": "1/9"},
        {"time_ns": 6, "bytes": -4, "device_type": 1, "device": 2, "address": 9, "allocated_bytes": 3},
        {"time_ns": 7, "bytes": 8, "device_type": 99, "device": 0, "reserved_bytes": 0},
        {"time_ns": 8},
    ]
    take_in(tmp_path, FakeSource([FULL], allocations=allocations, base_ns=1000))
    frame = pl.read_parquet(tmp_path / "entry" / "memory.parquet")
    assert frame.rows() == [
        ("cpu", 1005, 512, None, None, None, "1/9"),
        ("cuda:2", 1006, -4, 3, None, 9, "1/1"),
        ("device-99:0", 1007, 8, None, 0, None, "1/1"),
        (None, 1008, None, None, None, None, "1/1"),
    ]


@pytest.mark.parametrize(
    ("categories", "device"),
    [
        (["cpu_op"], "cpu"),
        (["cpu_op", "kernel"], "cuda"),
        (["cpu_op", "mtia_ccp_events"], "mtia"),
        (["cpu_op", "kernel", "xpu_runtime"], "xpu"),
        (["something"], None),
    ],
)
def test_kind_of_device(tmp_path: Path, categories: list[str], device: str | None):
    assert take_in(tmp_path, FakeSource([{"category": name} for name in categories]))[0].device == device


MS = 1_000_000


def repaired(*slices: tuple[int, int], tracks: str = "", host: bool = False) -> tuple[list[int], int]:
    """Durations after repair of slices (start, duration) in ms, and how many were wrong."""
    count = len(slices)
    duration = np.array([length * MS for _, length in slices], np.int64)
    changed = repair(
        np.array([ord(c) for c in tracks or "a" * count], np.int32),
        np.array([start * MS for start, _ in slices], np.int64),
        duration,
        is_device=np.full(count, not host),
    )
    return (duration // MS).tolist(), changed


WEEK = LONGEST_NS // MS


@pytest.mark.parametrize(
    ("slices", "more", "durations", "wrong"),
    [
        # an overflow ends at the next slice of the track, or at once
        ([(0, WEEK + 1), (30, 5), (10, 2), (40, WEEK * 9)], {"tracks": "aabb", "host": True}, [30, 5, 2, 0], 2),
        ([(0, WEEK)], {"host": True}, [WEEK], 0),
        # an end that came late is cut where the next work of the stream begins
        ([(0, 500), (20, 5), (40, 5), (900, 3)], {}, [20, 5, 5, 3], 1),
        ([(40, 5), (900, 3), (0, 500), (20, 5)], {}, [5, 3, 20, 5], 1),
        # overlaps that prove nothing: the next begins while this one drains, one alone may be a clock's error
        ([(0, 50), (20, 100)], {}, [50, 100], 0),
        ([(0, 50), (20, 5), (60, 5)], {}, [50, 5, 5], 0),
        ([(0, 9), (2, 1), (4, 1)], {}, [9, 1, 1], 0),  # too small to matter
        ([(0, 500), (500, 5), (510, 5)], {}, [500, 5, 5], 0),
    ],
)
def test_durations_that_cannot_be(slices: list[tuple[int, int]], more: Any, durations: list[int], wrong: int):
    assert repaired(*slices, **more) == (durations, wrong)


def test_absurd_starts_do_not_overflow():
    start = np.array([2**63 - 1, -(2**63)], np.int64)
    duration = np.array([5, 5], np.int64)
    repair(np.zeros(2, np.int32), start, duration, is_device=np.array([True, True]))
    assert (start + duration > start).all()


TRACKS = ("1/1", "1/2", "0/7", "x/stream 7", "/")
small = st.integers(0, 60)
wild = st.one_of(small, st.integers(-(2**63), 2**63 - 1))
number = st.one_of(st.integers(-1, 6), st.integers(-(2**63), 2**63 - 1))
CATEGORIES = ("cpu_op", "python_function", "user_annotation", "cuda_runtime", "kernel", "gpu_memcpy", "odd", None)


def rows(time: st.SearchStrategy[int]) -> st.SearchStrategy[list[Row]]:
    names = ("correlation", "external_id", "sequence", "forward_thread", "device", "bytes")
    optional: dict[str, Any] = dict.fromkeys(names, number)
    row: Any = st.fixed_dictionaries(
        {
            "category": st.sampled_from(CATEGORIES),
            "name": st.sampled_from(("a", "cudaGraphLaunch", None)),
            "track": st.sampled_from(TRACKS),
            "start_ns": time,
            "duration_ns": time,
        },
        optional=optional,
    )
    return st.lists(row, max_size=25)


arrows = st.lists(
    st.tuples(
        number, st.sampled_from(TRACKS), small, st.sampled_from(TRACKS), small, st.sampled_from(("ac2g", "fwdbwd"))
    )
)


@given(st.one_of(rows(small), rows(wild)), arrows, st.integers(1, 30))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_slices(given_rows: list[Row], given_arrows: list[tuple[int, str, int, str, int, str]], size: int):
    ends = [end for n, a, at, b, to, kind in given_arrows for end in arrow(n, (a, at), (b, to), kind)]
    with tempfile.TemporaryDirectory() as folder:
        index, events, links = take_in(Path(folder), FakeSource(given_rows, arrows=ends, size=size))
    assert index.slices == events.height == len(given_rows)
    assert events["id"].to_list() == list(range(len(given_rows)))
    assert events["category"].to_list() == [row["category"] for row in given_rows]
    device = [i for i, row in enumerate(given_rows) if row["category"] in ("kernel", "gpu_memcpy")]
    assert links["event"].to_list() == device
    tracks = events["track"].to_list()
    for i, parent in enumerate(events["parent"]):
        assert parent is None or tracks[parent] == tracks[i]
    assert (events["self_ns"] >= 0).all()
    categories = events["category"].to_list()
    for link in links.iter_rows(named=True):
        if link["launch"] is not None:
            assert categories[link["launch"]] == "cuda_runtime"
        for name in ("operator", "forward"):
            assert link[name] is None or categories[link[name]] == "cpu_op"
        assert link["frame"] is None or categories[link["frame"]] == "python_function"
        assert (link["state"] == "before_recording") == (link["launch"] is None and link["operator"] is None)
        assert (link["method"] is None) == (link["launch"] is None and link["operator"] is None)


FRAME = {"category": "python_function", "name": "train.py(3): step", "start_ns": 0, "duration_ns": 1_000_000}


def op(name: str, start: int, duration: int, **more: Any) -> Row:
    return {"category": "cpu_op", "name": name, "start_ns": start, "duration_ns": duration, **more}


def call(start: int, name: str = "cudaLaunchKernel", **more: Any) -> Row:
    return {"category": "cuda_runtime", "name": name, "start_ns": start, "duration_ns": 5, **more}


def kernel(start: int, **more: Any) -> Row:
    return {"category": "kernel", "name": "gemm", "track": "0/7", "start_ns": start, "duration_ns": 100, **more}


def linked(tmp_path: Path, *rows: Row, arrows: Sequence[Row] = ()) -> list[dict[str, Any]]:
    return take_in(tmp_path, FakeSource(rows, arrows=arrows, size=2))[2].rows(named=True)


def test_by_correlation_to_the_innermost_operator_and_function(tmp_path: Path):
    (link,) = linked(
        tmp_path,
        kernel(500, correlation=9),
        call(25, correlation=9),
        op("aten::mm", 20, 30),
        op("aten::linear", 10, 50),
        FRAME,
    )
    wanted = {"event": 0, "launch": 1, "operator": 2, "frame": 4, "method": "correlation", "state": "linked"}
    assert {name: link[name] for name in wanted} == wanted
    assert (link["forward"], link["forward_method"]) == (None, None)


@pytest.mark.parametrize(
    ("category", "device"),
    [
        *(("Runtime", "Kernel"), ("cuda_driver", "gpu_memcpy"), ("xpu_runtime", "Memset")),
        *(("mtia_runtime", "mtia_ccp_events"), ("privateuse1_runtime", "Kernel")),
    ],
)
def test_names_of_every_age_and_vendor(tmp_path: Path, category: str, device: str):
    (link,) = linked(
        tmp_path,
        op("aten::mm", 10, 50, category="Operator"),
        {**call(20), "category": category, "correlation": 1},
        {**kernel(90), "category": device, "correlation": 1},
    )
    assert (link["event"], link["operator"], link["state"]) == (2, 0, "linked")


@pytest.mark.parametrize("correlation", [{}, {"correlation": 0}])
@pytest.mark.parametrize("kind", ["ac2g", "async"])
def test_by_arrow_without_correlation(tmp_path: Path, correlation: dict[str, int], kind: str):
    (link,) = linked(
        tmp_path,
        op("aten::mm", 10, 50),
        call(20, correlation=0),
        kernel(90, **correlation),
        arrows=arrow(7, ("1/1", 20), ("0/7", 90), kind),
    )
    assert (link["launch"], link["operator"], link["method"], link["state"]) == (1, 0, "flow", "linked")


@pytest.mark.parametrize(
    ("rows", "names", "expected"),
    [
        (  # by External id, of the slice or of its launch
            [
                op("aten::mm", 10, 50, external_id=3),
                kernel(90, external_id=3),
                call(500, correlation=4, external_id=3),
                kernel(600, correlation=4),
                kernel(5, external_id=3),  # before the operator began
            ],
            ("launch", "operator", "method", "state"),
            [
                (None, 0, "external_id", "linked"),
                (2, 0, "external_id", "linked"),
                (None, None, None, "before_recording"),
            ],
        ),
        (  # by time on the launch's thread within rounding to whole microseconds
            [
                op("aten::mm", 0, 50_000),
                call(50_000, correlation=1),
                kernel(90_000, correlation=1),
                call(80_000, correlation=2),
                kernel(91_000, correlation=2),
            ],
            ("operator", "method", "state"),
            [(0, "containment", "linked"), (None, "correlation", "unlinked")],
        ),
        *(  # kernels of a graph share a launch and are apart
            (
                [op("replay", 10, 50), call(20, name, correlation=5), *(kernel(at, correlation=5) for at in (90, 200))],
                ("launch", "state"),
                [(1, "graph"), (1, "graph")],
            )
            for name in ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")
        ),
        (  # correlations that come twice
            [
                *(op("first", 0, 50), call(10, "hipLaunchKernel", correlation=5), kernel(40, correlation=5)),
                *(op("second", 100, 50), call(110, "hipLaunchKernel", correlation=5), kernel(140, correlation=5)),
                kernel(5, correlation=5),
            ],
            ("operator",),
            [(0,), (3,), (0,)],
        ),
    ],
)
def test_other_ways(tmp_path: Path, rows: list[Row], names: tuple[str, ...], expected: list[tuple[Any, ...]]):
    assert [tuple(row[name] for name in names) for row in linked(tmp_path, *rows)] == expected


BACKWARD = {"track": "1/2", "forward_thread": 1}


def backward(start: int, sequence: int, **more: Any) -> list[Row]:
    """A node of the backward pass, an operator in it, its launch and the kernel."""
    place = {"track": more.get("track", "1/2")}
    number = 1000 + start
    return [
        op("MmBackward0", start, 40, **{**BACKWARD, "sequence": sequence, **more}),
        op("aten::mm", start + 5, 30, **place),
        call(start + 10, correlation=number, **place),
        kernel(start + 500, correlation=number),
    ]


def test_backward_reaches_the_forward_operator_that_made_the_node(tmp_path: Path):
    (link,) = linked(
        tmp_path,
        op("aten::t", 0, 5, sequence=8),
        op("aten::linear", 10, 50, sequence=9, forward_thread=0),
        op("aten::mm", 20, 30, sequence=9),  # the last that began with the number made the node
        op("aten::relu", 70, 5, sequence=10),
        *backward(1000, 9),
        op("aten::mm", 5000, 30, sequence=9),  # after it
    )
    assert (link["forward"], link["forward_method"], link["operator"]) == (2, "sequence", 5)


def test_backward_by_arrow_where_there_is_no_number(tmp_path: Path):
    node = {"track": "1/2", "forward_thread": 1}
    (link,) = linked(
        tmp_path,
        op("aten::mm", 20, 30),
        op("MmBackward0", 1000, 40, **node),
        op("aten::mm", 1005, 30, track="1/2"),
        call(1010, correlation=4, track="1/2"),
        kernel(1500, correlation=4),
        arrows=arrow(3, ("1/1", 20), ("1/2", 1000), "fwdbwd"),
    )
    assert (link["forward"], link["forward_method"]) == (0, "flow")


def nested(*slices: tuple[int, int], functions: str = "", annotations: str = "", tracks: str = "") -> Nesting:
    """Slices as (start, duration); the letters `x` in `functions` and `annotations` mark slices by position."""
    count = len(slices)
    return nest(
        np.array([ord(c) for c in tracks] or [0] * count, dtype=np.int64),
        np.array([start for start, _ in slices], dtype=np.int64),
        np.array([duration for _, duration in slices], dtype=np.int64),
        is_function=np.array([c == "x" for c in functions.ljust(count)], dtype=bool),
        is_annotation=np.array([c == "x" for c in annotations.ljust(count)], dtype=bool),
        precedence=np.zeros(count, dtype=np.int64),
    )


@pytest.mark.parametrize(
    ("slices", "marks", "parents", "self_ns"),
    [
        ([(0, 100), (90, 12)], {}, [NONE, 0], [90, 10]),  # a child that reaches over the end is cut
        ([(0, 100), (90, 200), (95, 3)], {}, [NONE, NONE, 0], [97, 190, 3]),  # mostly outside it is a sibling
        # __enter__ [0, 50), its helper [42, 48), the annotation [40, 70), an operator inside the annotation
        (
            [(0, 50), (42, 6), (40, 30), (55, 10)],
            {"functions": "xx", "annotations": "  x"},
            [NONE, 0, NONE, 2],
            [44, 6, 10, 10],
        ),
    ],
)
def test_slices_that_do_not_nest(slices: Any, marks: dict[str, str], parents: list[int], self_ns: list[int]):
    result = nested(*slices, **marks)
    assert (result.parent.tolist(), result.self_ns.tolist(), result.clipped) == (parents, self_ns, 1)
    assert not marks or result.frame.tolist() == [NONE, 0, NONE, NONE]


slices = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.booleans(), st.booleans()), max_size=30)


def _marked(rows: Sequence[tuple[int, int, bool, bool]]) -> Nesting:
    flags = ["".join("x" if row[column] else " " for row in rows) for column in (2, 3)]
    return nested(*[row[:2] for row in rows], functions=flags[0], annotations=flags[1])


@given(slices)
def test_self_times_add_up_to_the_roots(rows: list[tuple[int, int, bool, bool]]):
    result = _marked(rows)
    roots = result.parent == NONE
    assert result.self_ns.sum() == result.extent_ns[roots].sum()
    assert (result.self_ns >= 0).all()
    assert (result.extent_ns <= [row[1] for row in rows]).all()
    for i, parent in enumerate(result.parent.tolist()):
        assert result.depth[i] == (0 if parent == NONE else result.depth[parent] + 1)
        if parent != NONE:
            assert result.extent_ns[i] <= result.extent_ns[parent]
            assert result.frame[i] == (parent if rows[parent][2] else result.frame[parent])


@given(slices)
@settings(max_examples=20)
def test_what_does_not_nest_is_found_among_much_that_does(rows: list[tuple[int, int, bool, bool]]):
    alone = _marked(rows)
    neat = [(1_000 + 10 * pair + inner, 8 - 4 * inner, False, False) for pair in range(1_500) for inner in (0, 1)]
    later = [(start + 20_000, *rest) for start, *rest in rows]
    result = _marked([(0, 30_000, False, False), *rows, *neat, *later])
    assert result.clipped == 2 * alone.clipped
    for begin in (1, 1 + len(rows) + len(neat)):
        own = slice(begin, begin + len(rows))
        assert (result.parent[own] == np.where(alone.parent >= 0, alone.parent + begin, 0)).all()
        assert (result.self_ns[own] == alone.self_ns).all()
    assert result.depth[1 + len(rows) : 1 + len(rows) + len(neat)].tolist() == [1, 2] * 1_500


@given(slices)
def test_slices_that_nest_are_left_alone(rows: list[tuple[int, int, bool, bool]]):
    # Laid out as equal halves of halves, nothing overlaps partially.
    laid = [(start % 8 * 64 >> (depth % 4), 64 >> (depth % 4)) for start, depth, _, _ in rows]
    laid = [(start // length * length, length) for start, length in laid]
    result = nested(*laid)
    assert result.clipped == 0
    assert (result.extent_ns == [length for _, length in laid]).all()
