"""A step cutter that lets events wait where nothing depends on them yet.

In the usual loop, fed by one loader, nothing that a backward pass or an optimizer step does can end a step: only the
next fetch can; in one without a loader, the end of its one optimizer's step does. Hooks then append to a list, as long
as every step looks the same and nobody has to act between two of them: a few lines among PyTorch's own work, where ours
always run with cold caches. Steps that wait are cut back to back, at an end at least `WAIT_NS` after the first one
began. Any other event first has all that waits taken in, with the times it had, so that the order of events never
changes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List

from stepscope.record.agent.segments import BACKWARD, DATA_WAIT, OPTIMIZER, Iterator, StepRow
from stepscope.record.agent.steps import MODELS_LIMIT, Emit, StepCutter

BACKWARD_START, BACKWARD_END, OPTIMIZER_START, OPTIMIZER_END, MODULE_CALL = range(5)
# An event is three entries of the queue: which, the optimizer or module, the time.
ENTRIES = 3
USUAL_LENGTH = 4 * ENTRIES
# Four rounds of backward and optimizer on one batch; a loop that goes on without a fetch is settled as it goes.
QUEUE_LIMIT = 4 * USUAL_LENGTH

# Whole steps wait for so long at most, or so many of them: what `kill -9` may take along, and one pause for all.
WAIT_NS = 100_000_000
STEP_LIMIT = 256
# A step that waits: its four times and the next fetch's start; then that fetch's end and samples, of the step after.
# One without a loader: the first call of a module, or None, and its four times, the last of which ends it.
TIMES, STRIDE = 5, 7
WAITING_LIMIT = STEP_LIMIT * STRIDE - (STRIDE - TIMES)

# Where an event finds us: nothing waits any more; between a fetch and the next; in a fetch whose start waits.
AT_ONCE, INSIDE, FETCHING = range(3)

USUAL = (BACKWARD_START, BACKWARD_END, OPTIMIZER_START, OPTIMIZER_END)
NO_UPDATE = (None, None, None, None)  # of a step of evaluation

EmitRows = Callable[[List[StepRow]], None]


class QueuedCutter(StepCutter):
    """Cuts the same steps as `StepCutter`, cheaper in the usual loop.

    While `patient`, which only its owner sets, whole steps may wait. Of steps cut together only the last can be live;
    the others go to `emit_rows` in one call.
    """

    def __init__(self, clock: Callable[[], int], emit: Emit, emit_rows: EmitRows) -> None:
        super().__init__(clock, emit)
        self._emit_rows = emit_rows
        self.patient = False
        self._state = AT_ONCE
        self._queue: list[int] = []  # events of the step under way
        self._waiting: list[Any] = []  # steps that are over
        self._unheard_ns: int | None = None  # when the steps began that were cut while nobody could act
        self._usual: int | None = None  # the iterator whose next fetch ends a usual step
        self._usual_optimizer: int | None = None  # the optimizer whose next end ends a usual step without a loader
        self._fetched_ns = 0  # where its last fetch ended, or the step before
        self._due_ns = 0  # an end from here on cuts
        self._at_once: tuple[Callable[[int, int], object], ...] = (
            lambda _, now: StepCutter.backward_start(self, now),
            lambda _, now: StepCutter.backward_end(self, now),
            partial(StepCutter.optimizer_start, self),
            partial(StepCutter.optimizer_end, self),
            lambda module, now: StepCutter.module_forward(self, now, True, module),
        )

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running, one whose start still waits included."""
        depth = 0
        for event in self._queue[::ENTRIES]:
            if event == BACKWARD_START:
                depth += 1
            elif event == BACKWARD_END and depth:
                depth -= 1
        return depth > 0 or super().in_backward

    def current_step(self) -> int | None:
        """As in `StepCutter`, steps that wait counted."""
        step = super().current_step()
        if step is None:
            return None
        waiting = len(self._waiting)
        return step + (waiting // TIMES if self._usual_optimizer is not None else (waiting + STRIDE - TIMES) // STRIDE)

    def hurry(self) -> None:
        """Cut the open step at the next end, and be patient only when told so again. From any thread."""
        self.patient = False
        self._due_ns = 0

    def settle(self) -> None:
        """Take in what waits; from here to the next fetch nothing does."""
        if self._waiting:
            if self._unheard_ns is None:
                self._unheard_ns = self._segments[0].start_ns
            self._cut_waiting(live=False)
        self._state = AT_ONCE
        self._usual = self._usual_optimizer = None
        if self._queue:
            queue, self._queue = self._queue, []
            for at in range(0, len(queue), ENTRIES):
                self._at_once[queue[at]](queue[at + 1], queue[at + 2])

    # The events that may wait

    def backward_start(self, now: int, root: int = 0, cleared: bool | None = None) -> None:
        if self._state == INSIDE and len(self._queue) < QUEUE_LIMIT:
            self._queue += (BACKWARD_START, 0, now)
        else:
            self.settle()
            super().backward_start(now, root, cleared)

    def backward_end(self, now: int) -> None:
        if self._state == INSIDE and len(self._queue) < QUEUE_LIMIT:
            self._queue += (BACKWARD_END, 0, now)
        else:
            self.settle()
            super().backward_end(now)

    def optimizer_start(self, optimizer_id: int, now: int) -> None:
        if self._state == INSIDE and len(self._queue) < QUEUE_LIMIT:
            self._queue += (OPTIMIZER_START, optimizer_id, now)
        else:
            self.settle()
            super().optimizer_start(optimizer_id, now)

    def optimizer_end(self, optimizer_id: int, now: int) -> None:
        if self._state == INSIDE and len(self._queue) < QUEUE_LIMIT:
            self._queue += (OPTIMIZER_END, optimizer_id, now)
            if self._usual_optimizer is None:
                return
            if optimizer_id == self._usual_optimizer and self._update_over(now):
                return
            self.settle()
        else:
            self.settle()
            super().optimizer_end(optimizer_id, now)
        self._await_update(optimizer_id)

    def module_forward(self, now: int, gradients: bool = True, module: int = 0) -> bool:
        # Inside a usual step with a loader it tells nothing, but what the first batches of a loop are for.
        if self._usual_optimizer is not None and not (gradients and not self._queue and now >= self._fetched_ns):
            self.settle()
        if self._state == AT_ONCE or not (self._waiting or self._usual_optimizer is not None):
            return super().module_forward(now, gradients, module)
        self._heard = True
        if gradients and len(self._models) < MODELS_LIMIT:
            self._models.add(module)
        if self._usual_optimizer is not None:
            self._queue += (MODULE_CALL, module, now)
        return False

    # The end of an update, which ends the usual step without a loader

    def _await_update(self, optimizer_id: int) -> None:
        """From here on events may wait, if a step begins that only the end of this optimizer's next one can end."""
        if self.patient and self._cycle == {optimizer_id} and self._mark is None and len(self._segments) == 1:
            segment = self._segments[0]
            if segment.empty and not (segment.knows_forward or segment.partial or self._stack or self._resting):
                self._usual_optimizer, self._state = optimizer_id, INSIDE
                self._fetched_ns = segment.start_ns
                since = segment.start_ns if self._unheard_ns is None else self._unheard_ns
                self._due_ns = since + WAIT_NS

    def _update_over(self, now: int) -> bool:
        """Whether the events that wait are those of a usual step, which then waits as well, or is cut."""
        queue, optimizer = self._queue, self._usual_optimizer
        called, events = (queue[2], queue[ENTRIES:]) if queue[0] == MODULE_CALL else (None, queue)
        times = _usual_times(events, self._fetched_ns if called is None else called)
        if times is None or optimizer is None:
            return False
        self._waiting += (called, *times)
        queue.clear()
        self._fetched_ns = now
        if now < self._due_ns and len(self._waiting) < STEP_LIMIT * TIMES:
            self.ask_use()
        else:
            self._unheard_ns = None
            self._cut_waiting(live=True)
            self._await_update(optimizer)
        return True

    # The fetch, which ends the usual step with a loader

    def fetch_start(self, iterator_id: int, now: int) -> None:
        """As in `StepCutter`; a usual step ends here, and is cut here or waits."""
        if iterator_id == self._usual:
            queue, iterator = self._queue, self._iterators[iterator_id]
            times = _usual_times(queue, self._fetched_ns)
            if times is not None:
                usual = times[3] <= now
            else:
                usual = iterator.evaluates and not queue and self._state == INSIDE and now >= self._fetched_ns
            if usual:
                if queue:
                    iterator.trained, iterator.evaluates = True, False
                    self._noted_update()
                waiting = self._waiting
                waiting += (*(times or NO_UPDATE), now)
                queue.clear()
                if now < self._due_ns and len(waiting) < WAITING_LIMIT:
                    self._state = FETCHING
                else:
                    self._unheard_ns = None
                    self._cut_waiting(live=True)
                return
        self.settle()
        super().fetch_start(iterator_id, now)

    def fetch_end(self, iterator_id: int, samples: int | None, now: int) -> None:
        """As in `StepCutter`; from here on events may wait, if this is the usual step so far."""
        if self._state == FETCHING and iterator_id == self._usual:
            waiting = self._waiting
            if now < waiting[-1]:  # a clock that ran backwards
                now = waiting[-1]
            waiting += (now, samples)
            self._fetched_ns = now
            self._state = INSIDE
            return
        self.settle()
        super().fetch_end(iterator_id, samples, now)
        if len(self._segments) == 1 and self._anchor is not None and not self._stack and self._mark is None:
            segment = self._segments[0]
            if self._resting is None and self._put_off is None and not segment.trained:
                self._state = INSIDE
                alone = segment.fetches == 1 and segment.leader == iterator_id == self._anchor
                waited_only = not segment.phases[BACKWARD] and not segment.phases[OPTIMIZER]  # no training in the fetch
                iterator = self._iterators.get(iterator_id)
                known = iterator is not None and iterator.fetched and (iterator.ahead is not True or iterator.held)
                if alone and known and waited_only and not segment.partial and self._cycle is None:
                    self._usual = iterator_id
                    self._fetched_ns = segment.end_ns
                    # epochs that are shorter than that, too, let listeners act between two of their steps
                    since = segment.start_ns if self._unheard_ns is None else self._unheard_ns
                    self._due_ns = since + WAIT_NS if self.patient else 0

    def _cut_waiting(self, live: bool) -> None:
        """Write the usual steps that wait as `StepCutter` would have, and be in the step that runs now.

        Each is one batch, a backward pass and an optimizer step or neither, and the start of the next fetch. `live`:
        that start is now. Else the step that runs began with it some time ago, and its fetch may be over.
        """
        if self._usual_optimizer is not None:
            self._cut_updates(live)
            return
        waiting, self._waiting = self._waiting, []
        leader, self._usual, self._state = self._usual, None, AT_ONCE
        assert leader is not None  # steps wait for its fetches only
        segment = self._segments[0]
        self._segments = []
        self._most_fetches = self._most_fetches or 1
        iterator, epoch, in_window = self._iterators[leader], segment.epoch, 1 if segment.in_window else 0
        ahead_of_use = iterator.ahead = iterator.ahead is True
        first_batch = 1 if segment.first_batch else 0
        wait, ahead, _, _, other = segment.phases
        begin, fetched, samples = segment.start_ns, segment.end_ns, segment.samples
        rows = []
        last = len(waiting) - TIMES
        for at in range(0, last + 1, STRIDE):
            start, end, step_start, step_end, over = waiting[at : at + TIMES]
            if start is None:
                kind, parts = "eval", (wait, ahead + other + over - fetched, 0, 0, 0)
                iterator.busy_ns = min(iterator.busy_ns, parts[1])
            else:
                rest = other + step_start - end + over - step_end
                kind, parts = "train", (wait, ahead + start - fetched, end - start, step_end - step_start, rest)
            if ahead_of_use:  # it works on the batch that the step before fetched
                samples, iterator.held = iterator.held[0], [samples]
            ends = (None, samples, 1, first_batch, in_window, "loader", None, None, None)
            rows.append(_new_row(StepRow, (self._number, kind, epoch, begin, over - begin, *parts, *ends)))
            self._number += 1
            begin, in_window, first_batch, ahead, other = over, 1 if self._window else 0, 0, 0, 0
            if at + STRIDE <= last:  # the fetch of the step that runs is told below
                iterator.batch()
                epoch = iterator.epoch
                fetched, samples = waiting[at + TIMES : at + STRIDE]
                wait = fetched - begin
        iterator.total += len(rows) - 1  # all but the first were fetched unheard
        self._remember((rows[:], leader, segment.last_batch - (1 if ahead_of_use else 0), 1, 1))
        self._fetch_begun(iterator, self._emit_waiting(rows, live, begin))
        if len(waiting) % STRIDE == 0:
            StepCutter.fetch_end(self, leader, waiting[-1], waiting[-2])

    def _cut_updates(self, live: bool) -> None:
        """The same of steps without a loader; the step that runs began with the end of the last, now if `live`."""
        waiting, self._waiting = self._waiting, []
        self._usual_optimizer, self._state = None, AT_ONCE
        self._noted_update()
        begin, in_window = self._segments[0].start_ns, int(self._segments[0].in_window)
        rows = []
        for at in range(0, len(waiting), TIMES):
            called, start, end, step_start, over = waiting[at : at + TIMES]
            wait = ahead = None
            rest = step_start - end
            if called is None:
                rest += start - begin
            else:
                wait, ahead = called - begin, start - called
            parts = wait, ahead, end - start, over - step_start, rest
            ends = (None, None, 0, 0, in_window, "optimizer", None, None, None)
            rows.append(_new_row(StepRow, (self._number, "train", None, begin, over - begin, *parts, *ends)))
            self._number += 1
            begin, in_window = over, int(self._window)
        self._remember((rows[:], None, 0, 1, 1))
        self._open(self._emit_waiting(rows, live, begin), partial=False)

    def _emit_waiting(self, rows: list[StepRow], live: bool, end: int) -> int:
        """Hand on rows of which the last ended at `end`, now if `live`; the time from which the next step may run."""
        self._written_ns = end
        row = rows.pop() if live else None
        if rows:
            self._emit_rows(rows)
        return end if row is None else self._emit_live(row, end)

    def _noted_update(self) -> None:
        self.optimizers_exist = self._optimizer_signalled = True
        self._cut_by_fetch, self._evaluating = False, 0

    def _fetch_begun(self, iterator: Iterator, now: int) -> None:
        self._lead(self._open(now, partial=False), iterator)
        self._before_fetch = None
        self._stack.append((DATA_WAIT, iterator.number))


_new_row = tuple.__new__


def _usual_times(events: list[int], since: int) -> tuple[int, int, int, int] | None:
    """The times of `events`, where they are a backward pass and an optimizer's step, one after the other."""
    if len(events) != USUAL_LENGTH:
        return None
    first, _, start, second, _, end, third, stepped, step_start, fourth, same, step_end = events
    usual = (first, second, third, fourth) == USUAL and stepped == same
    return (start, end, step_start, step_end) if usual and since <= start <= end <= step_start <= step_end else None


def _after_settling(name: str) -> Callable[..., Any]:
    event: Callable[..., Any] = getattr(StepCutter, name)

    def settled(self: QueuedCutter, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        return event(self, *args, **kwargs)

    return settled


# Everything else is in order only when nothing waits. `interrupt` calls `finish`.
for _name in (
    *("closure_start", "closure_end", "fetch_stop", "loader_created", "loader_length", "iterator_dead", "window"),
    *("evaluation_start", "evaluation_end", "optimizer_created", "optimizer_compiled", "optimizer_skipped", "mark"),
    "finish",
):
    setattr(QueuedCutter, _name, _after_settling(_name))
