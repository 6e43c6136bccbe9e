"""What is measured in profiler traces: device time by kind and by line, and how much of it could be linked.

Which trace a figure is of is said by run, worker and span, in the words of the TensorBoard plugin.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place


class TraceFacts(Struct, frozen=True):
    """One trace file: what reading it cost. Counts are of events; see `TraceQuality` of the reader for the first four.

    Ways of `linked_ns` are "correlation", "flow", "external_id" and "containment".

    rank: Rank of the trace: from its metadata, else its name, else the next free number.
    events: Entries seen in the file.
    salvaged: Of them not valid JSON, and mended.
    lost: Of them not usable.
    unsupported: Of kinds that hold no slice, arrow, allocation or name.
    clipped: Slices cut in the tree so that all nest.
    repaired: Slices whose duration was impossible: negative, over seven days, or over later work of its stream.
    device_events: Slices of devices: kernels, copies, fills.
    device_ns: Their durations, summed: streams side by side count twice.
    linked_ns: Of it what reached an operator, by the way it was found.
    before_recording_ns: Of it what was launched before the recording began.
    graph_ns: Of it what a CUDA graph replayed, which keeps no link to operators.
    unlinked_ns: The rest; the four sum to device_ns.
    link_rate (share): Linked by device time launched in the recording.
    """

    trace: str
    rank: int
    owner: str  # "stepscope" | "user"
    events: int
    salvaged: int
    lost: int
    unsupported: int
    clipped: int
    repaired: int
    problems: tuple[str, ...]
    device_events: int
    device_ns: int
    linked_ns: dict[str, int]
    before_recording_ns: int
    graph_ns: int
    unlinked_ns: int
    link_rate: float | None


class ReadingFacts(Struct, frozen=True):
    """All traces of a run together: what reading them cost, and how much device time could be linked to operators.

    traces: Trace files read.
    events: Entries seen in them.
    salvaged: Entries mended.
    lost: Entries lost.
    clipped: Slices cut so that all nest.
    repaired: Impossible durations repaired.
    device_events: Slices of devices.
    link_rate (share): Device time linked to operators, by device time launched in the recordings.
    linked_shares: The same by the way the link was found.
    graph_share: Replayed by CUDA graphs, of the device time launched in the recordings.
    unlinked_share: Linked to nothing, of the same.
    before_recording_share: Launched before the recordings began, of all device time.
    """

    traces: int
    events: int
    salvaged: int
    lost: int
    clipped: int
    repaired: int
    device_events: int
    link_rate: float | None
    linked_shares: dict[str, float]
    graph_share: float | None
    unlinked_share: float | None
    before_recording_share: float | None


class DeviceTime(Struct, frozen=True):
    """Time of one trace's devices in ns, by interval unions over all streams.

    `scope` is "launched" (only device slices whose launch is in the trace) or "all".

    rank: Rank of the trace.
    total_ns: First start to last end of the device slices of the scope.
    busy_ns: Time covered by any of them: a union over all streams.
    compute_ns: Time covered by kernels and fills, kernels of collectives left out.
    communication_ns: Time covered by kernels of collectives (nccl, rccl, cross_device_reduce in the name).
    memcpy_ns: Time covered by copies.
    exposed_communication_ns: Communication that no compute covers.
    exposed_memcpy_ns: Copies that neither compute nor communication covers.
    idle_ns: total_ns without busy_ns.
    busy_share: busy_ns by total_ns. It says that something ran, not that the device was full.
    events: Device slices of the scope.
    kind_ns: Plain sums of durations by category: streams side by side count twice.
    """

    rank: int
    trace: str
    scope: str
    total_ns: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    memcpy_ns: int
    exposed_communication_ns: int
    exposed_memcpy_ns: int
    idle_ns: int
    busy_share: float | None
    events: int
    kind_ns: dict[str, int]


class DeviceLine(Struct, frozen=True):
    """Device time caused by a line of the user's code, exclusively: each device slice counts for one line only.

    ns: Durations of the device slices whose launch this line caused; each counts for one line only.
    share: The same by all device time.
    ms_per_step: The same by profiled steps.
    events: Device slices.
    via (ns): The same by how the line was found: direct, or through the forward operator by sequence or flow.
    top (ns): The kernels that take most of it.
    """

    place: Place
    ns: int
    share: float
    ms_per_step: float | None
    events: int
    via: dict[str, int]
    top: tuple[tuple[str, int], ...]
    exact_line: bool  # False: place.line is where the function begins
    guess: bool  # True: no code of the user's on the stack, this is the innermost library function outside torch


class DeviceLines(Struct, frozen=True):
    """Device time by line of the user's; the ns of `lines` and of `unattributed` sum to `total_ns`.

    `basis` says whose time: "device" (slices of the device) or "cpu_op" (self time of operators, where a trace holds no
    device slice).

    total_ns: Time that is attributed: of device slices, or of operators where there is no device.
    unattributed (ns): What no line explains, by reason. Lines and this sum to total_ns.
    unattributed_shares: The same by total_ns.
    attributed_share: What lines explain, guesses included, by total_ns.
    guessed_share: Of it what only a line of a library explains.
    steps: Profiled steps of all processes the times are spread over.
    """

    basis: str
    total_ns: int
    lines: tuple[DeviceLine, ...]
    unattributed: dict[str, int]
    unattributed_shares: dict[str, float]
    attributed_share: float | None
    guessed_share: float | None
    steps: int | None


class SpanRef(Struct, frozen=True):
    """One trace file. `worker` is the file's name before its first dot, with its folder in front where two folders hold
    a worker of that name; of a run that stepscope recorded, the folder of the rank. `run` is the file's folder
    relative to what was given, "" where all traces lie in one. Workers of different runs may have the same `rank`.

    span: Number of the worker's trace, from 1 on, by the time in the files' names.
    rank: What the trace says of itself, else the file's name, else the next free number.
    """

    worker: str
    span: int
    rank: int
    process: str
    trace: str
    run: str = ""

    @property
    def label(self) -> str:
        return f"{self.worker}/span{self.span}"


# In names of devices whose capability has the form of NVIDIA's and means something else.
OTHER_MAKERS = ("AMD", "Radeon", "Instinct")


class GpuProperties(Struct, frozen=True):
    """What a trace says of a device; None where it does not.

    device: Number of the device in the trace.
    memory_bytes: Memory of the device.
    multiprocessors: Streaming multiprocessors, or compute units.
    max_threads_per_multiprocessor: Threads that one of them can hold.
    warp_size: Threads that run in step: 32 on NVIDIA, 64 on many AMD devices.
    """

    device: int
    name: str | None
    memory_bytes: int | None
    capability: str | None  # "7.0"
    multiprocessors: int | None
    max_threads_per_multiprocessor: int | None
    warp_size: int | None
