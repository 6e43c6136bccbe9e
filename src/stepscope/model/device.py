"""What profiled steps lost on devices: idle time by its cause on the host, work that could be less, work without need.

Every nanosecond of idle time is told by one loss alone. Losses of work are times in which nothing else ran: they do not
overlap idle time, but may overlap one another where a kernel is of two kinds. Whole operations own both.

A replay plays the same steps again without one kind of loss; docs/device_time.md says what depends on what in it.

Times of needless work (`PassFacts`) are ms of the mean step that the report speaks of, wall time lost: on a device,
work beside which nothing else ran, and idle time while the host prepared it.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from stepscope.model.findings import Place
from stepscope.model.trace import GpuProperties

# Idle time.
SYNC = "sync"  # the host waits for the device, and the device then for the host
COPY_IN = "copies_to_device"  # copies from the host that nothing hides, and what the host waits for them
ALLOCATOR = "allocator"  # calls that get or give back device memory
LAUNCH = "launch"  # the queue is empty: the host prepares the next launch
COMPILED = "compiled_launch"  # the same inside functions that a compiler made
HOST = "host"  # long stretches in which the host launches nothing
# Idle time and work of whole operations.
OPTIMIZER = "optimizer"  # updates that are not fused
ZERO_GRAD = "zero_grad"  # gradients set to zero
LINALG = "linear_algebra"  # decompositions that leave the device mostly empty
DATA_PARALLEL = "data_parallel"  # DataParallel's copies of the model, of batches and of results
# Work.
MATRIX = "matrix"  # products and convolutions that tensor cores could do
ATTENTION = "attention"  # what stands between the two products of an attention written out
LAYOUT = "layout"  # copies between memory layouts around convolutions
POINTWISE = "pointwise"  # what fusing runs of pointwise kernels would leave out
TILES = "tiles"  # of products in 16 bits the part that fills up tiles
DEVICE_COPY = "copies_on_devices"  # copies within a device or between devices that nothing hides


class LossLine(Struct, frozen=True):
    """A line of the user's and its part of a loss; `exact`: the line is the call's, not the function's first."""

    place: Place
    ns_per_step: float
    calls_per_step: float
    exact: bool


class Loss(Struct, frozen=True):
    """One kind of loss over all profiled steps.

    `ns_per_step` is the mean, `median_ns` the median step's. `calls_per_step` counts waits, copies, calls of the
    allocator, gaps or kernels. `parts` are ns per step by what took them: calls, operators, kernels.
    `details` are figures of this kind alone, units in the names.
    """

    kind: str
    ns_per_step: float
    median_ns: float
    calls_per_step: float
    lines: tuple[LossLine, ...]
    parts: dict[str, float]
    details: dict[str, float]


class DeviceLosses(Struct, frozen=True):
    """All losses of the traces of one run with device work, over their complete steps.

    `run` is that of `SpanRef`. `has_steps` is False where a trace names no step.

    `compute_ns_per_step` is the time in which a kernel that is no collective's ran. `filling_share` is the part of the
    kernels' time in those with a block for every multiprocessor. `batch_size` is the first dimension that most inputs
    of layers share; None where no shapes were recorded, or they do not agree.
    """

    run: str
    traces: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: int
    has_steps: bool
    step_ns: float
    compute_ns_per_step: float
    kernels_per_step: float
    median_kernel_ns: float | None
    filling_share: float | None
    batch_size: int | None
    has_shapes: bool
    sync_batch_norms_per_step: float
    gpus: tuple[GpuProperties, ...]
    losses: tuple[Loss, ...]

    def of(self, kind: str) -> Loss | None:
        """The loss of that kind, None where there is none."""
        return next((loss for loss in self.losses if loss.kind == kind), None)


# What-ifs beside the kinds of loss of `device_losses`, which keep their names.
LOADER = "loader"  # the training thread's fetches take no time
COLLECTIVES = "collectives"  # kernels of collectives take no time
COMPILE = "compile"  # compiling takes no time


def matrix(rate: float) -> str:
    """The what-if in which products on ordinary cores run `rate` times as fast, and all other kernels twice."""
    return f"{MATRIX}/{rate:g}"


class WhatIf(Struct, frozen=True):
    """The interior steps without one loss. ns.

    `never_late_*`: with a host that prepares launches in no time as well, where the loss is work of the device; None
    where it is not.
    """

    kind: str
    mean_ns: float
    median_ns: float
    never_late_mean_ns: float | None
    never_late_median_ns: float | None


