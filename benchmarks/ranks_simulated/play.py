"""A training step played from the work of each rank: who waits for whom, and when everything starts and ends.

Each rank has a host, a compute stream and a stream of communication, each free again at a time (microseconds since the
run began, shape (worlds, pp, dp, tp)). A collective is over when its last member has come and the transfer is done,
and leaves its members at slightly different times. Without `ahead` the host waits for all that it launches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ranks_simulated.scenario import AXES, Floats, Layout, Scenario
from ranks_simulated.work import Block

BUCKETS, BLOCKS, TP_CALLS = 4, 6, 2  # of DDP; of layers, of FSDP; in a pass of a microbatch
LAUNCH = 0.35  # of the device's time, for the host to launch it
PHASES = ("data_wait", "before_forward", "forward", "backward", "optimizer", "other")
Part = slice  # of the stages
EVERY = slice(None)


@dataclass(frozen=True)
class Call:
    """A kind of collective along an axis; transfer and a slow link's delay are shares of the nominal step."""

    kind: str
    axis: str
    share: float
    bytes: int
    link: float = 0.0  # of the delay, in this call

    @property
    def small(self) -> bool:
        return self.bytes < 65536


@dataclass
class Tape:
    """What a window records of a step. Rows are arrays over the ranks of the stages they name."""

    calls: list[tuple[str, str, int, Part, Floats, Floats, Floats]] = field(default_factory=list)
    work: list[tuple[str, int, Part, Floats, Floats]] = field(default_factory=list)
    computed: Floats | None = None  # of the step, shape (ranks,)


class Noise:
    """Slices of numbers drawn once: fast enough for every call of every step."""

    def __init__(self, seed: int) -> None:
        self._pool = np.random.default_rng([seed, 2]).standard_normal(2**20)
        self._random = random.Random(seed)

    def normal(self, shape: tuple[int, ...]) -> Floats:
        size = int(np.prod(shape))
        start = self._random.randrange(len(self._pool) - size)
        return self._pool[start : start + size].reshape(shape)

    def uniform(self) -> float:
        return self._random.random()


