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

# Parts of a step by the TensorBoard plugin, and what is in each.
PLUGIN_PARTS = {
    "Kernel": "kernels, those of collectives left out",
    "Memcpy": "copies",
    "Memset": "fills",
    "Communication": "kernels of collectives, and host ranges of their backends (nccl:, gloo: …)",
    "Runtime": "calls of the device's runtime or driver",
    "DataLoader": "the loader's __next__",
    "CPU Exec": "operators of any thread",
    "Other": "nothing of these",
}
# Ours, of a trace with device work: that work by kind, each without what the ones before it cover, then what the host
# did while the devices were idle.
DEVICE_PARTS = {
    "compute": "kernels, those of collectives left out, and fills, on any device",
    "exposed_communication": "kernels of collectives that no compute covers",
    "exposed_copies": "copies that neither compute nor communication covers",
}
IDLE_PARTS = {
    "idle_data": "no device works and the training thread is in the loader's __next__",
    "idle_sync": "no device works and it waits for one: *Synchronize, a blocking copy, .item()",
    "idle_compile": "no device works and it compiles (dynamo, inductor, Triton, TorchScript, extensions) "
    "or loads device code",
    "idle_allocator": "no device works and it is in cudaMalloc, cudaFree or their kin; "
    "PyTorch's own cache is not meant",
    "idle_launch": "no device works and it is in another call of the runtime or driver, launches above all",
    "idle_io": "no device works and it reads or writes files",
    "idle_python": "no device works and it runs Python only; needs with_stack, else this is in idle_unknown",
    "idle_operators": "no device works and it is inside an operator, outside all of the above",
    "idle_unknown": "no device works and nothing of the training thread was recorded",
}
# Ours, of a trace without: what the host did, each without what the ones before it cover.
HOST_PARTS = {
    "host_data": "the loader's __next__; of a trace without device work, as all that follow",
    "host_compile": "compiling",
    "host_convolution": "convolutions, forward and backward, with all below them",
    "host_matmul": "matrix products, likewise",
    "host_attention": "attention, likewise",
    "host_normalization": "normalization, likewise",
    "host_optimizer": "operators in the optimizer's step, and fused or foreach ones",
    "host_copies": "copies and conversions",
    "host_operators": "other operators",
    "host_communication": "collectives of any thread while the training thread runs no operator",
    "host_io": "files",
    "host_python": "Python only; needs with_stack",
    "host_unknown": "nothing recorded",
}
PARTS = {**DEVICE_PARTS, **IDLE_PARTS, **HOST_PARTS}
DEVICE, HOST = "device", "host"


class StepBreakdown(Struct, frozen=True):
    """One step: ns by part; the parts of either partition sum to `wall_ns`.

    start_ns: The later of the start of ProfilerStep#N on the host and the end of the step before. Without marked steps,
        the first slice of the host, else of a device.
    wall_ns: Until the later of the mark's end on the host and the end of the last device work launched in it. Time
        between two steps belongs to none.
    plugin_ns: Parts of the plugin; they sum to wall_ns.
    parts_ns: Our parts; they sum to wall_ns.
    """

    step: str  # the number in ProfilerStep#N; "0" for a trace without steps
    start_ns: int
    wall_ns: int
    plugin_ns: dict[str, int]  # by PLUGIN_PARTS, all of them
    parts_ns: dict[str, int]  # by DEVICE_PARTS and IDLE_PARTS, or by HOST_PARTS: see `Overview.basis`


class Summary(Struct, frozen=True):
    """Of one part over the steps. ns.

    mean_ns: Mean over the steps.
    median_ns: Median over the steps. Medians of parts do not sum to that of the step.
    p95_ns: 95th percentile over the steps, interpolated.
    share: The part's time in all steps by the wall time of all steps.
    """

    mean_ns: float
    median_ns: float
    p95_ns: float
    share: float


