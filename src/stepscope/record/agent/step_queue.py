"""A step cutter that lets events wait where nothing depends on them yet.

In the usual loop, fed by one loader, nothing that a backward pass or an optimizer step does can end a step: only the
next fetch can. Their hooks then append to a list, which costs a fraction of the bookkeeping among PyTorch's own work,
and the fetch settles the list in one go. Any other event settles it first, so that the order of events never changes.
"""

from __future__ import annotations

from functools import partial
from typing import Callable

from stepscope.record.agent.open_step import Emit
from stepscope.record.agent.phases import DATA_WAIT, Segment, StepRow
from stepscope.record.agent.steps import StepCutter

BACKWARD_START, BACKWARD_END, OPTIMIZER_START, OPTIMIZER_END = _USUAL = (0, 1, 2, 3)
# Four rounds of backward and optimizer on one batch; a loop that goes on without a fetch is settled as it goes.
QUEUE_LIMIT = 16


class QueuedCutter(StepCutter):
    """Cuts the same steps as `StepCutter`, cheaper in the usual loop."""

    def __init__(self, clock: Callable[[], int], emit: Emit) -> None:
        super().__init__(clock, emit)
        self._queue: list[tuple[int, int, int]] = []  # (event, optimizer, time)
        self._queueing = False
        self._at_once: tuple[Callable[[int, int], None], ...] = (
            lambda _, now: StepCutter.backward_start(self, now),
            lambda _, now: StepCutter.backward_end(self, now),
            partial(StepCutter.optimizer_start, self),
            partial(StepCutter.optimizer_end, self),
        )

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running, one whose start still waits included."""
        depth = 0
        for event, _, _ in self._queue:
            if event == BACKWARD_START:
                depth += 1
            elif event == BACKWARD_END and depth:
                depth -= 1
        return depth > 0 or super().in_backward

    def settle(self) -> None:
        """Take in what waits; from here to the next fetch nothing does."""
        self._queueing = False
        if self._queue:
            queue, self._queue = self._queue, []
            for event, optimizer_id, now in queue:
                self._at_once[event](optimizer_id, now)

    # The four events that may wait

    def backward_start(self, now: int) -> None:
        """As in `StepCutter`, now or at the next fetch."""
        if self._queueing and len(self._queue) < QUEUE_LIMIT:
            self._queue.append((BACKWARD_START, 0, now))
        else:
            self.settle()
            super().backward_start(now)

    def backward_end(self, now: int) -> None:
        """As in `StepCutter`, now or at the next fetch."""
        if self._queueing and len(self._queue) < QUEUE_LIMIT:
            self._queue.append((BACKWARD_END, 0, now))
        else:
            self.settle()
            super().backward_end(now)

    def optimizer_start(self, optimizer_id: int, now: int) -> None:
        """As in `StepCutter`, now or at the next fetch."""
        if self._queueing and len(self._queue) < QUEUE_LIMIT:
            self._queue.append((OPTIMIZER_START, optimizer_id, now))
        else:
            self.settle()
            super().optimizer_start(optimizer_id, now)

    def optimizer_end(self, optimizer_id: int, now: int) -> None:
        """As in `StepCutter`, now or at the next fetch."""
        if self._queueing and len(self._queue) < QUEUE_LIMIT:
            self._queue.append((OPTIMIZER_END, optimizer_id, now))
        else:
            self.settle()
            super().optimizer_end(optimizer_id, now)

    # The fetch, where the usual step is cut

    def fetch_start(self, iterator_id: int, now: int) -> None:
        """As in `StepCutter`; the usual step is cut here at once."""
        queue = self._queue
        if len(queue) == 4 and self._queueing and iterator_id == self._anchor and self._cycle is None:
            segment = self._segments[0]
            if segment.fetches == 1 and segment.leader == iterator_id and not segment.partial:
                (first, _, start), (second, _, end), (third, stepped, step_start), (fourth, same, step_end) = queue
                in_order = segment.end_ns <= start <= end <= step_start <= step_end <= now
                if in_order and stepped == same and (first, second, third, fourth) == _USUAL:
                    self._queueing = False
                    queue.clear()
                    self._cut_usual(segment, iterator_id, (start, end, step_start, step_end), now)
                    return
        self.settle()
        super().fetch_start(iterator_id, now)

    def fetch_end(self, iterator_id: int, samples: int | None, now: int) -> None:
        """As in `StepCutter`; from here on events may wait, if this is the usual step so far."""
        super().fetch_end(iterator_id, samples, now)
        self._queueing = (
            len(self._segments) == 1
            and not self._segments[0].trained
            and self._anchor is not None
            and self._mark is None
            and self._resting is None
            and not self._stack
        )

    # Everything else is in order only when nothing waits

    def fetch_stop(self, iterator_id: int, now: int) -> None:
        """As in `StepCutter`."""
        self.settle()
        super().fetch_stop(iterator_id, now)

    def loader_created(self, loader_id: int, iterator_id: int, now: int) -> None:
        """As in `StepCutter`."""
        self.settle()
        super().loader_created(loader_id, iterator_id, now)

    def iterator_dead(self, iterator_id: int, now: int) -> None:
        """As in `StepCutter`."""
        self.settle()
        super().iterator_dead(iterator_id, now)

    def optimizer_created(self) -> None:
        """As in `StepCutter`."""
        self.settle()
        super().optimizer_created()

    def optimizer_skipped(self, optimizer_id: int, now: int) -> None:
        """As in `StepCutter`."""
        self.settle()
        super().optimizer_skipped(optimizer_id, now)

    def module_forward(self, now: int) -> None:
        """As in `StepCutter`."""
        if not self._queueing:  # else a fetch has told where data wait ended
            super().module_forward(now)

    def mark(self, source: str, now: int) -> None:
        """As in `StepCutter`."""
        self.settle()
        super().mark(source, now)

    def window(self, active: bool) -> None:
        """As in `StepCutter`."""
        self.settle()
        super().window(active)

    def finish(self, now: int) -> None:
        """As in `StepCutter`; `interrupt` comes here as well."""
        self.settle()
        super().finish(now)

    def _cut_usual(self, segment: Segment, leader: int, times: tuple[int, int, int, int], now: int) -> None:
        """One batch, one backward pass, one optimizer step, and now the next fetch: as `StepCutter` would do it."""
        backward_start, backward_end, optimizer_start, optimizer_end = times
        wait, ahead, _, _, other = segment.phases
        row = _new_row(
            StepRow,
            (
                self._number,
                "train",
                segment.epoch,
                segment.start_ns,
                now - segment.start_ns,
                wait,
                ahead + backward_start - segment.end_ns,
                backward_end - backward_start,
                optimizer_end - optimizer_start,
                other + optimizer_start - backward_end + now - optimizer_end,
                None,
                segment.samples,
                1,
                1 if segment.first_batch else 0,
                1 if segment.in_window else 0,
                "loader",
            ),
        )
        self._optimizers_exist = self._optimizer_signalled = True
        self._cut_by_fetch = False
        self._strays = 0
        self._most_fetches = self._most_fetches or 1
        self._segments = []
        self._number += 1
        self._emit(row, True, now)
        start = max(now, self._clock())
        fresh = self._open(start, partial=False)
        fresh.leader = leader
        fresh.epoch = segment.epoch
        fresh.knows_forward = True
        self._before_fetch = None
        self._stack.append((DATA_WAIT, leader))
        iterator = self._iterators[leader]
        iterator.step_start = start
        iterator.step_fetches = 1


_new_row = tuple.__new__
