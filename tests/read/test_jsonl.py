"""Lines of JSON: kills, damage, and text that is no Unicode."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.read import jsonl
from stepscope.read.raw import Losses


def read(tmp_path: Path, data: bytes) -> tuple[list[dict[str, object]], Losses]:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    losses = Losses()
    return jsonl.read_rows(path, losses, "a.jsonl"), losses


def test_torn_and_bad_lines_are_told_apart(tmp_path: Path):
    deep = b'{"a":' + b"[" * 200_000
    rows, losses = read(tmp_path, b'{"a":1}\n{"a":\n\n[1]\n' + deep + b'\n{"a":2}\n{"a":3')
    assert rows == [{"a": 1}, {"a": 2}]
    assert losses.counts == {"bad_lines": 3, "torn_lines": 1}
    assert losses.files["torn_lines"] == ["a.jsonl"]
    rows, losses = read(tmp_path, b'{"a":1}')  # without a newline, and yet complete
    assert (rows, losses.counts) == ([{"a": 1}], {})
    assert jsonl.read_rows(tmp_path / "none", losses, "none") == []
    assert jsonl.read_object(tmp_path / "none", losses, "none") is None
    assert not losses.counts


@pytest.mark.parametrize(
    ("line", "value"),
    [(b'{"a":"\\udcff"}', "\\xff"), (b'{"a":"\xff"}', "\\xff"), (b'{"a":"\\ud800"}', "\\ud800"), (b'{"a":NaN}', None)],
)
def test_odd_text_is_spelled_out(tmp_path: Path, line: bytes, value: object):
    rows, losses = read(tmp_path, line + b"\n")
    assert rows == [{"a": value}]
    assert not losses.counts


def test_huge_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 64)
    rows, losses = read(tmp_path, b'{"a":"' + b"x" * 1000 + b'"}\n{"a":1}\n')
    assert rows == [{"a": 1}]
    assert losses.counts == {"bad_lines": 1}
