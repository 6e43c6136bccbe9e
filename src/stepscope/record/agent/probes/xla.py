"""Step boundaries of torch_xla: `torch_xla.sync` and the older `xm.mark_step`; one may call the other.

Where torch_xla is used, its counters are read at every boundary (`XlaCounters`), each read a few microseconds.
"""

from __future__ import annotations

import atexit
import sys
import time
from bisect import bisect_left, bisect_right
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.patches import Probe
from stepscope.record.agent.segments import StepRow


class XlaProbe(Probe):
    """Marks a step at each outermost sync."""

    name = "xla"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._depth = 0
        self._counters: XlaCounters | None = None

    def install(self) -> None:
        """Wrap what this version of torch_xla has."""
        super().install()

        def count() -> None:
            api = find_api()
            if api is not None:
                self._counters = self._counters or XlaCounters(self._agent, api)
                self._counters.active = True

        self._agent.guard.wrap(COUNTERS, count)()

    def uninstall(self) -> None:
        super().uninstall()
        if self._counters is not None:
            self._counters.active = False

    def _wrap_all(self) -> None:
        self._around(sys.modules["torch_xla"], "sync", self._before, self._after)
        model = sys.modules.get("torch_xla.core.xla_model")
        if model is not None:
            self._around(model, "mark_step", self._before, self._after)

    def _before(self, *_args: Any, **_kwargs: Any) -> bool:
        self._depth += 1
        return True

    def _after(self, _begun: bool, _result: Any, _error: BaseException | None) -> None:
        self._depth -= 1
        if self._depth == 0 and self._agent.accepts():
            self._agent.steps.mark("xla_sync", self._agent.page_faults.now())


COUNTERS = "xla_counters"  # their switch of the guard
COMPILE = "CompileTime"
EAGER_COMPILE = "EagerOpCompileTime"
TRANSFER = "TransferFromDeviceTime"
OLD_TRANSFER = "TransferFromServerTime"  # its name until 2.2
INBOUND = "InboundData"
SCALAR = "aten::_local_scalar_dense"

COUNTERS_EVERY_NS = 30_000_000_000
FEW_SAMPLES = 100  # that a look copies in a few microseconds at most
SAMPLE_NS = 500  # a look that takes longer for each sample has been interrupted by something else
RESTS = 1_000  # a look that is not cheap is followed by this many times its length without one
GAP_NS = 1_000_000  # between two steps, in which something may have happened that is of neither
MAX_SINGLE = 8  # more compilations in a step share one event
MAX_STEPS = 10_000  # between two looks

PERCENTILES = (1, 5, 10, 20, 50, 80, 90, 95, 99, 100)
OFTEN = (COMPILE, EAGER_COMPILE, "ExecuteTime", TRANSFER, OLD_TRANSFER, "TransferToDeviceTime", INBOUND, "OutboundData")
_BYTES = frozenset([INBOUND, "OutboundData"])
_COUNTS = frozenset(["InputOutputAliasCount", "TensorsGraphSize"])
_TIMES = frozenset(
    ["DeviceLockWait", "IrValueTensorToXlaData", "LazyTracing", "TensorToData", "UnwrapXlaData", "WrapXlaData"]
)

Step = Optional[int]
Sample = Tuple[float, float]  # when it ended, in seconds since the epoch on the system's clock; its value


# of each field of `Api`: its name in the compiled part of torch_xla, and in torch_xla.debug.metrics
_FUNCTIONS = (
    ("_xla_metric_data", "metric_data"),
    ("_xla_counter_value", "counter_value"),
    ("_get_executed_fallback_ops", "executed_fallback_ops"),
    ("_xla_counter_names", "counter_names"),
    ("_xla_metric_names", "metric_names"),
)


class Api(NamedTuple):
    """What this version of torch_xla lets us read; None where it has no such function."""

    metric_data: Callable[[str], Any]
    counter_value: Callable[[str], int | None]
    fallback_operators: Callable[[], Sequence[str]] | None
    counter_names: Callable[[], Sequence[str]] | None
    metric_names: Callable[[], Sequence[str]] | None
    version: str


def find_api() -> Api | None:
    """The functions of the torch_xla that has been imported, or None without the two that everything needs."""
    package = sys.modules.get("torch_xla")
    native, module = getattr(package, "_XLAC", None), sys.modules.get("torch_xla.debug.metrics")
    found = [getattr(native, in_native, None) or getattr(module, name, None) for in_native, name in _FUNCTIONS]
    functions = [function if callable(function) else None for function in found]
    return None if None in functions[:2] else Api._make([*functions, str(getattr(package, "__version__", "?"))])


# What a metric has gained in one step, or outside of steps (None): (step, new samples, their sum, those that are kept).
Growth = Tuple[Optional[int], int, float, Sequence[Sample]]


