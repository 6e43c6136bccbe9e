"""What profiled steps compute without need: models called once more, float64, forward work done twice, wide gradients.

All times are ms of the mean step that the report speaks of (`PassFacts.step_ms`), wall time lost: on a device, work
beside which nothing else ran, and idle time while the host prepared it.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place
from stepscope.model.views.spans import GpuProperties


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
