"""The work of each rank in each step, in microseconds: its noise, and what is planted in it.

World 0 has all plants. World 1 + k has all but plant k, and the same random numbers: what it is faster by is the cost
of plant k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ranks_simulated.scenario import PLANTS, Floats, Layout, Plant, Scenario

PARTS = ("data", "before", "forward", "backward", "optimizer", "other")
# shares of the nominal step; of "3d", forward and backward are those of the whole pipeline, bubbles included
_SHARES = {
    "dp": (0.008, 0.008, 0.28, 0.56, 0.05, 0.02),
    "fsdp": (0.008, 0.008, 0.27, 0.54, 0.04, 0.02),
    "hsdp": (0.008, 0.008, 0.27, 0.54, 0.04, 0.02),
    "3d": (0.006, 0.006, 0.25, 0.50, 0.04, 0.02),
}
_PAUSED = ("forward", "backward", "other")  # parts that a collection may fall into
BLOCK = 50  # steps whose work is drawn together
EVAL_EVERY, EVAL_STEPS, EPOCH_STEPS, SAVE_EVERY = 400, 3, 950, 1900
WARMUP = (15.0, 3.0, 2.3, 1.3, 1.05)  # factors of the first steps
SAVING_US = 1.5e6
CHECKPOINT_EVERY, RETRIES = 20, 0.3  # of what is planted
TOKENS = 8192.0  # of a rank's batch


@dataclass(frozen=True)
class Happening:
    """A row of `events`."""

    step: int
    rank: int
    kind: str
    duration_us: float


@dataclass
class Block:
    """Some steps from `first` on. Arrays have the shape (steps, worlds, ranks) where nothing else is said."""

    first: int
    parts: dict[str, Floats]
    pauses: dict[str, Floats]  # of the host, in a part: collections and retries
    link: Floats  # longer transfers of the groups of a rank
    hiccup: Floats  # (steps,): all transfers of the step
    gc: Floats
    tokens: Floats  # (steps, ranks)
    evaluation: np.ndarray
    happenings: list[Happening]


def chosen(scenario: Scenario, layout: Layout) -> list[tuple[Plant, np.ndarray]]:
    """Each plant with the ranks that it hits, drawn where the plant does not say."""
    rng = np.random.default_rng([scenario.seed, 7])
    found = []
    stages, replicas, _ = layout.shape
    for plant in scenario.plants:
        if plant.name not in PLANTS:
            raise ValueError(f"{plant.name!r} is none of {', '.join(PLANTS)}")
        rank, host = int(rng.integers(scenario.ranks)), int(rng.integers(scenario.hosts))
        rank = rank if plant.rank is None else plant.rank
        host = host if plant.host is None else plant.host
        everyone = np.arange(scenario.ranks)
        if plant.name in ("slow_host", "other_processes") or (plant.name == "slow_link" and plant.host is not None):
            hit = everyone // scenario.per_host == host
        elif plant.name == "heavy_stage":
            hit = layout.p == stages - 1
        elif plant.name in ("gc", "rotating_data", "sequence_length", "slow_storage"):
            hit = everyone >= 0
        elif plant.name == "checkpoint":
            hit = everyone == 0
        elif plant.name == "slow_data" and stages > 1 and plant.rank is None:  # stages between load nothing
            hit = everyone == rank % (replicas * layout.shape[2])
        else:
            hit = everyone == rank
        if plant.name == "heavy_stage" and stages < 2:
            raise ValueError("heavy_stage needs a layout with stages")
        found.append((plant, np.flatnonzero(hit)))
    return found


class Work:
    """Draws the work of a run, block by block."""

    def __init__(self, scenario: Scenario, layout: Layout) -> None:
        self.scenario, self.layout = scenario, layout
        self.plants = chosen(scenario, layout)
        self.rng = np.random.default_rng([scenario.seed, 1])
        ranks = scenario.ranks
        shares = dict(zip(PARTS, _SHARES[scenario.layout], strict=True))
        if scenario.layout == "3d":
            slots = scenario.microbatches + layout.shape[0] - 1
            for part in ("forward", "backward"):
                shares[part] *= scenario.microbatches / slots
        self.nominal = {part: share * scenario.step_ms * 1000 for part, share in shares.items()}
        self.computing = self.nominal["forward"] + self.nominal["backward"]
        device = 1 + 0.003 * self.rng.standard_normal(ranks)
        slower = self.rng.random(ranks) < 0.03  # devices differ by a percent or two for good
        self.device = device + slower * self.rng.uniform(0.01, 0.02, ranks)
        self.loads = (layout.p == 0) | (layout.p == layout.shape[0] - 1)
        self.hot_period = max(40, min(600, scenario.steps // 6))
        self.spread = self._spread()

    def _spread(self) -> float:
        """Deviation of the tokens that makes the longest of the replicas' batches one unit longer than the mean."""
        lengths = _lengths(np.random.default_rng([self.scenario.seed, 8]), 400, self.layout.shape[1])
        return 1.0 / float((lengths.max(axis=1) - lengths.mean(axis=1)).mean())

    def blocks(self) -> Iterator[Block]:
        for first in range(0, self.scenario.steps, BLOCK):
            yield self._block(first, min(BLOCK, self.scenario.steps - first))

    def hot(self, step: np.ndarray, plant: Plant) -> np.ndarray:
        """Whether a throttled device's clock is low in a step."""
        return self._on(step, plant) & (step // (self.hot_period // 2) % 2 == 1)

    def _on(self, step: np.ndarray, plant: Plant) -> np.ndarray:
        return step >= plant.since * self.scenario.steps

    def _natural(self, step: np.ndarray) -> dict[str, Floats]:
        """The parts without any plant, shape (steps, ranks)."""
        rng, shape = self.rng, (len(step), self.scenario.ranks)
        # all ranks of a step have something in common, each has its own, and now and then one stumbles
        common = np.exp(0.006 * rng.standard_normal((len(step), 1)))
        own = np.exp(0.004 * rng.standard_normal(shape))
        own += (rng.random(shape) < 2e-4) * rng.exponential(0.08, shape)
        natural = {
            "forward": common * own * self.device * np.exp(0.002 * rng.standard_normal(shape)),
            "backward": common * own * self.device,
            "optimizer": self.device * np.exp(0.01 * rng.standard_normal(shape)),
            "data": np.exp(0.25 * rng.standard_normal(shape)),
            "before": np.exp(0.1 * rng.standard_normal(shape)),
            "other": np.exp(0.15 * rng.standard_normal(shape)),
        }
        for part, values in natural.items():
            values *= self.nominal[part]
        if step[0] == 0:
            for number, factor in enumerate(WARMUP[: len(step)]):
                for part in ("forward", "backward"):
                    natural[part][number] *= factor
        natural["data"][step % EPOCH_STEPS == 0] += rng.uniform(3e5, 6e5)  # loader workers start anew
        natural["data"] += (rng.random(shape) < 2e-5) * rng.exponential(3e4, shape)
        natural["data"] *= self.loads
        return natural

    def _block(self, first: int, count: int) -> Block:
        scenario, rng, ranks = self.scenario, self.rng, self.scenario.ranks
        step, shape = np.arange(first, first + count), (count, ranks)
        natural = self._natural(step)
        happenings = []
        for saved in step[(step > 0) & (step % SAVE_EVERY == 0)].tolist():
            natural["other"][saved - first, 0] += SAVING_US
            happenings.append(Happening(saved, 0, "checkpoint", SAVING_US))
        gc = (rng.random(shape) < 0.1) * rng.uniform(100, 600, shape)
        gc += (rng.random(shape) < 5e-5) * rng.uniform(4e3, 1.2e4, shape)
        fallen = rng.integers(len(_PAUSED), size=shape)
        hiccup = (rng.random(count) < 0.002) * rng.exponential(1.0, count) * scenario.step_ms * 1000
        worlds = 1 + len(self.plants)
        block = Block(
            first=first,
            parts={part: np.repeat(values[:, None], worlds, axis=1) for part, values in natural.items()},
            pauses={part: np.zeros((count, worlds, ranks)) for part in _PAUSED},
            link=np.zeros((count, worlds, ranks)),
            hiccup=hiccup,
            gc=np.repeat(gc[:, None], worlds, axis=1),
            tokens=np.full(shape, TOKENS),
            evaluation=evaluation(step),
            happenings=happenings,
        )
        for number, (plant, hit) in enumerate(self.plants):
            # a generator of its own: other draws stay the same with and without the plant
            drawn = np.random.default_rng([scenario.seed, 100 + number, first])
            _Change(self, plant, hit, step, drawn).apply(block, without=number + 1)
        for index, part in enumerate(_PAUSED):
            block.pauses[part] += block.gc * (fallen == index)[:, None]
        return block


def evaluation(step: np.ndarray) -> np.ndarray:
    """Whether a step is one of evaluation."""
    return (step >= EVAL_EVERY) & (step % EVAL_EVERY < EVAL_STEPS)


def _lengths(rng: np.random.Generator, steps: int, replicas: int) -> Floats:
    """Tokens of each replica's batch beyond the mean, in deviations: many short, few long."""
    return (np.exp(0.6 * rng.standard_normal((steps, replicas))) - np.exp(0.18)) / (np.exp(0.18) * 0.6583)


class _Change:
    """What a plant does to the ranks it hits in some steps; arrays of the shape (steps, ranks)."""

    def __init__(self, work: Work, plant: Plant, hit: np.ndarray, step: np.ndarray, rng: np.random.Generator) -> None:
        scenario = work.scenario
        self.factors: dict[str, Floats] = {}
        self.parts: dict[str, Floats] = {}
        self.pauses: dict[str, Floats] = {}
        self.link: Floats | None = None
        self.gc: Floats | None = None
        self.tokens: Floats | None = None
        self.happenings: list[Happening] = []
        shape = (len(step), scenario.ranks)
        self.shape, self.step, self.rng = shape, step, rng
        on = np.zeros(shape)
        on[:, hit] = work._on(step, plant)[:, None]
        self.on = on
        self.excess = plant.size * scenario.step_ms * 1000
        self.work, self.plant = work, plant
        getattr(self, {"gc": "gc_pause"}.get(plant.name, plant.name))()

    def apply(self, block: Block, without: int) -> None:
        """To all worlds but one."""
        others = [world for world in range(block.link.shape[1]) if world != without]
        for part, factor in self.factors.items():
            block.parts[part][:, others] *= factor[:, None]
        if self.tokens is not None:
            block.tokens = self.tokens
            for part in ("forward", "backward"):
                block.parts[part][:, others] *= (self.tokens / TOKENS)[:, None]
                block.parts[part][:, without] *= self.tokens.mean(axis=1, keepdims=True) / TOKENS
        for target, more in ((block.parts, self.parts), (block.pauses, self.pauses)):
            for part, values in more.items():
                target[part][:, others] += values[:, None]
        if self.link is not None:
            block.link[:, others] += self.link[:, None]
        if self.gc is not None:
            block.gc[:, others] += self.gc[:, None]
        block.happenings += self.happenings

    def _jitter(self, sigma: float) -> Floats:
        return np.exp(sigma * self.rng.standard_normal(self.shape) - sigma**2 / 2)

    def _slower(self, on: Floats, excess: float) -> None:
        self.factors = dict.fromkeys(("forward", "backward"), 1 + on * excess / self.work.computing)

    def _one_in_turn(self) -> Floats:
        """As often as not a random rank of those hit, now and then two; the mean longest is the excess."""
        ranks = self.shape[1]
        turn = self.rng.random(self.shape) < 1 / ranks
        return turn * self.on * self.excess / (1 - np.exp(-1)) * self._jitter(0.2)

    def slow_gpu(self) -> None:
        self._slower(self.on, self.excess)

    def slow_host(self) -> None:
        self._slower(self.on, self.excess)

    def heavy_stage(self) -> None:
        self._slower(self.on, self.excess)

    def thermal(self) -> None:
        self._slower(self.on * self.work.hot(self.step, self.plant)[:, None], 2 * self.excess)

    def slow_link(self) -> None:
        self.link = self.on * self.excess

    def gc_pause(self) -> None:
        self.gc = self._one_in_turn()
        for row, rank in np.argwhere(self.gc >= 1e4):
            self.happenings.append(Happening(int(self.step[row]), int(rank), "gc", float(self.gc[row, rank])))

    def slow_data(self) -> None:
        self.parts["data"] = self.on * self.excess * self._jitter(0.3)

    def rotating_data(self) -> None:
        loads = self.work.loads
        self.parts["data"] = self._one_in_turn() * loads / loads.mean()

    def slow_storage(self) -> None:
        slow = self.rng.random((self.shape[0], 1)) < 0.3
        self.parts["data"] = self.on * slow * self.work.loads * self.excess / 0.3 * self._jitter(0.1)

    def sequence_length(self) -> None:
        lengths = _lengths(self.rng, self.shape[0], self.work.layout.shape[1])
        longer = self.work.spread * self.excess / self.work.computing * lengths[:, self.work.layout.d]
        self.tokens = np.round(TOKENS * np.maximum(0.2, 1 + longer * self.on))

    def checkpoint(self) -> None:
        saved = (self.step % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1)[:, None]
        self.parts["other"] = self.on * saved * self.excess * CHECKPOINT_EVERY * self._jitter(0.1)
        for row, rank in np.argwhere(self.parts["other"] > 0):
            took = float(self.parts["other"][row, rank])
            self.happenings.append(Happening(int(self.step[row]), int(rank), "checkpoint", took))

    def python_line(self) -> None:
        part = "other" if self.work.scenario.seed % 2 else "before"
        self.parts[part] = self.on * self.excess * self._jitter(0.2)

    def other_processes(self) -> None:
        for part, share in (("data", 0.2), ("before", 0.2), ("forward", 0.2), ("backward", 0.2), ("other", 0.2)):
            more = self.on * self.rng.gamma(2.0, self.excess * share / 2, self.shape)
            (self.pauses if part in _PAUSED else self.parts)[part] = more

    def allocator_retries(self) -> None:
        retried = self.rng.random(self.shape) < RETRIES
        self.pauses["forward"] = self.on * retried * self.excess / RETRIES * self._jitter(0.2)
        for row, rank in np.argwhere(self.pauses["forward"] > 0):
            took = float(self.pauses["forward"][row, rank])
            self.happenings.append(Happening(int(self.step[row]), int(rank), "retry", took))
