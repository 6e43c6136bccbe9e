"""What profiled steps lost on devices: idle time by its cause on the host, work that could be less, work without need.

Every nanosecond of idle time is told by one loss alone, but for OPERATORS, a part of HOST. Losses of work are times in
which nothing else ran: they do not overlap idle time, but may overlap one another where a kernel is of two kinds. Whole
operations own both.

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
MADE = "made_on_host"  # operators that make on the host what is copied to the device next, and these copies
HOST = "host"  # long stretches in which the host launches nothing
OPERATORS = "host_operators"  # of them those that pass in operators, and only these: no sample of Python tells them
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
    """A line of the user's and its part of a loss; `exact`: the line is the call's, not the function's first.

    ns_per_step: Of the loss what was caused from this line.
    calls_per_step: Its waits, copies, calls, gaps or kernels.
    """

    place: Place
    ns_per_step: float
    calls_per_step: float
    exact: bool


class Loss(Struct, frozen=True):
    """One kind of loss over all profiled steps.

    ns_per_step: Mean over steps. Of idle time each nanosecond belongs to one kind; of work only time counts in which
        nothing else ran.
    median_ns: The median step's.
    calls_per_step: Waits, copies, calls of the allocator, gaps or kernels that lost it.
    parts (ns): By operator, call or kernel, per step; of work all of the kernels' time, hidden or not.
    details (by name): Per step. `waited_ns`: all time of waits; `copied_ns`, `copied_bytes`: of copies; `exposed_ns`,
        `idle_ns`: what nothing hides, and idle time; `copies`, `lost_to_copies_ns`: copies of what was made for
        them, and what these lose; `freed_ns`, `emptied_ns`: calls that free, and those of empty_cache() with all
        behind it; `pageable_copies`, `blocking_copies`: copies from pageable memory, and those the host waits for;
        `pageable_ns`, `unpinned_async_ns`, `pinned_blocking_ns`, `pinned_async_ns`,
        `untold_ns`, `pinning_ns`: what was lost to copies from pageable memory, the same with non_blocking=True, from
        pinned memory with the host waiting, without, from memory of unknown kind, and to pinning; `between_ns`,
        `between_copies`: copies between devices; `kernels_behind_ns`: kernels behind gaps; `compiled_kernels`,
        `generated_kernels`, `collectives_ns`: kernels in compiled functions, those a compiler made, gaps before
        collectives; `launches`, `kernels_ns`: launches and kernels of an operation; `foreach_launches`,
        `fusable_launches`, `operator_calls`: of an optimizer those in groups, those a fused one would take in, and its
        operators; `matrices`, `matrix_rows`: of linear algebra, rows summed over matrices; `devices`: of DataParallel;
        `unaligned_ns`: products by kernels for rows that begin at any element; `tensor_core_ns`, `tf32_ns`: kernels on
        tensor cores, and those named TF32; `convolutions_ns`, `products_ns`: of products, and the products of an
        attention; `conversions_ns`, `first_ns`, `convolutions`: conversions of layouts, those at the first convolution
        of a step, and forward convolutions; `softmax_calls`: of attention; `runs_kernels`, `runs_ns`: all kernels of
        runs of pointwise ones.
    held_at: Of copies on a stream of their own the line that makes the device's other work wait for them.
    """

    kind: str
    ns_per_step: float
    median_ns: float
    calls_per_step: float
    lines: tuple[LossLine, ...]
    parts: dict[str, float]
    details: dict[str, float]
    held_at: Place | None = None


class DeviceLosses(Struct, frozen=True):
    """All losses of the traces of one run with device work, over their complete steps.

    `run` is that of `SpanRef`. `has_steps` is False where a trace names no step.

    ranks: Ranks whose traces hold device work.
    steps: Profiled steps with device work; a trace that names none counts as one.
    step_ns: Their mean wall time, cut as in the overview.
    compute_ns_per_step: Time in which a kernel ran that is no collective's, or a memset; mean over steps.
    kernels_per_step: Kernels that began in a step, without those of collectives.
    median_kernel_ns: The median duration of these kernels, without those of CUDA graphs if there are others.
    filling_share: Of the kernels' time what is in kernels with a block for every multiprocessor, as far as the writer
        tells.
    batch_size: The first dimension that most inputs of layers share (three dimensions and more, and indices of
        embeddings).
    sync_batch_norms_per_step: Forward calls of SyncBatchNorm layers per step.
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
        return next((loss for loss in self.losses if loss.kind == kind), None)


# What-ifs beside the kinds of loss of `device_losses`, which keep their names.
LOADER = "loader"  # the training thread's fetches take no time
COLLECTIVES = "collectives"  # kernels of collectives take no time
COMPILE = "compile"  # compiling takes no time


def matrix(rate: float) -> str:
    """The what-if in which products on ordinary cores run `rate` times as fast, and all other kernels twice."""
    return f"{MATRIX}/{rate:g}"


