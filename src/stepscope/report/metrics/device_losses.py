"""Definitions of the figures of what devices lose time to."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

_WHERE = "findings of the rules on devices (sync, launch, transfer, compute)"

SECTIONS = (
    Section(
        "DeviceLosses",
        "Devices: what profiled steps lose",
        _WHERE,
        metrics(
            ranks=("count", "Ranks whose traces hold device work."),
            steps=("count", "Profiled steps with device work; a trace that names none counts as one."),
            step_ns=("ns", "Their mean wall time, cut as in the overview."),
            compute_ns_per_step=(
                "ns",
                "Time in which a kernel ran that is no collective's, or a memset; mean over steps.",
            ),
            kernels_per_step=("count", "Kernels that began in a step, without those of collectives."),
            median_kernel_ns=("ns", "The median duration of these kernels."),
        ),
    ),
    Section(
        "Loss",
        "Devices: one kind of loss",
        _WHERE,
        metrics(
            ns_per_step=(
                "ns",
                "Mean over steps. Of idle time each nanosecond belongs to one kind; of work only time counts in which nothing else ran.",
            ),
            median_ns=("ns", "The median step's."),
            calls_per_step=("count", "Waits, copies, calls of the allocator, gaps or kernels that lost it."),
            parts=("ns", "By operator, call or kernel, per step; of work all of the kernels' time, hidden or not."),
            details=(
                "by name",
                "Per step. `waited_ns`: all time of waits; `copied_ns`, `copied_bytes`: of copies; `exposed_ns`, `idle_ns`: copies that nothing hides, and idle time behind them; `pageable_copies`, `blocking_copies`: copies from pageable memory, and those the host waits for; `kernels_behind_ns`: kernels behind gaps; `optimizer_ns`, `zero_grad_ns` and `…_launches`: gaps and launches inside these ranges; `tensor_core_ns`: kernels on tensor cores; `softmax_calls`, `products_ns`: of attention; `runs_kernels`, `runs_ns`: all kernels of runs of pointwise ones.",
            ),
        ),
    ),
    Section(
        "LossLine",
        "Devices: a line's part of a loss",
        _WHERE,
        metrics(
            ns_per_step=("ns", "Of the loss what was caused from this line."),
            calls_per_step=("count", "Its waits, copies, calls, gaps or kernels."),
        ),
    ),
)
