"""Samples laid over time: every stack that was met counts, sums are what py-spy reported, and time decides the rest."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stepscope.record.host.pyspy_stacks import ThreadHistory, Trace, apportion, count, read_trace
from tests.record.host.spy_traces import SpyTrace


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
    for stretch, following in zip(counted.stretches, counted.stretches[1:], strict=False):
        assert stretch.end_us == following.start_us
