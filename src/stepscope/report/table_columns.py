"""What the terminal shows of each table: its title, the columns that fit a line, the order, and what must be said.

Columns are written as `key`, whose heading is its name without the unit, or as `heading: key`.
"""

from __future__ import annotations

import re

from msgspec import Struct

from stepscope.model.views import PARTS, Diff

THREADS = "Host times are summed over threads: they can add up to more than the time that passed."
STREAMS = "Kernel times are summed over streams: what runs side by side counts twice."
USE = (
    "100 % utilisation means that some kernel ran at every moment, not that the GPU was full: see SM efficiency and "
    "occupancy."
)
_UNIT = re.compile("_(ns|ms|bytes|pct)$")


class Shown(Struct, frozen=True):
    """`columns` are (heading, key); `sort` is the column rows are ordered by, None for the order they come in."""

    title: str
    columns: tuple[tuple[str, str], ...]
    sort: str | None = None
    notes: tuple[str, ...] = ()
    define: bool = False  # say below the table what its columns mean
    quiet: tuple[str, ...] = ()  # columns left out where all of them are 0


def _columns(text: str) -> tuple[tuple[str, str], ...]:
    split = (column.rpartition(": ") for column in text.split("; "))
    return tuple((heading or _UNIT.sub("", key).replace("_", " "), key) for heading, _, key in split)


_SPAN = "worker; span"
_CAUSE = "backend; kind; why: cause; what: subject; operator"
_OFTEN = "times: count; time: total_ms; in steps: step_count; first: first_step; last: last_step; line: file; function"
_PARTS = "; ".join(f"{re.sub('^(exposed|idle|host)_', '', part)}: {part}_ns" for part in PARTS)

