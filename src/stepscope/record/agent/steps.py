"""Where one step ends and the next begins, from loader, autograd, optimizer and mark events: a pure state machine.

It imports nothing of torch and reads no clock but the injected one, so every kind of loop is tested without training.
A step runs from a loader's fetch (or the previous boundary) to the next boundary; a point that may or may not be one
starts a new segment (see `phases`) and is settled when the next event tells. A batch waits for its use: what was
fetched and not yet trained on belongs to the next update, or is a step of evaluation once something shows that it was
used otherwise (a module called without gradients, another loader's turn, the end of the loop). Without a loader, the
time before the first module forward is data wait; where that moment was not seen, data wait and forward are None and
their time is in other. Event methods take `now` in nanoseconds and never raise, whatever the order of events.
"""

from __future__ import annotations

from collections import deque
from typing import Callable, List, NamedTuple, Optional, Tuple

from stepscope.record.agent.segments import (
    BACKWARD,
    DATA_WAIT,
    FORWARD,
    NEVER,
    OPTIMIZER,
    OTHER,
    UNUSED,
    WITH_GRADIENTS,
    WITHOUT_GRADIENTS,
    Iterator,
    Segment,
    Snapshot,
    StepRow,
    build_row,
    merge,
)

# Undecided boundaries held before the loader's fetches (or the optimizer's ends) are taken as the boundaries: enough
# for any usual gradient accumulation, few enough that the journal is not far behind.
UNDECIDED_LIMIT = 64
# The same where it is known that no module was called on the batches: they are fetched ahead, or only looked through.
UNUSED_LIMIT = 256
# A script that has stopped marking is noticed after this many steps that look complete.
UNMARKED_LIMIT = 8

# Steps whose batches are remembered.
USES_LIMIT = 512

# Trained modules that are told from a teacher's.
MODELS_LIMIT = 16

MARK_PRIORITY = {"user": 3, "profiler_step": 2, "xla_sync": 1}
BACKWARD_AS_OPTIMIZER = -1  # stands for all optimizers that step inside backward


Emit = Callable[[Optional[StepRow], bool, int], None]


class Use(NamedTuple):
    """The batches that a step was trained on: `batches` of an iterator's from number `first` on, counted from 0.

    `passes` are the backward passes on them. `iterator` is None where the step had no loader.
    """

    start_ns: int
    end_ns: int
    step: int
    iterator: int | None
    first: int
    batches: int
    passes: int


# Rows of steps cut together, of which each used `batches` of an iterator's, one after the other, and had `passes`
# backward passes: (rows, iterator, the first step's first batch, batches, passes).
Used = Tuple[List[StepRow], Optional[int], int, int, int]

# What an optimizer's closure runs: up to its last backward pass, and behind it, as a framework's hooks do.
_CLOSURE, _BEHIND = (FORWARD, 0), (OTHER, 0)