class Metric:
    """One metric: what it stood at, and when it is worth another look."""

    def __init__(self, name: str, api: Api) -> None:
        self.name = name
        self.due_ns = 0
        self._read = api.metric_data
        self._count = 0
        self._total = 0.0
        self._looked_ns = 0

    def growth(self, now: int, rows: list[tuple[int, Step]], clock: Callable[[], int]) -> list[Growth]:
        """By step, what is new since the last look. `rows` are the starts of steps, oldest first; the last one ends."""
        begun = time.perf_counter_ns()
        data = self._read(self.name)
        taken = time.perf_counter_ns() - begun
        count, total, samples = data[:3] if data else (0, 0.0, ())
        kept = len(samples)
        self.due_ns = now + RESTS * min(taken, SAMPLE_NS * kept) if kept > FEW_SAMPLES else 0
        if count < self._count or total < self._total:  # the script has called clear_all
            self._count, self._total = 0, 0.0
        new, total, self._count, self._total = count - self._count, total - self._total, count, total
        since, self._looked_ns = self._looked_ns, now
        if new <= 0:
            return []
        samples = samples[-new:]
        first = bisect_left([start for start, _ in rows], since)
        covered = rows[min(first, len(rows) - 1) :]
        if len(covered) == 1:
            return [(covered[0][1], new, total, samples)]
        # Every sample belongs to the step in which it ended; those that are kept no more are of no step.
        starts, ahead_ns = [start for start, _ in covered], time.time_ns() - clock()
        by_step: dict[Step, list[Sample]] = {}
        for sample in samples:
            at = bisect_right(starts, round(sample[0] * 1e9) - ahead_ns) - 1
            by_step.setdefault(covered[max(at, 0)][1], []).append(sample)
        forgotten = new - len(samples)
        if forgotten > 0:
            by_step.setdefault(None, [])
        gone = max(0.0, total - sum(value for _, value in samples))
        grown: list[Growth] = []
        for step, part in by_step.items():
            number, size = len(part), sum(value for _, value in part)
            is_rest = step is None and forgotten > 0
            grown.append((step, number + forgotten, size + gone, part) if is_rest else (step, number, size, part))
        return grown