SHOWN: dict[str, Shown] = {
    "overview": Shown(
        "Overview: parts of a step", _columns(f"{_SPAN}; split: partition; part; mean_ns; median_ns; p95_ns; share")
    ),
    "steps": Shown(
        "Steps: parts of each",
        _columns(f"{_SPAN}; step; wall_ns; {_PARTS}"),
        quiet=tuple(key for _, key in _columns(_PARTS)),
    ),
    "gpus": Shown(
        "GPUs",
        _columns(
            f"{_SPAN}; device; name; memory_bytes; capability; utilisation: utilization_pct; "
            "SM efficiency: sm_efficiency_pct; occupancy: achieved_occupancy_pct; tensor cores: tensor_core_pct"
        ),
        notes=(USE,),
        define=True,
    ),
    "operators": Shown(
        "Operators",
        _columns(
            "operator: name; shapes; calls; a step: calls_per_step; device_self_ns; total: device_total_ns; "
            "host_self_ns; total: host_total_ns; memory: self_device_memory_bytes; "
            "tensor cores: tensor_core_self_pct; line: file"
        ),
        sort="device_self_ns",
        notes=(THREADS,),
    ),
    "stacks": Shown(
        "Call stacks behind an operator",
        _columns("calls; host_self_ns; device_self_ns; stack"),
        sort="host_self_ns",
        notes=(THREADS,),
    ),
    "kernels": Shown(
        "Kernels",
        _columns(
            "kernel: short_name; operator; grid; block; calls; total_ns; share; mean_ns; max_ns; "
            "blocks/SM: blocks_per_sm; occupancy_pct; tensor: tensor_cores; delay: launch_delay_ns; line: file"
        ),
        sort="total_ns",
        notes=(STREAMS,),
    ),
    "memory": Shown(
        "Memory by device",
        _columns("source; worker; span; device; peak_allocated_bytes; peak_reserved_bytes; capacity_bytes"),
    ),
    "memory-curve": Shown(
        "Memory over time", _columns(f"{_SPAN}; device; time: since_start_ns; allocated_bytes; reserved_bytes")
    ),
    "memory-operators": Shown(
        "Memory by operator",
        _columns(
            f"{_SPAN}; operator: name; device; calls; allocations; allocated, self: self_allocated_bytes; "
            "total: total_allocated_bytes; increase, self: self_increase_bytes; total: total_increase_bytes"
        ),
        sort="self_allocated_bytes",
    ),
    "memory-lines": Shown(
        "Memory by line of your code",
        _columns(
            f"{_SPAN}; line: file; device; allocations; allocated_bytes; at the peak: at_peak_bytes; "
            "not released: unreleased_bytes"
        ),
        sort="at_peak_bytes",
    ),
    "memory-blocks": Shown(
        "Largest allocations",
        _columns(
            f"{_SPAN}; size: bytes; device; allocated_ns; released_ns; operator; category; at the peak: at_peak; "
            "line: file"
        ),
        sort="bytes",
    ),
    "memory-states": Shown(
        "Memory of each device when the snapshot was taken",
        _columns(
            "snapshot: worker; device; reserved_bytes; in_use_bytes; rounding_bytes; pending_bytes; free_bytes; "
            "releasable_bytes; fragmented_bytes; largest free: largest_free_block_bytes"
        ),
        sort="reserved_bytes",
    ),
    "out-of-memory": Shown(
        "Allocations that failed",
        _columns(
            "snapshot: worker; device; asked for: requested_bytes; free: device_free_bytes; allocated_bytes; "
            "reserved_bytes; line: file"
        ),
    ),
    "modules": Shown(
        "Modules",
        _columns(
            "module: name; calls; host_self_ns; total: host_total_ns; device_self_ns; total: device_total_ns; "
            "backward host: backward_host_total_ns; device: backward_device_total_ns"
        ),
        notes=(THREADS,),
    ),
    "counters": Shown(
        "Counters over time", _columns(f"{_SPAN}; device; counter: metric; time: since_start_ns; value; unit")
    ),
    "communication": Shown(
        "Collectives of each rank",
        _columns(
            f"{_SPAN}; collective: name; group; ranks: group_size; type: dtype; calls; size: total_bytes; "
            "total_ns; mean_ns; overlapped_ns; exposed_ns; bus: bus_bytes_per_s"
        ),
        sort="total_ns",
    ),
    "distributed": Shown(
        "Workers: a mean step of each",
        _columns(
            f"{_SPAN}; rank; step: wall_ns; computation_ns; overlap_ns; communication_ns; other_ns; "
            "synchronising: synchronizing_ns; transferring_ns"
        ),
    ),
    "distributed-collectives": Shown(
        "Collectives over all workers",
        _columns(
            "collective: name; group; calls; workers; size: total_bytes; mean_ns; transferring_ns; "
            "synchronising: synchronizing_ns; last_rank"
        ),
        sort="synchronizing_ns",
    ),
    "compiles": Shown("Compiles by cause", _columns(f"{_CAUSE}; step; old; new; {_OFTEN}; versions: cache_entries")),
    "compile-steps": Shown(
        "Compiling in steps",
        _columns(
            "backend; step; kind; steps; compiled: compiling_steps; wall_ms; compile time: compile_ms; share; "
            "after warm-up: late_share; a compiling step: mean_compiling_ms; another: mean_quiet_ms; compiles; "
            "recompiles; breaks; transfers"
        ),
    ),
    "graph-breaks": Shown("Graph breaks by cause", _columns(f"{_CAUSE}; {_OFTEN}; reason: text")),
    "transfers": Shown("Transfers to the host, and operators that run there", _columns(f"{_CAUSE}; {_OFTEN}")),
    "xla-metrics": Shown(
        "Metrics of torch_xla, whole run",
        _columns(
            "rank; name; unit; samples; total; samples a second: per_second; value a second: value_per_second; "
            "p50; p90; p99"
        ),
        notes=("Percentiles and rates stand on the last samples only, 1,024 by default.",),
    ),
}


def diff_shown(table: str, found: Diff) -> Shown:
    """The columns of a comparison, under the names of its two sides."""
    per = " a step" if found.per_step else ""
    return Shown(
        f"{table.capitalize()}: {found.base} → {found.other}",
        _columns(
            f"what: key; calls{per}: base_calls; →: other_calls; time{per}: base_ns; →: other_ns; change: delta_ns; "
            f"ratio; device{per}: base_device_ns; →: other_device_ns; change: device_delta_ns"
        ),
    )
