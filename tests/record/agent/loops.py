"""A fake clock and training loops in miniature, to drive the step cutter without torch."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.step_queue import QueuedCutter
from stepscope.record.agent.steps import StepCutter


class Loop:
    """Drives the agent's step cutter; every verb takes the milliseconds it lasts, `rows` collects what was cut."""

    def __init__(self, optimizers: bool = True, cutter: type[StepCutter] = QueuedCutter) -> None:
        self.now = 1_000_000_000
        self.rows: list[StepRow] = []
        self.live: list[StepRow | None] = []
        self.listener_ms = 0
        self.listens_to: set[int] | None = None  # steps after which a listener takes time; None for all
        late = (self._emit_rows,) if issubclass(cutter, QueuedCutter) else ()
        self.cutter = cutter(lambda: self.now, self._emit, *late)
        self.cutter.ask_use = lambda: self.compiled is False
        self.compiled = False  # no module can be heard
        self._ids = iter(range(1, 1_000_000))
        self.made: dict[int, int] = {}  # loader -> its newest iterator
        if optimizers:
            self.cutter.optimizer_created()

    def _emit(self, row: StepRow | None, live: bool, _now_ns: int) -> None:
        if row is not None:
            self.rows.append(row)
        if live:
            self.live.append(row)
            if row is None or self.listens_to is None or row.step in self.listens_to:
                self.now += self.listener_ms * 1_000_000

    def _emit_rows(self, rows: list[StepRow]) -> None:
        for row in rows:
            self._emit(row, False, self.now)

    # ---------------------------------------------------------------------------------------------- the verbs

    def spend(self, ms: float) -> None:
        self.now += int(ms * 1_000_000)

    def iterate(self, loader: int, making_ms: float = 0, fetches_ahead: bool = False) -> int:
        iterator = self.made[loader] = next(self._ids)
        self.cutter.loader_created(loader, iterator, self.now, fetches_ahead)
        self.spend(making_ms)
        return iterator

    def fetch(self, iterator: int, ms: float = 2, samples: int | None = 8) -> None:
        self.cutter.fetch_start(iterator, self.now)
        self.spend(ms)
        self.cutter.fetch_end(iterator, samples, self.now)

    def stop(self, iterator: int, ms: float = 0) -> None:
        self.cutter.fetch_start(iterator, self.now)
        self.spend(ms)
        self.cutter.fetch_stop(iterator, self.now)

    def dead(self, iterator: int) -> None:
        self.cutter.iterator_dead(iterator, self.now)

    def batches(self, loader: int, count: int, fetch_ms: float = 2, making_ms: float = 0) -> Iterator[int]:
        """A for loop over a loader, exhausted at its end."""
        iterator = self.iterate(loader, making_ms)
        for number in range(count):
            self.fetch(iterator, fetch_ms)
            yield number
        self.stop(iterator)

    def forward(self, ms: float = 3, gradients: bool = True, module: int = 900) -> None:
        self.cutter.module_forward(self.now, gradients, module)
        self.spend(ms)

    def backward(self, ms: float = 4) -> None:
        self.cutter.backward_start(self.now)
        self.spend(ms)
        self.cutter.backward_end(self.now)

    def step(self, optimizer: int = 500, ms: float = 1) -> None:
        self.cutter.optimizer_start(optimizer, self.now)
        self.spend(ms)
        self.cutter.optimizer_end(optimizer, self.now)

    def train(self, optimizer: int = 500) -> None:
        """Forward, backward, optimizer: 8 ms."""
        self.forward()
        self.backward()
        self.step(optimizer)

    def finish(self) -> list[StepRow]:
        self.cutter.finish(self.now)
        return self.rows


def phases(row: StepRow) -> tuple[float | None, ...]:
    """Data wait, forward, backward, optimizer, other in milliseconds."""
    parts = (row.data_wait_ns, row.forward_ns, row.backward_ns, row.optimizer_ns, row.other_ns)
    return tuple(None if part is None else part / 1e6 for part in parts)
