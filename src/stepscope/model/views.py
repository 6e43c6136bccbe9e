"""The views of profiler traces: overview, GPUs, counters, operators, kernels, modules, communication, differences.

Times are integer nanoseconds; a figure that a trace does not give is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from stepscope.model.findings import Place
from stepscope.model.memory import MemoryView
from stepscope.model.trace import GpuProperties, SpanRef

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


class CallStack(Struct, frozen=True):
    """A distinct stack of the user's frames (innermost first) behind calls of an operator, with what it costs."""

    frames: tuple[Place, ...]
    calls: int
    host_self_ns: int
    device_self_ns: int


class OperatorRow(Struct, frozen=True):
    """All calls of one operator (and, grouped by shapes, with one list of input shapes).

    Host times are summed over threads. `host_self_ns` leaves out operators called by it and, as the plugin does, its
    own runtime calls (`runtime_ns`). Device times are of linked kernels, copies and fills; they count work on parallel
    streams once per operator (union of intervals), and `*_sum_ns` are the plain sums, which is what the plugin showed.
    A call within one of the same row (recursion) adds nothing to the totals; one that is the only call in it is no call
    of its own.
    """

    name: str
    shapes: str | None
    calls: int
    calls_per_step: float | None
    host_self_ns: int
    host_total_ns: int
    host_self_ns_per_step: float | None  # of the calls that began in a step
    host_total_ns_per_step: float | None
    runtime_ns: int
    device_self_ns: int | None  # None: the trace holds no device slice
    device_total_ns: int | None
    device_self_sum_ns: int | None
    device_total_sum_ns: int | None
    self_memory_bytes: int | None  # host: allocated minus released while the operator itself ran; None without memory
    total_memory_bytes: int | None
    self_device_memory_bytes: int | None
    total_device_memory_bytes: int | None
    tensor_core_eligible: bool
    tensor_core_self_pct: float | None  # of device_self_sum_ns
    tensor_core_total_pct: float | None
    has_call_stack: bool
    place: Place | None  # the user's line that most of its time comes from, with its share of that
    place_exact: bool


class KernelRow(Struct, frozen=True):
    """All launches of one kernel (and, grouped by launch, with one configuration).

    `name` is as the trace has it, `short_name` for people and unique in a table. `blocks_per_sm` and `occupancy_pct`
    are weighted by duration. `launch_delay_ns` is the mean from the beginning of the launch call to the beginning of
    the kernel, without those a graph replayed; None where no launch is in the trace.
    """

    name: str
    short_name: str
    operator: str | None  # the operator that launched most of its time
    grid: int | None  # blocks; only when grouped by launch
    block: int | None  # threads of a block
    registers: int | None
    shared_memory_bytes: int | None
    calls: int
    total_ns: int
    mean_ns: float
    min_ns: int
    max_ns: int
    share: float  # of all kernel time
    blocks_per_sm: float | None
    occupancy_pct: float | None
    tensor_cores: bool
    launch_delay_ns: float | None
    device: int | None  # None: several
    place: Place | None
    place_exact: bool


class ModuleNode(Struct, frozen=True):
    """A module instance at one place of the call tree (`path` is its way from the root, "ResNet_0/Sequential_1/…").

    Host and device time are of the forward calls, with the modules called below (`total`) or without (`self`); backward
    is what the autograd nodes of its forward operators cost. Summed over calls, threads and streams. Device times are
    None in a trace without work of a device, backward times in one without operators of a backward pass that are
    linked to their forward operators.
    """

    path: str
    name: str  # "Conv2d_3"
    module: str  # "Conv2d"
    depth: int
    calls: int
    calls_per_step: float | None  # of the calls that begin in a step
    host_self_ns: int
    host_total_ns: int
    device_self_ns: int | None
    device_total_ns: int | None
    backward_host_self_ns: int | None
    backward_host_total_ns: int | None
    backward_device_self_ns: int | None
    backward_device_total_ns: int | None
    operators: int  # called directly: by the module's own code, not by another operator or module


class ModuleTree(Struct, frozen=True):
    """Nodes in depth-first order, children in order of total time, the longest first. Self times of the device, forward
    and backward, and `unattributed_device_ns` sum to `device_ns`. Of traces without modules nothing is in it.
    """

    nodes: tuple[ModuleNode, ...]
    device_ns: int | None  # durations of all device slices
    unattributed_device_ns: int | None  # launched by no module
    backward_linked_share: float | None  # of the backward operators' host time, what reached a module
    steps: int | None  # of the traces


