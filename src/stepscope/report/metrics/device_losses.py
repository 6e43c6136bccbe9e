"""Definitions of the figures of what devices lose time to."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

_WHERE = "findings of the rules on devices (sync, launch, transfer, compute, communication)"

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
            median_kernel_ns=(
                "ns",
                "The median duration of these kernels, without those of CUDA graphs if there are others.",
            ),
            filling_share=(
                "share",
                "Of the kernels' time what is in kernels with a block for every multiprocessor, as far as the writer tells.",
            ),
            batch_size=(
                "count",
                "The first dimension that most inputs of layers share (three dimensions and more, and indices of embeddings).",
            ),
            sync_batch_norms_per_step=("count", "Forward calls of SyncBatchNorm layers per step."),
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
                "Per step. `waited_ns`: all time of waits; `copied_ns`, `copied_bytes`: of copies; `exposed_ns`, `idle_ns`: what nothing hides, and idle time; `pageable_copies`, `blocking_copies`: copies from pageable memory, and those the host waits for; `pageable_ns`, `unpinned_async_ns`, `pinned_blocking_ns`, `pinned_async_ns`, `untold_ns`, `pinning_ns`: what was lost to copies from pageable memory, the same with non_blocking=True, from pinned memory with the host waiting, without, from memory of unknown kind, and to pinning; `between_ns`, `between_copies`: copies between devices; `kernels_behind_ns`: kernels behind gaps; `compiled_kernels`, `generated_kernels`, `collectives_ns`: kernels in compiled functions, those a compiler made, gaps before collectives; `launches`, `kernels_ns`: launches and kernels of an operation; `foreach_launches`, `fusable_launches`, `operator_calls`: of an optimizer those in groups, those a fused one would take in, and its operators; `matrices`, `matrix_rows`: of linear algebra, rows summed over matrices; `devices`: of DataParallel; `unaligned_ns`: products by kernels for rows that begin at any element; `tensor_core_ns`, `tf32_ns`: kernels on tensor cores, and those named TF32; `convolutions_ns`, `products_ns`: of products, and the products of an attention; `conversions_ns`, `first_ns`, `convolutions`: conversions of layouts, those at the first convolution of a step, and forward convolutions; `softmax_calls`: of attention; `runs_kernels`, `runs_ns`: all kernels of runs of pointwise ones.",
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
