"""What the terminal shows of each table: its title, the columns that fit a line, the order, and what must be said."""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.views import DEVICE_PARTS, HOST_PARTS, IDLE_PARTS, Diff

THREADS = "Host times are summed over threads: they can add up to more than the time that passed."
STREAMS = "Kernel times are summed over streams: what runs side by side counts twice."
USE = (
    "100 % utilisation means that some kernel ran at every moment, not that the GPU was full: see SM efficiency and "
    "occupancy."
)


class Shown(Struct, frozen=True):
    """`columns` are (heading, key); `sort` is the column rows are ordered by, None for the order they come in."""

    title: str
    columns: tuple[tuple[str, str], ...]
    sort: str | None = None
    notes: tuple[str, ...] = ()
    define: bool = False  # say below the table what its columns mean
    quiet: tuple[str, ...] = ()  # columns left out where all of them are 0


# what tables of causes begin and end with
_WHAT = (("backend", "backend"), ("kind", "kind"), ("why", "cause"), ("what", "subject"), ("operator", "operator"))
_OFTEN = (
    ("times", "count"),
    ("time", "total_ms"),
    ("in steps", "step_count"),
    ("first", "first_step"),
    ("last", "last_step"),
    ("line", "file"),
    ("function", "function"),
)

COMPILER_TABLES: dict[str, Shown] = {
    "compiles": Shown(
        "Compiles by cause",
        (*_WHAT, ("step", "step"), ("old", "old"), ("new", "new"), *_OFTEN, ("versions", "cache_entries")),
    ),
    "compile-steps": Shown(
        "Compiling in steps",
        (
            ("backend", "backend"),
            ("step", "step"),
            ("kind", "kind"),
            ("steps", "steps"),
            ("compiled", "compiling_steps"),
            ("wall", "wall_ms"),
            ("compile time", "compile_ms"),
            ("share", "share"),
            ("after warm-up", "late_share"),
            ("a compiling step", "mean_compiling_ms"),
            ("another", "mean_quiet_ms"),
            ("compiles", "compiles"),
            ("recompiles", "recompiles"),
            ("breaks", "breaks"),
            ("transfers", "transfers"),
        ),
    ),
    "graph-breaks": Shown("Graph breaks by cause", (*_WHAT, *_OFTEN, ("reason", "text"))),
    "transfers": Shown("Transfers to the host, and operators that run there", (*_WHAT, *_OFTEN)),
    "xla-metrics": Shown(
        "Metrics of torch_xla, whole run",
        (
            ("rank", "rank"),
            ("name", "name"),
            ("unit", "unit"),
            ("samples", "samples"),
            ("total", "total"),
            ("samples a second", "per_second"),
            ("value a second", "value_per_second"),
            ("p50", "p50"),
            ("p90", "p90"),
            ("p99", "p99"),
        ),
        notes=("Percentiles and rates stand on the last samples only, 1,024 by default.",),
    ),
}

_SPAN = (("worker", "worker"), ("span", "span"))

STEP_PARTS = tuple(
    (part.removeprefix("exposed_").removeprefix("idle_").removeprefix("host_"), f"{part}_ns")
    for part in (*DEVICE_PARTS, *IDLE_PARTS, *HOST_PARTS)
)

