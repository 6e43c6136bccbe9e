"""Operators and kernels of profiler traces."""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place


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
