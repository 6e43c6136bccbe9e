"""Definitions of the figures of what memory may cost a run."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

_WHERE = "risks, and findings of memory.allocator_retries"

SECTIONS = (
    Section("Risk", "Risks", "risks", metrics(ranks=("count", "Ranks it was seen on."))),
    Section(
        "MemoryGrowth",
        "Memory that grows with the steps",
        _WHERE,
        metrics(
            rank=("count", "Number of the rank."),
            points=("count", "Readings between two steps, or steps of a trace."),
            steps=("count", "From the first of them to the last."),
            seconds=("s", "From the first of them to the last."),
            early_bytes=(
                "bytes",
                "At the first, on the straight line through all (Theil and Sen). Of the host pages that cannot be dropped; of a device what the allocator had given out. In a trace the level at the end of its first step, 0 where it does not say what stood when it began.",
            ),
            late_bytes=("bytes", "The same at the last."),
            bytes_per_step=("bytes", "Their difference by the steps between; in a trace the median rise."),
            room_bytes=(
                "bytes",
                "What the limit leaves above the last reading; of the host, above those of all ranks on it.",
            ),
            steps_left=("count", "Steps until there is no room, at this rate. At most: others may take of it too."),
            seconds_left=("s", "The same as time, with all ranks of the host that grow."),
        ),
    ),
    Section(
        "GrowthLine",
        "Memory that grows: a line's part",
        _WHERE,
        metrics(
            bytes_per_step=(
                "bytes",
                "Median over the recorded steps but the last of what the line allocated in a step and still stood at the end of the next.",
            ),
            blocks_per_step=("count", "The same in blocks."),
        ),
    ),
    Section(
        "MemoryLimit",
        "The limit of memory that holds for a process",
        _WHERE,
        metrics(
            bytes=("bytes", "The most that the process can hold, or on the host all processes of the run together."),
            total_bytes=("bytes", "Of the device that the process sees, which may be a slice of one; of the machine."),
            others_bytes=(
                "bytes",
                "In use on the device, and not held by the allocator of this process: other processes, and what the driver takes. The most that was read.",
            ),
            fraction=("share", "What `torch.cuda.set_per_process_memory_fraction` leaves to the process."),
        ),
    ),
    Section(
        "MemoryPeak",
        "The most memory held of a device",
        _WHERE,
        metrics(
            rank=("count", "Number of the rank; null of traces and snapshots."),
            allocated_bytes=("bytes", "Given out by the allocator, at its peak."),
            reserved_bytes=("bytes", "Held by the allocator, at its own peak, which may be another moment."),
            retries=("count", "Allocations that were tried again after all cached blocks were given back."),
            out_of_memory=("count", "Allocations that failed."),
        ),
    ),
    Section(
        "RetryFacts",
        "Steps with retries of the allocator",
        _WHERE,
        metrics(
            rank=("count", "Number of the rank that lost most."),
            retries=("count", "Between its first and its last steady step."),
            steps=("count", "Steady steps between readings."),
            steps_struck=("count", "Of them between two readings with a retry in between."),
            stretches=("count", "Between two neighbouring readings, with a retry."),
            usual_ms=("ms", "Median of the steps that are not struck."),
            struck_ms=("ms", "Mean of those that are."),
            lost_ms_per_step=(
                "ms",
                "By how much `struck_ms` exceeds `usual_ms`, and what the mean of the others exceeds their median by, spread over all steps.",
            ),
            total_ms_per_step=("ms", "Mean of all these steps."),
        ),
    ),
)