SHOWN: dict[str, Shown] = {
    "overview": Shown(
        "Overview: parts of a step",
        (
            *_SPAN,
            ("split", "partition"),
            ("part", "part"),
            ("mean", "mean_ns"),
            ("median", "median_ns"),
            ("p95", "p95_ns"),
            ("share", "share"),
        ),
    ),
    "steps": Shown(
        "Steps: parts of each",
        (
            *_SPAN,
            ("step", "step"),
            ("wall", "wall_ns"),
            *STEP_PARTS,
        ),
        quiet=tuple(key for _, key in STEP_PARTS),
    ),
    "gpus": Shown(
        "GPUs",
        (
            *_SPAN,
            ("device", "device"),
            ("name", "name"),
            ("memory", "memory_bytes"),
            ("capability", "capability"),
            ("utilisation", "utilization_pct"),
            ("SM efficiency", "sm_efficiency_pct"),
            ("occupancy", "achieved_occupancy_pct"),
            ("tensor cores", "tensor_core_pct"),
        ),
        notes=(USE,),
        define=True,
    ),
    "operators": Shown(
        "Operators",
        (
            ("operator", "name"),
            ("shapes", "shapes"),
            ("calls", "calls"),
            ("a step", "calls_per_step"),
            ("device self", "device_self_ns"),
            ("total", "device_total_ns"),
            ("host self", "host_self_ns"),
            ("total", "host_total_ns"),
            ("memory", "self_device_memory_bytes"),
            ("tensor cores", "tensor_core_self_pct"),
            ("line", "file"),
        ),
        sort="device_self_ns",
        notes=(THREADS,),
    ),
    "stacks": Shown(
        "Call stacks behind an operator",
        (("calls", "calls"), ("host self", "host_self_ns"), ("device self", "device_self_ns"), ("stack", "stack")),
        sort="host_self_ns",
        notes=(THREADS,),
    ),
    "kernels": Shown(
        "Kernels",
        (
            ("kernel", "short_name"),
            ("operator", "operator"),
            ("grid", "grid"),
            ("block", "block"),
            ("calls", "calls"),
            ("total", "total_ns"),
            ("share", "share"),
            ("mean", "mean_ns"),
            ("max", "max_ns"),
            ("blocks/SM", "blocks_per_sm"),
            ("occupancy", "occupancy_pct"),
            ("tensor", "tensor_cores"),
            ("delay", "launch_delay_ns"),
            ("line", "file"),
        ),
        sort="total_ns",
        notes=(STREAMS,),
    ),
    "memory": Shown(
        "Memory by device",
        (
            ("source", "source"),
            *_SPAN,
            ("device", "device"),
            ("peak allocated", "peak_allocated_bytes"),
            ("peak reserved", "peak_reserved_bytes"),
            ("capacity", "capacity_bytes"),
        ),
    ),
    "memory-curve": Shown(
        "Memory over time",
        (
            *_SPAN,
            ("device", "device"),
            ("time", "since_start_ns"),
            ("allocated", "allocated_bytes"),
            ("reserved", "reserved_bytes"),
        ),
    ),
    "memory-operators": Shown(
        "Memory by operator",
        (
            *_SPAN,
            ("operator", "name"),
            ("device", "device"),
            ("calls", "calls"),
            ("allocations", "allocations"),
            ("allocated, self", "self_allocated_bytes"),
            ("total", "total_allocated_bytes"),
            ("increase, self", "self_increase_bytes"),
            ("total", "total_increase_bytes"),
        ),
        sort="self_allocated_bytes",
    ),
    "memory-lines": Shown(
        "Memory by line of your code",
        (
            *_SPAN,
            ("line", "file"),
            ("device", "device"),
            ("allocations", "allocations"),
            ("allocated", "allocated_bytes"),
            ("at the peak", "at_peak_bytes"),
            ("not released", "unreleased_bytes"),
        ),
        sort="at_peak_bytes",
    ),
    "memory-blocks": Shown(
        "Largest allocations",
        (
            *_SPAN,
            ("size", "bytes"),
            ("device", "device"),
            ("allocated", "allocated_ns"),
            ("released", "released_ns"),
            ("operator", "operator"),
            ("category", "category"),
            ("at the peak", "at_peak"),
            ("line", "file"),
        ),
        sort="bytes",
    ),
    "memory-states": Shown(
        "Memory of each device when the snapshot was taken",
        (
            ("snapshot", "worker"),
            ("device", "device"),
            ("reserved", "reserved_bytes"),
            ("in use", "in_use_bytes"),
            ("rounding", "rounding_bytes"),
            ("pending", "pending_bytes"),
            ("free", "free_bytes"),
            ("releasable", "releasable_bytes"),
            ("fragmented", "fragmented_bytes"),
            ("largest free", "largest_free_block_bytes"),
        ),
        sort="reserved_bytes",
    ),
    "out-of-memory": Shown(
        "Allocations that failed",
        (
            ("snapshot", "worker"),
            ("device", "device"),
            ("asked for", "requested_bytes"),
            ("free", "device_free_bytes"),
            ("allocated", "allocated_bytes"),
            ("reserved", "reserved_bytes"),
            ("line", "file"),
        ),
    ),
    "modules": Shown(
        "Modules",
        (
            ("module", "name"),
            ("calls", "calls"),
            ("host self", "host_self_ns"),
            ("total", "host_total_ns"),
            ("device self", "device_self_ns"),
            ("total", "device_total_ns"),
            ("backward host", "backward_host_total_ns"),
            ("device", "backward_device_total_ns"),
        ),
        notes=(THREADS,),
    ),
    "counters": Shown(
        "Counters over time",
        (
            *_SPAN,
            ("device", "device"),
            ("counter", "metric"),
            ("time", "since_start_ns"),
            ("value", "value"),
            ("unit", "unit"),
        ),
    ),
    "communication": Shown(
        "Collectives of each rank",
        (
            *_SPAN,
            ("collective", "name"),
            ("group", "group"),
            ("ranks", "group_size"),
            ("type", "dtype"),
            ("calls", "calls"),
            ("size", "total_bytes"),
            ("total", "total_ns"),
            ("mean", "mean_ns"),
            ("overlapped", "overlapped_ns"),
            ("exposed", "exposed_ns"),
            ("bus", "bus_bytes_per_s"),
        ),
        sort="total_ns",
    ),
    "distributed": Shown(
        "Workers: a mean step of each",
        (
            *_SPAN,
            ("rank", "rank"),
            ("step", "wall_ns"),
            ("computation", "computation_ns"),
            ("overlap", "overlap_ns"),
            ("communication", "communication_ns"),
            ("other", "other_ns"),
            ("synchronising", "synchronizing_ns"),
            ("transferring", "transferring_ns"),
        ),
    ),
    "distributed-collectives": Shown(
        "Collectives over all workers",
        (
            ("collective", "name"),
            ("group", "group"),
            ("calls", "calls"),
            ("workers", "workers"),
            ("size", "total_bytes"),
            ("mean", "mean_ns"),
            ("transferring", "transferring_ns"),
            ("synchronising", "synchronizing_ns"),
            ("last rank", "last_rank"),
        ),
        sort="synchronizing_ns",
    ),
    **COMPILER_TABLES,
}


def diff_shown(table: str, found: Diff) -> Shown:
    """The columns of a comparison, under the names of its two sides."""
    per = " a step" if found.per_step else ""
    return Shown(
        f"{table.capitalize()}: {found.base} → {found.other}",
        (
            ("what", "key"),
            (f"calls{per}", "base_calls"),
            ("→", "other_calls"),
            (f"time{per}", "base_ns"),
            ("→", "other_ns"),
            ("change", "delta_ns"),
            ("ratio", "ratio"),
            (f"device{per}", "base_device_ns"),
            ("→", "other_device_ns"),
            ("change", "device_delta_ns"),
        ),
    )
