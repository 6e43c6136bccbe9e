"""A stretch of a step, its exclusive phases, and how stretches become a row of the step journal.

A step is built from one or more segments. While it is not yet known whether a point is a step boundary (an optimizer
may still follow), the stretch after it is a segment of its own; later the segments are merged into one row or written
as several. Times are integer nanoseconds; the phases of a segment always sum to its duration.
"""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(5)

# What became of a batch, as far as the one-time module hook could tell; None where it was not asked.
UNUSED, WITH_GRADIENTS, WITHOUT_GRADIENTS = range(3)

Snapshot = Tuple[int, List[int]]  # (time, the five phases up to it)


class StepRow(NamedTuple):
    """A row of steps.jsonl; the fields are `model.STEP_COLUMNS`, in that order."""

    step: int
    kind: str
    epoch: int | None
    start_ns: int
    wall_ns: int
    data_wait_ns: int | None
    forward_ns: int | None
    backward_ns: int | None
    optimizer_ns: int | None
    other_ns: int | None
    device_ns: int | None
    samples: int | None
    fetches: int
    first_batch: int
    in_window: int
    signal: str
    framework_step: int | None = None
    minor_faults: int | None = None
    major_faults: int | None = None


class Segment:
    """What happened from `start_ns` to `end_ns`. `leader` is the iterator whose batches the segment works on.

    Defaults live on the class: one segment is made per step, on the training thread.
    """

    leader: int | None = None
    epoch: int | None = None
    fetches = 0
    samples: int | None = None
    last_samples: int | None = None  # of the batch fetched last
    first_batch = False
    backward = 0  # passes, nested ones counted once
    use: int | None = None  # UNUSED, WITH_GRADIENTS, WITHOUT_GRADIENTS
    stepped = False  # an optimizer stepped, or was skipped by the scaler
    optimizers: frozenset[int] = frozenset()
    signal: Snapshot | None = None  # at the end of the last completing event
    knows_forward = False  # where forward begins is known: at the end of a fetch, or the first module call
    knows_wait = True  # what came before that was waiting, and no update by hand
    partial = False  # began before anything of it was seen
    carried = False  # its predecessor, on the same batch, was complete
    by_other_loader = False  # began at a fetch of a second loader
    in_window = False

    def __init__(self, start_ns: int, in_window: bool) -> None:
        self.start_ns = start_ns
        self.end_ns = start_ns  # up to where time has been charged
        self.phases = [0, 0, 0, 0, 0]
        if in_window:
            self.in_window = True

    @property
    def trained(self) -> bool:
        """Whether a backward pass or an optimizer step happened in it."""
        return self.backward > 0 or self.stepped

    @property
    def empty(self) -> bool:
        """Whether nothing was seen in it."""
        return self.leader is None and not self.fetches and not self.backward and not self.stepped

    def charge(self, now: int, phase: int) -> int:
        """Give the time up to `now` to `phase`; a clock that seems to run backwards is held. Returns the time used."""
        if now < self.end_ns:
            return self.end_ns
        self.phases[phase] += now - self.end_ns
        self.end_ns = now
        return now

    def snapshot(self, now: int) -> Snapshot:
        """The segment as if it ended at `now`, the gap up to there being other."""
        phases = list(self.phases)
        now = max(now, self.end_ns)
        phases[OTHER] += now - self.end_ns
        return now, phases

    def rewind(self, snapshot: Snapshot) -> None:
        """End the segment where the snapshot was taken."""
        self.end_ns, self.phases = snapshot