class StepCutter:
    """Cuts steps. `emit(row, live, now)` gets each row; `live` when called between two steps, where listeners may act.

    With `row` None a loop starts. `clock` is read again after a live `emit`: what it took is in no step. `ask_use` is
    called where the next module call would tell something; it returns whether `module_forward` will be called.
    """

    def __init__(self, clock: Callable[[], int], emit: Emit) -> None:
        self._clock = clock
        self._emit = emit
        self._segments: list[Segment] = []  # of the open step, the last one open; empty between loops
        self._stack: list[tuple[int, int]] = []  # (phase, token) of the calls we are inside
        self._anchor: int | None = None  # the iterator whose fetches are boundaries
        self._resting: Snapshot | None = None  # the loop ended inside a step; where, if nothing continues it
        self.optimizers_exist = False  # the script has made one: what else it differentiates is no step
        self._optimizer_signalled = False
        self._mark: str | None = None  # the strongest source of marks seen
        self._number = 0
        self._single = (0, -2)  # the last iterator that was asked for one batch alone, and the steps until then
        self._most_fetches = 0
        self._window = False
        self._written_ns = 0  # the end of the last row: no step begins before it, whatever the clock does
        self._iterators: dict[int, Iterator] = {}
        self._uses: deque[Used] = deque()  # the last steps, `USES_LIMIT` at least
        self._remembered = 0  # how many those are
        self.ask_use: Callable[[], bool] = lambda: False
        self._evaluating = 0
        self._looked_through: list[Segment] = []  # batches that nothing was done with, in a script with no step yet
        self._epochs: dict[int, int] = {}
        self._before_fetch: Snapshot | None = None
        self._idle_since: int | None = None
        self._cut_by_fetch = False  # optimizers exist but never signal
        self._cycle: set[int] | None = None  # optimizers of one iteration without a loader
        self._leading = 0  # that of them which came twice first
        self._uneven = False  # others join in every few iterations: each begins with the one that leads
        self._put_off: Segment | None = None  # batches of an update that an evaluation was put before
        self._root = 0  # the line the running backward pass was called from
        self._accumulates = False  # gradients are kept from one backward pass to the next, no optimizer in sight
        self._heard = False  # modules are called in this script
        self._models: set[int] = set()  # those called with gradients
        # Before the first step: when the optimizer was made, and the first module called after that.
        self._made_ns: int | None = None
        self._called_ns: int | None = None
        self._opened_ns: int | None = None  # where a step was opened whose begin was not seen

    def loader_created(self, loader_id: int, iterator_id: int, now: int, fetches_ahead: bool = False) -> int:
        """An iterator over a loader, iterated before as often as is returned, is about to be made; ids are unique.

        `fetches_ahead`: the loader is known to fetch a batch before it hands out the one before.
        """
        epoch = self._epochs.get(loader_id, 0)
        self._epochs[loader_id] = epoch + 1
        anchor = self._iterators.get(self._anchor or 0)
        if anchor is not None and anchor.exhausted and anchor.loader == loader_id:
            self.iterator_dead(anchor.number, now)  # its loop is over, wherever it is still held
        before = self._segments[-1].snapshot(now) if self._segments and not self._stack else None
        iterator = self._iterators[iterator_id] = Iterator(iterator_id, epoch, now, before, loader_id)
        iterator.ahead = True if fetches_ahead else None
        return epoch

    def loader_length(self, iterator_id: int, batches: int) -> None:
        """An epoch of the iterator has so many batches; one that yields more begins anew by itself."""
        iterator = self._iterators.get(iterator_id)
        if iterator is not None and batches > 0:
            iterator.length = batches

    def evaluation_start(self, _now: int) -> None:
        """The script, or its framework, says that it evaluates from here on (nested calls are welcome)."""
        self._evaluating += 1

    def evaluation_end(self, _now: int) -> None:
        self._evaluating = max(0, self._evaluating - 1)

    def fetch_start(self, iterator_id: int, now: int) -> None:
        """`__next__` of an iterator begins."""
        iterator = self._iterators.get(iterator_id)
        if iterator is None:
            iterator = self._iterators[iterator_id] = Iterator(iterator_id, None, now, None)
        if self._stack and self._stack[-1][0] == OPTIMIZER and not self.in_backward:
            self._stack.clear()  # an optimizer step that raised never told of its end
        if self._stack:
            self._enter(DATA_WAIT, iterator_id, now, OTHER)
            return
        if self._evaluating:
            iterator.evaluates = iterator.declared = True
        now = self._fetch_boundary(iterator, now) if self._segments else self._start_loop(now)
        if not self._segments:
            self._open(now, partial=False)
        if self._anchor is None or (len(self._segments) == 1 and self._segments[0].empty):
            self._anchor = iterator_id
        segment = self._segments[-1]
        if segment.leader is None:
            self._lead(segment, iterator)
        if segment.end_ns != now or segment.backward:
            self._before_fetch = segment.snapshot(now)
            segment.charge(now, OTHER)
        else:
            self._before_fetch = None  # the step begins here
        self._stack.append((DATA_WAIT, iterator_id))

    def fetch_end(self, iterator_id: int, samples: int | None, now: int) -> None:
        """`__next__` returned a batch of `samples` rows (None when unknown), or raised something else than the end."""
        iterator = self._iterators.get(iterator_id)
        if iterator is not None:
            iterator.total += 1
        if not self._leave(DATA_WAIT, now) or self._stack:
            return
        segment = self._segments[-1]
        if iterator is not None and not iterator.fetched:
            iterator.fetched = segment.first_batch = True
        if segment.leader != iterator_id:
            return
        if self._put_off is not None and self._put_off.leader == iterator_id:
            self._resume(segment)
        segment.fetches += 1
        segment.last_samples = samples
        if samples is not None:
            segment.samples = (segment.samples or 0) + samples
        if iterator is not None:
            iterator.batch()
            segment.last_batch = iterator.total - 1
            segment.epoch = iterator.epoch
            # A loader that trains need not be asked, but for a second batch in a row.
            waits = len(self._segments) > 1 and not self._segments[-2].trained
            if (waits or not (iterator.trained or iterator.evaluates)) and not segment.trained and self.ask_use():
                segment.use = UNUSED

    def fetch_stop(self, iterator_id: int, now: int) -> None:
        """`__next__` raised StopIteration: the step ended where that call began, unless a batch still waits."""
        self._leave(DATA_WAIT, now)
        iterator = self._iterators.get(iterator_id)
        last = self._segments[-1] if len(self._segments) > 1 and not self._stack else None
        if last is not None and last.by_other_loader and not (last.fetches or last.trained):
            self._undo_division()  # it began nothing
        if not self._stack and self._segments and iterator_id in (self._anchor, self._segments[0].leader):
            waits = any(segment.fetches for segment in self._segments)
            if iterator is not None and (iterator.held or (waits and not self._trained())):
                iterator.exhausted = True
                self._anchor = iterator_id
                return
            end, start = self._before_fetch, self._segments[-1].start_ns
            if end is None or end[0] < start:  # the step began with this very call
                end = start, [0, 0, 0, 0, 0]
            self._anchor, self._idle_since = None, now
            last = self._segments[-1]
            if not self._trained():
                self._segments = []  # cut at this very fetch, or batches nothing was done with
            elif len(self._segments) > 1 and not last.trained and not last.fetches:
                self._segments.pop()
                self._resting = self._segments[-1].snapshot(0)
            else:
                self._resting = end
        self._iterators.pop(iterator_id, None)

    def iterator_dead(self, iterator_id: int, now: int) -> None:
        """An iterator was destroyed before its end: the loop was left by break, or only peeked into it."""
        iterator = self._iterators.get(iterator_id)
        if iterator is not None and iterator_id == self._anchor:
            if iterator.exhausted and iterator.trained and not iterator.evaluates and not self._trained():
                return  # its last batches were kept, and may still be trained on
            if iterator.total == 1 and not self._trained():
                gone, steps = self._single
                self._iterators.pop(gone, None)
                self._single = iterator_id, self._number
                if 0 < self._number <= steps + 1 and not any(one.trained for one in self._iterators.values()):
                    return  # `next(iter(loader))` in each step: what it gave feeds this one
            self._anchor = None
            if not self._stack and self._segments and self._resting is None:
                self._anchor_dead(iterator, now)
        self._iterators.pop(iterator_id, None)

    def _anchor_dead(self, iterator: Iterator, now: int) -> None:
        last = self._segments[-1]
        if last.trained and self._complete(last):
            self._close("loader", False, now)
            self._idle_since = now
        elif self._trained():
            self._resting = last.snapshot(now)
        else:
            if iterator.exhausted or self._used_last(iterator, now)[0]:
                last.charge(now, OTHER)
            else:
                self._segments.pop()
            if iterator.count == 1 and self._number == 0 and not iterator.exhausted:
                self._segments = []  # a model built, or tried, on one batch before the training
            self._write_untrained("end", live=False)
            self._idle_since = now

    def _used_last(self, iterator: Iterator | None, now: int) -> tuple[bool, int]:
        """Whether an evaluation used its last batch, as a loop left at its top did not; and until when at most."""
        last = self._segments[-1]
        busy = [segment.end_ns - segment.start_ns - segment.phases[DATA_WAIT] for segment in self._segments[:-1]]
        least_ns = min(iterator.busy_ns if iterator is not None else NEVER, *busy, NEVER)
        if last.use is not None:
            used = last.use != UNUSED
        else:  # a framework fetches nothing in vain; a small last batch, or one behind a cold first, takes little time
            used = (iterator is not None and iterator.declared) or now - last.end_ns >= least_ns // 4
        return used, min(now, last.end_ns + (4 * least_ns if least_ns < NEVER else 0))

    def backward_start(self, now: int, root: int = 0, cleared: bool | None = None) -> None:
        """A backward pass begins (nested calls are welcome).

        While no optimizer is known (`wants_roots`), `root` is the line that called it and `cleared` whether gradients
        were cleared since the pass before.
        """
        if self._resting is not None or not self._segments or self._put_off is not None:
            self._continue_or_open(now)
        self._root = 0
        if root and self.wants_roots and not self._stack:
            self._root = root
            if cleared is False:  # the last division was none: gradients are added to those of the pass before it
                self._accumulates = True
                if len(self._segments) > 1 and not self._segments[-1].trained:
                    self._undo_division()
                self._segments[-1].stepped = False
            else:
                self._before_update(root)
        last = self._segments[-1]
        if not self._stack and last.stepped and last.leader is not None and self._mark is None:
            # A second update on the same batch, or the second optimizer of a GAN: undecided.
            self._divide(now, FORWARD, "optimizer", carried=True)
            last = self._segments[-1]
        if not self.in_backward:
            last.backward += 1
            if self._stack and self._stack[-1] == _BEHIND:
                self._stack[-1] = _CLOSURE
        self._enter(BACKWARD, 0, now, FORWARD)

    def backward_end(self, now: int) -> None:
        if not self._leave(BACKWARD, now):
            return
        if self._stack:
            if self.in_backward:
                return
            if self._stack[-1] == _CLOSURE:
                self._stack[-1] = _BEHIND
        last = self._segments[-1]
        if BACKWARD_AS_OPTIMIZER in last.optimizers and not last.stepped:
            self._optimizer_done(BACKWARD_AS_OPTIMIZER, now)
        elif not self.optimizers_exist:
            last.signal = last.snapshot(now)
            if self._root and not self._stack and self._without_loader() and self._mark is None:
                self._update_done(self._root, now)
                self.ask_use()

    @property
    def wants_roots(self) -> bool:
        """Whether backward passes are all there is to cut steps by."""
        return not self.optimizers_exist and self._mark is None and self._without_loader()

    def optimizer_created(self, now: int | None = None) -> None:
        """An Optimizer object exists in the process: backward alone does not complete a step any more."""
        self.optimizers_exist = True
        if self._number == 0 and not self._segments and self._idle_since is None:
            self._made_ns, self._called_ns = now, None
            self.ask_use()

    def optimizer_compiled(self, _now: int) -> None:
        """Dynamo has compiled the `step` of an optimizer, hooks left out: unless another tells, backward has to do."""
        self.optimizers_exist = False

    def optimizer_start(self, optimizer_id: int, now: int) -> None:
        """`step` of an optimizer begins (nested calls are welcome)."""
        if self._resting is not None or not self._segments or self._put_off is not None:
            self._continue_or_open(now)
        if self._stack and (OPTIMIZER, optimizer_id) in self._stack:  # the earlier call raised
            del self._stack[self._stack.index((OPTIMIZER, optimizer_id)) :]
        if not self._stack:
            self._segments[-1].charge(now, OTHER)
            self._before_optimizer(optimizer_id)
            self._stack.append((OPTIMIZER, optimizer_id))
            return
        if self.in_backward and BACKWARD_AS_OPTIMIZER not in self._segments[-1].optimizers:
            self._before_optimizer(BACKWARD_AS_OPTIMIZER)
            self._segments[-1].optimizers |= {BACKWARD_AS_OPTIMIZER}
        self._enter(OPTIMIZER, optimizer_id, now, OTHER)

    def optimizer_end(self, optimizer_id: int, now: int) -> None:
        if self._leave(OPTIMIZER, now, optimizer_id) and not self._stack:
            self._optimizer_done(optimizer_id, now)

    def closure_start(self, now: int) -> None:
        """The optimizer calls the closure it was given: forward, and the backward pass inside."""
        if self._opened_ns is not None and self._segments and len(self._stack) == 1:
            # The first step of all: nothing of it came before the optimizer.
            self._open(self._opened_ns, partial=False)
        self._opened_ns = None
        if self._segments and self._segments[0].leader is None and not self._segments[0].knows_forward:
            self._segments[0].knows_forward, self._segments[0].knows_wait = True, False
        self._enter(*_CLOSURE, now, OTHER)

    def closure_end(self, now: int) -> None:
        self._leave(*((OTHER, now) if _BEHIND in self._stack else (FORWARD, now)))

    def optimizer_skipped(self, optimizer_id: int, now: int) -> None:
        """A GradScaler found an overflow and left the update out: the iteration is complete all the same."""
        if self._stack:
            return
        self._continue_or_open(now)
        self._segments[-1].charge(now, OTHER)
        self._before_optimizer(optimizer_id)
        self._optimizer_done(optimizer_id, now)

    def module_forward(self, now: int, gradients: bool = True, module: int = 0) -> bool:
        """A module is called, with gradients or without. Returns whether the next call is of interest as well.

        It tells what a batch is for. Where there is no loader, the gap before it was data wait: in the first call of a
        step with gradients, or of a module that never had any (a teacher), not in an evaluation of the trained one.
        """
        self._heard = True
        if gradients and len(self._models) < MODELS_LIMIT:
            self._models.add(module)
        if self._segments and self._segments[-1].use == UNUSED:
            self._segments[-1].use = WITH_GRADIENTS if gradients else WITHOUT_GRADIENTS
        if self._stack or self._resting is not None:
            return False
        if not self._segments:
            if gradients and self._called_ns is None:
                self._called_ns = now
            return not gradients
        last = self._segments[-1]
        segment = last if self._root or self._uneven else self._segments[0]
        if segment.knows_forward or segment.trained or (len(self._segments) > 1 and segment is not last):
            return False
        if self._root:  # the parameters were changed by hand since the backward pass
            segment.knows_wait = False
        evaluation = not gradients and module in self._models
        segment.charge(now, DATA_WAIT if segment.knows_wait and not evaluation else OTHER)
        if evaluation:
            segment.knows_wait = False
            return True
        segment.knows_forward = True
        return False

    def mark(self, source: str, now: int) -> None:
        """A step boundary set by `source`: "user", "profiler_step" or "xla_sync". Weaker sources are ignored."""
        if MARK_PRIORITY.get(source, 0) < MARK_PRIORITY.get(self._mark or "", 0) or self._stack:
            return
        first, self._mark = self._mark is None, source
        if first and self._segments and all(segment.empty for segment in self._segments):
            self._segments = []  # the optimizer or the loader had cut this step already
        if self._resting is not None:
            now = max(now, self._settle_rest())
        elif self._segments:
            self._segments[-1].charge(now, OTHER)
            trained = self._trained()
            if not trained and len(self._segments) == 1 and self._segments[0].first_batch:
                # A mark at the top of the loop's body, or an evaluation step: the next mark will tell.
                self._divide(now, OTHER, source)
                return
            if not trained and len(self._segments) > 1:
                self._write_each(source)
            else:
                now = self._close(source, True)
        self._open(now, partial=False)

    def interrupt(self, now: int) -> None:
        """Events will be missing for a while: write what is complete, drop the rest, know nothing of what follows."""
        self.finish(now)
        self._idle_since = self._made_ns = self._called_ns = None

    def handed_over(self, now: int) -> None:
        """Another thread trains: batches that this one fetched without a step of its own are that one's."""
        made_ns, self._looked_through = self._made_ns, []
        if self._number == 0:
            self._segments = []
        self.interrupt(now)
        self._made_ns = made_ns

    def finish(self, now: int) -> None:
        """Write the last open step, ended at its last signal, if it was complete."""
        self._stack.clear()
        if self._resting is not None:
            self._settle_rest(live=False)
        elif self._segments:
            last = self._segments[-1]
            if not self._trained():
                used, end_ns = self._used_last(self._iterators.get(last.leader or 0), now)
                if used:
                    last.charge(end_ns, OTHER)
                else:
                    self._segments.pop()  # nobody knows whether more was to come
                self._write_untrained("end", live=False)
            elif last.signal is not None and self._complete(last):
                last.rewind(last.signal)
            else:
                self._segments.pop()
            if self._some_complete():
                self._close_undecided(live=False)
        self._segments = self._looked_through if self._number == 0 else []
        self._write_each("loader")
        self._looked_through = []
        self._anchor = None
        self._idle_since = now

    def _fetch_boundary(self, iterator: Iterator, now: int) -> int:
        """Decide whether this fetch ends the open step. Returns the time, later when a step was cut."""
        if self._resting is not None:
            return self._settle_rest()
        last = self._segments[-1]
        if self._segments[0].leader is None and all(segment.empty for segment in self._segments):
            if self._mark is None or iterator.number != self._anchor:
                self._segments = []  # what came before this loop is no step
                now = self._start_loop(now)
            return now
        anchor = self._iterators.get(self._anchor) if self._anchor is not None else None
        if anchor is None:  # a loop with a loader follows one without
            self._anchor = None
            if last.empty:
                self._segments.pop()
                return self._close("optimizer", True)
            if self._segments[0].partial and self._mark is None:
                self._segments = []  # nobody saw it begin: this fetch is a better start
                return self._start_loop(now)
            if last.trained and self._complete(last) and self._mark is None:
                return self._close("loader", True, now)
            return now
        if iterator is not anchor:
            return self._other_fetch(iterator, last, now)
        return self._leading_fetch(iterator, last, now)

    def _leading_fetch(self, iterator: Iterator, last: Segment, now: int) -> int:
        if last.by_other_loader and not last.trained and self._trained() and self._mark is None:
            if last.use != UNUSED:
                return self._split_off_evaluation(iterator, last, now)
            self._undo_division()  # a batch for the next step
            last = self._segments[-1]
        if not self._trained():
            return self._fetch_again(iterator, last, now) if last.fetches else now
        if self._complete(last) and last.trained and not self._mark:
            return self._close("loader", True, now)
        # Gradients accumulate, or the optimizer is silent, or the user's mark is late: undecided.
        self._divide(now, OTHER, "loader")
        return now

    def _fetch_again(self, iterator: Iterator, last: Segment, now: int) -> int:
        """The leading loader fetches, and nothing was trained on what it fetched before."""
        if iterator.ahead and not iterator.held and last.fetches == 1 == len(self._segments):
            return now  # one batch ahead
        now = last.charge(now, OTHER)
        limit = UNUSED_LIMIT if last.use == UNUSED else UNDECIDED_LIMIT
        if iterator.evaluates or last.use == WITHOUT_GRADIENTS or len(self._segments) >= limit:
            iterator.evaluates = True
            return self._write_untrained("loader", live=True)
        self._segments.append(Segment(now, self._window))
        return now

    def _write_untrained(self, signal: str, live: bool) -> int:
        """Write batches that will not be trained on as steps of evaluation, one per batch that was used.

        A batch on which no module was called was fetched ahead of the next one that was. Where there is no such batch
        at all, the loop only looked through its data: that is told where nothing else is done, or without modules.
        """
        segments, self._segments = self._segments, []
        steps: list[list[Segment]] = [[]]
        for segment in segments:
            iterator = self._iterators.get(segment.leader or 0)
            if not segment.fetches:  # the loader was found empty: is there a batch that it handed out late?
                if iterator is None or not (iterator.held or iterator.ahead):
                    continue
                if iterator.trained and not iterator.evaluates:
                    continue
            steps[-1].append(segment)
            if segment.use != UNUSED or (self._number and not self._heard):
                steps.append([])
        if len(steps) > 1:
            steps.pop()
            self._looked_through = []
        else:
            unused, steps = steps[0], []
            if self._number == 0:
                self._looked_through += unused
                if len(self._looked_through) >= UNUSED_LIMIT:
                    steps, self._looked_through = [[segment] for segment in self._looked_through], []
            elif live:
                steps = [[segment] for segment in unused]
        end = self._clock()
        for number, step in enumerate(steps, 1):
            end = self._write(step, signal, live and number == len(steps))
        return end

    def _other_fetch(self, iterator: Iterator, last: Segment, now: int) -> int:
        """A fetch of a loader that does not lead: a loop inside or after the loop, or a second source of batches."""
        if iterator.ahead and iterator.total == 1:
            return now  # the batch it keeps
        unused = len(self._segments) > 1 and not last.trained
        if unused and last.by_other_loader and last.use != UNUSED and self._mark is None:
            # The second loader's batch was not trained on: the step was over before it, or is put off.
            return self._split_off_evaluation(iterator, last, now)
        anchor = self._iterators.get(self._anchor or 0, iterator)  # itself where the other one is gone
        inside = iterator.created_ns > self._segments[0].start_ns
        complete = last.trained and self._complete(last)
        if inside and complete:
            # Making the iterator (starting its workers) is no part of the step before it.
            if iterator.before is not None and iterator.before[0] >= last.end_ns:
                last.rewind(iterator.before)
            else:
                last.charge(now, OTHER)
            self._anchor = iterator.number
            return self._close("loader", True)
        if unused and last.by_other_loader and not self._trained():
            return now
        if not self._trained() and (anchor.exhausted or any(segment.fetches for segment in self._segments)):
            known = last.use == WITHOUT_GRADIENTS or anchor.evaluates or anchor.exhausted or len(self._segments) > 1
            if known or (iterator.trained and not anchor.trained):
                # The loop over the other loader was an evaluation.
                last.charge(now, OTHER)
                self._anchor = iterator.number
                return self._write_untrained("loader", live=True)
        # A batch of the loader that trains, and an evaluation before it is trained on?
        waits = last.fetches and not last.trained and not iterator.trained and len(self._segments) == 1
        waits = waits and (inside or iterator.evaluates)
        if (complete or waits or (last.trained and self._evaluating)) and self._mark is None:
            self._divide(now, OTHER, "loader")
            self._segments[-1].by_other_loader = True
        return now

    def _split_off_evaluation(self, iterator: Iterator, last: Segment, now: int) -> int:
        before = self._segments[:-1]
        if self._trained() and self._complete(before[-1]):
            self._split_off_last("loader")
        else:
            self._put_off, self._segments = merge(before), [last]
        self._anchor = iterator.number
        if last.leader == iterator.number:
            return self._fetch_again(iterator, last, now)
        last.charge(now, OTHER)
        return self._write_untrained("loader", live=True)

    def _undo_division(self) -> None:
        """The last division was none, and nothing was trained since."""
        last, before = self._segments.pop(), self._segments[-1]
        before.end_ns = last.end_ns
        before.phases = [sum(pair) for pair in zip(before.phases, last.phases)]

    def _before_optimizer(self, optimizer_id: int) -> None:
        """An optimizer is about to step: whatever was said before, this is no evaluation."""
        self.optimizers_exist, self._evaluating = True, 0
        self._before_update(optimizer_id)

    def _before_update(self, identity: int) -> None:
        """An optimizer, or a line that calls backward, acts: one that did before tells what a division was."""
        seen = self._step_optimizers(self._segments[:-1]) if len(self._segments) > 1 else set()
        if self._mark is not None or identity not in seen:
            if self._cycle is not None and identity not in self._cycle:
                self._cycle, self._uneven = None, True
            return
        last = self._segments[-1]
        if last.by_other_loader:
            self._split_off_last("loader")
            self._anchor = last.leader
        elif self._without_loader():
            if self._uneven and self._leading in seen and identity != self._leading:
                return
            self._uneven = self._uneven and self._leading in seen
            if not self._uneven or len(seen) > 1:
                self._cycle = None if self._accumulates else seen
            self._leading = identity
            self._split_off_last("optimizer")

    def _trained(self) -> bool:
        return any(segment.trained for segment in self._segments)

    def _optimizer_done(self, optimizer_id: int, now: int) -> None:
        self._optimizer_signalled = True
        self._cut_by_fetch = False
        self._update_done(optimizer_id, now)

    def _update_done(self, identity: int, now: int) -> None:
        last = self._segments[-1]
        last.stepped = True
        last.optimizers |= {identity}
        last.signal = last.snapshot(now)
        if self._mark is not None or not self._without_loader():
            return
        if self._cycle and self._step_optimizers(self._segments) >= self._cycle:
            self._open(self._close("optimizer", True), partial=False)
        else:
            self._divide(now, OTHER, "optimizer")
            if self._uneven:
                self.ask_use()

    def _complete(self, segment: Segment) -> bool:
        """Whether nothing more is expected of the segment before a boundary."""
        if segment.stepped or segment.carried:
            return True
        if not segment.backward:
            return segment.fetches > 0 or len(self._segments) > 1
        return not self.optimizers_exist or self._cut_by_fetch

    def _continue_or_open(self, now: int) -> None:
        """Training activity: it continues a step whose loop had ended, or starts one where none is open."""
        self._resting = None
        iterator = self._iterators.get(self._put_off.leader or 0) if self._put_off is not None else None
        if iterator is None:
            self._put_off = None
        elif self._segments:  # the evaluation is over
            self._idle_since = self._segments[-1].end_ns
            self._write_untrained("loader", live=False)
        if not self._segments:
            called = self._called_ns if self._idle_since is None else None
            since = self._idle_since if called is None else called
            if since is None:
                since, self._opened_ns = self._made_ns, now
            segment = self._open(now if since is None else min(since, now), partial=since is None)
            if iterator is not None:
                self._resume(segment)
                self._lead(segment, iterator)
                self._anchor = iterator.number
            if called is not None:
                segment.knows_forward, segment.knows_wait = True, False

    def _divide(self, now: int, gap: int, signal: str, carried: bool = False) -> None:
        """Begin a new segment at a point that may be a boundary; too many of them are boundaries."""
        last = self._segments[-1]
        now = last.charge(now, gap)
        segment = Segment(now, self._window)
        if carried:
            segment.carried = True
            segment.leader, segment.epoch, segment.last_batch = last.leader, last.epoch, last.last_batch
        limit = max(UNDECIDED_LIMIT, 4 * self._most_fetches) if self._mark is None else UNMARKED_LIMIT
        if len(self._segments) < limit:
            self._segments.append(segment)
            return
        if self._mark is not None:
            self._mark = None
        elif carried:
            self._anchor = None
            segment.carried, segment.leader = False, None
        else:
            self._cut_by_fetch = True
        self._write_each(signal)
        self._segments = [segment]

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running."""
        return any(phase == BACKWARD for phase, _ in self._stack)

    def current_step(self) -> int | None:
        """Number of the open step, None between loops.

        Batches of a loader that has never trained are taken for steps of evaluation, until it is known what they are.
        """
        if not self._segments or self._resting is not None:
            return None
        before = self._segments[:-1]
        iterator = self._iterators.get(self._segments[0].leader or 0) if before else None
        if iterator is None or iterator.trained or any(segment.trained for segment in self._segments):
            return self._number
        return self._number + sum(segment.use != UNUSED for segment in before)

    def window(self, active: bool) -> None:
        """torch.profiler is on from now on, or off; the open step counts as inside when it was on at any time."""
        self._window = active
        if active and self._segments:
            self._segments[-1].in_window = True

    def _without_loader(self) -> bool:
        return self._anchor is None and all(segment.leader is None for segment in self._segments)

    @staticmethod
    def _step_optimizers(segments: list[Segment]) -> set[int]:
        return {optimizer for segment in segments for optimizer in segment.optimizers}

    def _start_loop(self, now: int) -> int:
        self._emit(None, True, now)
        now = max(now, self._clock())
        self._open(now, partial=False)
        return now

    def _open(self, now: int, partial: bool) -> Segment:
        segment = Segment(max(now, self._written_ns), self._window)
        segment.partial = partial
        self._segments = [segment]
        self._resting = None
        return segment

    def _lead(self, segment: Segment, iterator: Iterator) -> None:
        put_off = self._put_off
        if put_off is not None and put_off.leader == iterator.number and not put_off.backward:
            self._put_off = None
        segment.leader = iterator.number
        segment.epoch = iterator.epoch
        segment.last_batch = iterator.total - 1
        segment.knows_forward = True

    def _resume(self, segment: Segment) -> None:
        """The segment goes on with what an evaluation was put before; the time of that is in no step."""
        for name in ("fetches", "samples", "last_samples", "first_batch", "backward"):
            setattr(segment, name, getattr(self._put_off, name))
        self._put_off = None

    def _split_off_last(self, signal: str) -> None:
        """The last division was a boundary: what precedes it is a step."""
        last = self._segments.pop()
        self._close(signal, False)
        self._segments = [last]

    def _settle_rest(self, live: bool = True) -> int:
        """Nothing continued the step the last loop ended in: write it as it was then."""
        end, self._resting = self._resting, None
        if end is not None and self._segments:
            self._segments[-1].rewind(end)
        return self._close_undecided(live)

    def _some_complete(self) -> bool:
        silent = self.optimizers_exist and not self._optimizer_signalled
        return any(segment.trained and (silent or self._complete(segment)) for segment in self._segments)

    def _close_undecided(self, live: bool) -> int:
        """Write segments no later event can settle: one step each where boundaries were guessed, else one step.

        Passes without an update, fewer than the step before had, are none: accumulation leaves them over.
        """
        usual = self._uses[-1][-1] if self._uses else 0
        if 0 < sum(segment.backward for segment in self._segments) < usual and not self._some_complete():
            self._segments = []
            return self._clock()
        silent = not self._optimizer_signalled and self.optimizers_exist
        if (silent or self._mark is not None) and len(self._segments) > 1:
            self._write_each("loader")
            return self._clock()
        return self._close("end", live)

    def _write_each(self, signal: str) -> None:
        segments, self._segments = self._segments, []
        for segment in segments:
            self._write([segment], signal, live=False)

    def _close(self, signal: str, live: bool, now: int | None = None) -> int:
        """Write the open segments, the last one up to `now`, as one step. The time from which the next may run."""
        if now is not None:
            self._segments[-1].charge(now, OTHER)
        segments, self._segments = self._segments, []
        return self._write(segments, signal, live)

    def _write(self, segments: list[Segment], signal: str, live: bool) -> int:
        end = segments[-1].end_ns
        row: StepRow | None = None
        if not segments[0].partial:
            row = build_row(segments, self._number, signal)
            iterator = self._iterators.get(segments[0].leader or 0)
            if iterator is not None:
                row = self._used(iterator, segments, row)
            if row.kind == "train":
                held = len(iterator.held) if iterator is not None else 0
                self._remember(([row], *self._use_of(segments, row.fetches, held)))
            self._written_ns = end
            self._number += 1
            self._most_fetches = max(self._most_fetches, row.fetches)
        if live:
            return self._emit_live(row, end)
        if row is not None:
            self._emit(row, False, end)
        return end

    def _emit_live(self, row: StepRow | None, end: int) -> int:
        self._emit(row, True, end)
        if row is not None and not row.fetches:
            self.ask_use()  # in the next step the first module call tells where forward begins
        return max(end, self._clock())

    @staticmethod
    def _used(iterator: Iterator, segments: list[Segment], row: StepRow) -> StepRow:
        """The row with the batches that were used in the step: one that a loader fetched ahead is the next step's."""
        if row.kind == "train":
            iterator.trained, iterator.evaluates = True, False
        else:
            iterator.busy_ns = min(iterator.busy_ns, row.forward_ns or 0)
        if iterator.ahead is False:
            return row
        uses = sum(segment.backward if row.kind == "train" else segment.use != UNUSED for segment in segments)
        beyond = row.fetches == uses + 1 and segments[0].fetches > 0 and not segments[0].trained
        if iterator.ahead is None:
            iterator.ahead = beyond and (len(segments) > 1 or segments[0].fetches > 1)
            if not iterator.ahead:
                return row
        held, iterator.held = iterator.held, []
        if not (iterator.exhausted and not segments[-1].fetches):  # else it is the call that found the loader empty
            # In every step, or in none: what it fetches is one step's.
            if beyond if held else row.fetches == 1:
                iterator.ahead = False
            elif row.fetches:
                iterator.held = [merge(segments).last_samples]
        samples = [row.samples, *held, *(None if late is None else -late for late in iterator.held)]
        known = [count for count in samples if count is not None]
        return row._replace(
            fetches=row.fetches + len(held) - len(iterator.held), samples=sum(known) if known else row.samples
        )

    def _use_of(self, segments: list[Segment], fetches: int, held: int) -> tuple[int | None, int, int, int]:
        """(iterator, first batch, batches, backward passes) of a step that used `fetches` and left `held` over."""
        leader, count = segments[0].leader, max(fetches, 1)
        last = next((segment.last_batch for segment in reversed(segments) if segment.leader == leader), 0) - held
        return leader, max(last + 1 - count, 0), count, sum(segment.backward for segment in segments)

    def _remember(self, used: Used) -> None:
        self._uses.append(used)
        self._remembered += len(used[0])
        while self._remembered - len(self._uses[0][0]) >= USES_LIMIT:
            self._remembered -= len(self._uses.popleft()[0])

    def uses(self) -> list[Use]:
        """The batches that the last trained steps used, in order."""
        return [
            Use(row.start_ns, row.start_ns + row.wall_ns, row.step, iterator, first + at * batches, batches, passes)
            for rows, iterator, first, batches, passes in self._uses
            for at, row in enumerate(rows)
            if row.kind == "train"
        ]

    def runs_since(self, step: int) -> list[tuple[int, int | None, int, int, int]]:
        """(first step, iterator, its first batch, batches of each step, steps) of steps cut together from `step` on."""
        return [
            (rows[0].step, iterator, first, batches, len(rows))
            for rows, iterator, first, batches, _ in self._uses
            if rows[0].step >= step
        ]

    def open_use(self) -> Use | None:
        """The batches of the step under way, as far as they are fetched."""
        segments = self._segments
        if not segments or self._resting is not None:
            return None
        fetches = sum(segment.fetches for segment in segments if segment.leader == segments[0].leader)
        iterator = self._iterators.get(segments[0].leader or 0)
        held = 0
        if iterator is not None and iterator.ahead:
            held = int(fetches > 0 and not iterator.exhausted)
            fetches += len(iterator.held) - held
        return Use(segments[0].start_ns, segments[-1].end_ns, self._number, *self._use_of(segments, fetches, held))

    def _enter(self, phase: int, token: int, now: int, gap: int) -> None:
        if self._segments:
            self._segments[-1].charge(now, self._stack[-1][0] if self._stack else gap)
        self._stack.append((phase, token))

    def _leave(self, phase: int, now: int, token: int | None = None) -> bool:
        """End the innermost call of `phase`, and calls inside it whose end was never told. False when there is none."""
        if len(self._stack) == 1:  # nearly always, and three times a step: hence `charge` written out
            if self._stack[0][0] != phase or token not in (None, self._stack[0][1]):
                return False
            self._stack.clear()
            if not self._segments:
                return False
            segment = self._segments[-1]
            if now > segment.end_ns:
                segment.phases[phase] += now - segment.end_ns
                segment.end_ns = now
            return True
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index][0] == phase and token in (None, self._stack[index][1]):
                if self._segments:
                    self._segments[-1].charge(now, self._stack[-1][0])
                del self._stack[index:]
                return bool(self._segments)
        return False
