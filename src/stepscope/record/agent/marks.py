"""What a script may call itself: `step`, `region`, `mark` and `log`.

All of them do nothing, at the cost of one global look-up, unless an agent is active in this process, so they may stay
in a script that is run without stepscope. None of them ever raises, synchronises a device or reads a tensor's data on
one.
"""

from __future__ import annotations

import sys
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Callable, Mapping, TypeVar

from stepscope.record.agent.patches import is_compiling_check

if TYPE_CHECKING:
    from types import TracebackType

    from stepscope.record.agent.agent import Agent

F = TypeVar("F", bound=Callable[..., Any])

# Regions written one by one in a step; more of the same name are summed up in one event at the step's end.
REGIONS_PER_STEP = 50
SHORTEST_NS = 200_000  # shorter regions of `RegionSums` are summed up
SUM_NS = 2_000_000  # and written once they come to so much: a hundredth of it is what writing takes


class _Recorder:
    """The active side of the marks: bound to an agent, every method guarded."""

    def __init__(self, agent: Agent) -> None:
        sums, written = RegionSums(agent), 0
        self.now = now = agent.clock.now

        def step() -> None:
            if agent.accepts():
                agent.steps.mark("user", agent.page_faults.now())

        def mark(name: str) -> None:
            agent.journal.write("mark", name=name)

        def region(name: str, start_ns: int, end_ns: int, kind: str, **place: Any) -> None:
            nonlocal written
            agent.regions_written = True
            agent.steps.hurry()  # regions are counted by step
            if written < REGIONS_PER_STEP:
                written += 1
                sums.tell((name, kind, *place.items()), start_ns, end_ns - start_ns)
            else:
                sums.keep(name, start_ns, end_ns, kind, place)

        def log(values: Mapping[str, Any]) -> None:
            metrics, now_ns = agent.metrics, now()
            for name, value in values.items():
                if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1 and value.dtype.kind in "fiub":
                    value = float(value)
                metrics.keep(metrics.series(str(name), "log"), now_ns, value)

        def flush() -> None:
            nonlocal written
            written = 0
            sums.flush()

        guarded = partial(agent.guard.wrap, "marks")
        self.step, self.mark, self.region, self.log, self.flush = map(guarded, (step, mark, region, log, flush))


class RegionSums:
    """Regions that may come in every step, summed up by name, kind and place; `add` writes long ones each."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._sums: dict[tuple[Any, ...], list[int]] = {}  # (name, kind, …) -> [duration, calls, first start]

    def add(self, name: str, start_ns: int, end_ns: int, kind: str, place: Mapping[str, Any] | None = None) -> None:
        """One more; `place` are the fields of the line it is told with."""
        if end_ns - start_ns >= SHORTEST_NS:
            record_region(name, start_ns, end_ns, kind, **(place or {}))
            return
        key = self.keep(name, start_ns, end_ns, kind, place or {})
        if self._sums[key][0] >= SUM_NS:
            self._write(key)

    def keep(self, name: str, start_ns: int, end_ns: int, kind: str, place: Mapping[str, Any]) -> tuple[Any, ...]:
        """Add it to those of its key, which is returned."""
        key = (name, kind, *place.items())
        total = self._sums.setdefault(key, [0, 0, start_ns])
        total[0] += end_ns - start_ns
        total[1] += 1
        return key

    def flush(self) -> None:
        """Write what is summed up."""
        for key in list(self._sums):
            self._write(key)

    def _write(self, key: tuple[Any, ...]) -> None:
        duration_ns, count, start_ns = self._sums.pop(key)
        self.tell(key, start_ns, duration_ns, count=count)

    def tell(self, key: tuple[Any, ...], start_ns: int, duration_ns: int, **more: int) -> None:
        """Write so much of a key."""
        name, kind, *place = key
        source = {} if kind == "region" else {"source": kind}
        self._agent.journal.write("region", start_ns, duration_ns, name=name, **dict(place), **more, **source)


_recorder: _Recorder | None = None
_is_compiling: Callable[[], bool] = is_compiling_check()  # a plain global, which Dynamo can fold


def activate(agent: Agent) -> None:
    """Bind the marks to an agent."""
    global _recorder, _is_compiling
    _recorder = _Recorder(agent)
    agent.flush_regions = _recorder.flush
    _is_compiling = is_compiling_check()


def deactivate() -> None:
    """Make the marks do nothing again (in a forked child, or when recording ends)."""
    global _recorder
    _recorder = None


def record_region(name: str, start_ns: int, end_ns: int, kind: str, **place: Any) -> None:
    """A range some other source has timed (`kind` names it, e.g. "nvtx"), on the epoch clock."""
    if _recorder is not None:
        _recorder.region(name, start_ns, end_ns, kind, **place)


# ------------------------------------------------------------------------------------------------------ public


def step() -> None:
    """End the current step here. From the first call on, training steps are cut by these marks alone."""
    if _recorder is not None:
        _recorder.step()


def mark(name: str) -> None:
    """Note a moment under a name, such as "checkpoint written"."""
    if _recorder is not None:
        _recorder.mark(str(name))


def log(values: str | Mapping[str, Any], value: Any = None) -> None:
    """Record metrics: `log("loss", 0.3)` or `log({"train/loss": 0.3, "train/lr": 1e-4})`.

    Numbers and tensors of one element; one on a device is read later, behind an event, so that nothing waits for it.
    """
    if _recorder is not None:
        _recorder.log({values: value} if isinstance(values, str) else values)


class region:
    """A named range of the step, as a context manager or decorator; seen in a profiler's trace under its name too."""

    __slots__ = ("_function", "_start", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._start: int | None = None
        self._function: Any = None

    def __enter__(self) -> region:
        recorder = _recorder
        if recorder is not None and not _is_compiling():
            self._function = _enter_record_function(self.name)
            self._start = recorder.now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        start, function = self._start, self._function
        self._start = self._function = None
        recorder = _recorder
        if start is not None and recorder is not None:
            recorder.region(str(self.name), start, recorder.now(), "region")
        if function is not None:
            function.__exit__(kind, error, traceback)

    def __call__(self, function: F) -> F:
        name = self.name

        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with region(name):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]


def _enter_record_function(name: str) -> Any:
    """An entered `record_function` when a profiler is on, so that the range is carried into its trace."""
    torch = sys.modules.get("torch")
    autograd = getattr(torch, "autograd", None)
    enabled = getattr(autograd, "_profiler_enabled", None)
    # A session over all threads is not this thread's own: torch then answers False here and sets a flag.
    everywhere = getattr(getattr(autograd, "profiler", None), "_is_profiler_enabled", False)
    if enabled is None or not (everywhere or enabled()):
        return None
    function = torch.autograd.profiler.record_function(name)  # type: ignore[union-attr]
    function.__enter__()
    return function
