"""Definitions of the figures of operators and kernels."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

SECTIONS = (
    Section(
        "OperatorRow",
        "Operators",
        "views.operators",
        metrics(
            calls=(
                "count",
                "Calls that began in the span or step. A call whose only inner operator has the same name is one with it.",
            ),
            calls_per_step=("count", "Calls that began in a profiled step, by the number of these steps."),
            host_total_ns=(
                "ns",
                "Durations of the calls, summed over all threads; a call within one of the same row adds nothing. Can exceed the time that passed.",
            ),
            host_self_ns=("ns", "The same without operators called by it and without its own runtime calls."),
            host_self_ns_per_step=(
                "ns",
                "host_self_ns of the calls that began in a profiled step, by the number of these steps; as recorded, not scaled to the steady step.",
            ),
            host_total_ns_per_step=("ns", "The same of host_total_ns."),
            runtime_ns=("ns", "Calls of the device's runtime or driver whose innermost operator this is."),
            device_self_sum_ns=(
                "ns",
                "Durations of linked kernels, copies and fills that the operator launched itself. Without CUDA graphs' replays and work launched before the recording.",
            ),
            device_total_sum_ns=("ns", "The same with those of all operators below it, each once."),
            device_self_ns=(
                "ns",
                "The same intervals as device_self_sum_ns as a union over streams: what runs side by side counts once. Rows do not add up.",
            ),
            device_total_ns=("ns", "The same of device_total_sum_ns."),
            self_memory_bytes=(
                "bytes",
                "Allocated without released on the host while it was the innermost operator of its thread. Below 0: it released more. Not a peak.",
            ),
            total_memory_bytes=("bytes", "The same with all operators below it."),
            self_device_memory_bytes=("bytes", "As self_memory_bytes, on all other devices."),
            total_device_memory_bytes=("bytes", "As total_memory_bytes, on all other devices."),
            tensor_core_self_pct=(
                "percent",
                "Part of device_self_sum_ns in kernels whose name says tensor or matrix cores. Not how busy these were.",
            ),
            tensor_core_total_pct=("percent", "The same of device_total_sum_ns."),
        ),
        tables=("operators",),
        about=(
            "`tensor_core_eligible` says that the operator, or one it called, can end in a matrix product; not that its types and "
            "sizes suit. `place` is the line of yours that most of its device self time comes from (of the host's where there is none), "
            "`place.share` its part of that time; `place_exact` that it is the calling line and not where the function begins."
        ),
    ),
    Section(
        "CallStack",
        "Call stacks behind an operator",
        "analyze --table stacks",
        metrics(
            calls=("count", "Calls behind the stack."),
            host_self_ns=("ns", "Their host self time."),
            device_self_ns=("ns", "Their device self time, a plain sum."),
        ),
        tables=("stacks",),
    ),
    Section(
        "KernelRow",
        "Kernels",
        "views.kernels",
        metrics(
            grid=("count", "Blocks of the grid; as the next three only when grouped by launch."),
            block=("count", "Threads of a block."),
            registers=("count", "Registers of a thread."),
            shared_memory_bytes=("bytes", "Shared memory of a block."),
            calls=("count", "Kernels of the name, or of the launch configuration; collectives too, linked or not."),
            total_ns=("ns", "Their durations: a plain sum over streams."),
            mean_ns=("ns", "Mean duration."),
            min_ns=("ns", "Shortest."),
            max_ns=("ns", "Longest."),
            share=("share", "Of the summed kernel time of the table."),
            blocks_per_sm=(
                "count",
                "Blocks by multiprocessors, weighted by duration. Below 1, part of the GPU has no block.",
            ),
            occupancy_pct=("percent", "The writer's estimate, weighted by duration; not measured."),
            launch_delay_ns=(
                "ns",
                "Mean from the start of the launch to the start of the kernel. Waiting behind earlier work is in it: long delays are good where the GPU is busy. Without graphs' replays.",
            ),
            device=("count", "Number of the device; missing where the row has several."),
        ),
        tables=("kernels",),
    ),
)
