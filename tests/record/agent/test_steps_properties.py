"""Whatever the order of events, the cutter never raises and its rows are ordered, disjoint and add up."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepscope.model import STEP_COLUMNS
from stepscope.record.agent.step_queue import QueuedCutter
from stepscope.record.agent.steps import StepCutter, StepRow

from .loops import Loop

identities = st.integers(min_value=0, max_value=3)
EVENTS: list[Callable[[Loop, int], object]] = [
    lambda loop, i: loop.cutter.loader_created(i % 2, i + 1, loop.now),
    lambda loop, i: loop.cutter.fetch_start(i + 1, loop.now),
    lambda loop, i: loop.cutter.fetch_end(i + 1, i or None, loop.now),
    lambda loop, i: loop.cutter.fetch_stop(i + 1, loop.now),
    lambda loop, i: loop.fetch(i + 1),
    lambda loop, i: loop.stop(i + 1),
    lambda loop, i: loop.cutter.iterator_dead(i + 1, loop.now),
    lambda loop, _: loop.cutter.backward_start(loop.now),
    lambda loop, _: loop.cutter.backward_end(loop.now),
    lambda loop, _: loop.backward(),
    lambda loop, _: loop.cutter.optimizer_created(),
    lambda loop, i: loop.cutter.optimizer_start(i, loop.now),
    lambda loop, i: loop.cutter.optimizer_end(i, loop.now),
    lambda loop, i: loop.step(i),
    lambda loop, i: loop.train(i),
    lambda loop, i: loop.cutter.optimizer_skipped(i, loop.now),
    lambda loop, _: loop.cutter.module_forward(loop.now),
    lambda loop, i: loop.cutter.mark(("user", "profiler_step", "xla_sync", "unknown")[i], loop.now),
    lambda loop, i: loop.cutter.window(bool(i % 2)),
    lambda loop, _: loop.cutter.interrupt(loop.now),
    lambda loop, _: setattr(loop, "now", loop.now - 1000),  # a clock should not, and yet
]


def check(rows: list[StepRow]) -> None:
    end = 0
    for number, row in enumerate(rows):
        assert row._fields == STEP_COLUMNS
        assert row.step == number
        assert row.start_ns >= end
        assert row.wall_ns >= 0
        end = row.start_ns + row.wall_ns
        parts = [row.data_wait_ns, row.forward_ns, row.backward_ns, row.optimizer_ns, row.other_ns]
        known = [part for part in parts if part is not None]
        assert all(part >= 0 for part in known)
        assert sum(known) == row.wall_ns
        assert (row.data_wait_ns is None) == (row.forward_ns is None)
        assert row.kind in ("train", "eval")
        assert row.signal in ("user", "profiler_step", "xla_sync", "unknown", "optimizer", "loader", "end")


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(EVENTS) - 1), identities, st.integers(0, 5)), max_size=120),
    st.integers(0, 1),
)
@example([(1, 1, 0), (7, 0, 0), (2, 0, 0), (3, 1, 1)], 0)  # training inside the fetch that begins the step
def test_any_order_of_events(events: list[tuple[int, int, int]], listener_ms: int) -> None:
    loop = Loop(optimizers=False)
    loop.listener_ms = listener_ms
    for event, identity, gap in events:
        loop.spend(gap)
        EVENTS[event](loop, identity)
    loop.spend(1)
    check(loop.finish())


PLAIN_STEP = [(4, 1, 2), (9, 0, 1), (13, 1, 0)]  # fetch, backward, optimizer


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, len(EVENTS) - 1), identities, st.integers(0, 5)), max_size=12)
        | st.just(PLAIN_STEP),
        max_size=12,
    ),
    st.integers(0, 1),
)
def test_events_that_wait_change_nothing(parts: list[list[tuple[int, int, int]]], listener_ms: int) -> None:
    results = []
    for cutter in (StepCutter, QueuedCutter):
        loop = Loop(cutter=cutter)
        loop.listener_ms = listener_ms
        numbers = []
        for event, identity, gap in (event for part in parts for event in part):
            loop.spend(gap)
            EVENTS[event](loop, identity)
            numbers.append(loop.cutter.current_step())
        loop.spend(1)
        results.append((loop.finish(), loop.live, numbers))
    assert results[0] == results[1]


def test_a_backward_pass_that_waits_is_running() -> None:
    loop = Loop()
    iterator = loop.iterate(1)
    loop.fetch(iterator)
    assert not loop.cutter.in_backward
    loop.cutter.backward_start(loop.now)
    assert loop.cutter.in_backward
    loop.step()  # inside backward
    assert loop.cutter.in_backward
    loop.cutter.backward_end(loop.now)
    loop.cutter.backward_end(loop.now)
    assert not loop.cutter.in_backward


def test_the_usual_step_is_cut_without_the_state_machine() -> None:
    loop = Loop()
    loop.cutter._at_once = ()  # type: ignore[attr-defined]
    for _ in loop.batches(1, 5):
        loop.train()
    assert [row.kind for row in loop.finish()] == ["train"] * 5


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
def test_regular_loops_yield_one_row_per_update(
    updates: int, accumulate: int, epochs: int, validate: bool, gaps: list[int]
) -> None:
    loop = Loop()
    for _ in range(epochs):
        for number in loop.batches(1, updates * accumulate):
            loop.spend(gaps[0])
            loop.forward()
            loop.backward()
            loop.spend(gaps[1])
            if number % accumulate == accumulate - 1:
                loop.step()
                loop.spend(gaps[2])
        if validate:
            for _ in loop.batches(2, 2):
                loop.spend(gaps[3])
    rows = loop.finish()
    check(rows)
    train = [row for row in rows if row.kind == "train"]
    assert len(train) == updates * epochs
    assert {row.wall_ns // 1_000_000 for row in train} == {accumulate * (9 + gaps[0] + gaps[1]) + 1 + gaps[2]}
    assert len(rows) - len(train) == (2 * epochs if validate else 0)
