"""What telemetry says of GPUs' clocks, of where data lies and of memory that is far from its cores.

Means are over readings between the first and the last steady training step. A figure that was not read is None.
"""

from __future__ import annotations

from msgspec import Struct


class GpuClocks(Struct, frozen=True):
    """The clock of one GPU of the run, over readings in which it was not idle.

    `reasons`: why it ran below its highest clock -> share of the readings. `lost_share` is the mean of 1 - clock by
    highest clock over all readings of the training time, 0 in those without a reason that somebody could remove.
    """

    host: str
    device: str
    readings: int  # of the training time
    busy_readings: int  # of these, not idle
    utilization: float | None  # share of the time in which a kernel ran
    clock_mhz: float
    max_clock_mhz: float
    reasons: dict[str, float]
    lost_share: float
    power_w: float | None
    power_limit_w: float | None  # enforced now
    power_default_w: float | None  # as delivered
    temperature_c: float | None  # highest
    strangers: int | None  # processes on it that are not the run's, most at a time; None where own ones do not show
    strangers_bytes: int | None


class StorageMount(Struct, frozen=True):
    """A file system that holds data of the run. `files` were open in looks, or named on the command line."""

    kind: str
    path: str
    files: int
    source: str  # "open files" | "command line"


class StorageFacts(Struct, frozen=True):
    """Where the processes that load data read it from: loader workers, else the training processes. Summed over them.

    `cold_share` is the part of the bytes they asked for that came from a device and not from the page cache;
    `early_cold_share` and `late_cold_share` are of the first and the last third of the training time.
    """

    role: str  # "loader_worker" | "rank"
    mounts: tuple[StorageMount, ...]  # the most files first
    requested_bytes_per_s: float | None
    device_bytes_per_s: float | None
    cold_share: float | None
    early_cold_share: float | None
    late_cold_share: float | None
    blocked_share: float | None  # of readings in which a process slept where nothing can wake it: mostly for a disk
    blocked_readings: int
    io_delay_share: float | None  # of their time, waiting for a disk, where the kernel counts it
    major_faults_per_s: float | None
    pressure_pct: float | None  # of the time, in which something waited for a disk or network storage (PSI)


class NumaFacts(Struct, frozen=True):
    """Nodes of memory, on machines with several. Shares are of readings of the training processes' main threads."""

    nodes: int
    main_nodes: dict[str, float]  # node -> share of the readings
    gpu_nodes: dict[str, int]  # GPU -> node next to it
    away_share: float | None  # of the readings, on another node than the process's GPU; None where that is not known
