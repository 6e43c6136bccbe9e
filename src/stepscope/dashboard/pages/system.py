"""The page of the machine: telemetry beside the steps, and what was made of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import asdict

from stepscope.analyze.pictures.series import telemetry
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.dashboard.pages.steps import labelled
from stepscope.model.machine import EnergyFacts, MachineFacts
from stepscope.model.timeline import Telemetry
from stepscope.report import sentences, words
from stepscope.report.table import USE

POINTS, EMBEDDED_POINTS = 500, 150
SYNC = "time"
WHY = "This recording holds no telemetry: traces and stacks of other tools have none."
NOT_HERE = "No reading lies in the steps that are chosen, nor within a second of them."
AROUND_NS = 1_000_000_000  # a reading tells of the second before it
RECORD = "stepscope run reads the machine once a second, beside the training, and the GPUs through NVML."


class Chart(NamedTuple):
    """One chart. `metrics` are `name role label`, separated by semicolons; the label stands behind the subject where
    there are several. `quiet`: left out where all is 0.
    """

    id: str
    title: str
    y: str
    unit: str
    metrics: str
    help: str | None = None
    most: float | None = None
    quiet: bool = False


_CORES = (
    "busy_cores cpu in use by anyone; load_1m baseline load, one minute; "
    "stolen_cores limit given to others by the hypervisor; throttled_cores waiting throttled by the cgroup"
)
_POWER = (
    "gpu_power_w power power; gpu_power_limit_w limit limit; gpu_counted_power_w measured mean, by the energy counter"
)
_OF_RAPL = "Mean since the reading before, by the energy counters of the machine (RAPL), whoever used it."
_CLOCKS = "gpu_sm_clock_mhz clock clock; gpu_sm_clock_max_mhz limit highest"
_BYTES = (
    "requested_bytes_per_s baseline asked for; read_bytes_per_s read brought from storage; "
    "write_bytes_per_s write written"
)
_PRESSURE = (
    "psi_cpu_some_pct cpu waiting for a core; psi_io_some_pct io waiting for storage; "
    "psi_memory_some_pct memory waiting for memory"
)
_OF_CPU = "Of all threads of a process since the reading before: 100 % is one core. Loader workers are summed."
_OF_CORES = "Of the processors that the run may use. Load counts tasks that run or want to."
_OF_DELAY = "Of each second, how long the main thread could have run and had no core (schedstat)."
_OF_PAGES = "Pages of a process in memory; shared ones count in each. Loader workers are summed."
_OF_BYTES = "Bytes that a process asked for by reads, and of these and of mapped files what storage had to bring."
_OF_PRESSURE = "Share of the time in which at least one task stood still for want of it (PSI)."
_SHARE = "share of the time"
_DELAY, _SWITCHES = "Main threads ready without a core", "Main threads taken off their core"
CHARTS = (
    Chart("gpu-utilisation", "GPU utilisation", "utilisation", "pct", "gpu_util_pct utilisation", USE, 100),
    Chart("cpu", "CPU use of processes", "CPU use", "pct", "cpu_pct", _OF_CPU),
    Chart("cores", "Cores of the host", "cores", "number", _CORES, _OF_CORES),
    Chart("delay", _DELAY, _SHARE, "share", "run_delay_share", _OF_DELAY, quiet=True),
    Chart("resident", "Resident memory", "memory", "bytes", "rss_bytes", _OF_PAGES),
    Chart("gpu-memory", "GPU memory in use", "memory", "bytes", "gpu_memory_bytes"),
    Chart("gpu-power", "GPU power", "power", "W", _POWER),
    Chart("cpu-power", "Power of processors and memory", "power", "W", "power_w", _OF_RAPL),
    Chart("gpu-clock", "GPU clock", "SM clock", "MHz", _CLOCKS),
    Chart("gpu-temperature", "GPU temperature", "temperature", "celsius", "gpu_temperature_c temperature"),
    Chart("io", "Reading and writing", "bytes a second", "bytes_per_s", _BYTES, _OF_BYTES, quiet=True),
    Chart("pressure", "Pressure", "of the time", "pct", _PRESSURE, _OF_PRESSURE, 100, quiet=True),
    Chart("faults", "Page faults that read a disk", "a second", "per_s", "major_faults_per_s", quiet=True),
    Chart("switches", _SWITCHES, "times a second", "per_s", "involuntary_switches_per_s", quiet=True),
)
SUMMARY = (
    "CPU of a training process: rank_cpu_pct; CPU of loader workers, summed: workers_cpu_pct; "
    "Highest resident memory: rank_rss_peak_bytes; Highest, of a loader worker: workers_rss_peak_bytes; "
    "Cores in use: busy_cores; Load, one minute: load_1m; CPU clock: cpu_frequency_mhz; "
    "Throttled by the cgroup: cgroup_throttled_s; Out of memory in the cgroup: cgroup_oom_events count; "
    "Brought from storage: rank_read_bytes_per_s; Written: rank_write_bytes_per_s; GPU utilisation: gpu_util_pct; "
    "Highest GPU memory: gpu_memory_peak_bytes; GPU power: gpu_power_w; GPU power limit: gpu_power_limit_w; "
    "GPU SM clock: gpu_sm_clock_mhz; GPU temperature: gpu_temperature_c"
)

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
    reasons=lambda row: (
        ", ".join(
            f"{name} {words.percent(share)}"
            for name, share in sorted(row["reasons"].items(), key=lambda pair: -pair[1])
        )
        or None
    ),
)
_ENERGY = blocks.columns(
    "Device: device; Name: name; Source: source; Energy: joules; Mean power: mean_w W; Read over: seconds s; "
    "In the sum: counted; Sampled power by the counter: sampled_ratio number; What to know: why; Host: host",
    joules=lambda row: words.joules(row["joules"]),
)
_PAUSE_LINE = blocks.columns("Line: place; Collections: count count; Per step: ms_per_step ms bar")


def build(context: PageContext) -> list[Block]:
    """The blocks of the page."""
    found = _telemetry(context)
    analysis = context.run.analysis
    if found is None:
        why = WHY if context.run.tables.system.is_empty() else NOT_HERE
        made = [blocks.empty("No telemetry", why, RECORD, traced.again(context))]
    else:
        help_ = blocks.meaning("system", "system")
        items = [{**item, "help": help_} for item in blocks.measures(analysis.system, SUMMARY, of="system")]
        made = [blocks.figures(items, "While it trained")] if items else []  # means and peaks over the training time
        made += [_about(found), *_step_chart(found), *_charts(found)]
    return [*made, *_energy(context, analysis.energy), *blocks.folded(_machine(context, analysis.machine))]


def empty(context: PageContext) -> bool:
    """Whether there is neither telemetry nor anything else about the machine."""
    return context.run.tables.system.is_empty() and not list(_groups(context.run.analysis.machine))


def _telemetry(context: PageContext) -> Telemetry | None:

    between = None
    if context.scope.steps is not None:
        steps = context.run.tables.steps.drop_nulls(["start_ns", "wall_ns"])
        if not steps.is_empty():
            ends = (steps["start_ns"] + steps["wall_ns"]).max()
            between = (int(steps["start_ns"].min()) - AROUND_NS, int(ends) + AROUND_NS)  # type: ignore[arg-type]
    limit = EMBEDDED_POINTS if context.embedded else POINTS
    return telemetry(context.run.tables, labelled(context), limit, between)


def _about(found: Telemetry) -> Block:
    text = f"{found.readings:,} readings"
    if found.bucket_s is not None:
        text += f"; each point is the mean of {words.seconds(found.bucket_s)}"
    if found.dropped:
        text += f"; {found.dropped} further series are left out"
    if len(found.hosts) > 1:
        text += f"; of {len(found.hosts)} hosts"
    return blocks.text(f"{text}. Times are since the start of the run.", "note")


def _step_chart(found: Telemetry) -> Iterator[Block]:
    if len(found.step_ms) < 2:
        return
    longest = max(range(len(found.step_ms)), key=lambda at: found.step_ms[at])
    yield blocks.drawn(
        "steps-over-time",
        "Step time",
        "line",
        f"Steps of {found.step_process} over time; the longest takes "
        f"{words.milliseconds(found.step_ms[longest])}, {words.seconds(found.step_time_s[longest])} in.",
        ("time since the start", "s", found.step_time_s),
        ("time of the step", "ms"),
        [("step time", found.step_ms, "wall")],
        ("Telemetry", "step_ms"),
        sync=SYNC,
        small=True,
    )


def _charts(found: Telemetry) -> Iterator[Block]:
    of_values = blocks.meaning("TelemetrySeries", "values")
    for chart in CHARTS:
        declared = {name: rest for name, _, rest in (each.partition(" ") for each in chart.metrics.split("; "))}
        shown = [one for one in found.series if one.metric in declared and (not chart.quiet or any(one.values))]
        if not shown:
            continue
        several = len({one.subject for one in shown}) > 1
        made = []
        for one in shown:
            role, _, label = declared[one.metric].partition(" ")
            name = f"{one.subject}: {label}" if several and label else label or one.subject
            made.append(blocks.series(name, chart.unit, one.values, role=role if role and not several else None))
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
            help=blocks.help_(chart.help, "utilisation" if chart.help == USE else None) if chart.help else of_values,
            sync=SYNC,
            small=True,
        )


def _energy(context: PageContext, energy: EnergyFacts | None) -> Iterator[Block]:
    """What the run drew and what that cost, by device; why nothing was read in one line."""
    if energy is None:
        return
    said = list(sentences.energy(context.base.report(source=context.source)))
    yield from (blocks.text(text) for text in said)
    if not said:
        yield blocks.text(f"Energy: not measured: {energy.absent}", "note")
        return
    rows = [asdict(one) for one in energy.domains]
    notes = [blocks.sentence(note) for note in energy.notes]
    domains = blocks.rows_table(context, "energy", "Energy by device", "EnergyDomain", _ENERGY, rows, notes=notes)
    yield from blocks.folded(domains)
    yield from (blocks.text(blocks.sentence(text), "warning") for text in energy.warnings)


def _groups(machine: MachineFacts) -> Iterator[tuple[str, object, str]]:
    """(title, record, figures) of each part of the machine's facts that is there."""
    for title, record, figures in (
        ("How training shared its cores", machine.cpu, _CPU),
        ("Threads of a training process", machine.cpu and machine.cpu.pool, _POOL),
        ("Pauses for garbage collection", machine.pauses, _PAUSES),
        ("Memory pressure", machine.memory, _MEMORY),
        ("Storage", machine.storage, _STORAGE),
        ("Nodes of memory", machine.numa, _NUMA),
    ):
        if record is not None and any(getattr(record, each.key) for each in blocks.columns(figures)):
            yield title, record, figures


def _machine(context: PageContext, machine: MachineFacts) -> Iterator[Block]:
    for title, record, figures in _groups(machine):
        yield blocks.figures(blocks.measures(record, figures), title)
    if machine.pauses is not None:
        lines = [{**asdict(line), "place": asdict(line.place)} for line in machine.pauses.lines]
        title = "Lines at which collections struck"
        yield from blocks.rows_table(context, "pauses", title, "PauseLine", _PAUSE_LINE, lines)
    gpus = [asdict(gpu) for gpu in machine.gpus]
    yield from blocks.rows_table(context, "gpu-clocks", "Clocks of GPUs", "GpuClocks", _GPU, gpus)
    if machine.storage is not None and machine.storage.mounts:
        mounts = machine.storage.mounts
        facts = [blocks.fact(f"{each.path} ({each.kind})", f"{each.files} files", each.source) for each in mounts]
        yield blocks.facts("File systems that data is read from", facts)
