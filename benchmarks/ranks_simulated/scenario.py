"""What is simulated: the job's shape, what is planted in it, and what was recorded of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.tables.reduced import Group, group_id

Floats = NDArray[np.float64]

LAYOUTS = ("dp", "fsdp", "hsdp", "3d")
# name -> (kinds of a right verdict, causes of a right verdict where the signal was recorded, and where it was not)
PLANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "slow_gpu": (("rank",), ("compute",), ("unknown", "compute")),
    "slow_host": (("host",), ("compute",), ("unknown", "compute")),
    "slow_link": (("link",), ("link",), ("unknown", "link")),
    "thermal": (("rank",), ("clock",), ("unknown", "compute")),
    "gc": (("rotating",), ("gc",), ("unknown",)),
    "slow_data": (("rank",), ("data",), ("unknown", "python")),
    "rotating_data": (("rotating",), ("data",), ("unknown", "python")),
    "sequence_length": (("rotating",), ("sequence_length",), ("unknown", "compute")),
    "heavy_stage": (("stage",), ("stage",), ("stage", "unknown")),
    "checkpoint": (("rank",), ("checkpoint",), ("unknown", "python")),
    "python_line": (("rank",), ("python",), ("unknown", "python")),
    "other_processes": (("host",), ("other_processes",), ("unknown",)),
    "allocator_retries": (("rank",), ("memory",), ("unknown",)),
    "slow_storage": (("global", "none"), ("data", "unknown"), ("unknown", "data")),
}


@dataclass(frozen=True)
class Plant:
    """A cause of lost time.

    size: extra work of those it hits, as a share of the nominal step, in the mean; what it costs is played.
    rank, host: whom it hits; chosen by the seed where None.
    recorded: whether what tells the cause is in the tables.
    since: share of the run after which it begins.
    """

    name: str
    size: float = 0.10
    rank: int | None = None
    host: int | None = None
    recorded: bool = True
    since: float = 0.0


@dataclass(frozen=True)
class Clocks:
    """Errors of the hosts' clocks; ends of collectives have the jitter of a host and of a rank: deviations."""

    offset_ms: float = 50.0
    drift_ppm: float = 30.0
    slews: float = 0.3  # of hosts that are slewed by up to 3 ms at some time
    step_ms: float = 0.0  # one host's clock is set by so much at some time
    rank_jitter_us: float = 10.0
    host_jitter_us: float = 30.0
    wave_ms: float = 3.0  # round the ring, of large collectives
    outliers: float = 0.03  # of ends that are 1 to 3 ms late


@dataclass(frozen=True)
class Scenario:
    """tp and pp are of the layout "3d", where data parallelism takes the rest; `shard` of "hsdp"."""

    hosts: int = 8
    per_host: int = 8
    layout: str = "dp"
    tp: int = 8
    pp: int = 4
    shard: int = 8
    microbatches: int = 8
    steps: int = 1000
    step_ms: float = 400.0
    windows: int = 3
    window_steps: int = 20
    plants: tuple[Plant, ...] = ()
    missing: float = 0.0
    whole_hosts: bool = False  # half of the missing ranks are whole hosts
    clocks: Clocks = Clocks()
    small_calls: bool = True  # a small all-reduce in each step, of the norm of gradients
    ahead: bool = False  # the host only launches, and waits for the device once a step
    places_told: bool = True  # dp, pp and tp of each rank, beside the groups
    seed: int = 1

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def shape(self) -> tuple[int, int, int]:
        """(pp, dp, tp): rank = (p * dp + d) * tp + t, as Megatron counts. Shards of "hsdp" lie along tp."""
        pp, tp = {"3d": (self.pp, self.tp), "hsdp": (1, self.shard)}.get(self.layout, (1, 1))
        if self.layout not in LAYOUTS or self.ranks % (pp * tp):
            raise ValueError(f"{self.ranks} ranks cannot be laid out as {self.layout} with tp {tp} and pp {pp}")
        return pp, self.ranks // (pp * tp), tp

    def window_starts(self) -> tuple[int, ...]:
        """First steps of windows: the first after warm-up, the others spread evenly."""
        if not self.windows:
            return ()
        first = min(30, max(5, self.steps // 10))
        apart = max(self.window_steps + 1, (self.steps - first) // self.windows)
        starts = (first + apart * number for number in range(self.windows))
        return tuple(start for start in starts if start + self.window_steps <= self.steps)


AXES = {"all": (1, 2, 3), "dp": (2,), "pp": (1,), "tp": (3,), "model": (1, 3)}
# axis -> what the framework calls the groups along it
_NAMES = {
    "dp": {"all": "default_pg"},
    "fsdp": {"all": "default_pg", "dp": "mesh_dp_shard"},
    "hsdp": {"all": "default_pg", "dp": "mesh_dp_replicate", "tp": "mesh_dp_shard"},
    "3d": {
        "all": "default_pg",
        "dp": "DATA_PARALLEL_GROUP",
        "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
        "tp": "TENSOR_MODEL_PARALLEL_GROUP",
        "model": "MODEL_PARALLEL_GROUP",
    },
}


class Layout:
    """Groups along the axes. `ids[axis]`: the id of each rank's group, shape (ranks,)."""

    def __init__(self, scenario: Scenario) -> None:
        pp, dp, tp = self.shape = scenario.shape
        self.per_host = scenario.per_host
        ranks = np.arange(scenario.ranks).reshape(self.shape)
        self.p, self.d, self.t = (index.ravel() for index in np.indices(self.shape))
        self.groups: list[Group] = []
        self.ids: dict[str, NDArray[np.object_]] = {}
        self.spans_hosts: dict[str, bool] = {}
        for axis, name in _NAMES[scenario.layout].items():
            along = [number - 1 for number in AXES[axis]]
            moved = np.moveaxis(ranks, along, range(-len(along), 0)).reshape(
                -1, int(np.prod([self.shape[number] for number in along]))
            )
            ids = np.empty(scenario.ranks, dtype=object)
            for members in moved:
                group = Group(group_id(members.tolist(), name), tuple(sorted(members.tolist())), name)
                self.groups.append(group)
                ids[members] = group.id
            self.ids[axis] = ids
            self.spans_hosts[axis] = bool(any(len(set(row // scenario.per_host)) > 1 for row in moved))
        # where a rank stands in the ring of its group along an axis, 0 to 1
        self.ring = {axis: _position(self.shape, AXES[axis], (pp, dp, tp)) for axis in _NAMES[scenario.layout]}


def _position(shape: tuple[int, int, int], axes: tuple[int, ...], sizes: tuple[int, int, int]) -> Floats:
    index = np.indices(shape)
    position, size = np.zeros(shape), 1
    for axis in reversed(axes):
        position += index[axis - 1] * size
        size *= sizes[axis - 1]
    return position / size