class Player:
    """Plays step after step; `phases` of the last one are world 0's, shape (pp, dp, tp)."""

    def __init__(self, scenario: Scenario, layout: Layout, worlds: int) -> None:
        self.scenario, self.layout = scenario, layout
        self.noise = Noise(scenario.seed)
        self.shape = (worlds, *layout.shape)
        self.host, self.device, self.stream, self.second = (np.zeros(self.shape) for _ in range(4))
        self.mark = np.zeros(layout.shape)
        self.phases = {phase: np.zeros(layout.shape) for phase in PHASES}
        self.computed = np.zeros(layout.shape)
        self.waited = np.zeros(layout.shape)  # for others, in calls that hold a rank up
        self.tape: Tape | None = None
        self.count: dict[str, Floats] = {}
        self._order = _schedule(layout.shape[0], scenario.microbatches)
        self._play: Callable[[], None] = {"dp": self._dp, "fsdp": self._fsdp, "hsdp": self._hsdp, "3d": self._3d}[
            scenario.layout
        ]
        clocks = scenario.clocks
        self._jitter = (clocks.host_jitter_us, clocks.rank_jitter_us, clocks.wave_ms * 1000)

    def step(self, block: Block, row: int, tape: Tape | None) -> None:
        """Play one step; `host` of each world is where it ends."""
        self.tape = tape
        shape = self.shape
        self.w = {part: values[row].reshape(shape) for part, values in block.parts.items()}
        self.p = {part: values[row].reshape(shape) for part, values in block.pauses.items()}
        self.link, self.hiccup = block.link[row].reshape(shape), float(block.hiccup[row])
        self.linked = bool(self.link.any())
        for values in self.phases.values():
            values[:] = 0
        self.computed[:] = 0
        self.waited[:] = 0
        self.mark = self.host[0].copy()
        begun = self.host
        self.host = self.host + self.w["data"]
        self._spend("data_wait")
        self._did("data", begun[0])
        self.host = self.host + self.w["before"]
        self._spend("before_forward")
        if block.evaluation[row]:
            self.host = self.host + self.p["forward"]
            self._compute("forward", self.w["forward"])
            self._wait_for_device()
            self._spend("forward")
        else:
            self._play()
        begun = self.host
        self.host = self.host + self.w["other"] + self.p["other"]
        self._spend("other")
        self._did("other", begun[0])

    # What layouts are made of.

    def _spend(self, phase: str, part: Part = EVERY) -> None:
        """The host's time since it was last asked goes to a phase."""
        now = self.host[0, part]
        self.phases[phase][part] += now - self.mark[part]
        self.mark[part] = now

    def _did(self, kind: str, begun: Floats) -> None:
        if self.tape is not None:
            self.tape.work.append((kind, 0, EVERY, begun, self.host[0]))

    def _pause(self, part: str) -> None:
        self.host = self.host + self.p[part]

    def _compute(self, kind: str, work: Floats) -> None:
        begun = np.maximum(self.device, self.host)
        self.device = begun + work
        self.host = self.host + LAUNCH * work if self.scenario.ahead else self.device
        self.computed += work[0]
        if self.tape is not None:
            self.tape.work.append((kind, 0, EVERY, begun[0], self.device[0]))

    def _wait_for_device(self) -> None:
        self.host = np.maximum(self.host, self.device)

    def _call(self, call: Call, start: Floats, part: Part = EVERY) -> Floats:
        """When each member of a collective that comes at `start` is let go; of some stages, where `part` says so."""
        axes = AXES[call.axis]
        latest = start.max(axis=axes, keepdims=True)
        noise = self.noise
        groups = latest.shape[1:]
        transfer = call.share * self.scenario.step_ms * 1000 * np.exp(0.03 * noise.normal(groups))
        across = self.layout.spans_hosts[call.axis]
        if across and not call.small:
            transfer = transfer + self.hiccup * call.share / 0.1
        if self.linked and across and call.link:
            transfer = transfer + call.link * self.link[:, part].max(axis=axes, keepdims=True)
        host_us, rank_us, wave_us = self._jitter
        late = rank_us * noise.normal(start.shape[1:])
        if across:
            per = self.scenario.per_host
            of_host = noise.normal((self.scenario.hosts, 1)) * host_us
            late = late + np.broadcast_to(of_host, (self.scenario.hosts, per)).reshape(self.layout.shape)[part]
            if not call.small:
                turn = self.layout.ring[call.axis][part] + noise.uniform()
                most = min(wave_us, 0.25 * call.share * self.scenario.step_ms * 1000) * noise.uniform()
                late = late + most * 0.5 * (1 + np.sin(2 * np.pi * turn))
        end = latest + np.maximum(transfer + late, 2.0)
        if self.tape is not None:
            number = self._number(call.axis, part)
            bytes_ = np.full(start.shape[1:], call.bytes)
            self.tape.calls.append((call.kind, call.axis, number, part, bytes_, start[0], end[0]))
        else:
            self._number(call.axis, part)
        return end

    def _number(self, axis: str, part: Part) -> int:
        counted = self.count.setdefault(axis, np.zeros(self.layout.shape[0], np.int64))
        number = int(counted[part][0])
        counted[part] += 1
        return number

    def _blocking(self, call: Call) -> None:
        """A collective that the compute stream waits for, and the host with it where it does not run ahead."""
        start = np.maximum(self.device, self.host)
        self.device = self._call(call, start)
        self.waited += self.device[0] - start[0]
        if not self.scenario.ahead:
            self._wait_for_device()

    # Layouts: from the first forward pass to the optimizer's end.

    def _optimize(self, calls: tuple[Call, ...] = ()) -> None:
        if not self.scenario.ahead:
            self._wait_for_device()
        self._spend("backward")
        self._wait_for_device()  # the norm of gradients is read
        for call in calls:
            self._blocking(call)
        self._compute("optimizer", self.w["optimizer"])
        self._wait_for_device()
        self._spend("optimizer")

    def _small(self) -> tuple[Call, ...]:
        return SMALL if self.scenario.small_calls else ()

    def _dp(self) -> None:
        self._pause("forward")
        self._compute("forward", self.w["forward"])
        self._spend("forward")
        self._pause("backward")
        for call in DP_BUCKETS:
            self._compute("backward", self.w["backward"] / BUCKETS)
            self.stream = self._call(call, np.maximum(self.stream, self.device))
        self.waited += np.maximum(self.stream - self.device, 0)[0]
        self.device = np.maximum(self.device, self.stream)
        self._optimize(self._small())

    def _fsdp(self) -> None:
        self._sharded(FSDP_GATHER, FSDP_SCATTER, None)

    def _hsdp(self) -> None:
        self._sharded(HSDP_GATHER, HSDP_SCATTER, HSDP_REDUCE)

    def _sharded(self, gather: Call, scatter: Call, reduce: Call | None) -> None:
        """Blocks of layers whose parameters are gathered one ahead, and gradients scattered behind."""
        self._pause("forward")
        for name in ("forward", "backward"):
            ready = self._call(gather, np.maximum(self.stream, self.host))
            self.stream = ready
            for block in range(BLOCKS):
                free = np.maximum(self.device, self.host)
                self.waited += np.maximum(ready - free, 0)[0]
                self.device = np.maximum(free, ready)
                if not self.scenario.ahead:
                    self.host = self.device
                if block < BLOCKS - 1:
                    ready = self.stream = self._call(gather, np.maximum(self.stream, self.device))
                self._compute(name, self.w[name] / BLOCKS)
                if name == "backward":
                    self.stream = self._call(scatter, np.maximum(self.stream, self.device))
                    if reduce is not None:
                        self.second = self._call(reduce, np.maximum(self.second, self.stream))
            if name == "forward":
                self._spend("forward")
                self._pause("backward")
        last = np.maximum(self.stream, self.second) if reduce is not None else self.stream
        self.waited += np.maximum(last - self.device, 0)[0]
        self.device = np.maximum(self.device, last)
        self._optimize(self._small())

    def _3d(self) -> None:
        """Microbatches one forward, one backward; then gradients and parameters of the data-parallel groups."""
        self._pause("forward")
        self.device = np.maximum(self.device, self.host)
        stages, batches = self.layout.shape[0], self.scenario.microbatches
        sent: dict[tuple[str, int, int], Floats] = {}
        for kind, stage, batch in self._order:
            part, name = slice(stage, stage + 1), "forward" if kind == "F" else "backward"
            source = stage - 1 if kind == "F" else stage + 1
            if 0 <= source < stages:
                ready, given = self.device[:, part].copy(), sent.pop((kind, source, batch))
                come = np.maximum(given + self._transfer(part, source), ready + 3.0)
                self.device[:, part] = come
                self.waited[part] += come[0] - ready[0]
                if self.tape is not None:
                    self._exchanged(part, slice(source, source + 1), ready[0], given[0], come[0])
            begun = self.device[:, part].copy()
            if batch == 0 and kind == "B":
                begun += self.p["backward"][:, part]
            now = begun
            piece = self.w[name][:, part] / (batches * TP_CALLS)
            for _ in range(TP_CALLS):
                now = now + piece
                if self.layout.shape[2] > 1:
                    now = self._call(TP_REDUCE, now, part)
            self.device[:, part] = now
            self.computed[part] += piece[0] * TP_CALLS
            self.host = self.host if self.scenario.ahead else self.device
            if self.tape is not None:
                self.tape.work.append((name, batch, part, begun[0], now[0].copy()))
            if 0 <= (stage + 1 if kind == "F" else stage - 1) < stages:
                sent[kind, stage, batch] = now.copy()
            self._spend(name, part)
        if self.scenario.ahead:
            self.host = self.host + LAUNCH * (self.w["forward"] + self.w["backward"])
        self.host, self.device = self.host.copy(), self.device.copy()
        self._blocking(DP_SCATTER)
        self._optimize(self._small())
        self._blocking(DP_GATHER)
        self._spend("optimizer")

    def _transfer(self, part: Part, source: int) -> Floats:
        """Of a microbatch's activations or gradients, from one stage to the next."""
        took = 0.0008 * self.scenario.step_ms * 1000 * np.exp(0.05 * self.noise.normal((1, *self.shape[2:])))
        if self.linked:
            slow = np.maximum(self.link[:, part], self.link[:, source : source + 1])
            took = took + 0.05 * slow / self.scenario.microbatches
        return took

    def _exchanged(self, part: Part, source: Part, ready: Floats, given: Floats, come: Floats) -> None:
        """A message as both ends see it: each is there from its own time on, and both are let go together."""
        assert self.tape is not None
        for kind, stages, start in (("recv", part, ready), ("send", source, given)):
            number, size = self._number("p2p", stages), np.full(start.shape, 2**25)
            self.tape.calls.append((kind, "pp", number, stages, size, start, come))