class Overview(Struct, frozen=True):
    """The steps of one span.

    `basis` says what `parts` are of: DEVICE where the trace holds device work, else HOST; the two have no part in
    common, because time on a host without a device is not idle time of one.

    dropped_steps: Steps at the end that launched no recorded device work, and the last one if it has fewer than 80 % of
        the device slices of the one before: the recording ended before its work did.
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
    """One device of one span.

    window_ns: From the first step's start to the last one's end; all figures are of kernels in it.
    utilization_pct: Part of the window in which at least one kernel runs, on any stream. 100 % does not mean that the
        GPU is full: one block on one multiprocessor is enough, and a collective that only waits for others counts.
        Copies and fills do not.
    sm_efficiency_pct: Mean over the window of min(1, blocks per multiprocessor of the kernels that run). An estimate
        from the sizes of launches, not measured: it cannot see that a block waits for memory.
    achieved_occupancy_pct: Mean of an estimate for each kernel (warps held by warps that fit), weighted by time;
        kernels without one do not count. It is the writer's, in whole percent. Where that has none, or the 0 % that
        Kineto writes for kernels with more than 48 KB of shared memory per block, it comes from the launch (grid,
        block, registers, shared memory) and the device's limits by NVIDIA's rules, for NVIDIA's devices from Volta on.
        Not measured: it takes every warp to last as long as its kernel. High occupancy is no need for high speed.
    tensor_core_pct: Part of summed kernel time in kernels whose names tell tensor cores (Volta to Blackwell) or AMD's
        matrix cores. It does not say how busy these are.
    tensor_core_plugin_pct: The same with the plugin's names, which end with Ampere.
    tensor_core_eligible_pct: Of the time of kernels linked to an operator, what lies below one that could use tensor
        cores.
    kernels: Kernels with time in the window.
    """

    span: SpanRef
    gpu: GpuProperties
    window_ns: int
    utilization_pct: float | None
    sm_efficiency_pct: float | None
    achieved_occupancy_pct: float | None
    tensor_core_pct: float | None
    tensor_core_plugin_pct: float | None
    kernels: int
    tensor_core_eligible_pct: float | None


class Counter(Struct, frozen=True):
    """A figure over time: value[i] is the mean from `start_ns + i * bucket_ns` to the next, or to `end_ns`.

    device: Number of the device.
    start_ns: Beginning of the first bucket.
    end_ns: End of the last bucket, which may be shorter.
    bucket_ns: Length of a bucket: 1, 2 or 5 times a power of ten, so that there are at most 250.
    values (in unit): Means over the buckets, as below.
    """

    span: SpanRef
    device: int
    metric: str  # "utilization_pct" | "sm_efficiency_pct" | "queue_length" | "copy_bytes_per_s"
    unit: str
    start_ns: int
    end_ns: int
    bucket_ns: int
    values: tuple[float, ...]


class CallStack(Struct, frozen=True):
    """A distinct stack of the user's frames (innermost first) behind calls of an operator, with what it costs.

    calls: Calls behind the stack.
    host_self_ns: Their host self time.
    device_self_ns: Their device self time, a plain sum.
    """

    frames: tuple[Place, ...]
    calls: int
    host_self_ns: int
    device_self_ns: int


class OperatorRow(Struct, frozen=True):
    """All calls of one operator (and, grouped by shapes, with one list of input shapes).

    Device times are of linked kernels, copies and fills: unions of intervals, and `*_sum_ns` the plain sums, which is
    what the plugin showed.

    calls: Calls that began in the span or step. A call whose only inner operator has the same name is one with it.
    calls_per_step: Calls that began in a profiled step, by the number of these steps.
    host_total_ns: Durations of the calls, summed over all threads; a call within one of the same row adds nothing. Can
        exceed the time that passed.
    host_self_ns: The same without operators called by it and without its own runtime calls.
    host_self_ns_per_step: host_self_ns of the calls that began in a profiled step, by the number of these steps; as
        recorded, not scaled to the steady step.
    host_total_ns_per_step: The same of host_total_ns.
    runtime_ns: Calls of the device's runtime or driver whose innermost operator this is.
    device_self_sum_ns: Durations of linked kernels, copies and fills that the operator launched itself. Without CUDA
        graphs' replays and work launched before the recording.
    device_total_sum_ns: The same with those of all operators below it, each once.
    device_self_ns: The same intervals as device_self_sum_ns as a union over streams: what runs side by side counts
        once. Rows do not add up.
    device_total_ns: The same of device_total_sum_ns.
    self_memory_bytes: Allocated without released on the host while it was the innermost operator of its thread. Below
        0: it released more. Not a peak.
    total_memory_bytes: The same with all operators below it.
    self_device_memory_bytes: As self_memory_bytes, on all other devices.
    total_device_memory_bytes: As total_memory_bytes, on all other devices.
    tensor_core_self_pct: Part of device_self_sum_ns in kernels whose name says tensor or matrix cores. Not how busy
        these were.
    tensor_core_total_pct: The same of device_total_sum_ns.
    """

    name: str
    shapes: str | None
    calls: int
    calls_per_step: float | None
    host_self_ns: int
    host_total_ns: int
    host_self_ns_per_step: float | None
    host_total_ns_per_step: float | None
    runtime_ns: int
    device_self_ns: int | None  # None: the trace holds no device slice
    device_total_ns: int | None
    device_self_sum_ns: int | None
    device_total_sum_ns: int | None
    self_memory_bytes: int | None
    total_memory_bytes: int | None
    self_device_memory_bytes: int | None
    total_device_memory_bytes: int | None
    tensor_core_eligible: bool
    tensor_core_self_pct: float | None
    tensor_core_total_pct: float | None
    has_call_stack: bool
    place: Place | None  # the user's line that most of its time comes from, with its share of that
    place_exact: bool


class KernelRow(Struct, frozen=True):
    """All launches of one kernel (and, grouped by launch, with one configuration).

    `name` is as the trace has it, `short_name` for people and unique in a table.

    grid: Blocks of the grid; as the next three only when grouped by launch.
    block: Threads of a block.
    registers: Registers of a thread.
    shared_memory_bytes: Shared memory of a block.
    calls: Kernels of the name, or of the launch configuration; collectives too, linked or not.
    total_ns: Their durations: a plain sum over streams.
    mean_ns: Mean duration.
    min_ns: Shortest.
    max_ns: Longest.
    share: Of the summed kernel time of the table.
    blocks_per_sm: Blocks by multiprocessors, weighted by duration. Below 1, part of the GPU has no block.
    occupancy_pct: An estimate, weighted by duration; not measured. Where it comes from is told at
        `achieved_occupancy_pct` of a GPU. Missing where neither the writer nor the launch tells.
    launch_delay_ns: Mean from the start of the launch to the start of the kernel. Waiting behind earlier work is in it:
        long delays are good where the GPU is busy. Without graphs' replays.
    device: Number of the device; missing where the row has several.
    """

    name: str
    short_name: str
    operator: str | None  # the operator that launched most of its time
    grid: int | None
    block: int | None
    registers: int | None
    shared_memory_bytes: int | None
    calls: int
    total_ns: int
    mean_ns: float
    min_ns: int
    max_ns: int
    share: float
    blocks_per_sm: float | None
    occupancy_pct: float | None
    tensor_cores: bool
    launch_delay_ns: float | None
    device: int | None
    place: Place | None
    place_exact: bool


class ModuleNode(Struct, frozen=True):
    """A module instance at one place of the call tree (`path` is its way from the root, "ResNet_0/Sequential_1/…").

    Host and device time are of the forward calls, with the modules called below (`total`) or without (`self`); backward
    is what the autograd nodes of its forward operators cost. Summed over calls, threads and streams. Device times are
    None in a trace without work of a device, backward times in one without operators of a backward pass that are linked
    to their forward operators.

    depth: Modules around it. Beyond 100 levels a call counts for the module there.
    calls: Forward calls at this place of the tree; recomputation (checkpointing) counts at its own.
    calls_per_step: Calls that begin in a step, by steps.
    host_self_ns: Self times of all host slices whose innermost module this is, over calls and threads, backward
        operators left out. Waiting is in it, so it is no CPU time.
    host_total_ns: The same with all modules below.
    device_self_ns: Durations of device slices that were launched with this module innermost around. A plain sum:
        streams side by side count twice. A CUDA graph counts for the module that replays it.
    device_total_ns: The same with all modules below; when the work runs does not matter.
    backward_host_self_ns: Host time below autograd operators whose forward operator this module ran. Sums of gradients
        belong to a parameter and are in no module.
    backward_host_total_ns: The same with all modules below.
    backward_device_self_ns: Durations of device slices launched by these operators.
    backward_device_total_ns: The same with all modules below.
    operators: Operators it calls with no other operator in between.
    """

    path: str
    name: str  # "Conv2d_3"
    module: str  # "Conv2d"
    depth: int
    calls: int
    calls_per_step: float | None
    host_self_ns: int
    host_total_ns: int
    device_self_ns: int | None
    device_total_ns: int | None
    backward_host_self_ns: int | None
    backward_host_total_ns: int | None
    backward_device_self_ns: int | None
    backward_device_total_ns: int | None
    operators: int


class ModuleTree(Struct, frozen=True):
    """Nodes in depth-first order, children in order of total time, the longest first. Of traces without modules nothing
    is in it.

    device_ns: Durations of all device slices of traces that hold modules.
    unattributed_device_ns: device_ns without all self times: launched before the recording, outside modules, or by
        backward operators whose forward operator is not known.
    backward_linked_share: Of the host time below backward operators, what reached a module.
    steps: Steps of these traces.
    """

    nodes: tuple[ModuleNode, ...]
    device_ns: int | None
    unattributed_device_ns: int | None
    backward_linked_share: float | None
    steps: int | None


class CollectiveRow(Struct, frozen=True):
    """Calls of one collective with one group, data type and size, on one rank. Bandwidth is None where sizes are.

    group_size: Ranks of the process group.
    message_bytes: Of one call, the larger of the rank's input and output; never guessed.
    calls: Kernels, or ranges of backends on the host such as gloo.
    total_bytes: message_bytes times calls.
    total_ns: Durations of the calls, waiting for other ranks included: a plain sum.
    mean_ns: Mean duration of a call.
    min_ns: Shortest call.
    max_ns: Longest call.
    overlapped_ns: Of the calls' time, what compute kernels or fills ran beside on any device of the trace; without
        device work, operators of the host that are no part of a collective. Copies hide nothing.
    exposed_ns: Of the calls' time, when neither computation nor a collective that began earlier ran: no moment counts
        twice. It tells what nothing hides, not what blocks.
    algorithm_bytes_per_s: total_bytes by total_ns: a lower bound of the link's speed, as waiting is in it.
    bus_bytes_per_s: The same times 2(n-1)/n (all_reduce), (n-1)/n (all_gather, reduce_scatter, all_to_all, gather,
        scatter) or 1 (broadcast, reduce, send, recv), n being the group's size: what the links carry.
    """

    span: SpanRef
    name: str  # "all_reduce"
    library: str | None  # "nccl" (of AMD's as well), "gloo" …
    group: str | None
    group_size: int | None
    dtype: str | None  # "bfloat16"
    message_bytes: int | None
    calls: int
    total_bytes: int | None
    total_ns: int
    mean_ns: float
    min_ns: int
    max_ns: int
    overlapped_ns: int
    exposed_ns: int
    algorithm_bytes_per_s: float | None
    bus_bytes_per_s: float | None


class WorkerShare(Struct, frozen=True):
    """One worker's mean step: computation alone, computation and communication at once, communication alone, the rest.

    `transferring_ns` and `synchronizing_ns` are None where nothing was matched.

    steps: Steps the means are of, as in the overview.
    wall_ns: Mean step. The next four sum to it.
    computation_ns: Computation while no collective ran.
    overlap_ns: Computation and a collective at once.
    communication_ns: A collective and no computation.
    other_ns: The rest: idle, copies alone, the host's work.
    transferring_ns: Of each matched collective the last part, as long as the shortest run of any worker. An upper bound
        where ranks have no trace.
    synchronizing_ns: The rest of the matched collectives: waiting for other ranks.
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
    """One kind of collective in one group over all workers: who waits for whom. Means are over calls and workers.

    calls: Collectives found on at least two workers.
    workers: Workers in the largest match.
    total_bytes: Each match once, by its largest message.
    mean_ns: Mean over matched calls and workers; the sum of the next two.
    transferring_ns: Mean of the shortest call of each match.
    synchronizing_ns: Mean of what the calls take beyond that: waiting.
    last_rank: The rank the others waited for longest altogether. Uses no clock of another host.
    """

    name: str
    group: str | None
    calls: int
    workers: int
    total_bytes: int | None
    mean_ns: float
    transferring_ns: float
    synchronizing_ns: float
    last_rank: int | None


