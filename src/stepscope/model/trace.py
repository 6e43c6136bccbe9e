"""What is measured in profiler traces: device time by kind and by line, and how much of it could be linked.

Which trace a figure is of is said by run, worker and span, in the words of the TensorBoard plugin.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place


class TraceFacts(Struct, frozen=True):
    """One trace file: what reading it cost. Counts are of events; see `TraceQuality` of the reader for the first four.

    `device_ns` is the summed duration of all device slices. `linked_ns` gives, by method ("correlation", "flow",
    "external_id", "containment"), how much of it reached an operator; `before_recording_ns` has no launch in the trace,
    `graph_ns` was launched by a CUDA graph, and `unlinked_ns` is the rest. The five sum to `device_ns`.
    """

    trace: str
    rank: int
    owner: str  # "stepscope" | "user"
    events: int
    salvaged: int
    lost: int
    unsupported: int
    clipped: int  # overlaps cut so that slices nest
    repaired: int  # impossible durations
    problems: tuple[str, ...]
    device_events: int
    device_ns: int
    linked_ns: dict[str, int]
    before_recording_ns: int
    graph_ns: int
    unlinked_ns: int
    # of the device time that was not launched before the recording, the part linked to an operator; None without any
    link_rate: float | None


class ReadingFacts(Struct, frozen=True):
    """All traces of a run together: what reading them cost, and how much device time could be linked to operators.

    `link_rate` and `linked_shares` (by method) are parts of the device time that was launched in the recordings,
    `before_recording_share` is the part of all device time that was not; None without device time.
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

    `compute` are kernels and memsets, `communication` kernels of collectives, `memcpy` copies; the exposed figures are
    what the ones named before do not cover. `total` is first start to last end; idle is total - busy. `scope` is
    "launched" (only device slices whose launch is in the trace) or "all". `kind_ns` are plain sums of durations by
    category of the trace: streams that run beside each other count twice there.
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
    busy_share: float | None  # of total
    events: int
    kind_ns: dict[str, int]


class DeviceLine(Struct, frozen=True):
    """Device time caused by a line of the user's code, exclusively: each device slice counts for one line only.

    `via` tells how: "direct" (the launch ran below the line), "sequence" or "flow" (a backward operator, by its
    forward operator). `top` are the kernels that take most of it, (name, ns).
    """

    place: Place
    ns: int
    share: float  # of all device time
    ms_per_step: float | None
    events: int
    via: dict[str, int]  # way -> ns
    top: tuple[tuple[str, int], ...]
    exact_line: bool  # False: place.line is where the function begins
    guess: bool  # True: no code of the user's on the stack, this is the innermost library function outside torch


class DeviceLines(Struct, frozen=True):
    """Device time by line of the user's; the ns of `lines` and of `unattributed` sum to `total_ns`.

    `basis` says whose time: "device" (slices of the device) or "cpu_op" (self time of operators, where a trace holds
    no device slice). `unattributed` is ns by reason, in words; `unattributed_shares` are the same as parts of total.
    """

    basis: str
    total_ns: int
    lines: tuple[DeviceLine, ...]
    unattributed: dict[str, int]
    unattributed_shares: dict[str, float]
    attributed_share: float | None  # of total, guesses included
    guessed_share: float | None
    steps: int | None  # profiled steps of all processes the times are spread over


class SpanRef(Struct, frozen=True):
    """One trace file. `worker` is the file's name before its first dot, with its folder in front where two folders hold
    a worker of that name; of a run that stepscope recorded, the folder of the rank. `span` counts the worker's traces
    from 1 in order of the time in their names. `run` is the file's folder relative to what was given, "" where all
    traces lie in one. `rank` is what the trace says of itself: workers of different runs may have the same.
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


class GpuProperties(Struct, frozen=True):
    """What a trace says of a device; None where it does not."""

    device: int
    name: str | None
    memory_bytes: int | None
    capability: str | None  # "7.0"
    multiprocessors: int | None
    max_threads_per_multiprocessor: int | None
    warp_size: int | None
