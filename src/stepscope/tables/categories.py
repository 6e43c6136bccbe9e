"""What a slice is, by its category and name; writers renamed categories in 2021 and vendors add their own."""

from __future__ import annotations

from collections.abc import Iterable

FUNCTION = "python_function"
ANNOTATION = "user_annotation"
OPERATORS = frozenset({"cpu_op", "operator", "Operator"})
KERNELS = frozenset({"kernel", "Kernel", "mtia_ccp_events"})
COPIES = frozenset({"gpu_memcpy", "Memcpy"})
FILLS = frozenset({"gpu_memset", "Memset"})
DEVICE = KERNELS | COPIES | FILLS

# What torch.profiler writes beside these, and calls of a runtime: of the host, of the profiler, of streams.
_OTHERS = frozenset(
    {FUNCTION, ANNOTATION, "gpu_user_annotation", "Trace", "overhead", "cuda_sync", "cuda_event", "collective_comm"}
    | {"cpu_instant_event", "cuda_profiler_range", "external_correlation", "hpu_op", "mtia_insight", "mtia_workloadd"}
)

# What the names of slices that mark a step begin with: a profiler's schedule, and optimizers.
STEP = "ProfilerStep#"
OPTIMIZER = "Optimizer.step#"

_RUNTIME_ENDS = ("_runtime", "_driver")
_GRAPH_LAUNCH = "graphlaunch"

_DEVICE_MARKS = {"mtia_ccp_events": "mtia", "xpu_runtime": "xpu", "hpu_op": "hpu", "privateuse1_runtime": "privateuse1"}

# Of slices with the very same times, who encloses whom; anything else comes in between.
_PRECEDENCE = {
    ANNOTATION: 0,
    "gpu_user_annotation": 0,
    FUNCTION: 1,
    **dict.fromkeys(OPERATORS, 2),
    **dict.fromkeys(DEVICE, 6),
}
_BETWEEN = 3
_RUNTIME_PRECEDENCE = 4


def is_runtime(category: str) -> bool:
    """Whether slices of the category are calls of a device's runtime or driver, which launch device slices."""
    return category == "Runtime" or category.endswith(_RUNTIME_ENDS)


def is_known(category: str) -> bool:
    return category in OPERATORS | DEVICE | _OTHERS or is_runtime(category)


def is_graph_launch(name: str) -> bool:
    """Whether a runtime call launches a whole graph: cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch."""
    return _GRAPH_LAUNCH in name.lower()


def precedence(category: str) -> int:
    """The lower, the further out, of slices that begin and end together."""
    return _PRECEDENCE.get(category, _RUNTIME_PRECEDENCE if is_runtime(category) else _BETWEEN)


def device_kind(names: Iterable[str]) -> str | None:
    """The kind of device whose work has slices of these categories; "cpu" where only the host's has, else None."""
    seen = set(names)
    marked = next((kind for mark, kind in _DEVICE_MARKS.items() if mark in seen), None)
    return marked or ("cuda" if seen & DEVICE else "cpu" if seen & OPERATORS else None)