class Distributed(Struct, frozen=True):
    """Several workers side by side.

    missing_ranks: Numbers of ranks that are in the world or a group and have no trace.
    matched: Collectives with a partner: by group and sequence number, else the j-th call of the kind, group and size in
        the step.
    unmatched: Calls without one, point to point included; they count in no split of waiting.
    """

    workers: tuple[WorkerShare, ...]
    collectives: tuple[CollectiveOverWorkers, ...]
    missing_ranks: tuple[int, ...]
    matched: int
    unmatched: int
    notes: tuple[str, ...]


class DiffRow(Struct, frozen=True):
    """One thing on both sides; None where one side has none. Delta is other minus base, nothing counting as 0; ratio is
    other over base.

    level: Depth in the tree; 0 in flat tables.
    base_calls: Calls on the first side.
    other_calls: Calls on the other side.
    base_ns: Time on the first side. Overview: the part; operators: host self; kernels: device time; modules: host,
        forward and backward; tree: host with all below, summed over threads.
    other_ns: The same on the other side.
    delta_ns: Other without base; missing counts as nothing.
    ratio: Other by base.
    base_device_ns: Device time on the first side: of operators self, of modules and the tree with all below.
    other_device_ns: The same on the other side.
    device_delta_ns: Other device time without that of the base.
    """

    key: str
    level: int
    base_calls: float | None
    other_calls: float | None
    base_ns: float | None
    other_ns: float | None
    delta_ns: float
    ratio: float | None
    base_device_ns: float | None
    other_device_ns: float | None
    device_delta_ns: float | None


class Diff(Struct, frozen=True):
    """`tables` by name: "overview" (the step and our parts of it), "tensorboard" (its parts as the plugin had them),
    "operators", "kernels", "modules", with rows by falling |delta| of host or device, whichever is larger; and
    "tree" (structure of steps: loader, modules, backward, optimizer, matched in order) in its own order. `absent`: a
    table to why it is not there.
    """

    base: str
    other: str
    per_step: bool
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
