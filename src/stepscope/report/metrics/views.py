"""Definitions of the figures of profiler traces: steps and their parts, GPUs, counters, operators, kernels."""

from __future__ import annotations

from stepscope.report.metrics.entry import Metric, Section, metrics

PLUGIN = {
    "kernel": "kernels, those of collectives left out",
    "memcpy": "copies",
    "memset": "fills",
    "communication": "kernels of collectives, and host ranges of their backends (nccl:, gloo: …)",
    "runtime": "calls of the device's runtime or driver",
    "dataloader": "the loader's __next__",
    "cpu_exec": "operators of any thread",
    "other": "nothing of these",
}
PARTS = {
    "compute": "kernels, those of collectives left out, and fills, on any device",
    "exposed_communication": "kernels of collectives that no compute covers",
    "exposed_copies": "copies that neither compute nor communication covers",
    "idle_data": "no device works and the training thread is in the loader's __next__",
    "idle_sync": "no device works and it waits for one: *Synchronize, a blocking copy, .item()",
    "idle_compile": "no device works and it compiles (dynamo, inductor, Triton, TorchScript, extensions) or loads device code",
    "idle_allocator": "no device works and it is in cudaMalloc, cudaFree or their kin; PyTorch's own cache is not meant",
    "idle_launch": "no device works and it is in another call of the runtime or driver, launches above all",
    "idle_io": "no device works and it reads or writes files",
    "idle_python": "no device works and it runs Python only; needs with_stack, else this is in idle_unknown",
    "idle_operators": "no device works and it is inside an operator, outside all of the above",
    "idle_unknown": "no device works and nothing of the training thread was recorded",
    "host_data": "the loader's __next__; of a trace without device work, as all that follow",
    "host_compile": "compiling",
    "host_convolution": "convolutions, forward and backward, with all below them",
    "host_matmul": "matrix products, likewise",
    "host_attention": "attention, likewise",
    "host_normalization": "normalization, likewise",
    "host_optimizer": "operators in the optimizer's step, and fused or foreach ones",
    "host_copies": "copies and conversions",
    "host_operators": "other operators",
    "host_communication": "collectives of any thread while the training thread runs no operator",
    "host_io": "files",
    "host_python": "Python only; needs with_stack",
    "host_unknown": "nothing recorded",
}
STEP_PARTS = {
    **{f"{name}_ns": Metric("ns", f"Time in the step: {text}.") for name, text in PARTS.items()},
    **{
        f"tensorboard_{name}_ns": Metric("ns", f"Time in the step by the plugin's order, first match: {text}.")
        for name, text in PLUGIN.items()
    },
}