def _schedule(stages: int, batches: int) -> list[tuple[str, int, int]]:
    """(F or B, stage, microbatch) of one forward, one backward, in an order in which each finds what it needs."""
    queues = []
    for stage in range(stages):
        early = min(stages - stage - 1, batches)
        order = [("F", batch) for batch in range(early)]
        for batch in range(batches - early):
            order += [("F", early + batch), ("B", batch)]
        order += [("B", batch) for batch in range(batches - early, batches)]
        queues.append(order)
    done: set[tuple[str, int, int]] = set()
    found = []
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, batch = queue[0]
                before = ("F", stage - 1, batch) if kind == "F" else ("B", stage + 1, batch)
                if 0 <= before[1] < stages and before not in done:
                    break
                queue.pop(0)
                done.add((kind, stage, batch))
                found.append((kind, stage, batch))
    return found


_MB = 2**20
SMALL = (Call("all_reduce", "all", 0.0004, 4), Call("all_gather", "all", 0.0005, 512))
DP_BUCKETS = tuple(Call("all_reduce", "all", share, size * _MB, 0.25) for share, size in
                   ((0.03, 128), (0.05, 200), (0.05, 200), (0.03, 128)))  # fmt: skip
FSDP_GATHER, FSDP_SCATTER = (
    Call("all_gather", "dp", 0.02, 300 * _MB, 0.05),
    Call("reduce_scatter", "dp", 0.03, 300 * _MB, 0.1),
)
HSDP_GATHER, HSDP_SCATTER = (
    Call("all_gather", "tp", 0.01, 300 * _MB, 0.05),
    Call("reduce_scatter", "tp", 0.015, 300 * _MB, 0.1),
)
HSDP_REDUCE = Call("all_reduce", "dp", 0.03, 40 * _MB, 1 / BLOCKS)
TP_REDUCE = Call("all_reduce", "tp", 0.0006, 32 * _MB)
DP_SCATTER, DP_GATHER = (
    Call("reduce_scatter", "dp", 0.05, 800 * _MB, 0.6),
    Call("all_gather", "dp", 0.04, 400 * _MB, 0.4),
)
