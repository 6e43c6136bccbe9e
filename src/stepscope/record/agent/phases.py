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
    """What happened from `start_ns` to `end_ns`. `leader` is the iterator whose batches the segment works on."""

    __slots__ = (
        "backward",
        "by_other_loader",
        "carried",
        "end_ns",
        "epoch",
        "fetches",
        "first_batch",
        "in_window",
        "knows_forward",
        "leader",
        "optimizers",
        "partial",
        "phases",
        "samples",
        "signal",
        "start_ns",
        "stepped",
    )

    def __init__(self, start_ns: int, in_window: bool) -> None:
        self.start_ns = start_ns
        self.end_ns = start_ns  # up to where time has been charged
        self.phases = [0, 0, 0, 0, 0]
        self.leader: int | None = None
        self.epoch: int | None = None
        self.fetches = 0
        self.samples: int | None = None
        self.first_batch = False
        self.backward = False
        self.stepped = False  # an optimizer stepped, or was skipped by the scaler
        self.optimizers: set[int] = set()
        self.signal: Snapshot | None = None  # at the end of the last completing event
        self.knows_forward = False  # where data wait ends is known: a fetch, or the first module forward
        self.partial = False  # began before anything of it was seen
        self.carried = False  # its predecessor, on the same batch, was complete
        self.by_other_loader = False  # began at a fetch of a second loader
        self.in_window = in_window

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


def build_row(segments: Sequence[Segment], number: int, signal: str) -> StepRow:
    """The row of consecutive segments merged into one step.

    Batches are counted for the first segment's loader only: the second loader of a zip does not double the samples.
    Where data wait cannot be told from forward (no loader, and no module was called under the one-time hook) both are
    None and their time is in other. In an evaluation step everything after the fetch is forward.
    """
    first = segments[0]
    totals = [sum(column) for column in zip(*(segment.phases for segment in segments))]
    fed = [segment for segment in segments if segment.leader is not None]
    counted = [segment for segment in fed if segment.leader == fed[0].leader]
    samples = [segment.samples for segment in counted if segment.samples is not None]
    train = any(segment.trained for segment in segments)
    data_wait: int | None = totals[DATA_WAIT]
    forward: int | None = totals[FORWARD]
    other = totals[OTHER]
    if not first.knows_forward and not fed:
        other += totals[DATA_WAIT] + totals[FORWARD]
        data_wait = forward = None
    elif not train:
        forward = totals[FORWARD] + other
        other = 0
    return StepRow(
        step=number,
        kind="train" if train else "eval",
        epoch=fed[0].epoch if fed else None,
        start_ns=first.start_ns,
        wall_ns=sum(totals),
        data_wait_ns=data_wait,
        forward_ns=forward,
        backward_ns=totals[BACKWARD],
        optimizer_ns=totals[OPTIMIZER],
        other_ns=other,
        device_ns=None,
        samples=sum(samples) if samples else None,
        fetches=sum(segment.fetches for segment in counted),
        first_batch=int(any(segment.first_batch for segment in segments)),
        in_window=int(any(segment.in_window for segment in segments)),
        signal=signal,
    )
