"""What telemetry says of the machine while the measured steps ran, so that runs can be held against each other.

Readings come once a second: of a measured part of some seconds figures are missing, and a missing one says nothing.
"""

from __future__ import annotations

import polars as pl

from stepscope.analyze.input.loader import known_cores
from stepscope.analyze.machine import cores, hardware
from stepscope.analyze.machine.readings import average, growths, level
from stepscope.comparison.measured_steps import MeasuredSteps
from stepscope.comparison.thresholds import LEAST_READINGS
from stepscope.engine.journal import event_data, mean
from stepscope.model.machine import GpuClocks
from stepscope.tables.schema import Tables

NEW_ITERATORS = 2  # in the measured part: the first may be of workers that then stay
CORES, OTHERS, DELAY = "cores", "others_cores", "run_delay_share"
READ, FAULTS = "read_bytes_per_step", "major_faults_per_step"
MAPPED = "minor_faults_per_step"
CPU_CLOCK, GPU_CLOCK = "cpu_frequency_mhz", "gpu_clock_mhz"


def readings(tables: Tables, measured: MeasuredSteps) -> pl.DataFrame | None:
    """Telemetry from the start of the first measured step to the end of the last; None with too few readings."""
    spans = measured.spans
    if not spans:
        return None
    first, last = min(start for start, _ in spans.values()), max(end for _, end in spans.values())
    known = tables.system.filter(pl.col("value").is_not_null() & pl.col("time_ns").is_between(first, last))
    return known if known["time_ns"].n_unique() >= LEAST_READINGS else None


def conditions(tables: Tables, measured: MeasuredSteps) -> dict[str, float]:
    """Figures by name, those that were read; docs/metrics.md defines each."""
    mapped = measured.rows["minor_faults"].drop_nulls()
    by_step = {MAPPED: mean(mapped)} if len(mapped) else {}
    found = readings(tables, measured)
    if found is None:
        return by_step
    ranks = [rank.pid for rank in tables.ranks]
    workers = tables.processes.filter(pl.col("role") == "loader_worker")["pid"].drop_nulls().unique().to_list()
    delay = average(growths(found, "run_delay_ns", ranks))
    clocks = [gpu.clock_mhz for gpu in gpus(tables, found)]
    figures = {
        CORES: known_cores(tables),
        OTHERS: None if _come_and_go(tables, measured) else _others(found),
        DELAY: None if delay is None else min(1.0, delay / 1e9),
        READ: _per_step(found, "read_bytes", [*ranks, *workers], measured),
        FAULTS: _per_step(found, "major_faults", [*ranks, *workers], measured),
        CPU_CLOCK: level(found, "cpu_frequency_mhz")[0],
        GPU_CLOCK: sum(clocks) / len(clocks) if clocks else None,
    }
    return by_step | {name: float(value) for name, value in figures.items() if value is not None}


def gpus(tables: Tables, found: pl.DataFrame | None) -> tuple[GpuClocks, ...]:
    """The GPUs of the run, over these readings."""
    return hardware.gpu_clocks(tables, found)


def _come_and_go(tables: Tables, measured: MeasuredSteps) -> bool:
    """Whether loader workers were started anew in the measured part: most end before telemetry has seen what they used,
    which then looks like the use of others."""
    workers = tables.processes.filter((pl.col("role") == "loader_worker") & pl.col("start_ns").is_not_null())
    for process, (start, end) in measured.spans.items():
        made = [
            row
            for row, data in event_data(tables, "loader")
            if row["process"] == process and (data.get("num_workers") or 0) and start < (row["time_ns"] or 0) < end
        ]
        pids = [rank.pid for rank in tables.ranks if rank.process == process]
        own = workers.filter(pl.col("ppid").is_in(pids))["start_ns"]
        if len(made) >= NEW_ITERATORS and (own.is_empty() or own.is_between(start, end).any()):
            return True
    return False


def _others(found: pl.DataFrame) -> float | None:
    """Cores in use that are not the run's own, mean over hosts; the recorder's own use is among them.

    None in recordings that do not tell how busy the cores are.
    """
    parts = []
    for rows in found.partition_by("host", maintain_order=True):
        own = rows.filter(pl.col("metric") == "cpu_pct").group_by("time_ns").agg(pl.col("value").sum()).sort("time_ns")
        if own.height:
            others = cores.others(rows, float(own["value"].sum()) / own.height / 100.0)
            parts += [] if others is None else [others]
    return sum(parts) / len(parts) if parts else None


def _per_step(found: pl.DataFrame, metric: str, pids: list[int], measured: MeasuredSteps) -> float | None:
    """Growth of a counter over the measured part, summed over processes, by measured steps."""
    own = found.filter((pl.col("metric") == metric) & pl.col("pid").is_in(pids)).sort("time_ns")
    if own.is_empty():
        return None
    grown = sum(max(0.0, rows["value"][-1] - rows["value"][0]) for rows in own.partition_by("host", "pid"))
    seconds = (int(found["time_ns"].to_numpy().max()) - int(found["time_ns"].to_numpy().min())) / 1e9
    spans = measured.spans.values()
    whole = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9
    return grown / seconds * whole / measured.count if seconds > 0 and measured.count else None