@dataclass(frozen=True)
class Replay:
    """The replay of one run's traces; `run` is that of `SpanRef`.

    `traces` were replayed; `left_out` were not, because the replay does not come out at what was recorded, or the trace
    is too large. Interior steps are all but a trace's first and last, or all where there are fewer than three.
    `recorded_*` are of the steps as cut by the overview, `unchanged_*` of their replay without any change,
    `never_late_*` of one with a host that prepares launches in no time. `residual` is how far recorded and unchanged
    steps lie apart, as a share of the recorded ones. For `unexplained_ns` of a mean step slices had all they need, no
    device did anything, and still they did not start.
    """

    run: str
    traces: tuple[str, ...]
    left_out: tuple[str, ...]
    steps: int
    recorded_mean_ns: float
    recorded_median_ns: float
    unchanged_mean_ns: float
    unchanged_median_ns: float
    never_late_mean_ns: float
    never_late_median_ns: float
    residual: float
    unexplained_ns: float
    what_ifs: tuple[WhatIf, ...]

    def of(self, kind: str) -> WhatIf | None:
        """The what-if of that kind, None where the traces hold nothing of it."""
        return next((one for one in self.what_ifs if one.kind == kind), None)


class PassLine(Struct, frozen=True):
    """A line of the user's and its part; `exact`: the line is the call's, not the function's first."""

    place: Place
    ms_per_step: float
    exact: bool


class ExtraCall(Struct, frozen=True):
    """Calls of a module that the same steps train, whose result no backward pass reads and which is scored.

    `ms_per_step` is the module's own time; `around_ms_per_step` that of the user's code around it which trains nothing,
    `around` the function that holds all of that, if it is one. `at_most_ms_per_step` is the latter with what chance
    may have kept from the samples.
    `nodes_per_step` counts nodes recorded for a backward pass that never comes, 0 where gradients were off.
    """

    module: str
    place: Place
    exact: bool
    calls_per_step: float
    steps_share: float
    ms_per_step: float
    around_ms_per_step: float
    at_most_ms_per_step: float
    around: Place | None
    nodes_per_step: float
    samples: int
    source: str


class ModelCopy(Struct, frozen=True):
    """Copies of a model or of its state inside the steps; `call` is the function that copies.

    `samples` is 0 where a trace told of it. `at_most_ms_per_step`: the most of it that chance may have kept from them.
    """

    call: str
    place: Place
    ms_per_step: float
    at_most_ms_per_step: float
    samples: int
    source: str


class Doubles(Struct, frozen=True):
    """Operators on tensors in float64, forward and backward, and the conversions from and to it.

    `parts` are ms per step by operator. `operators_per_step` counts outermost ones.
    """

    compute_ms_per_step: float
    conversion_ms_per_step: float
    operators_per_step: float
    conversions_per_step: float
    lines: tuple[PassLine, ...]
    parts: dict[str, float]


class Recompute(Struct, frozen=True):
    """Forward operators that run again inside the backward pass, as activation checkpointing does.

    `memory_share` is the peak of the device's memory that the trace recorded, None where it recorded none.
    """

    ms_per_step: float
    operators_per_step: float
    checkpoints_per_step: float
    lines: tuple[PassLine, ...]
    memory_share: float | None
    samples: int
    source: str


class WideGradients(Struct, frozen=True):
    """Backward nodes that each fill a whole tensor with zeros for the gradient of a small part of it.

    `shape` is that tensor's, `part` that of the gradient that came in, `forward` the operator that took the part.
    """

    node: str
    forward: str | None
    place: Place | None
    exact: bool
    calls_per_step: float
    bytes_per_call: int
    shape: tuple[int, ...]
    part: tuple[int, ...]
    dtype: str
    dimension: str | None
    ms_per_step: float
    at_most_ms_per_step: float


class PassFacts(Struct, frozen=True):
    """The training steps of the traces of one run. `run` is that of `SpanRef`.

    `modules`: calls of modules were recorded; `types`: types of operators' inputs were; `shapes`: their shapes;
    `functions`: Python functions were; `numbered`: the sequence numbers of autograd nodes.
    `step_ms` is the mean step that all times are part of; `gpus` are those of the traces.
    """

    run: str
    traces: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: int
    has_steps: bool
    step_ms: float
    on_device: bool
    gpus: tuple[GpuProperties, ...]
    modules: bool
    types: bool
    shapes: bool
    numbered: bool
    functions: bool
    extra_calls: tuple[ExtraCall, ...]
    doubles: Doubles | None
    recompute: Recompute | None
    wide_gradients: tuple[WideGradients, ...]
    copies: tuple[ModelCopy, ...]


class PassesFacts(Struct, frozen=True):
    """`runs`: of traces with training steps. `copies` by sampled stacks, None without any of steady steps."""

    runs: tuple[PassFacts, ...]
    copies: tuple[ModelCopy, ...] | None
