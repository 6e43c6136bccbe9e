"""Entries as bytes: all of them, untouched where sound, repaired where damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.read.kineto import RawEvents
from stepscope.read.streams import Limits
from tests.read.collected import event, kernel, written

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


def test_cut_off(tmp_path: Path):
    text = json.dumps(ENTRIES[:3]).encode()
    stream = RawEvents(written(tmp_path, text[:-20]))
    assert len([json.loads(entry) for entry in stream]) == 2
    assert stream.lost == 1
    assert stream.problems


@pytest.mark.parametrize("content", [b"", b"[]", b"hello", b'{"a": 1}'])
def test_nothing(tmp_path: Path, content: bytes):
    with pytest.raises(UnreadableInputError):
        list(RawEvents(written(tmp_path, content)))


def test_absent(tmp_path: Path):
    with pytest.raises(UnreadableInputError, match="No such file"):
        RawEvents(tmp_path / "none.json")
