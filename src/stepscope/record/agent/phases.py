"""A stretch of a step, its exclusive phases, and how stretches become a row of the step journal.

A step is built from one or more segments. While it is not yet known whether a point is a step boundary (an optimizer
may still follow), the stretch after it is a segment of its own; later the segments are merged into one row or written
as several. Times are integer nanoseconds; the phases of a segment always sum to its duration.
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Tuple

DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(5)

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


class Segment:
    """What happened from `start_ns` to `end_ns`. `leader` is the iterator whose batches the segment works on.

    Defaults live on the class: one segment is made per step, on the training thread.
    """

    leader: int | None = None
    epoch: int | None = None
    fetches = 0
    samples: int | None = None
    first_batch = False
    backward = False
    stepped = False  # an optimizer stepped, or was skipped by the scaler
    optimizers: frozenset[int] = frozenset()
    signal: Snapshot | None = None  # at the end of the last completing event
    knows_forward = False  # where data wait ends is known: a fetch, or the first module forward
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
        return self.backward or self.stepped

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
    """An iterator over a loader, as the step cutter knows it. It may be asked for batches of several steps."""

    __slots__ = ("before", "created_ns", "epoch", "fetched", "number", "step_fetches", "step_start")

    def __init__(self, number: int, epoch: int | None, created_ns: int, before: Snapshot | None) -> None:
        self.number = number
        self.epoch = epoch
        self.created_ns = created_ns
        self.before = before  # the open segment as it was when the iterator was being made
        self.fetched = False
        self.step_start = -1  # of the step `step_fetches` counts in
        self.step_fetches = 0


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
    merged.first_batch = any(segment.first_batch for segment in segments)
    merged.backward = any(segment.trained for segment in segments)
    merged.knows_forward = first.knows_forward
    return merged


def build_row(segments: Sequence[Segment], number: int, signal: str) -> StepRow:
    """The row of consecutive segments merged into one step.

    Where data wait cannot be told from forward (no loader, and no module was called under the one-time hook) both are
    None and their time is in other. In an evaluation step everything after the fetch is forward.
    """
    step = segments[0] if len(segments) == 1 else merge(segments)
    wait, ahead, backward, optimizer, other = step.phases
    train = step.backward or step.stepped
    data_wait: int | None = wait
    forward: int | None = ahead
    if not step.knows_forward and step.leader is None:
        data_wait, forward, other = None, None, other + wait + ahead
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
