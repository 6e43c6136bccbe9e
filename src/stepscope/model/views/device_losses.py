"""What the devices of profiled steps lost time to: idle time by its cause on the host, and work that could be less.

Every nanosecond of idle time is told by one loss alone. Losses of work are times in which nothing else ran: they do not
overlap idle time, but may overlap one another where a kernel is of two kinds. Whole operations own both.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place
from stepscope.model.views.spans import GpuProperties

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
