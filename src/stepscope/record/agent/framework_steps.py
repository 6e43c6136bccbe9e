"""A framework's own step number, as it stood where a step ended.

Rows are cut late: steps wait to be cut together, and some boundaries are known only when the next event tells. So the
number is not read when a row is written but where each fetch and each backward pass begins, when the step before has
been counted and the next has not, and kept with the time. A row then gets what was read first at or after its end.
Where a framework counts a step when it begins, what was read last before the end is the number of that step.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from stepscope.record.agent.guard import Guard
    from stepscope.record.agent.phases import StepRow

NEVER = 1 << 62
KEPT = 2_000  # readings; a row is written long before so many steps have passed


class FrameworkSteps:
    """Readings of one counter at a time; None before `begin`, after `end` and where it cannot be read."""

    def __init__(self, guard: Guard) -> None:
        # A switch of its own: where the number cannot be read, fetches and rows go on.
        self.sample = guard.wrap("framework_steps", self._sample)
        self._filled_guarded = guard.wrap("framework_steps", self._filled)
        self._read: Callable[[], int | None] | None = None
        self._begun = False
        # One entry per value: when it was read first and last, the value, and the training it is of (0: of none).
        self._firsts = [0]
        self._lasts = [NEVER]
        self._values: list[int | None] = [None]
        self._trainings = [0]
        self._training = 0
        self._trained = 0  # the latest training that a training step was written of

    def begin(self, read: Callable[[], int | None], begun: bool, now: int) -> None:
        """A training begins, whose number `read` returns; `begun`: its counter counts steps when they begin."""
        self._training += 1
        self._append(now, now, None, self._training)
        self._read, self._begun = read, begun

    def end(self, now: int) -> None:
        """The training is over."""
        self.sample(now)
        self._read = None
        self._append(now + 1, NEVER, None, 0)

    def filled(self, row: StepRow, now: int) -> StepRow:
        """`row` with its number. Steps of evaluation before the first training step of a training have none."""
        return self._filled_guarded(row, now) or row

    def _sample(self, now: int) -> None:
        """Read the number: at a fetch or a backward pass, before it is told to the step cutter."""
        read = self._read
        if read is None:
            return
        value = read()
        if value == self._values[-1]:
            self._lasts[-1] = now
        else:
            self._append(now, now, value, self._training)

    def _filled(self, row: StepRow, now: int) -> StepRow:
        end = row.start_ns + row.wall_ns
        if end > self._lasts[-1]:
            if not row.fetches:
                return row  # cut where its optimizer ended: the framework has not counted it yet
            self._sample(max(now, end))
        index = bisect_left(self._firsts, end) - 1 if self._begun else bisect_left(self._lasts, end)
        started = self._trainings[bisect_right(self._firsts, row.start_ns) - 1]
        if started:  # a training's last step may end only where the next loop begins: it is the one it began in
            while self._trainings[index] != started:
                index -= 1
        if row.kind == "train":
            self._trained = max(self._trained, self._trainings[index])
        value = self._values[index] if self._trained == self._trainings[index] else None
        return row if value is None else row._replace(framework_step=value)

    def _append(self, first: int, last: int, value: int | None, training: int) -> None:
        if self._lasts[-1] >= first:
            self._lasts[-1] = max(first - 1, self._firsts[-1])
        self._firsts.append(first)
        self._lasts.append(last)
        self._values.append(value)
        self._trainings.append(training)
        if len(self._values) > KEPT:
            for column in (self._firsts, self._lasts, self._values, self._trainings):
                del column[: KEPT // 2]


def reader(owner: Any, path: str) -> Callable[[], int | None]:
    """Reads the whole number at `path` from `owner`, which is not kept alive: None where there is none, as on a device.

    A number in a tensor on the CPU is read through the memory it shares with NumPy: no operator of torch runs.
    """
    get, living = attrgetter(path), weakref.ref(owner)
    views: dict[int, tuple[Any, Any]] = {}

    def read() -> int | None:
        try:
            value = get(living())
        except AttributeError:
            return None
        return value if value.__class__ is int else _in_tensor(value, views)

    return read


def _in_tensor(value: Any, views: dict[int, tuple[Any, Any]]) -> int | None:
    tensor = getattr(value, "_value", value)  # of a Keras variable
    known = views.get(id(tensor))
    if known is None:
        if getattr(getattr(tensor, "device", None), "type", None) != "cpu" or tensor.numel() != 1:
            return None
        views.clear()
        known = views[id(tensor)] = tensor, tensor.detach().numpy()
    return int(known[1])
