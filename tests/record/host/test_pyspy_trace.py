"""py-spy's Chrome trace read back into stacks: what was sampled, when, and what a damaged file does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.record.host import pyspy_stacks
from stepscope.record.host.pyspy_stacks import UnreadableTraceError, read_trace
from tests.record.host.spy_traces import SpyTrace

MAIN, A, B = ("<module>", "/t.py", 9), ("a", "/t.py", 1), ("b", "/t.py", 2)


def test_a_pthread_used_again_is_another_thread(tmp_path: Path) -> None:
    spy = SpyTrace()
    spy.sample(1, {7: [A]}, {7: "thread (70)"})
    spy.sample(5, {7: [A]}, {7: "thread (71)"})
    first, second = read_trace(spy.write(tmp_path / "t", 9)).threads
    assert (first.tid, first.starts_us, first.end_us) == (70, [1], 5)
    assert (second.tid, second.starts_us, second.end_us) == (71, [5], 9)


def good_file(folder: Path) -> bytes:
    spy = SpyTrace()
    spy.sample(10, {7: [MAIN, A]})
    return spy.write(folder / "good", 20).read_bytes()


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_torn_file_is_unreadable(tmp_path: Path, cut: int) -> None:
    (tmp_path / "t").write_bytes(good_file(tmp_path)[:cut])
    with pytest.raises(UnreadableTraceError):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"ts":20', '"ts":1'), ('"ph":"B"', '"ph":"E"'), ('"ph":"B"', '"ph":"X"'), ('"tid":7', '"tid":"7"'), ('"a"', "1")],
)
def test_events_that_cannot_be_are_unreadable(tmp_path: Path, old: str, new: str) -> None:
    text = good_file(tmp_path).decode()
    assert old in text
    (tmp_path / "t").write_text(text.replace(old, new, 1))
    with pytest.raises(UnreadableTraceError):
        read_trace(tmp_path / "t")


def test_an_absent_and_a_huge_file_are_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnreadableTraceError, match="cannot be read"):
        read_trace(tmp_path / "absent")
    good_file(tmp_path)
    monkeypatch.setattr(pyspy_stacks, "MOST_BYTES", 10)
    with pytest.raises(UnreadableTraceError, match="--rate"):
        read_trace(tmp_path / "good")


def test_stacks_beyond_what_memory_may_hold_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspy_stacks, "MOST_CHARACTERS", 20)
    good_file(tmp_path)
    with pytest.raises(UnreadableTraceError, match="too deep"):
        read_trace(tmp_path / "good")


@given(names=st.lists(st.text(alphabet=st.sampled_from('ab},{"argsé:[]\\ \n'), max_size=12), max_size=30))
def test_reading_in_pieces_is_reading_at_once(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    path = tmp_path_factory.mktemp("pieces") / "t"
    spy = SpyTrace()
    for time_us, name in enumerate(names):
        spy.sample(time_us, {7: [(name, name, 1), MAIN]})
    spy.write(path, len(names))
    whole = read_trace(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyspy_stacks, "_CHUNK_BYTES", 64)
        assert read_trace(path) == whole
    assert len(json.loads(path.read_text())) >= 2 * len(whole.records)
