"""When to open a window and how long to keep it open: decisions only, no clock, no file, no profiler.

`Plan` waits for a steady step time and falls back when a run may be too short to become steady; `SchedulePlan` counts
steps as `torch.profiler.schedule` does. Both are told every step boundary and answer with an `Opening` or None.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from stepscope.record.agent.config import WindowConfig

HIGH = "high"
LOW = "low"

MIN_ACTIVE = 3  # per-step figures need repeats to tell a habit from an accident
MAX_ACTIVE = 10  # more steps of the same kind add bytes, not knowledge
# About this much training per window: stopping and exporting took 13 times what was traced in a Python-heavy loop.
AIM_NS = 100_000_000
DEVICE_WARMUP = 1  # device tracing starts lazily and drops its first records; CPU tracing has nothing to warm up
LAST_CHANCE_MARGIN = 1  # steps kept free between a last-chance window and the end of the epoch
GIVE_UP_STEPS = 40  # after so many steps a loop will not become steady soon
GIVE_UP_NS = 60_000_000_000
MAX_ATTEMPTS = 4  # windows tried in automatic mode, dropped ones included
MAX_LOW = 1  # low-confidence windows in automatic mode: the next one must be better


@dataclass(frozen=True)
class Boundary:
    """What is known between two steps. `remaining` counts steps left in the loader's epoch; None where unknown."""

    completed: int
    kind: str
    wall_ns: int
    first_batch: bool = False
    compiled: bool = False
    saved: bool = False
    in_window: bool = False
    remaining: int | None = None
    elapsed_ns: int = 0  # since the first step was cut


@dataclass(frozen=True)
class Opening:
    """Open now: `warmup` steps prepared, then `active` steps recorded."""

    warmup: int
    active: int
    confidence: str
    reason: str


class Plan:
    """One window over steady steps; before that at most one of low confidence, for runs that may end first.

    `observe` is told of every boundary; `decide` only answers.
    """

    def __init__(self, config: WindowConfig, *, once: bool = False) -> None:
        self._enough = (HIGH, LOW) if once else (HIGH,)  # confidence of a window after which none is wanted
        self.everywhere = config.everywhere
        self.warmup = 0  # DEVICE_WARMUP where a device will be traced as well, unless a schedule gives it
        self.max_active: int | None = None  # set from the bytes an earlier window took
        self._walls: deque[int] = deque(maxlen=NOISY_STEPS)
        self._outlier = False
        self._seen = 0
        self._attempts = 0
        self._low = 0
        self._done = False

    @property
    def over(self) -> bool:
        """Whether no window will be asked for any more."""
        return self._done or self._attempts >= MAX_ATTEMPTS

    def observe(self, at: Boundary) -> None:
        """A step was cut."""
        self._outlier = is_outlier(at.wall_ns, self._walls)
        if at.kind != "train":
            return
        self._seen += 1
        if not (at.first_batch or at.compiled or at.saved or at.in_window):
            self._walls.append(at.wall_ns)

    def decide(self, at: Boundary) -> Opening | None:
        """An `Opening`, or None to go on without a window. `at` is the boundary observed last."""
        # Stacks recorded during compilation are gigabytes.
        if at.compiled or (not self.everywhere and (at.kind != "train" or at.saved)):
            return None
        opening = self._opening(at)
        if opening is None or self.max_active is None or opening.active <= self.max_active:
            return opening
        return replace(opening, active=max(1, self.max_active))

    def opened(self, _at: Boundary) -> None:
        """The window decided on was opened, or given up for a reason outside this plan."""
        self._attempts += 1

    def closed(self, *, kept: bool, confidence: str) -> None:
        """A window that was opened has ended."""
        if kept and confidence in self._enough:
            self._done = True
        elif kept:
            self._low += 1

    def _opening(self, at: Boundary) -> Opening | None:
        if self.over or (self._outlier and not self.everywhere):
            return None
        walls = list(self._walls)
        aim = AIM_NS // max(1, median(walls)) if walls else MIN_ACTIVE
        usual = active = min(MAX_ACTIVE, max(MIN_ACTIVE, aim))
        if at.remaining is not None:
            active = max(MIN_ACTIVE, min(active, at.remaining - self.warmup))
        if (at.remaining is None or at.remaining >= self.warmup + active) and is_steady(walls):
            return Opening(self.warmup, active, HIGH, "step time is steady")
        if self._low >= MAX_LOW:
            return None
        if at.remaining is not None and 1 <= at.remaining <= self.warmup + MIN_ACTIVE + LAST_CHANCE_MARGIN:
            warmup = self.warmup if at.remaining > self.warmup + 1 else 0
            active = max(1, min(MIN_ACTIVE, at.remaining - warmup))
            return Opening(warmup, active, LOW, "the epoch ends before step time was steady")
        if at.remaining is None and agree(walls):
            reason = f"{AGREEING_STEPS} steps agree, too few to call step time steady"
        elif walls and (self._seen >= GIVE_UP_STEPS or at.elapsed_ns >= GIVE_UP_NS):
            reason = f"step time was not steady after {self._seen} steps in {at.elapsed_ns / 1e9:.0f} s"
        else:
            return None
        return Opening(self.warmup, usual, LOW, reason)


