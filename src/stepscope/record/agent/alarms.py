"""A loss or a norm that stops being finite, or leaps: noticed while the run goes on, with the data of its step.

Values are judged when they are read (`Metrics.listeners`), at most half a second after they were kept: a leap is a
value far above the 200 before it, on their scale and on that of their logarithms, as the analysis defines it over whole
series. The first of a trouble is written as an `alarm` event once its step is known, with the indices of the batch and
of the two before it; what follows within `QUIET_STEPS` is not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence, Tuple

from stepscope.record.agent.batches import NAMES_LIMIT
from stepscope.record.agent.metrics import as_json
from stepscope.record.agent.origins import Origins, Outputs

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.metrics import Series
    from stepscope.record.agent.steps import Use

NAME, SEARCH = "alarms", "search"
WINDOW = 200  # values before, that one is held against
LEAST_BEFORE = 30  # with fewer the spread is not known to better than a third
SCORE = 8.0  # robust standard deviations: normal noise reaches 5 once in a million values
LOG_SCORE = 6.0  # of logarithms, whose noise has no heavier tail than the normal one
TAIL = 1.5  # times what the highest of `WINDOW` values was above the usual; of fewer, which know less of a tail, more
RECENT = 50  # of these, which alone tell a series that fell fast before
FALLEN = 2.0  # times that the first of the window are above the last
SMALLEST_CHANGE = 0.1  # of what is usual: runs of one script differ by a few percent
PART, PARTS = 100, 20  # a longer tail: what 200 values have not shown, a converged loss may do now and then
LIKE = 10.0  # times what is usual: the level of a part that was like now
LEVELLED = 1.3  # times that the first half of such a part is above the second, at most: a fall is no tail
LONG_TAIL = 2.0  # times the highest of those parts above their median
SMALLEST = 0.1  # of the upper quartile of the first values: a loss near 0 leaps by large factors, and means nothing
SIGMA = 1.4826  # the median distance of what is above the median as a standard deviation (of a normal distribution)
DUE = WINDOW  # new values after which the rough limit is made anew: 70 us then, a third of a microsecond a value
QUIET_VALUES = 20  # of a series after a leap: a new level is no row of leaps
QUIET_STEPS = 50
EVENTS_LIMIT = 20
LOOKS_LIMIT, ARMED_LIMIT = 8, 4  # for who made values, of a run
PASSES_LIMIT = 4_096  # short steps may be cut hundreds at a time, and accumulate gradients
NOT_AGAIN = "no later step that was looked at has shown it again"
COMPILED = "code is compiled, where no module can be listened to"
SERIES_LIMIT = 64
INTS_LIMIT = 10_000  # indices in an event
BATCHES_BEFORE = 2
PENDING_LIMIT = 256
VALUES_PER_STEP = 256  # times of values that are kept, to tell which batch of a step a value is of

Batch = Tuple[int, int, int]  # the step, the iterator, the number of the batch


class Doubt(NamedTuple):
    """A value that stands out; `low` and `high` of those before it, None where there were too few to judge by."""

    time_ns: int
    value: float
    low: float | None
    high: float | None


class Watched:
    """The last values of one series."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._times: deque[int] = deque(maxlen=VALUES_PER_STEP)
        self._part: list[float] = []  # the last values, of which no part is made yet
        self._parts: deque[tuple[float, float]] = deque(maxlen=PARTS)  # usual size, and how far up the highest goes
        self._smallest = 0.0
        self._limit = math.inf  # what is above it is looked at
        self._new = 0  # values since the limit was made
        self._quiet = 0  # values that are not judged
        self.is_finite = True  # the value before was

    def look(self, times: Sequence[int], values: list[float]) -> list[Doubt]:
        """Take values in; those that stand out."""
        found: list[Doubt] = []
        self._times.extend(times)
        at = 0
        while at < len(values):  # until the limit is due, together where nothing of them is new
            part = values[at : at + DUE - self._new]
            usual = self.is_finite and not self._quiet and len(self._values) == WINDOW
            if usual and max(part) <= self._limit and math.isfinite(sum(part)):
                self._took(part)
            else:
                found += self._look_singly(times[at : at + len(part)], part)
            at += len(part)
        return found

    def _look_singly(self, times: Sequence[int], values: list[float]) -> list[Doubt]:
        found = []
        for time_ns, value in zip(times, values):
            if value - value != 0.0:  # NaN, or infinite
                if self.is_finite:
                    found.append(Doubt(time_ns, value, *self._range()))
                self.is_finite = False
                continue
            self.is_finite = True
            if self._quiet:
                self._quiet -= 1
            elif value > self._limit and self._leaps(value):
                found.append(Doubt(time_ns, value, *self._range()))
                self._quiet = QUIET_VALUES
                continue
            self._took([value])
        return found

    def _took(self, values: list[float]) -> None:
        self._values.extend(values)
        self._part += values
        if len(self._part) >= PART:
            part, self._part = self._part[-PART:], []
            sizes = [*map(abs, part)]
            if _median(sizes[: PART // 2]) <= LEVELLED * _median(sizes[PART // 2 :]):
                self._parts.append((_median(sizes), max(part) - _median(part)))
        self._new += len(values)
        if self._new >= DUE or self._new * 8 >= len(self._values) < WINDOW:
            # The limit is half the score, for what is judged against the last values exactly.
            self._new, known = 0, list(self._values)
            if len(known) >= LEAST_BEFORE:
                if not self._smallest:
                    self._smallest = SMALLEST * sorted(map(abs, known))[3 * len(known) // 4]
                usual, spread, _ = _expected(known)
                self._limit = usual + SCORE / 2 * spread

    def number_in(self, start_ns: int, time_ns: int) -> int | None:
        """How many values of the series came before `time_ns`, from `start_ns` on; None where they are forgotten."""
        times = self._times
        if len(times) == times.maxlen and times[0] >= start_ns:
            return None
        return sum(start_ns <= time < time_ns for time in times)

    def _range(self) -> tuple[float | None, float | None]:
        values = self._values
        return (min(values), max(values)) if len(values) >= LEAST_BEFORE else (None, None)

    def _leaps(self, value: float) -> bool:
        values = list(self._values)
        usual, size = _median(values), _median([*map(abs, values)])  # of a series about 0 the size alone is a level
        least = max(self._smallest, SMALLEST_CHANGE * size)
        if not least or value - usual < least:  # what has been 0 so far has no size to leap from
            return False
        like = (tail for middle, tail in self._parts if middle <= LIKE * size)
        if value - usual < LONG_TAIL * max(like, default=0.0):
            return False
        if min(values) <= 0:
            return _stands_out(value, values)
        recent = values[-RECENT:]
        has_fallen = _median(values[:RECENT]) >= FALLEN * _median(recent)
        return any(
            _stands_out(value, before) and _stands_out(math.log(value), [*map(math.log, before)], LOG_SCORE)
            for before in (values, recent)[: 1 + has_fallen]
        )


def _stands_out(value: float, values: list[float], score: float = SCORE) -> bool:
    usual, spread, highest = _expected(values)
    return value - usual >= max(score * spread, TAIL * math.sqrt(WINDOW / len(values)) * highest)


def _expected(values: list[float]) -> tuple[float, float, float]:
    """(what `values` lead to expect, robust spread, highest) about the line through the medians of both halves.

    A series that falls fast is not noisy. Where most values are equal, the spread is a part of their size that no
    rounding reaches.
    """
    half = len(values) // 2
    early, late = _median(values[:half]), _median(values[half:])
    slope = (late - early) / half
    first = early - slope * half / 2
    rest = [value - first - slope * at for at, value in enumerate(values)]
    usual, middle = max(late, first + slope * (len(values) - 1)), _median(rest)
    distance = _median([value - middle for value in rest if value >= middle])  # below, a loss near 0 has a tail of logs
    return usual, max(SIGMA * distance, 1e-3 * abs(usual), 1e-12), max(rest)


def _median(values: list[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Search:
    """Who made a value that is not finite: told by its graph, its gradients, or what modules put out when it stays."""

    def __init__(self, agent: Agent) -> None:
        self.is_scaled = False  # a GradScaler looks for its scale by norms that are not finite
        self._agent = agent
        self._origins: Origins | None = None  # made for the first look
        self._outputs: Outputs | None = None
        self._found: dict[int, tuple[dict[str, Any], int]] = {}  # by time: what a look has told, and its own time
        self._again: dict[str, Any] = {}  # what the steps after the last value without an origin have told
        self._looked = self._armed = 0  # how often it was looked, and how often steps were listened to
        self._lost_ns: int | None = None  # the value that was looked at last; None once there are finite ones again
        self._knows = False  # that look has told who made it
        look = agent.guard.wrap(SEARCH, self._look)
        agent.metrics.loss_lost = partial(look, Origins.of_loss)
        agent.metrics.norm_lost = lambda *lost: None if self.is_scaled else look(Origins.of_gradients, *lost)

    @property
    def is_under_way(self) -> bool:
        """Whether steps are still listened to."""
        return self._outputs is not None and self._outputs.is_armed

    def recovered(self, time_ns: int) -> None:
        """A value of this time is finite."""
        if self._lost_ns is not None and time_ns > self._lost_ns:
            self._lost_ns = None

    def goes_on(self) -> None:
        """A value has been heard of: where no look has told who made it, or what came before it, the next steps may."""
        if (self._lost_ns is not None and self._knows) or self._armed >= ARMED_LIMIT or self.is_under_way:
            return
        self._armed += 1
        self._again.clear()
        if self._outputs is None:
            self._outputs = Outputs(self._agent, self._again.update)
        self._outputs.arm()

    def of(self, time_ns: int, step: int | None) -> dict[str, Any]:
        """What is known of the value of this time, which is of `step`."""
        told, own_ns = self._found.pop(time_ns, ({}, 0))
        if own_ns:
            self._agent.journal.write("monitor", time_ns, own_ns, step=step, measured=[SEARCH], cost_ns=own_ns)
        if "where" not in told and ("where" in self._again or not told):
            told = dict(self._again)
        return told or {"reason": COMPILED if self._agent.compile_used else NOT_AGAIN}

    def _look(self, look: Callable[..., dict[str, Any]], lost: Any, time_ns: int) -> None:
        """Before the backward pass of a lost loss, or before a lost norm clips; once in a trouble."""
        agent = self._agent
        if self._lost_ns is not None or self._looked >= LOOKS_LIMIT or agent.user_profiler_active:
            return
        self._lost_ns = time_ns
        self._looked += 1
        if self._origins is None:
            self._origins = Origins(agent.first_model)
        began = monotonic_ns()
        told = look(self._origins, lost, agent.device.in_use)
        self._knows = "where" in told
        self._found[time_ns] = told, monotonic_ns() - began


class Alarms:
    """Listens to all series of a process."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._watched: dict[int, Watched] = {}  # by the identity of the series
        self._pending: list[tuple[Doubt, Series]] = []  # whose step is not known yet
        self._under_way: Use | None = None
        self._written = 0
        self._quiet_until = self._lost_until = -1  # steps: after a leap, after what is not finite
        self._scaled = False  # by a GradScaler, for which a norm that is not finite is usual
        self._search = Search(agent)
        self._passes: deque[int] = deque(maxlen=PASSES_LIMIT)  # when backward passes began
        agent.metrics.listeners.append(agent.guard.wrap(NAME, self._heard))
        agent.add_boundary_hook(lambda _row, _now_ns: self._settle() if self._pending else None, NAME)
        agent.add_end_hook(self._settle, NAME)
        agent.add_finish_hook(self._at_finish, NAME)
        # All steps are written: say what is left.
        self.finish = agent.guard.wrap(NAME, lambda: self._settle(last=True), inject=False)

    def _heard(self, series: Series, times: Sequence[int], values: list[float]) -> None:
        if series.source == "scaler":
            self._scaled = self._search.is_scaled = True
        told_again = series.source == "clipping" and series.about.get("again")
        if series.source not in ("backward", "clipping") or told_again or series.name.endswith("_scaled"):
            return
        watched = self._watched.get(id(series))
        if watched is None:
            if len(self._watched) >= SERIES_LIMIT:
                return
            watched = self._watched[id(series)] = Watched()
        if series.source == "backward":
            self._passes.extend(times)
        was_lost = not watched.is_finite
        found = watched.look(times, values)
        if (was_lost or found) and watched.is_finite:
            self._search.recovered(times[-1])
        if found and len(self._pending) < PENDING_LIMIT:
            self._pending += [(doubt, series) for doubt in found]
            self._agent.steps.hurry()
            if any(self._is_lost(doubt, series) for doubt in found):
                self._search.goes_on()

    def _at_finish(self) -> None:
        steps = self._agent.steps
        steps.settle()
        self._under_way = steps.open_use()

    def _settle(self, last: bool = False) -> None:
        """Write the alarms whose step is over."""
        if not self._pending:
            return
        uses = self._agent.steps.uses()
        starts = [use.start_ns for use in uses]
        pending, self._pending = sorted(self._pending, key=lambda alarm: alarm[0].time_ns), []
        for doubt, series in pending:
            moment = doubt.time_ns
            if series.source == "clipping":  # a norm is of the backward pass before it, as in the table of metrics
                moment = max((time for time in self._passes if time <= moment), default=moment)
            at = bisect_right(starts, moment) - 1
            searched = self._is_lost(doubt, series) and self._search.is_under_way
            if not last and (searched or not uses or moment >= uses[-1].end_ns):
                self._pending.append((doubt, series))
                continue
            known = at >= 0 and moment < uses[at].end_ns
            before = uses[: at + 1]
            if not known and self._under_way is not None and moment >= self._under_way.start_ns:
                before, known = [*before, self._under_way], True
            step = before[-1].step if known else None
            origin = self._search.of(doubt.time_ns, step) if self._is_lost(doubt, series) else None
            if self._is_new(doubt, series, before[-1].step if before else 0):
                self._written += 1
                self._write(doubt, series, before if known else [], origin)

    def _is_lost(self, doubt: Doubt, series: Series) -> bool:
        """Whether it is not finite, and no norm that a GradScaler looks for its scale by."""
        return not (math.isfinite(doubt.value) or (self._scaled and series.source == "clipping"))

    def _is_new(self, doubt: Doubt, series: Series, step: int) -> bool:
        if math.isfinite(doubt.value):
            if step <= max(self._quiet_until, self._lost_until):
                return False
            self._quiet_until = step + QUIET_STEPS
        else:
            if not self._is_lost(doubt, series):
                return False
            quiet, self._lost_until = step <= self._lost_until, step + QUIET_STEPS
            if quiet:
                return False
        return self._written < EVENTS_LIMIT

    def _write(self, doubt: Doubt, series: Series, uses: list[Use], origin: dict[str, Any] | None) -> None:
        """The last of `uses` is the step of the value, if there is any."""
        suspects: list[Batch] = []
        before: list[Batch] = []
        if uses and uses[-1].iterator is not None:
            use = uses[-1]
            # The batches of the step that the value is of: one, where each had a backward pass.
            first, last = use.first, use.first + use.batches - 1
            number = self._watched[id(series)].number_in(use.start_ns, doubt.time_ns)
            one_each = series.source == "backward" and use.passes == use.batches
            if one_each and number is not None and number < use.batches:
                first = last = use.first + number
            suspects = _batches(use, first, last)
            before = _batches(use, use.first, first - 1)
            for other in reversed(uses[:-1]):
                if len(before) >= BATCHES_BEFORE:
                    break
                known = {batch[1:] for batch in suspects + before}  # two steps may use one batch
                own = _batches(other, other.first, other.first + other.batches - 1)
                before = [batch for batch in own if batch[1:] not in known] + before
        self._agent.journal.write(
            "alarm",
            doubt.time_ns,
            step=uses[-1].step if uses else None,
            series=series.name,
            source=series.source,
            value=as_json(doubt.value),
            low=doubt.low,
            high=doubt.high,
            **{name: series.about.get(name) for name in ("file", "line", "function")},
            origin=origin,
            batches=self._described(suspects, before[-BATCHES_BEFORE:]),
        )

    def _described(self, suspects: list[Batch], before: list[Batch]) -> list[dict[str, Any]]:
        """In order of use; there is room for the suspects first."""
        room, names = INTS_LIMIT, NAMES_LIMIT
        described: list[dict[str, Any]] = []
        for step, iterator, number in suspects + before[::-1]:
            told = self._agent.batches.described(iterator, number, room, names)
            indices = told["indices"] or []
            room, names = room - len(indices), names - len(indices)
            described.append({"step": step, "suspect": len(described) < len(suspects), **told})
        return described[len(suspects) :][::-1] + described[: len(suspects)]


def _batches(use: Use, first: int, last: int) -> list[Batch]:
    return [] if use.iterator is None else [(use.step, use.iterator, number) for number in range(first, last + 1)]