class XlaCounters:
    """Polls at step boundaries while it is `active`, and writes `compile`, `transfer`, `fallback` and `counters`.

    What was counted before it came belongs to nobody's steps.
    """

    def __init__(self, agent: Agent, api: Api) -> None:
        self._agent = agent
        self._api = api
        self._source = ", torch_xla " + api.version
        self._compiles = [Metric(COMPILE, api), Metric(EAGER_COMPILE, api)]
        old = api.metric_data(OLD_TRANSFER) and not api.metric_data(TRANSFER)
        self._transfers = Metric(OLD_TRANSFER if old else TRANSFER, api)
        self._inbound = Metric(INBOUND, api)
        for metric in (*self._compiles, self._transfers, self._inbound):
            metric.growth(agent.clock.now(), [(0, None)], agent.clock.now)
        self._operators: dict[str, int] = {}
        self._operators = self._calls()
        self._scalars: dict[Step, int] = {}  # reads of single values since transfers were last looked at
        self._rows: list[tuple[int, Step]] = []  # (start, step) of what metrics have not all been looked at for
        self._boundary_ns = agent.clock.now()
        self._counted_ns = self._boundary_ns
        self.active = False
        self._finished = False
        # The listener only reads numbers, but needs every step on its own to tell which one they are of.
        agent.add_step_listener(self, COUNTERS, lambda: self.active)
        agent.add_finish_hook(self.finish, COUNTERS)
        # torch_xla ends itself at exit, and what is registered later is called earlier.
        atexit.register(agent.guard.wrap(COUNTERS, self.finish, inject=False))

    def finish(self) -> None:
        """Write what has not been told yet, and how everything stands."""
        if not self._finished:
            self._finished = True
            self.active = False
            now = self._agent.clock.now()
            self._rows.append((self._boundary_ns, self._agent.steps.current_step()))
            self._poll(now, at_once=True)
            names = self._api.metric_names
            self._write_counters(OFTEN if names is None else names())

    def __call__(self, row: StepRow | None, now: int) -> None:
        if not self.active:
            return
        if row is None or row.start_ns - self._boundary_ns > GAP_NS:
            self._rows.append((self._boundary_ns, None))
        if row is not None:
            self._rows.append((row.start_ns, row.step))
        self._boundary_ns = now
        if len(self._rows) > MAX_STEPS:
            del self._rows[: MAX_STEPS // 2]
        self._poll(now)
        if now - self._counted_ns >= COUNTERS_EVERY_NS:
            self._counted_ns = now
            self._write_counters(OFTEN)

    def _poll(self, now: int, at_once: bool = False) -> None:
        step = self._rows[-1][1]
        before, self._operators = self._operators, self._calls()
        for name, count in self._operators.items() if before != self._operators else ():
            known = before.get(name, 0)
            new = count - known if count >= known else count  # cleared since
            if new and name == SCALAR:
                self._scalars[step] = self._scalars.get(step, 0) + new
            elif new:
                self._write("fallback", None, None, step, operator=name, count=new, source="counter " + name)
        for metric in self._compiles:
            if at_once or metric.due_ns <= now:
                self._write_compiles(metric, self._growth(metric, now))
        if at_once or self._transfers.due_ns <= now:
            self._write_transfers(self._growth(self._transfers, now), now)
            self._scalars.clear()
        if all(metric.due_ns <= now for metric in (*self._compiles, self._transfers)):
            self._rows.clear()

    def _growth(self, metric: Metric, now: int) -> list[Growth]:
        return metric.growth(now, self._rows, self._agent.clock.now)

    def _calls(self) -> dict[str, int]:
        """Calls of every operator without lowering, and of reading single values."""
        api = self._api
        if api.fallback_operators is not None:
            names = api.fallback_operators()
        elif api.counter_names is not None:
            names = [name for name in api.counter_names() if "aten::" in name]
        else:
            names = list(self._operators) or [SCALAR]
        if not names and not self._operators:
            return self._operators
        counts = {name: api.counter_value(name) for name in names}
        return {name: count for name, count in counts.items() if count}

    def _write(self, kind: str, time_ns: int | None, duration_ns: int | None, step: Step, **fields: Any) -> None:
        fields["source"] += self._source
        fields.update(step=step, step_source=None if step is None else "poll", backend="torch_xla")
        self._agent.journal.write(kind, time_ns, duration_ns, **fields)

    def _start_ns(self, samples: Sequence[Sample]) -> int | None:
        """When the first of them began, on the agent's clock."""
        ahead_ns = time.time_ns() - self._agent.clock.now()
        return round(samples[0][0] * 1e9 - samples[0][1]) - ahead_ns if samples else None

    def _write_compiles(self, metric: Metric, found: list[Growth]) -> None:
        source = "metric " + metric.name
        for step, number, total, samples in found:
            if step is not None:
                self._agent.last_compile_step = step
            singly = len(samples) == number <= MAX_SINGLE
            parts = [(1, sample[1], [sample]) for sample in samples] if singly else [(number, total, samples)]
            for count, taken_ns, own in parts:
                self._write("compile", self._start_ns(own), round(taken_ns), step, count=count, source=source)

    def _write_transfers(self, found: list[Growth], now: int) -> None:
        sizes = {step: size for step, _, size, _ in self._growth(self._inbound, now)} if found else {}
        reads = [min(self._scalars.get(step, 0), number) for step, number, *_ in found]
        over = sum(self._scalars.values()) - sum(reads)
        for (step, number, total, samples), read in zip(found, reads):
            # Reads are known by when they were counted, transfers by when they ended.
            scalars = read + max(0, min(over, number - read))
            over -= scalars - read
            begun, size = self._start_ns(samples), sizes.get(step)
            for operator, count in ((SCALAR, scalars), (None, number - scalars)):
                if count:
                    fields = {"direction": "device_to_host", "operator": operator, "count": count}
                    fields["bytes"] = None if size is None else round(size * (count / number))
                    fields["source"] = "metric " + self._transfers.name
                    self._write("transfer", begun, round(total * (count / number)), step, **fields)

    def _write_counters(self, names: Sequence[str]) -> None:
        api = self._api
        metrics = {}
        for name in names:
            unit = _unit(name)
            data = api.metric_data(name) if unit is not None else None
            if unit is not None and data and data[0]:
                metrics[name] = _summary(unit, *data)
        counters = {name: api.counter_value(name) for name in (api.counter_names() if api.counter_names else ())}
        counters = {name: value for name, value in counters.items() if value}
        if metrics or counters:
            self._write("counters", None, None, None, metrics=metrics, counters=counters, source="metrics")


def _unit(name: str) -> str | None:
    """The unit of a metric's values, which only its own report tells; None of one we do not know."""
    if name in _BYTES:
        return "bytes"
    if name in _COUNTS:
        return "count"
    return "ns" if name.endswith("Time") or name in _TIMES else None


def _summary(unit: str, count: int, total: float, samples: Sequence[Sample]) -> dict[str, Any]:
    values = sorted(value for _, value in samples)
    ends = [end for end, _ in samples]
    span = max(ends) - min(ends) if ends else 0.0
    percentiles = {str(at): values[min(len(values) - 1, at * len(values) // 100)] for at in PERCENTILES if values}
    return {
        "unit": unit,
        "samples": count,
        "total": total,
        "samples_per_second": len(values) / span if span > 0 else None,
        "value_per_second": sum(values) / span if span > 0 else None,
        "percentiles": percentiles,
    }