class Iterator:
    """An iterator over a loader, as the step cutter knows it. It may be asked for batches of several steps.

    One that looks ahead keeps the batch it fetched last for the next step: `held` is a list of that batch's samples.
    """

    __slots__ = (
        "ahead",
        "before",
        "busy_ns",
        "count",
        "created_ns",
        "epoch",
        "evaluates",
        "exhausted",
        "fetched",
        "held",
        "length",
        "number",
        "step_fetches",
        "step_start",
        "trained",
    )

    def __init__(self, number: int, epoch: int | None, created_ns: int, before: Snapshot | None) -> None:
        self.number = number
        self.epoch = epoch
        self.created_ns = created_ns
        self.before = before  # the open segment as it was when the iterator was being made
        self.fetched = False
        self.step_start = -1  # of the step `step_fetches` counts in
        self.step_fetches = 0
        self.count = 0  # batches of this epoch
        self.length: int | None = None  # of an epoch, where one iterator may go on to the next
        self.trained = False  # its batches are trained on
        self.evaluates = False  # its batches are used, and not trained on
        self.busy_ns = 0  # what the last evaluation step did beside the fetch
        self.ahead: bool | None = None  # whether it fetches one batch ahead; None until the first step tells
        self.held: list[int | None] = []
        self.exhausted = False  # there is no further batch; what was fetched may still be used

    def batch(self) -> None:
        """A batch was fetched; one that goes on by itself is in the next epoch."""
        self.count += 1
        if self.length is not None and self.count > self.length:
            self.count = 1
            if self.epoch is not None:
                self.epoch += 1


def merge(segments: Sequence[Segment]) -> Segment:
    """Consecutive segments as one. Batches are counted for the first one's loader only.

    The second loader of a zip, or of a second optimizer's turn, does not double the samples.
    """
    first = segments[0]
    merged = Segment(first.start_ns, any(segment.in_window for segment in segments))
    merged.end_ns = segments[-1].end_ns
    merged.phases = [sum(column) for column in zip(*(segment.phases for segment in segments))]
    fed = [segment for segment in segments if segment.leader is not None]
    counted = [segment for segment in fed if segment.leader == fed[0].leader]
    samples = [segment.samples for segment in counted if segment.samples is not None]
    if fed:
        merged.leader, merged.epoch = fed[0].leader, fed[0].epoch
        merged.fetches = sum(segment.fetches for segment in counted)
        merged.samples = sum(samples) if samples else None
        merged.last_samples = next((segment.last_samples for segment in reversed(counted) if segment.fetches), None)
    merged.first_batch = any(segment.first_batch for segment in segments)
    merged.backward = sum(segment.backward for segment in segments)
    merged.stepped = any(segment.stepped for segment in segments)
    merged.knows_forward = first.knows_forward
    merged.knows_wait = first.knows_wait
    return merged


def build_row(segments: Sequence[Segment], number: int, signal: str) -> StepRow:
    """The row of consecutive segments merged into one step.

    Where data wait cannot be told from forward (no loader, and no module was called under the one-time hook) both are
    None and their time is in other; where it cannot be told from an update by hand, it is None and in other as well.
    In an evaluation step everything after the fetch is forward.
    """
    step = segments[0] if len(segments) == 1 else merge(segments)
    wait, ahead, backward, optimizer, other = step.phases
    train = step.trained
    data_wait: int | None = wait
    forward: int | None = ahead
    if not step.knows_forward and step.leader is None:
        data_wait, forward, other = None, None, other + wait + ahead
    elif not step.knows_wait:
        data_wait, other = None, other + wait
    elif not train:
        forward, other = ahead + other, 0
    return StepRow(
        number,
        "train" if train else "eval",
        step.epoch,
        step.start_ns,
        step.end_ns - step.start_ns,
        data_wait,
        forward,
        backward,
        optimizer,
        other,
        None,
        step.samples,
        step.fetches,
        int(step.first_batch),
        int(step.in_window),
        signal,
    )


Emit = Callable[[Optional[StepRow], bool, int], None]


