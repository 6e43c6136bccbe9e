"""Where the time of profiled steps goes, and how well the GPUs were used."""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.views.spans import GpuProperties, SpanRef

PLUGIN_PARTS = ("Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other")
# Ours, of a trace with device work: that work by kind, each without what the ones before it cover, then what the host
# did while the devices were idle.
DEVICE_PARTS = ("compute", "exposed_communication", "exposed_copies")
IDLE_PARTS = (
    *("idle_data", "idle_sync", "idle_compile", "idle_allocator", "idle_launch", "idle_io"),
    *("idle_python", "idle_operators", "idle_unknown"),
)
# Ours, of a trace without: what the host did, each without what the ones before it cover.
HOST_PARTS = (
    *("host_data", "host_compile", "host_convolution", "host_matmul", "host_attention", "host_normalization"),
    *("host_optimizer", "host_copies", "host_operators", "host_communication", "host_io", "host_python"),
    "host_unknown",
)
DEVICE, HOST = "device", "host"


class StepBreakdown(Struct, frozen=True):
    """One step: ns by part; the parts of either partition sum to `wall_ns`."""

    step: str  # the number in ProfilerStep#N; "0" for a trace without steps
    start_ns: int
    wall_ns: int
    plugin_ns: dict[str, int]  # by PLUGIN_PARTS, all of them
    parts_ns: dict[str, int]  # by DEVICE_PARTS and IDLE_PARTS, or by HOST_PARTS: see `Overview.basis`


class Summary(Struct, frozen=True):
    """Of one part over the steps. ns."""

    mean_ns: float
    median_ns: float
    p95_ns: float
    share: float  # of the summed wall time


class Overview(Struct, frozen=True):
    """The steps of one span. `dropped_steps` were recorded without the end of their device work.

    `basis` says what `parts` are of: DEVICE where the trace holds device work, else HOST; the two have no part in
    common, because time on a host without a device is not idle time of one.
    """

    span: SpanRef
    steps: tuple[StepBreakdown, ...]
    wall: Summary
    plugin: dict[str, Summary]
    parts: dict[str, Summary]
    dropped_steps: int
    has_steps: bool  # False: the trace names no step, its whole length is one
    basis: str  # DEVICE | HOST


class GpuSummary(Struct, frozen=True):
    """One device of one span; definitions in docs/metrics.md. Percent are 0 to 100."""

    span: SpanRef
    gpu: GpuProperties
    window_ns: int  # from the first step's start to the last one's end
    utilization_pct: float | None
    sm_efficiency_pct: float | None
    achieved_occupancy_pct: float | None
    tensor_core_pct: float | None  # share of kernel time, with the complete name sets
    tensor_core_plugin_pct: float | None  # with the plugin's names
    kernels: int
    tensor_core_eligible_pct: float | None  # of the time of kernels with an operator, below one that could use them


class Counter(Struct, frozen=True):
    """A figure over time: value[i] is the mean from `start_ns + i * bucket_ns` to the next, or to `end_ns`."""

    span: SpanRef
    device: int
    metric: str  # "utilization_pct" | "sm_efficiency_pct" | "queue_length" | "copy_bytes_per_s"
    unit: str
    start_ns: int
    end_ns: int
    bucket_ns: int
    values: tuple[float, ...]
