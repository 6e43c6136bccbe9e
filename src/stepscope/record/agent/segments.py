"""A stretch of a step, its exclusive phases, and how stretches become a row of the step journal.

A step is built from one or more segments. While it is not yet known whether a point is a step boundary (an optimizer
may still follow), the stretch after it is a segment of its own; later the segments are merged into one row or written
as several. Times are integer nanoseconds; the phases of a segment always sum to its duration.
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Tuple

DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(5)

# What became of a batch, as far as the one-time module hook could tell; None where it was not asked.
UNUSED, WITH_GRADIENTS, WITHOUT_GRADIENTS = range(3)

NEVER = 1 << 62  # ns

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
    last_batch = -1  # the number of the leader's batch that was fetched last
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

    fetched = False
    count = 0  # batches of this epoch
    total = 0  # batches that were fetched
    length: int | None = None  # of an epoch, where one iterator may go on to the next
    trained = False  # its batches are trained on
    evaluates = False  # its batches are used, and not trained on
    declared = False  # a framework said so
    busy_ns = NEVER  # the least that an evaluation step did beside the fetch
    ahead: bool | None = None  # whether it fetches one batch ahead; None until the first step tells
    exhausted = False  # there is no further batch; what was fetched may still be used

    def __init__(
        self, number: int, epoch: int | None, created_ns: int, before: Snapshot | None, loader: int | None = None
    ) -> None:
        self.number = number
        self.loader = loader
        self.epoch = epoch
        self.created_ns = created_ns
        self.before = before  # the open segment as it was when the iterator was being made
        self.held: list[int | None] = []

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
