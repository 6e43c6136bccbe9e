"""Definitions of the figures of memory."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

_SPAN = ("count", "Number of the worker's trace, from 1 on; of recordings of memory 1.")

SECTIONS = (
    Section(
        "MemoryView",
        "Memory",
        "views.memory",
        metrics(
            pairs=(
                "count",
                "Allocations whose release was recorded, matched by address. An address allocated twice was released unseen.",
            ),
            unpaired_allocations=("count", "Allocations without one."),
            unpaired_releases=("count", "Releases of what was allocated before the recording."),
        ),
    ),
    Section(
        "MemoryCurve",
        "Memory over time",
        "views.memory.curves",
        metrics(
            span=_SPAN,
            times_ns=(
                "ns",
                "Moments of the curve: at most 1,000, extremes kept. `clock` says since when: the epoch, the start of the file, or only the order.",
            ),
            allocated_bytes=(
                "bytes",
                "In use after the event: in traces the allocator's total, in snapshots the bytes asked for, in timelines the sum of categories. With `relative` the change since the recording began. On `cpu` only what was allocated while memory was recorded, not the process's memory.",
            ),
            reserved_bytes=(
                "bytes",
                "Held by the caching allocator. Missing on the host, which reserves nothing. Not what other processes hold.",
            ),
            peak_allocated_bytes=("bytes", "The highest level within the recording; not the process's peak."),
            peak_time_ns=("ns", "Its first moment."),
            peak_reserved_bytes=("bytes", "The highest reserved level."),
            peak_recorded_bytes=("bytes", "Of the peak, what was allocated in the recording and not yet released."),
            peak_before_bytes=(
                "bytes",
                "The rest of the peak, allocated before the recording: its line is not known. Below 0 only where releases were lost.",
            ),
            start_allocated_bytes=("bytes", "The level before the first event."),
            end_allocated_bytes=("bytes", "The level after the last event."),
            capacity_bytes=("bytes", "Memory of the device."),
            by_category=("bytes", "PyTorch's categories in a timeline file; they sum to allocated_bytes."),
            peak_by_category=("bytes", "The same at the peak."),
            events=("count", "Events the curve was made from."),
        ),
        tables=("memory", "memory-curve"),
    ),
    Section(
        "MemoryPoint",
        "Memory over time: a moment",
        "analyze --table memory-curve",
        metrics(
            time_ns=("ns", "The moment."),
            since_start_ns=("ns", "The same since the first of the curve."),
            allocated_bytes=("bytes", "In use then."),
            reserved_bytes=("bytes", "Held by the allocator then."),
        ),
        tables=("memory-curve",),
    ),
    Section(
        "MemoryOperator",
        "Memory by operator",
        "views.memory.operators",
        metrics(
            span=_SPAN,
            calls=("count", "Calls of the name in the trace."),
            allocations=("count", "Allocations while it was the innermost operator of the thread."),
            total_allocations=("count", "The same with operators it called."),
            self_allocated_bytes=("bytes", "Sum of these allocations; not what it kept."),
            total_allocated_bytes=(
                "bytes",
                "The same with operators it called; a call in a call of its own name counts once.",
            ),
            self_increase_bytes=(
                "bytes",
                "Allocated without released while it was innermost. A release counts for the operator that runs then, not for the one that allocated.",
            ),
            total_increase_bytes=("bytes", "The same with operators it called."),
            at_peak_bytes=(
                "bytes",
                "Of its own allocations, what stood at the device's peak. They sum to peak_recorded_bytes.",
            ),
        ),
        tables=("memory-operators",),
    ),
    Section(
        "MemoryLine",
        "Memory by line of your code",
        "views.memory.lines",
        metrics(
            span=_SPAN,
            allocations=(
                "count",
                "Allocations whose innermost line of yours this is; those of the backward pass count for the forward operator's line.",
            ),
            allocated_bytes=("bytes", "Their sum."),
            at_peak_bytes=("bytes", "What of it stood at the peak."),
            unreleased_bytes=("bytes", "Not released before the recording ended; by itself no leak."),
            standing_bytes=("bytes", "In a snapshot, what stands when it was taken, whenever allocated."),
        ),
        tables=("memory-lines",),
    ),
    Section(
        "MemoryBlock",
        "Memory: largest allocations",
        "views.memory.blocks",
        metrics(
            span=_SPAN,
            bytes=("bytes", "Size. The 50 largest at the peak and the 50 largest others of each device are listed."),
            allocated_ns=("ns", "When it was allocated; missing: before the recording."),
            released_ns=("ns", "When it was released; missing: after the recording."),
        ),
        tables=("memory-blocks",),
    ),
    Section(
        "MemoryState",
        "Memory when a snapshot was taken",
        "views.memory.states",
        metrics(
            reserved_bytes=("bytes", "All segments: the sum of in use, rounding, pending and free."),
            in_use_bytes=("bytes", "Asked for by tensors."),
            rounding_bytes=("bytes", "Given beyond that."),
            pending_bytes=("bytes", "Released, but another stream may still use it."),
            free_bytes=("bytes", "Held back for later: releasable and fragmented."),
            releasable_bytes=("bytes", "Whole free segments, which empty_cache() gives back."),
            fragmented_bytes=("bytes", "Free beside blocks in use, which it cannot give back."),
            largest_free_block_bytes=("bytes", "The largest request that needs no new segment."),
            segments=("count", "Segments."),
            blocks_in_use=("count", "Blocks in use."),
        ),
        tables=("memory-states",),
    ),
    Section(
        "OutOfMemory",
        "Allocations that failed",
        "views.memory.out_of_memory",
        metrics(
            time_ns=("ns", "When."),
            requested_bytes=("bytes", "What was asked for."),
            device_free_bytes=("bytes", "What the device reported as free."),
            allocated_bytes=("bytes", "In use just before."),
            reserved_bytes=("bytes", "Held by the allocator just before."),
        ),
        tables=("out-of-memory",),
    ),
)
