"""Whatever a trace holds, taking it in neither fails nor loses a slice, and its tables agree with each other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tables.fakes import FakeSource, Row, arrow, take_in

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