class SchedulePlan(Plan):
    """skip_first, then cycles of wait, warmup and active steps; `repeat` cycles, 0 for as long as the run lasts.

    Whether steps are steady does not matter, nor whether a device is in use.
    """

    def __init__(self, config: WindowConfig) -> None:
        super().__init__(config)
        self.warmup = config.warmup
        self._config = config
        self._active = max(1, config.active)
        self._last_cycle = -1  # the cycle a window was last opened in

    @property
    def over(self) -> bool:
        return 0 < self._config.repeat <= self._last_cycle + 1

    def opened(self, _at: Boundary) -> None:
        self._last_cycle = self._position(_at)[0]

    def _opening(self, at: Boundary) -> Opening | None:
        cycle, position = self._position(at)
        # Later than planned where the planned step compiled or evaluated; a cycle without a fit step is left out.
        if cycle <= self._last_cycle or 0 < self._config.repeat <= cycle or position < self._config.wait:
            return None
        return Opening(self.warmup, self._active, HIGH, "as scheduled")

    def _position(self, at: Boundary) -> tuple[int, int]:
        """(cycle, step in it) of the step that begins; cycle -1 while the first steps are skipped."""
        return divmod(at.completed - self._config.skip_first, self._config.wait + self.warmup + self._active)


# Measured: a recorded event takes about a third of the memory that it takes as JSON.
JSON_BYTES_PER_BYTE = 3
MEMORY_NOISE_BYTES = 64_000_000  # what a training process gains or frees between steps anyway


class Budget:
    """Time and bytes of all windows of a process. The first window may always be opened."""

    def __init__(self, *, began_ns: int, time_share: float, byte_budget: int) -> None:
        self.time_share = time_share
        self.bytes_left = byte_budget  # that further traces may take
        self.last_cost_ns = 0
        self._spent_ns = 0
        self._began_ns = began_ns
        self.opened = False  # a window was

    def charge(self, cost_ns: int) -> None:
        """A window cost so much: its calls, and how much longer its steps took than usual."""
        self.last_cost_ns = cost_ns
        self._spent_ns += cost_ns

    def affords_time(self, now_ns: int) -> bool:
        """Whether another window like the last one would stay within the share of the time run so far."""
        allowed_ns = self.time_share * (now_ns - self._began_ns)
        return not self.opened or self._spent_ns + self.last_cost_ns <= allowed_ns

    def over_time(self) -> str:
        """The reason to give when `affords_time` is False."""
        return f"another window would exceed {100 * self.time_share:.3g} % of the run's time"

    def fits(self, size: int) -> bool:
        """Whether a trace of `size` bytes may be kept."""
        return size <= self.bytes_left

    def steps_left(self, size: int, steps: int) -> int:
        """How many steps the bytes left will hold, going by a trace of `size` bytes over `steps` steps."""
        return max(0, self.bytes_left) * steps // max(1, size)

    def outgrown_by(self, grown_bytes: int) -> bool:
        """Whether a recording that made the process grow by so much will take too many bytes as JSON."""
        return (grown_bytes - MEMORY_NOISE_BYTES) * JSON_BYTES_PER_BYTE > self.bytes_left


# Five steps are the fewest in which one odd step cannot hide a trend: a median of five has two neighbours on each side.
STEADY_STEPS = 5
# Two-thread hosts show 5 to 15 % between equal steps; warm-up (allocator, autotuning, page cache) shows 50 % and more.
STEADY_SPREAD = 0.20
# A loop with stalls never has five quiet steps in a row. Over twelve, the middle half must agree and the newer half
# must not differ from the older one.
NOISY_STEPS = 12
NOISY_QUARTILE_SPREAD = 0.20
NOISY_DRIFT = 0.10
# Few steps that agree this well are worth a look when there may be no more of them.
AGREEING_STEPS = 3
AGREEING_SPREAD = 0.25
# Logging and checkpoint steps take visibly longer than their neighbours.
OUTLIER_RATIO = 1.5


def median(values: Sequence[int]) -> int:
    """The middle value (the lower one of two), without floating point. `values` must not be empty."""
    return sorted(values)[(len(values) - 1) // 2]


def spread(walls: Sequence[int]) -> float:
    """(largest - smallest) / median; infinite for nothing or for a median of zero."""
    if not walls:
        return float("inf")
    middle = median(walls)
    return (max(walls) - min(walls)) / middle if middle > 0 else float("inf")


def is_steady(walls: Sequence[int]) -> bool:
    """True when the newest steps agree, or when many noisy ones show no drift. `walls` is oldest first."""
    if len(walls) >= STEADY_STEPS and spread(walls[-STEADY_STEPS:]) <= STEADY_SPREAD:
        return True
    walls = walls[-NOISY_STEPS:]
    if len(walls) < NOISY_STEPS:
        return False
    ordered, middle = sorted(walls), median(walls)
    quarter, half = len(ordered) // 4, len(walls) // 2
    if middle <= 0 or (ordered[-1 - quarter] - ordered[quarter]) / middle > NOISY_QUARTILE_SPREAD:
        return False
    return abs(median(walls[half:]) - median(walls[:half])) / middle <= NOISY_DRIFT


def agree(walls: Sequence[int]) -> bool:
    """True when the newest `AGREEING_STEPS` steps agree within `AGREEING_SPREAD`."""
    return len(walls) >= AGREEING_STEPS and spread(walls[-AGREEING_STEPS:]) <= AGREEING_SPREAD


def is_outlier(wall_ns: int, walls: Sequence[int]) -> bool:
    """True when a step took much longer than the others in `walls` (at least three are needed to say so)."""
    return len(walls) >= AGREEING_STEPS and wall_ns > OUTLIER_RATIO * median(walls)
