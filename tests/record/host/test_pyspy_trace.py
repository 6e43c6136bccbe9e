"""py-spy's Chrome trace read back into stacks: what was sampled, when, how often; the files made of it; and damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.read.raw import Losses
from stepscope.read.run_folder import read_times
from stepscope.record.host import pyspy_stacks
from stepscope.record.host.pyspy_stacks import (
    Counted,
    Stretch,
    ThreadHistory,
    Trace,
    UnreadableTraceError,
    apportion,
    count,
    read_trace,
    write_segment,
)
from tests.read.stack_text import parse
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


@pytest.mark.parametrize(
    ("cut", "old", "new"),
    [
        (0, '"ts":20', '"ts":1'),
        (1, '"ph":"B"', '"ph":"E"'),
        (40, '"ph":"B"', '"ph":"X"'),
        (-1, '"tid":7', '"tid":"7"'),
        (-2, '"a"', "1"),
    ],
)
def test_a_torn_file_and_events_that_cannot_be_are_unreadable(tmp_path: Path, cut: int, old: str, new: str) -> None:
    text = good_file(tmp_path)
    assert old.encode() in text
    for damaged in (text[:cut], text.replace(old.encode(), new.encode(), 1)):
        (tmp_path / "t").write_bytes(damaged)
        with pytest.raises(UnreadableTraceError):
            read_trace(tmp_path / "t")


@pytest.mark.parametrize(
    ("name", "limit", "words"),
    [
        ("absent", "MOST_BYTES", "cannot be read"),
        ("good", "MOST_BYTES", "--rate"),
        ("good", "MOST_CHARACTERS", "too deep"),
    ],
)
def test_an_absent_a_huge_and_a_deep_file_are_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: str, words: str
) -> None:
    good_file(tmp_path)
    monkeypatch.setattr(pyspy_stacks, limit, 20)
    with pytest.raises(UnreadableTraceError, match=words):
        read_trace(tmp_path / name)


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


@given(st.lists(st.tuples(st.integers(1, 10**7), st.integers(0, 9)), min_size=1, max_size=20), st.integers(0, 500))
def test_apportion_gives_all_and_each_its_least(entries: list[tuple[int, int]], more: int) -> None:
    weights, least = [weight for weight, _ in entries], [few for _, few in entries]
    shares = apportion(sum(least) + more, weights, least)
    assert sum(shares) == sum(least) + more
    assert all(share >= few for share, few in zip(shares, least, strict=True))


def lives_on(thread: ThreadHistory) -> None:  # noqa: ARG001
    return None


def two_threads(folder: Path) -> Trace:
    """A thread at work in two turns, and one that stands still; 10 samples each, 100 ms apart."""
    work, rest, still = ("work", "/t.py", 1), ("rest", "/t.py", 2), ("wait", "/t.py", 3)
    spy = SpyTrace()
    for number in range(10):
        spy.sample(number * 100_000, {7: [work if number < 6 else rest], 8: [still]})
    return read_trace(spy.write(folder / "t", 1_000_000))


def test_a_thread_that_ended_gets_no_time_beyond(tmp_path: Path) -> None:
    def died(thread: ThreadHistory) -> int | None:
        return 300_000 if thread.tid == 8 else None

    counted = count(two_threads(tmp_path), 13, rate_hz=10, last_seen_us=died)
    (wait,) = [stretch for stretch in counted.stretches if "wait" in counted.records[stretch.record]]
    assert (wait.start_us, wait.end_us) == (0, 300_000)
    assert counted.counts[wait.record] == 3
    assert sum(counted.counts) == 13


@given(st.data())
def test_stretches_of_a_thread_follow_each_other_and_hold_their_moments(data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(1, 300_000), min_size=1, max_size=40))
    moments = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    thread = ThreadHistory("thread (7)", 7, [index % 3 for index in range(len(gaps))], moments, moments[-1] + 1000)
    trace = Trace(["a", "b", "c"], [thread], moments[0], thread.end_us)
    counted = count(trace, data.draw(st.integers(0, 200)), rate_hz=20, last_seen_us=lives_on)
    for stretch, met in zip(counted.stretches, moments, strict=True):
        assert stretch.start_us <= met <= stretch.end_us
    assert min(counted.counts[: len(gaps)]) >= 1
    for stretch, following in zip(counted.stretches, counted.stretches[1:], strict=False):
        assert stretch.end_us == following.start_us


START_NS = 1_700_000_000_000_000_000


def part(pid: int, start_ns: int, *records: str) -> Counted:
    """A process whose thread passed through `records`, 1 ms each and 2 samples each."""
    stretches = tuple(Stretch(index, index * 1000, (index + 1) * 1000) for index in range(len(records)))
    return Counted(records, (2,) * len(records), stretches, 9_000, f'process {pid}:"python t.py";', start_ns)


def test_records_of_all_parts_are_found_again_with_their_times(tmp_path: Path) -> None:
    parts = [part(1, START_NS + 500_000, "thread (1);a (/t.py:1)", "thread (1);b (/t.py:2)"),
             part(2, START_NS, "thread (2): x\ny;c (/t.py:3)")]  # fmt: skip
    assert write_segment(tmp_path / "stacks-0.raw", parts) == (True, "stacks-0.times.json")
    text = (tmp_path / "stacks-0.raw").read_text()
    stacks = parse(text.splitlines(keepends=True)).stacks
    by_record = {stack.record: stack.frames[0].function for stack in stacks}
    losses = Losses()
    found = read_times(tmp_path / "stacks-0.times.json", losses, "x")
    assert not losses.counts
    assert [
        (by_record[record], start - START_NS, end - START_NS)
        for record, start, end in zip(found.record, found.start_ns, found.end_ns, strict=True)
    ] == [
        ("c", 0, 1_000_000),
        ("a", 500_000, 1_500_000),
        ("b", 1_500_000, 2_500_000),
    ]
    assert [(stack.pids, stack.samples) for stack in stacks] == [((1,), 2), ((1,), 2), ((2,), 2)]
    assert not list(tmp_path.glob("*.part"))


def test_a_name_that_looks_like_the_next_record_does_not_shift_the_others(tmp_path: Path) -> None:
    odd = 'thread (1): x\nprocess 9:"sh";thread (9);z (/z.py:1) 5;a (/t.py:1)'
    write_segment(tmp_path / "stacks-0.raw", [part(1, START_NS, odd, "thread (1);b (/t.py:2)")])
    stacks = parse((tmp_path / "stacks-0.raw").read_text().splitlines(keepends=True)).stacks
    assert [(stack.record, stack.pids) for stack in stacks] == [(0, (1,)), (1, (1,))]


def test_names_that_are_no_valid_text_are_written_all_the_same(tmp_path: Path) -> None:
    assert write_segment(tmp_path / "stacks-0.raw", [part(1, START_NS, "thread (1);\udc80 (/t.py:1)")])[0]
    assert b"\\udc80 (/t.py:1) 2" in (tmp_path / "stacks-0.raw").read_bytes()


def test_too_many_stretches_leave_the_stacks_without_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspy_stacks, "MOST_STRETCHES", 1)
    parts = [part(1, START_NS, "thread (1);a (/t.py:1)", "thread (1);b (/t.py:2)")]
    assert write_segment(tmp_path / "stacks-0.raw", parts) == (True, None)
    assert [path.name for path in tmp_path.iterdir()] == ["stacks-0.raw"]


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    assert write_segment(tmp_path / "gone" / "stacks-0.raw", [part(1, START_NS, "thread (1)")]) == (False, None)