SECTIONS = (
    Section(
        "SpanRef",
        "Worker and span",
        "views.*.span",
        metrics(
            span=("count", "Number of the worker's trace, from 1 on, by the time in the files' names."),
            rank=("count", "What the trace says of itself, else the file's name, else the next free number."),
        ),
    ),
    Section(
        "Overview",
        "Overview",
        "views.overview",
        metrics(
            dropped_steps=(
                "count",
                "Steps at the end that launched no recorded device work, and the last one if it has fewer than 80 % of "
                "the device slices of the one before: the recording ended before its work did.",
            ),
        ),
        about=(
            "`wall`, `plugin` and `parts` are summaries over the steps. `parts` is our partition, `plugin` that of the "
            "TensorBoard plugin; each is exclusive, in the order of the two lists below, and sums to the step. `basis` is "
            "`device`, or `host` for a trace without device work, whose time is no idle time of a device. What the host "
            "did while devices were idle is no proof that the gap goes with it. Idle means that no device of the trace works."
        ),
    ),
    Section(
        "Summary",
        "Overview: a part over the steps",
        "views.overview[].wall, .parts, .plugin",
        metrics(
            mean_ns=("ns", "Mean over the steps."),
            median_ns=("ns", "Median over the steps. Medians of parts do not sum to that of the step."),
            p95_ns=("ns", "95th percentile over the steps, interpolated."),
            share=("share", "The part's time in all steps by the wall time of all steps."),
        ),
        tables=("overview",),
    ),
    Section(
        "StepBreakdown",
        "Overview: each step",
        "views.overview[].steps",
        metrics(
            start_ns=(
                "ns",
                "The later of the start of ProfilerStep#N on the host and the end of the step before. Without marked "
                "steps, the first slice of the host, else of a device.",
            ),
            wall_ns=(
                "ns",
                "Until the later of the mark's end on the host and the end of the last device work launched in it. "
                "Time between two steps belongs to none.",
            ),
            plugin_ns=("ns", "Parts of the plugin; they sum to wall_ns."),
            parts_ns=("ns", "Our parts; they sum to wall_ns."),
        ),
        tables=("steps",),
    ),
    Section(
        "StepParts",
        "Overview: the parts of a step",
        "views.overview[].steps[].parts_ns, .plugin_ns",
        STEP_PARTS,
        tables=("steps",),
        about="Of each moment the first part that fits, in this order. In `report.json` the parts are keys without `_ns`.",
    ),
    Section(
        "GpuProperties",
        "GPUs: what they are",
        "views.gpus[].gpu",
        metrics(
            device=("count", "Number of the device in the trace."),
            memory_bytes=("bytes", "Memory of the device."),
            multiprocessors=("count", "Streaming multiprocessors, or compute units."),
            max_threads_per_multiprocessor=("count", "Threads that one of them can hold."),
            warp_size=("count", "Threads that run in step: 32 on NVIDIA, 64 on many AMD devices."),
        ),
        tables=("gpus",),
    ),
    Section(
        "GpuSummary",
        "GPUs: how well they are used",
        "views.gpus",
        metrics(
            window_ns=("ns", "From the first step's start to the last one's end; all figures are of kernels in it."),
            utilization_pct=(
                "percent",
                "Part of the window in which at least one kernel runs, on any stream. 100 % does not mean that the GPU is "
                "full: one block on one multiprocessor is enough, and a collective that only waits for others counts. "
                "Copies and fills do not.",
            ),
            sm_efficiency_pct=(
                "percent",
                "Mean over the window of min(1, blocks per multiprocessor of the kernels that run). An estimate from the "
                "sizes of launches, not measured: it cannot see that a block waits for memory.",
            ),
            achieved_occupancy_pct=(
                "percent",
                "Mean of the writer's estimate for each kernel (warps held by warps that fit), weighted by time. High "
                "occupancy is no need for high speed.",
            ),
            tensor_core_pct=(
                "percent",
                "Part of summed kernel time in kernels whose names tell tensor cores (Volta to Blackwell) or AMD's matrix "
                "cores. It does not say how busy these are.",
            ),
            tensor_core_plugin_pct=("percent", "The same with the plugin's names, which end with Ampere."),
            tensor_core_eligible_pct=(
                "percent",
                "Of the time of kernels linked to an operator, what lies below one that could use tensor cores.",
            ),
            kernels=("count", "Kernels with time in the window."),
        ),
        tables=("gpus",),
    ),
    Section(
        "Counter",
        "Counters over time",
        "views.counters",
        metrics(
            device=("count", "Number of the device."),
            start_ns=("ns", "Beginning of the first bucket."),
            end_ns=("ns", "End of the last bucket, which may be shorter."),
            bucket_ns=("ns", "Length of a bucket: 1, 2 or 5 times a power of ten, so that there are at most 250."),
            values=("in unit", "Means over the buckets, as below."),
        ),
        tables=("counters",),
    ),
    Section(
        "CounterPoint",
        "Counters over time: a bucket",
        "analyze --table counters",
        metrics(
            value=(
                "in unit",
                "Mean over the bucket. utilization_pct and sm_efficiency_pct as of GPUs; queue_length: launches that "
                "have begun and whose first device slice has not; copy_bytes_per_s: bytes of copies, spread evenly "
                "over their time, all directions together.",
            ),
            time_ns=("ns", "Beginning of the bucket, since the epoch."),
            since_start_ns=("ns", "The same since the first bucket."),
        ),
        tables=("counters",),
    ),
)
