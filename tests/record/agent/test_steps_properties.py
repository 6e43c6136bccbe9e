"""Whatever the order of events, the cutter never raises and its rows are ordered, disjoint and add up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepscope.model import STEP_COLUMNS
from stepscope.record.agent import step_queue
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.step_queue import QueuedCutter
from stepscope.record.agent.steps import StepCutter

from .loops import Loop
from .test_steps import happen

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
    lambda loop, _: loop.cutter.evaluation_start(loop.now),
    lambda loop, _: loop.cutter.evaluation_end(loop.now),
    lambda loop, _: loop.cutter.closure_start(loop.now),
    lambda loop, _: loop.cutter.closure_end(loop.now),
    lambda loop, i: loop.cutter.backward_start(loop.now, i + 1, (None, True, False, True)[i]),
    lambda loop, i: loop.cutter.loader_length(i + 1, i),
    lambda loop, i: loop.cutter.loader_created(i % 2, i + 1, loop.now, fetches_ahead=True),
    lambda loop, i: loop.forward(1, bool(i % 2), i),
    lambda loop, _: loop.cutter.interrupt(loop.now),
    lambda loop, _: setattr(loop, "now", loop.now - 1000),  # a clock should not, and yet
    lambda loop, _: loop.cutter.optimizer_compiled(loop.now),
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
        assert row.data_wait_ns is None or row.forward_ns is not None
        assert row.fetches >= 0
        assert row.samples is None or row.samples >= 0
        assert row.kind in ("train", "eval")
        assert row.signal in ("user", "profiler_step", "xla_sync", "unknown", "optimizer", "loader", "end")


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(EVENTS) - 1), identities, st.integers(0, 5)), max_size=120),
    st.integers(0, 1),
)
@example([(1, 1, 0), (7, 0, 0), (2, 0, 0), (3, 1, 1)], 0)  # training inside the fetch that begins the step
@example([(17, 0, 0), (17, 0, 0), (28, 0, 0), (1, 0, 0), (9, 0, 0)], 0)  # the clock is set back between two steps
@example([(1, 0, 3), (11, 2, 2), (5, 2, 2), (14, 0, 4), (9, 3, 0), (3, 0, 4)], 0)  # a fetch that told of its end late
def test_any_order_of_events(events: list[tuple[int, int, int]], listener_ms: int) -> None:
    loop = Loop(optimizers=False)
    loop.listener_ms = listener_ms
    for event, identity, gap in events:
        loop.spend(gap)
        EVENTS[event](loop, identity)
    loop.spend(1)
    check(loop.finish())


PLAIN_STEP = [(4, 1, 2), (9, 0, 1), (13, 1, 0)]  # fetch, backward, optimizer
UNFED_STEP = [(26, 1, 2), (9, 0, 1), (13, 1, 0)]  # a module's call in place of the fetch
EVALUATION = [(4, 1, 1)]
ANY_EVENT = st.tuples(st.integers(0, len(EVENTS) + 1), identities, st.integers(0, 5))
LOOPS = st.lists(
    st.lists(ANY_EVENT, max_size=12)
    | st.integers(1, 5).map(PLAIN_STEP.__mul__)
    | st.integers(1, 6).map(UNFED_STEP.__mul__)
    | st.integers(3, 6).map(UNFED_STEP[1:].__mul__)
    | st.integers(1, 3).map(EVALUATION.__mul__),
    max_size=12,
)
Seen = tuple[list[StepRow], list[StepRow | None], list[int | None]]  # rows, live ones, the open step after each event


def drive(loop: Loop, parts: list[list[tuple[int, int, int]]]) -> Seen:
    """Runs the events, two more kinds among them that only a patient cutter knows."""
    numbers = []
    for event, identity, gap in (event for part in parts for event in part):
        loop.spend(gap)
        if event < len(EVENTS):
            EVENTS[event](loop, identity)
        elif isinstance(loop.cutter, QueuedCutter):
            if event == len(EVENTS):
                loop.cutter.hurry()
            else:
                loop.cutter.patient = identity > 0
        numbers.append(loop.cutter.current_step())
    loop.spend(1)
    return loop.finish(), loop.live, numbers


@settings(max_examples=400, deadline=None)
@given(LOOPS, st.integers(0, 1))
@example([[(1, 1, 0), (13, 0, 0), (2, 0, 0)], PLAIN_STEP * 2], 0)  # an optimizer stepped inside an earlier fetch
@example([[(1, 0, 0), (11, 0, 0)], UNFED_STEP, [(19, 0, 0)], EVALUATION, PLAIN_STEP], 0)  # evaluates between batches
def test_events_that_wait_change_nothing(parts: list[list[tuple[int, int, int]]], listener_ms: int) -> None:
    results = []
    for cutter in (StepCutter, QueuedCutter):
        loop = Loop(cutter=cutter)
        loop.listener_ms = listener_ms
        results.append(drive(loop, [[event for event in part if event[0] < len(EVENTS)] for part in parts]))
    assert results[0] == results[1]


@settings(max_examples=400, deadline=None)
@given(LOOPS, st.integers(0, 1), st.sampled_from([1, 25, 60, 10_000]), st.integers(1, 4))
@example([[(1, 0, 0)], PLAIN_STEP * 9, [(3, 0, 0)]], 1, 60, 4)
@example([[(1, 1, 0), (13, 0, 0), (2, 0, 0)], EVALUATION * 2], 0, 1, 1)
@example([[(18, 1, 0), (1, 1, 0), (18, 0, 0), (2, 1, 0), *PLAIN_STEP[1:]], PLAIN_STEP * 2], 0, 60, 4)
@example([[(0, 1, 0), (24, 1, 0)], PLAIN_STEP * 2], 0, 25, 2)  # epochs of one batch each, counted once
def test_steps_that_wait_are_cut_as_they_would_have_been(
    parts: list[list[tuple[int, int, int]]], listener_ms: int, wait_ms: int, limit: int
) -> None:
    patient = Loop()
    assert isinstance(patient.cutter, QueuedCutter)
    patient.cutter.patient = True
    patient.listener_ms = listener_ms
    waiting_limit = limit * step_queue.STRIDE - (step_queue.STRIDE - step_queue.TIMES)
    with (
        patch.object(step_queue, "WAIT_NS", wait_ms * 1_000_000),
        patch.object(step_queue, "WAITING_LIMIT", waiting_limit),
    ):
        rows, live, numbers = drive(patient, parts)
    plain = Loop(cutter=StepCutter)
    plain.listener_ms = listener_ms
    plain.listens_to = {row.step for row in live if row is not None}
    plain_rows, plain_live, plain_numbers = drive(plain, parts)
    assert rows == plain_rows
    assert numbers == plain_numbers
    assert live == [row for row in plain_live if row is None or row.step in plain.listens_to]


def patient_loop(words: str = "") -> Loop:
    """Whole steps of 10 ms may wait; `words` as in the scenarios, by the iterator of loader 1."""
    loop = Loop()
    loop.cutter.patient = True  # type: ignore[attr-defined]
    happen(loop, ["iter1", *words.split()])
    return loop


def test_steps_wait_no_longer_than_a_tenth_of_a_second() -> None:
    loop = patient_loop()
    begun = written = loop.now
    for _ in range(250):
        happen(loop, ["fetch1:0.5", "fwd:0.5", "bwd:0.5", "opt:0.5"])
        if loop.rows:
            written = loop.rows[-1].start_ns + loop.rows[-1].wall_ns
        assert loop.now - max(begun, written) <= 102_000_000
    assert [row.step for row in loop.live if row is not None] == [49, 99, 149, 199]
    assert [row.wall_ns for row in loop.rows] == [2_000_000] * 200
    assert len(loop.finish()) == 250
    assert len(patient_loop("4( fetch1 train wait:110 )").rows) == 3  # long ones do not wait


def test_listeners_are_heard_between_two_steps_of_short_epochs() -> None:
    """Of epochs that end before steps have waited for as long as they may."""
    loop = patient_loop()
    for epoch in range(20):
        for _ in loop.batches(epoch, 20, fetch_ms=0.5):
            happen(loop, ["fwd:0.5", "bwd:0.5", "opt:0.5"])
    heard = [row.start_ns + row.wall_ns for row in loop.live if row is not None]
    assert len(heard) >= 6
    assert all(later - earlier <= 150_000_000 for earlier, later in pairwise(heard))
    assert [row.wall_ns for row in loop.finish()].count(2_000_000) >= 360


def test_a_backward_pass_that_waits_is_running() -> None:
    loop = Loop()
    for words, running in (("iter1 fetch1", 0), ("bwd_begin", 1), ("opt", 1), ("bwd_end", 0), ("bwd_end", 0)):
        happen(loop, words.split())  # an optimizer inside backward, and an end that was told twice
        assert loop.cutter.in_backward == bool(running)
