"""Where the bytes are cut never matters, and braces in texts or arguments fool nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.read.kineto import RawEvents
from stepscope.read.streams import Limits
from tests.read.collected import Collected, event, kernel, read, written

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


@pytest.mark.parametrize(
    "text", ["[{0}, {0}]", " \n[ {0},\n{0} ]\n\n", '{{"traceEvents"\n:\n[\n{0}\n,{0},]\n, "with_stack": 1}}\n']
)
def test_surrounding_space_and_a_trailing_comma(tmp_path: Path, text: str):
    for size in (3, 2**20):
        trace = read(tmp_path, text.format(json.dumps(event())).encode(), limits=Limits(piece_bytes=size))
        assert (trace.names, trace.quality.lost) == (["aten::add"] * 2, 0)
        assert trace.quality.problems == () or ",]" in text


# ---- entries as bytes: all of them, untouched where sound, repaired where damaged

ENTRIES = [
    event('a},{"ph"'),
    {"ph": "C", "name": "counter", "args": {"x": 1.50}},
    kernel("k", list=[{"a": 1}, {}]),
    {"x": 1},
]


@pytest.mark.parametrize("size", [50, 2**20])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_entries_come_out_as_they_are(tmp_path: Path, size: int, name: str):
    content = {"schemaVersion": 1, "traceEvents": ENTRIES, "secret": "example-not-a-secret", "with_stack": 1}
    stream = RawEvents(written(tmp_path, content, name), Limits(piece_bytes=size))
    assert list(stream) == [json.dumps(entry).encode() for entry in ENTRIES]
    assert stream.metadata() == {"schemaVersion": 1, "with_stack": 1}
    assert stream.problems == ()


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (rb'{"ph": "X", "name": "C:\x"}', r"C:\x"),
        (b'{"ph": "X", "name": "\xff"}', r"\xff"),
        (b'{"ph": "X", "name": "a", "args": {"x": NaN}}', "a"),
    ],
)
def test_damaged_entries_are_valid_afterwards(tmp_path: Path, bad: bytes, name: str):
    good = json.dumps(event()).encode()
    stream = RawEvents(written(tmp_path, b"[" + good + b"," + bad + b"," + good + b"]"))
    entries = [json.loads(entry) for entry in stream]
    assert [entry["name"] for entry in entries] == ["aten::add", name, "aten::add"]
    assert stream.lost == 0


def test_what_is_no_trace_or_is_cut_off(tmp_path: Path):
    stream = RawEvents(written(tmp_path, json.dumps(ENTRIES[:3]).encode()[:-20]))
    assert len([json.loads(entry) for entry in stream]) == 2
    assert (stream.lost, bool(stream.problems)) == (1, True)
    for content in (b"", b"[]", b"hello", b'{"a": 1}'):
        with pytest.raises(UnreadableInputError):
            list(RawEvents(written(tmp_path, content)))