class WhatIf(Struct, frozen=True):
    """The interior steps without one loss; `never_late_*` are None where the loss is no work of the device.

    mean_ns: The mean interior step of a replay without the loss.
    median_ns: The median step's.
    never_late_mean_ns: Where the loss is work of the device: the mean step without it, with a host that prepares
        launches in no time.
    never_late_median_ns: The median step's.
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
    is too large.

    steps: Interior steps: all but a trace's first and last, or all where there are fewer than three.
    recorded_mean_ns: Their mean wall time, cut as in the overview.
    recorded_median_ns: The median step's.
    unchanged_mean_ns: The mean step of a replay without any change.
    unchanged_median_ns: The median step's.
    never_late_mean_ns: The mean step of a replay with a host that prepares launches in no time.
    never_late_median_ns: The median step's.
    residual (share): How far recorded and unchanged steps lie apart, summed, of the recorded ones.
    unexplained_ns: In a mean step: no device does anything although a slice was launched and its stream free, for more
        than 20 us.
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
        return next((one for one in self.what_ifs if one.kind == kind), None)


class PassLine(Struct, frozen=True):
    """A line of the user's and its part; `exact`: the line is the call's, not the function's first.

    ms_per_step: The line's part of the loss, shared out by recorded time.
    """

    place: Place
    ms_per_step: float
    exact: bool


class ExtraCall(Struct, frozen=True):
    """Calls of a module that the same steps train, whose result no backward pass reads and which is scored.

    `around` is the function that holds all of the user's code around them that trains nothing, if it is one.

    calls_per_step: Calls of the module, mean over the profiled steps.
    steps_share: Profiled steps with such a call.
    ms_per_step: Time of these calls; by samples of their line where there are 30.
    around_ms_per_step: With the user's code around them in which nothing is trained.
    at_most_ms_per_step: The same, at the upper end of what its samples allow for (95 %).
    nodes_per_step: Autograd nodes they recorded; 0 where gradients were off.
    samples: Samples of the line.
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

    `samples` is 0 where a trace told of it.

    ms_per_step: Samples below the function that copies, as a part of the mean steady step.
    at_most_ms_per_step: The same, at the upper end of what these samples allow for (95 %).
    samples: These samples.
    """

    call: str
    place: Place
    ms_per_step: float
    at_most_ms_per_step: float
    samples: int
    source: str


class Doubles(Struct, frozen=True):
    """Operators on tensors in float64, forward and backward, and the conversions from and to it.

    compute_ms_per_step: Operators of torch with an input of at least 1,024 elements in float64.
    conversion_ms_per_step: Copies between float64 and other types, with what asked for them.
    operators_per_step: Such operators that lie in no other.
    conversions_per_step: Such conversions.
    parts (ms): By operator, in proportion to recorded times.
    """

    compute_ms_per_step: float
    conversion_ms_per_step: float
    operators_per_step: float
    conversions_per_step: float
    lines: tuple[PassLine, ...]
    parts: dict[str, float]


class Recompute(Struct, frozen=True):
    """Forward operators that run again inside the backward pass, as activation checkpointing does.

    ms_per_step: From the first to the last such operator of a node, without nodes between; by samples where there are
        50.
    operators_per_step: Such operators that lie in no other.
    checkpoints_per_step: Nodes for which something is computed again.
    memory_share: The allocator's peak by the GPU's memory, where the trace recorded both.
    samples: Samples below torch.utils.checkpoint in the backward pass.
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

    `forward` is the operator that took the part.

    calls_per_step: Nodes of this kind and shape.
    bytes_per_call: The tensor that each fills: elements by size of the type.
    shape: Its dimensions.
    part: Dimensions of the gradient that came in.
    ms_per_step: Time of the nodes and of adding up their results, less one of them.
    at_most_ms_per_step: The most it can be where the profiled backward pass is far from the steady one.
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


GROWN = "grown"


class WastedWork(Struct, frozen=True):
    """Work that another form of the same computation would not do.

    kind: broadcast, one_hot, dense_gradient, decomposition, unused_gradient, grown or history.
    operator: What makes the large tensor, or decomposes.
    shape: The large tensor; empty of decompositions.
    calls_per_step: Calls of the operators that made it.
    ms_per_step: Time of all operators on such a tensor, in the backward pass and the update too.
    """

    kind: str
    operator: str
    shape: tuple[int, ...]
    calls_per_step: float
    ms_per_step: float
    lines: tuple[PassLine, ...]


class PassFacts(Struct, frozen=True):
    """The training steps of the traces of one run. `run` is that of `SpanRef`.

    `modules`: calls of modules were recorded; `types`: types of operators' inputs were; `shapes`: their shapes;
    `functions`: Python functions were; `numbered`: the sequence numbers of autograd nodes.

    ranks: Ranks whose traces hold training steps.
    steps: Profiled steps in which a backward pass runs; a trace that names none counts as one.
    step_ms: The mean step that all times are part of: the steady one where a journal has it, else the profiled one.
    made_by_updates (share): Of the large tensors that the host makes in a step, what optimizers make, by size.
    made_by_growing (share): Of these, the tensors that `torch.cat` makes longer again and again.
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
    wasted: tuple[WastedWork, ...]
    made_by_updates: float | None = None
    made_by_growing: float | None = None


class PassesFacts(Struct, frozen=True):
    """`runs`: of traces with training steps. `copies` by sampled stacks, None without any of steady steps."""

    runs: tuple[PassFacts, ...]
    copies: tuple[ModelCopy, ...] | None
