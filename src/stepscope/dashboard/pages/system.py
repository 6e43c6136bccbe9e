"""The page of the machine: telemetry beside the steps, and what was made of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import asdict

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.report import words
from stepscope.report.table import USE

if TYPE_CHECKING:
    from stepscope.model.machine import MachineFacts
    from stepscope.model.timeline import Telemetry

POINTS, EMBEDDED_POINTS = 500, 150
SYNC = "time"
WHY = "This recording holds no telemetry: traces and stacks of other tools have none."
NOT_HERE = "No reading lies in the steps that are chosen, nor within a second of them."
AROUND_NS = 1_000_000_000  # a reading tells of the second before it
RECORD = "stepscope run reads the machine once a second, beside the training, and the GPUs through NVML."


class Chart(NamedTuple):
    """One chart. `metrics` are (name, label, role); the label stands behind the subject where there are several.

    `quiet`: left out where all is 0.
    """

    id: str
    title: str
    y: str
    unit: str
    metrics: tuple[tuple[str, str, str | None], ...]
    help: str | None = None
    most: float | None = None
    quiet: bool = False


_CORES = (
    ("busy_cores", "in use by anyone", "cpu"),
    ("load_1m", "load, one minute", "baseline"),
    ("stolen_cores", "given to others by the hypervisor", "limit"),
    ("throttled_cores", "throttled by the cgroup", "waiting"),
)
_POWER = (("gpu_power_w", "power", "power"), ("gpu_power_limit_w", "limit", "limit"))
_CLOCKS = (("gpu_sm_clock_mhz", "clock", "clock"), ("gpu_sm_clock_max_mhz", "highest", "limit"))
_BYTES = (
    ("requested_bytes_per_s", "asked for", "baseline"),
    ("read_bytes_per_s", "brought from storage", "read"),
    ("write_bytes_per_s", "written", "write"),
)
_PRESSURE = (
    ("psi_cpu_some_pct", "waiting for a core", "cpu"),
    ("psi_io_some_pct", "waiting for storage", "io"),
    ("psi_memory_some_pct", "waiting for memory", "memory"),
)
_OF_CPU = "Of all threads of a process since the reading before: 100 % is one core. Loader workers are summed."
_OF_CORES = "Of the processors that the run may use. Load counts tasks that run or want to."
_OF_DELAY = "Of each second, how long the main thread could have run and had no core (schedstat)."
_OF_PAGES = "Pages of a process in memory; shared ones count in each. Loader workers are summed."
_OF_BYTES = "Bytes that a process asked for by reads, and of these and of mapped files what storage had to bring."
_OF_PRESSURE = "Share of the time in which at least one task stood still for want of it (PSI)."


def _one(name: str, role: str | None = None) -> tuple[tuple[str, str, str | None], ...]:
    return ((name, "", role),)


CHARTS = (
    Chart("gpu-utilisation", "GPU utilisation", "utilisation", "pct", _one("gpu_util_pct", "utilisation"), USE, 100),
    Chart("cpu", "CPU use of processes", "CPU use", "pct", _one("cpu_pct"), _OF_CPU),
    Chart("cores", "Cores of the host", "cores", "number", _CORES, _OF_CORES),
    Chart(
        *("delay", "Main threads ready without a core", "share of the time", "share"),
        *(_one("run_delay_share"), _OF_DELAY),
        quiet=True,
    ),
    Chart("resident", "Resident memory", "memory", "bytes", _one("rss_bytes"), _OF_PAGES),
    Chart("gpu-memory", "GPU memory in use", "memory", "bytes", _one("gpu_memory_bytes")),
    Chart("gpu-power", "GPU power", "power", "W", _POWER),
    Chart("gpu-clock", "GPU clock", "SM clock", "MHz", _CLOCKS),
    Chart(*("gpu-temperature", "GPU temperature", "temperature", "celsius"), _one("gpu_temperature_c", "temperature")),
    Chart("io", "Reading and writing", "bytes a second", "bytes_per_s", _BYTES, _OF_BYTES, quiet=True),
    Chart("pressure", "Pressure", "of the time", "pct", _PRESSURE, _OF_PRESSURE, 100, quiet=True),
    Chart("faults", "Page faults that read a disk", "a second", "per_s", _one("major_faults_per_s"), quiet=True),
    Chart(
        *("switches", "Main threads taken off their core", "times a second", "per_s"),
        _one("involuntary_switches_per_s"),
        quiet=True,
    ),
)
SUMMARY = {
    "rank_cpu_pct": "CPU of a training process",
    "workers_cpu_pct": "CPU of loader workers, summed",
    "rank_rss_peak_bytes": "Highest resident memory",
    "workers_rss_peak_bytes": "Highest, of a loader worker",
    "busy_cores": "Cores in use",
    "load_1m": "Load, one minute",
    "cpu_frequency_mhz": "CPU clock",
    "cgroup_throttled_s": "Throttled by the cgroup",
    "cgroup_oom_events": "Out of memory in the cgroup",
    "rank_read_bytes_per_s": "Brought from storage",
    "rank_write_bytes_per_s": "Written",
    "gpu_util_pct": "GPU utilisation",
    "gpu_memory_peak_bytes": "Highest GPU memory",
    "gpu_power_w": "GPU power",
    "gpu_power_limit_w": "GPU power limit",
    "gpu_sm_clock_mhz": "GPU SM clock",
    "gpu_temperature_c": "GPU temperature",
}
COUNTS = ("cgroup_oom_events",)

_CPU = (
    "Cores the run may use: cores; Cores the run used: own_cores; Main thread ready without a core: run_delay_share; "
    "Of a step, because of the run itself: own_ms_per_step; Of a step, because of others: others_ms_per_step; "
    "Of a step, throttled: throttled_ms_per_step; Threads of torch: threads; "
    "Training processes on the host: ranks_on_host; Stolen by a hypervisor: stolen_cores; "
    "Taken off its core: involuntary_switches_per_s; Moved to another core: migrations_per_s"
)
_POOL = (
    "Main thread on a core: main_cpu_share; Cores the other threads used: used_cores; "
    "Other threads ready without one: ready_threads; Lost to too many threads, a step: lost_ms_per_step"
)
_PAUSES = (
    "Garbage collections: count; Full ones: full; Per step: ms_per_step; Longest: longest_ms; "
    "Steps struck: steps_struck"
)
_STORAGE = (
    "Asked for: requested_bytes_per_s; Brought from storage: device_bytes_per_s; Not in the page cache: cold_share; "
    "Readings blocked on a disk: blocked_share; Waiting for block devices: io_delay_share; "
    "Pressure of storage: pressure_pct"
)
_MEMORY = "Page faults from disk, a step: major_faults_per_step; Stalled for want of memory: stalled_pct"
_NUMA = "Nodes of memory: nodes; Away from its GPU's node: away_share"
_GPU = blocks.columns(
    "GPU: device; Utilisation: utilization share; SM clock: clock_mhz MHz; Highest: max_clock_mhz MHz; "
    "Lost: lost_share share bar; Power: power_w W; Limit: power_limit_w W; Temperature: temperature_c celsius; "
    "Why below: reasons; Foreign processes: strangers count",
    reasons=lambda row: _shares(row["reasons"]),
)
_PAUSE_LINE = blocks.columns("Line: place; Collections: count count; Per step: ms_per_step ms bar")


def build(context: PageContext) -> list[Block]:
    """The blocks of the page."""
    found = _telemetry(context)
    analysis = context.run.analysis
    made: list[Block] = []
    if found is None:
        made.append(
            blocks.empty(
                "No telemetry", WHY if context.run.tables.system.is_empty() else NOT_HERE, RECORD, traced.again(context)
            )
        )
    else:
        made += [*_summary(analysis.system), *_about(found), *_step_chart(found), *_charts(found)]
    if analysis.machine is not None:
        made += _machine(context, analysis.machine)
    return made


def empty(context: PageContext) -> bool:
    """Whether there is neither telemetry nor anything else about the machine."""
    return context.run.tables.system.is_empty() and not list(_groups(context.run.analysis.machine))


def _telemetry(context: PageContext) -> Telemetry | None:
    from stepscope.analyze.pictures.series import telemetry
    from stepscope.dashboard.pages.steps import labelled

    between = None
    if context.scope.steps is not None:
        steps = context.run.tables.steps.drop_nulls(["start_ns", "wall_ns"])
        if not steps.is_empty():
            ends = (steps["start_ns"] + steps["wall_ns"]).max()
            between = (int(steps["start_ns"].min()) - AROUND_NS, int(ends) + AROUND_NS)  # type: ignore[arg-type]
    limit = EMBEDDED_POINTS if context.embedded else POINTS
    return telemetry(context.run.tables, labelled(context), limit, between)


def _summary(system: dict[str, Any]) -> list[Block]:
    """Means and peaks over the training time."""
    help_ = blocks.meaning("system", "system")
    items = [
        blocks.figure(label, system[key], "count" if key in COUNTS else blocks.unit_of(key) or "number", help=help_)
        for key, label in SUMMARY.items()
        if system.get(key) is not None
    ]
    return [blocks.figures(items, "While it trained")] if items else []


def _about(found: Telemetry) -> list[Block]:
    text = f"{found.readings:,} readings"
    if found.bucket_s is not None:
        text += f"; each point is the mean of {words.seconds(found.bucket_s)}"
    if found.dropped:
        text += f"; {found.dropped} further series are left out"
    if len(found.hosts) > 1:
        text += f"; of {len(found.hosts)} hosts"
    return [blocks.text(f"{text}. Times are since the start of the run.", "note")]


def _step_chart(found: Telemetry) -> list[Block]:
    if len(found.step_ms) < 2:
        return []
    longest = max(range(len(found.step_ms)), key=lambda at: found.step_ms[at])
    return [
        blocks.chart(
            "steps-over-time",
            "Step time",
            "line",
            sentence=(
                f"Steps of {found.step_process} over time; the longest takes "
                f"{words.milliseconds(found.step_ms[longest])}, {words.seconds(found.step_time_s[longest])} in."
            ),
            x=("time since the start", "s", found.step_time_s),
            y=("time of the step", "ms"),
            y_min=0,
            series=[blocks.series("step time", "ms", found.step_ms, role="wall")],
            help=blocks.meaning("Telemetry", "step_ms"),
            sync=SYNC,
        )
    ]


def _charts(found: Telemetry) -> Iterator[Block]:
    for chart in CHARTS:
        labels = {name: (label, role) for name, label, role in chart.metrics}
        shown = [one for one in found.series if one.metric in labels]
        if chart.quiet:
            shown = [one for one in shown if any(one.values)]
        if not shown:
            continue
        several = len({one.subject for one in shown}) > 1
        made = []
        for one in shown:
            label, role = labels[one.metric]
            name = f"{one.subject}: {label}" if several and label else label or one.subject
            made.append(blocks.series(name, chart.unit, one.values, role=role if not several else None))
        names = [each["name"] for each in made]
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield blocks.chart(
            chart.id,
            chart.title,
            "line",
            sentence=f"{chart.title} over time of {listed}.",
            x=("time since the start", "s", found.time_s),
            y=(chart.y, chart.unit),
            y_min=0,
            y_max=chart.most,
            series=made,
            help=blocks.help_(chart.help, "utilisation" if chart.help == USE else None)
            if chart.help
            else blocks.meaning("TelemetrySeries", "values"),
            sync=SYNC,
        )


def _groups(machine: MachineFacts | None) -> Iterator[tuple[str, object, str]]:
    """(title, record, figures) of each part of the machine's facts that is there."""
    if machine is None:
        return
    parts: tuple[tuple[str, object | None, str], ...] = (
        ("How training shared its cores", machine.cpu, _CPU),
        ("Threads of a training process", machine.cpu.pool if machine.cpu is not None else None, _POOL),
        ("Pauses for garbage collection", machine.pauses, _PAUSES),
        ("Memory pressure", machine.memory, _MEMORY),
        ("Storage", machine.storage, _STORAGE),
        ("Nodes of memory", machine.numa, _NUMA),
    )
    for title, record, figures in parts:
        if record is not None and any(getattr(record, each.key) for each in blocks.columns(figures)):
            yield title, record, figures


def _machine(context: PageContext, machine: MachineFacts) -> Iterator[Block]:
    for title, record, figures in _groups(machine):
        yield blocks.figures(blocks.measures(record, figures), title)
    if machine.pauses is not None:
        lines = [{**asdict(line), "place": asdict(line.place)} for line in machine.pauses.lines]
        yield from blocks.rows_table(
            context, "pauses", "Lines at which collections struck", "PauseLine", _PAUSE_LINE, lines
        )
    gpus = [asdict(gpu) for gpu in machine.gpus]
    yield from blocks.rows_table(context, "gpu-clocks", "Clocks of GPUs", "GpuClocks", _GPU, gpus)
    if machine.storage is not None and machine.storage.mounts:
        mounts = [
            blocks.fact(f"{mount.path} ({mount.kind})", f"{mount.files} files", mount.source)
            for mount in machine.storage.mounts
        ]
        yield blocks.facts("File systems that data is read from", mounts)


def _shares(reasons: dict[str, float]) -> str | None:
    found = sorted(reasons.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {words.percent(share)}" for name, share in found) or None