class CollectiveRow(Struct, frozen=True):
    """Calls of one collective with one group, data type and size, on one rank. Bandwidth is None where sizes are.

    `overlapped_ns` is plainly summed over calls; `exposed_ns` counts a moment of several collectives once. What is left
    of `total_ns` ran beside an earlier collective.
    """

    span: SpanRef
    name: str  # "all_reduce"
    library: str | None  # "nccl" (of AMD's as well), "gloo" …
    group: str | None
    group_size: int | None
    dtype: str | None  # "bfloat16"
    message_bytes: int | None  # of a call: the larger of what the rank puts in and gets out
    calls: int
    total_bytes: int | None
    total_ns: int
    mean_ns: float
    min_ns: int
    max_ns: int
    overlapped_ns: int  # while kernels of computation ran
    exposed_ns: int
    algorithm_bytes_per_s: float | None
    bus_bytes_per_s: float | None


class WorkerShare(Struct, frozen=True):
    """One worker's mean step: computation alone, computation and communication at once, communication alone, the rest.
    The four sum to `wall_ns`.

    Of the time in collectives that were matched over workers, overlapped or not, `transferring_ns` is what the fastest
    worker needed for each and `synchronizing_ns` the rest: waiting for others. None where nothing was matched.
    """

    span: SpanRef
    steps: int
    wall_ns: int
    computation_ns: int
    overlap_ns: int
    communication_ns: int
    other_ns: int
    synchronizing_ns: int | None
    transferring_ns: int | None


class CollectiveOverWorkers(Struct, frozen=True):
    """One kind of collective in one group over all workers: who waits for whom. Means are over calls and workers."""

    name: str
    group: str | None
    calls: int  # matched over workers
    workers: int
    total_bytes: int | None  # of all matched calls; each call counts once, as the largest of its workers' messages
    mean_ns: float
    transferring_ns: float  # mean of the shortest of each match
    synchronizing_ns: float  # mean of the rest
    last_rank: int | None  # that others waited for longest altogether: its calls were the shortest, so it came last


class Distributed(Struct, frozen=True):
    """Several workers side by side. `missing_ranks` are known from the group's size and have no trace."""

    workers: tuple[WorkerShare, ...]
    collectives: tuple[CollectiveOverWorkers, ...]
    missing_ranks: tuple[int, ...]
    matched: int
    unmatched: int
    notes: tuple[str, ...]


class DiffRow(Struct, frozen=True):
    """One thing on both sides; None where one side has none. Delta is other minus base, nothing counting as 0; ratio is
    other over base.

    `ns` is time of the step in the overview, self time of the host for operators, time on the host for modules and the
    tree (with all below; forward and backward for modules), and time of the device for kernels.
    `device_ns` is self device time for operators, device time with all below for modules and the tree.
    """

    key: str
    level: int  # depth in the tree, 0 in a flat table
    base_calls: float | None  # like `ns`
    other_calls: float | None
    base_ns: float | None  # per step, where steps are known on both sides; else plain
    other_ns: float | None
    delta_ns: float
    ratio: float | None
    base_device_ns: float | None
    other_device_ns: float | None
    device_delta_ns: float | None  # None where neither side has device time


class Diff(Struct, frozen=True):
    """`tables` by name: "overview" (the step and our parts of it), "tensorboard" (its parts as the plugin had them),
    "operators", "kernels", "modules", with rows by falling |delta| of host or device, whichever is larger; and "tree"
    (structure of steps: loader, modules, backward, optimizer, matched in order) in its own order. `absent`: a table to
    why it is not there.
    """

    base: str
    other: str
    per_step: bool
    base_steps: int | None
    other_steps: int | None
    tables: dict[str, tuple[DiffRow, ...]]
    absent: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SpanViews:
    """What is shown of one span by itself, as the TensorBoard plugin did."""

    span: SpanRef
    overview: Overview | None
    gpus: tuple[GpuSummary, ...]
    operators: tuple[OperatorRow, ...]
    kernels: tuple[KernelRow, ...]


@dataclass(frozen=True)
class Views:
    """All views of the traces of a run. `absent` says of each view that is empty why it is."""

    spans: tuple[SpanViews, ...]
    operators: tuple[OperatorRow, ...]  # of all spans together, as are the next three
    kernels: tuple[KernelRow, ...]
    memory: MemoryView | None
    modules: ModuleTree | None
    counters: tuple[Counter, ...]
    communication: tuple[CollectiveRow, ...]
    distributed: Distributed | None
    # the TensorBoard plugin's own figures: {"workers": {worker: {"spans": {number: {...}}}}}, units in the names
    tensorboard: dict[str, Any]
    absent: dict[str, str] = field(default_factory=dict)