class OpenStep:
    """Segments, phases and rows. `emit(row, live, now)` gets each row; see `steps.StepCutter`."""

    def __init__(self, clock: Callable[[], int], emit: Emit) -> None:
        self._clock = clock
        self._emit = emit
        self._segments: list[Segment] = []  # of the open step, the last one open; empty between loops
        self._stack: list[tuple[int, int]] = []  # (phase, token) of the calls we are inside
        self._anchor: int | None = None  # the iterator whose fetches are boundaries
        self._resting: Snapshot | None = None  # the loop ended inside a step; where, if nothing continues it
        self._optimizers_exist = False
        self._optimizer_signalled = False
        self._mark: str | None = None  # the strongest source of marks seen
        self._number = 0
        self._most_fetches = 0
        self._window = False
        self._written_ns = 0  # the end of the last row: no step begins before it, whatever the clock does
        self._iterators: dict[int, Iterator] = {}

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running."""
        return any(phase == BACKWARD for phase, _ in self._stack)

    @property
    def optimizers_exist(self) -> bool:
        """Whether the script has made an optimizer: what else it differentiates is no step."""
        return self._optimizers_exist

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
        segment.leader = iterator.number
        segment.epoch = iterator.epoch
        segment.knows_forward = True

    def _split_off_last(self, signal: str) -> None:
        """The last division was a boundary: what precedes it is a step."""
        last = self._segments.pop()
        self._close(signal, live=False)
        self._segments = [last]

    def _settle_rest(self, live: bool = True) -> int:
        """Nothing continued the step the last loop ended in: write it as it was then."""
        end = self._resting
        self._resting = None
        if end is not None and self._segments:
            self._segments[-1].rewind(end)
        return self._close_undecided("end", live)

    def _close_undecided(self, signal: str, live: bool) -> int:
        """Write segments no later event can settle: one step each where boundaries were guessed, else one step."""
        silent = not self._optimizer_signalled and self._optimizers_exist
        if (silent or self._mark is not None) and len(self._segments) > 1:
            self._write_each("loader")
            self._segments = []
            return self._clock()
        return self._close(signal, live)

    def _write_each(self, signal: str) -> None:
        for segment in self._segments:
            self._write([segment], signal, live=False)

    def _close(self, signal: str, live: bool) -> int:
        """Write the open segments as one step. Returns the time from which the next step may run."""
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
            self._written_ns = end
            self._number += 1
            self._most_fetches = max(self._most_fetches, row.fetches)
        if row is not None or live:
            self._emit(row, live, end)
        return max(end, self._clock()) if live else end

    @staticmethod
    def _used(iterator: Iterator, segments: list[Segment], row: StepRow) -> StepRow:
        """The row with the batches that were used in the step: one that a loader fetched ahead is the next step's."""
        if row.kind == "train":
            iterator.trained, iterator.evaluates = True, False
        else:
            iterator.busy_ns = row.forward_ns or 0
        if iterator.ahead is False:
            return row
        uses = sum(segment.backward for segment in segments)
        if row.kind == "eval":
            uses = sum(segment.use != UNUSED for segment in segments)
        beyond = row.fetches == uses + 1 and segments[0].fetches > 0 and not segments[0].trained
        if iterator.ahead is None:
            iterator.ahead = beyond and (len(segments) > 1 or segments[0].fetches > 1)
            if not iterator.ahead:
                return row
        held = iterator.held
        last = iterator.exhausted and not segments[-1].fetches  # the call that found the loader empty
        # In every step, or in none: what it fetches is one step's.
        if (held and beyond and not last) or (not held and row.fetches == 1 and not last):
            iterator.ahead = False
            iterator.held = []
        elif row.fetches and not last:
            merged = segments[0] if len(segments) == 1 else merge(segments)
            iterator.held = [merged.last_samples]
        else:
            iterator.held = []
        samples = [row.samples, *held, *(None if late is None else -late for late in iterator.held)]
        known = [count for count in samples if count is not None]
        return row._replace(
            fetches=row.fetches + len(held) - len(iterator.held), samples=sum(known) if known else row.samples
        )

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
