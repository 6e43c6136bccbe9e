"""The open step and the calls it is inside: bookkeeping without any judgement on where a step ends.

`steps.StepCutter` decides; this class charges time to phases, keeps the segments, and writes them as rows. Nothing here
imports torch or reads a clock but the injected one.
"""

from __future__ import annotations

from typing import Callable, Optional

from stepscope.record.agent.phases import BACKWARD, UNUSED, Iterator, Segment, Snapshot, StepRow, build_row, merge

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
