"""Where the bytes are cut never matters, and braces in texts or arguments fool nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.read.kineto import KinetoTrace
from stepscope.read.streams import Limits
from tests.read.collected import SHARED, Collected, event, kernel, read, written

needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the folder of recorded traces is not here")

FLOW = {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 1, "cat": "ac2g", "name": "ac2g"}
TRICKY = [
    event("a},{b"),
    event('a"},{"ph": "X"}'),
    event("back\\slash\\"),
    event("]}"),
    event(args={"list": [{"ph": "X"}, {"ph": "X", "a": [{}, {"b": "},{"}]}], "Input Dims": [[1, 2], []]}),
    event(args={"deep": {"deeper": [{"a": 1}, {"b": [1, {"c": {}}]}]}}),
    kernel("k", correlation=3, grid=[1, 2, 3]),
    FLOW,
    {"name": "last first", "ph": "X", "ts": 3, "dur": 1},
    {"args": {"a": [{}, {}]}, "name": "args first", "ph": "X", "ts": 3, "dur": 1},
]
TAIL = {"ERROR": [{"ph": 1}, {}, {"message": "},{"}], "distributedInfo": {"rank": 4, "world_size": 5}, "traceName": "x"}


def whole(result: Collected) -> tuple[Any, ...]:
    return result.slices, result.flows, result.memory, result.summary


@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("root", ["object", "array", "object with tail"])
def test_any_size_of_pieces_gives_the_same(tmp_path: Path, indent: int | None, root: str):
    events = TRICKY * 3
    if root != "array" and root != "object":
        events = [*events, {**TRICKY[0], "name": "end"}]
    content: Any = events if root == "array" else {"schemaVersion": 1, "traceEvents": events}
    if root.endswith("tail"):
        content |= {**TAIL, "ERROR": [{"x": 1}, {"message": "},{"}]}
    text = json.dumps(content, indent=indent).encode()
    expected = whole(read(tmp_path, text))
    assert len(expected[0]["name"]) == sum(each["ph"] == "X" for each in events)
    assert expected[3].quality.events == len(events)
    assert expected[3].quality.lost == expected[3].quality.salvaged == 0
    assert expected[3].quality.problems == ()
    assert expected[3].metadata.get("distributedInfo", {}).get("rank") == (4 if root.endswith("tail") else None)
    for name in ("trace.json", "trace.json.gz"):
        for size in (1, 7, 64, 200, 201, 202, 203, 1000, len(text) - 1):
            assert whole(read(tmp_path, text, name, Limits(piece_bytes=size))) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(TRICKY), min_size=1, max_size=12),
    st.integers(1, 500),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_any_events_and_pieces(tmp_path: Path, events: list[Any], size: int, indent: int | None, tail: bool):
    text = json.dumps({"traceEvents": events, **(TAIL if tail else {})}, indent=indent).encode()
    trace = read(tmp_path, text, limits=Limits(piece_bytes=size))
    assert trace.names == [each["name"] for each in events if each["ph"] == "X"]
    assert (trace.quality.events, trace.quality.lost, trace.quality.problems) == (len(events), 0, ())


def test_one_event_and_surrounding_space(tmp_path: Path):
    one = json.dumps(event()).encode()
    for content in (b"[" + one + b"]", b" \n[ " + one + b" ]\n\n", b'{"traceEvents"\n:\n[\n' + one + b"\n]\n}\n"):
        assert read(tmp_path, content).quality.problems == ()
        assert read(tmp_path, content, limits=Limits(piece_bytes=3)).names == ["aten::add"]


def test_trailing_comma_is_forgiven(tmp_path: Path):
    one = json.dumps(event())
    trace = read(tmp_path, f'{{"traceEvents": [{one}, {one}, ], "schemaVersion": 1}}'.encode())
    assert len(trace.names) == 2
    assert trace.quality.lost == 0
    assert trace.summary.metadata == {"schemaVersion": 1}


def test_large_traces_come_in_several_chunks(tmp_path: Path):
    events = [event(f"op{i % 7}", ts=i, args={"External id": i}) for i in range(150_000)]
    trace = read(tmp_path, events)
    assert trace.chunks > 1
    assert trace.slices["external_id"] == list(range(150_000))
    assert trace.slices["start_ns"] == [i * 1000 for i in range(150_000)]
    assert trace.names[-1] == "op3"


def test_progress_reaches_the_end(tmp_path: Path):
    path = written(tmp_path, [event()] * 20_000)
    seen: list[tuple[int, int]] = []
    limits = Limits(piece_bytes=100_000)
    assert [*KinetoTrace(path, limits=limits, progress=lambda at, size: seen.append((at, size))).chunks()]
    assert seen[-1] == (path.stat().st_size,) * 2
    assert [at for at, _ in seen] == sorted(at for at, _ in seen)
    assert len(seen) > 5
