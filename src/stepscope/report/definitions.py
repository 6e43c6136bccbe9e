"""What each figure means, by record: the list behind docs/definitions.md, columns of tables, their legends and tooltips.

A figure is declared where its field is: in the last paragraph of the docstring of its record (`stepscope.model`), a
line for each, as `name: What it is.`, or `name (unit): What it is.` where the name does not say the unit (`UNITS`);
without either it is a count. `python -m stepscope.report.definitions` prints docs/definitions.md; a test keeps page and records equal, and the
declarations complete.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache, cached_property

from msgspec import Struct

from stepscope.model import (
    comparison,
    compilers,
    device_losses,
    findings,
    machine,
    memory,
    metrics,
    run_facts,
    sampled,
    timeline,
    trace,
    views,
)

UNITS = {  # by a word of a figure's name
    **{word: word for word in ("ns", "ms", "s", "bytes", "share", "cores", "ratio")},
    "seconds": "s",
    "pct": "percent",
    "shares": "share",
    "fraction": "share",
    "mhz": "MHz",
    "w": "W",
    "c": "C",
}
_FIGURE = re.compile(r"(\w+)(?: \(([^)]+)\))?: (.+)")


class Definition(Struct, frozen=True):
    """`unit` in words ("ns", "bytes", "percent", "share", "count"); `definition` in whole sentences."""

    unit: str
    definition: str


class Section(Struct, frozen=True, dict=True):
    """The figures of `described`: a record of the model, or a text that names and declares them as its docstring does.

    `where` is their place in report.json, `tables` those of `analyze --table` that hold them.
    """

    described: type | str
    title: str
    where: str
    tables: tuple[str, ...] = ()
    about: str = ""

    @property
    def record(self) -> str:
        """The name of the record, or what stands first in the text."""
        return self.described.partition("\n")[0] if isinstance(self.described, str) else self.described.__name__

    @cached_property
    def definitions(self) -> Mapping[str, Definition]:
        """By name, in the order they are shown."""
        return figures(self.described if isinstance(self.described, str) else self.described.__doc__ or "")


@cache
def figures(text: str) -> Mapping[str, Definition]:
    """The figures that the last paragraph of a docstring declares, if that is what it does."""
    last = inspect.cleandoc(text).rpartition("\n\n")[2]
    found = [_FIGURE.fullmatch(line) for line in re.sub(r"\n +", " ", last).split("\n")]
    if not all(found):
        return {}
    ending = ((match[1], match[2], match[3]) for match in found if match)
    return {name: Definition(unit or _unit(name), definition) for name, unit, definition in ending}


def _unit(name: str) -> str:
    if name.endswith(("per_s", "per_second")):
        return "bytes/s" if "bytes" in name else "1/s"
    return next((UNITS[word] for word in name.split("_") if word in UNITS), "count")


def definition(table: str, key: str) -> Definition | None:
    """The meaning of a column of a table of `analyze --table`; None for names and texts."""
    return _first(key, (section for section in SECTIONS if table in section.tables))


def definition_of(record: str, key: str) -> Definition | None:
    """The meaning of a figure of a record by the record's name ("StepFacts"), None of what is no figure."""
    return _first(key, (section for section in SECTIONS if section.record == record))


def _first(key: str, sections: Iterator[Section]) -> Definition | None:
    return next((section.definitions[key] for section in sections if key in section.definitions), None)


# figures that are no field of a record
_REGIONS = """regions

calls: Times the range was entered in the steps looked at.
calls_per_step: The same by steps.
ms_per_step: Time in it in a step, on the host's clock; ranges in ranges count in both.
"""
_SYSTEM = """system

system (in the name): Means and peaks of telemetry in the run; each name carries its unit: docs/run_folder.md says
    where each reading comes from.
"""
_CURVE_POINT = """CurvePoint

step: Whose interval holds the time; missing where none does.
time_ns: When it was kept, on the epoch clock.
since_start_ns: The same since the start of the run.
value (in unit): In the unit that the name ends in; NaN and infinities are values, which JSON holds as "nan", "inf" and
    "-inf".
"""
_COUNTER_POINT = """CounterPoint

value (in unit): Mean over the bucket. utilization_pct and sm_efficiency_pct as of GPUs; queue_length: launches that
    have begun and whose first device slice has not; copy_bytes_per_s: bytes of copies, spread evenly over their time,
    all directions together.
time_ns: Beginning of the bucket, since the epoch.
since_start_ns: The same since the first bucket.
"""
_CAUSES_AS_A_TABLE = """causes as a table

definition_line: Line where the compiled function begins.
call_line: Line of your code that called it.
"""
_METRICS_AS_A_TABLE = "metrics as a table\n\n" + "\n".join(
    f"p{percent} (as `unit`): {percent} percent of the last samples are at most this."
    for percent in (1, 5, 10, 20, 50, 80, 90, 95, 99)
)
_MEMORY_POINT = """MemoryPoint

time_ns: The moment.
since_start_ns: The same since the first of the curve.
allocated_bytes: In use then.
reserved_bytes: Held by the allocator then.
"""
_CONDITIONS = """Conditions

cores: Cores the run may use: affinity, cut by the cgroup's quota.
others_cores: Of these, in use by others or taken by a hypervisor. The recorder itself is among the others.
run_delay_share: Of the time, in which a rank's main thread could run and had no core.
read_bytes_per_step: What training processes and loader workers brought from storage, by steps.
major_faults_per_step: Their page faults that read a disk, by steps.
minor_faults_per_step: Pages that the measured steps had the system map; mean, by the journal.
cpu_frequency_mhz: Mean clock of the CPU.
gpu_clock_mhz: Mean clock of the run's GPUs while they were not idle.
"""
_STEP_PARTS = "StepParts\n\n" + "\n".join(
    (
        *(f"{name}_ns: Time in the step: {text}." for name, text in views.PARTS.items()),
        *(
            f"tensorboard_{part.lower().replace(' ', '_')}_ns: Time in the step by the plugin's order, first match: {text}."
            for part, text in views.PLUGIN_PARTS.items()
        ),
    )
)

_BOTH = "compare --json, experiment.json"
_MEMORY_LOSSES = "risks, and findings of memory.allocator_retries"
_DEVICE_LOSSES = "findings of the rules on devices (sync, launch, transfer, compute, communication)"
_REPLAYS = "ceilings of findings on devices and of the loader in traces"
_NEEDLESS = "not in the report; behind rules on the host, on precision and on the backward pass"
_RANKS = "not in the report; behind the communication rules"
_TIMELINE = "not in the report; the timeline of `stepscope view`"

SECTIONS: tuple[Section, ...] = (
    Section(run_facts.RunFacts, "The run", "run"),
    Section(run_facts.FrameworkFacts, "The training framework", "run.framework"),
    Section(run_facts.StepFacts, "Steps", "steps, views.steps_by_kind"),
    Section(
        run_facts.ProfiledFacts,
        "Profiled steps",
        "views.profiled; said beside every table and page of operators, kernels and modules",
    ),
    Section(run_facts.PartitionPart, "Parts of the step", "steps.partition"),
    Section(run_facts.FixedCosts, "Paid once", "views.fixed_costs, steps.fixed_cost_s"),
    Section(findings.Unexplained, "What nobody explained", "unexplained"),
    Section(findings.UnexplainedPart, "What nobody explained: a part", "unexplained.parts"),
    Section(findings.Finding, "Findings", "findings"),
    Section(findings.Diagnosis, "All findings together", "views.findings_share"),
    Section(findings.Interval, "Expected gain", "findings[].expected_gain"),
    Section(findings.Place, "Places", "where, place"),
    Section(run_facts.Quality, "Quality of the recording", "quality.counts"),
    Section(trace.TraceFacts, "Quality of a trace", "quality.traces"),
    Section(trace.ReadingFacts, "Quality of all traces together", "quality.reading"),
    Section(run_facts.StackFacts, "Sampled stacks", "views.stacks"),
    Section(run_facts.HotLine, "Sampled lines", "views.stacks.hot_lines, views.loader.lines"),
    Section(run_facts.LoaderFacts, "Loader", "views.loader"),
    Section(run_facts.BatchContent, "What a batch of the loader holds", "views.loader.batch"),
    Section(run_facts.LoopFacts, "Python loops over items", "views.loops"),
    Section(run_facts.IoFacts, "Files in the step", "views.io"),
    Section(run_facts.PythonFacts, "Python on the main thread", "views.python"),
    Section(run_facts.WindowFacts, "Profiler windows", "views.windows"),
    Section(run_facts.Site, "Where things were made", "views.sites"),
    Section(run_facts.ProcessFacts, "Processes", "views.processes"),
    Section(_REGIONS, "Regions", "views.regions"),
    Section(_SYSTEM, "Telemetry", "views.system"),
    Section(trace.DeviceTime, "Device time by kind", "views.device_time"),
    Section(trace.DeviceLines, "Device time by line of your code", "views.device_lines"),
    Section(trace.DeviceLine, "A line's device time", "views.device_lines.lines"),
    Section(trace.SpanRef, "Worker and span", "views.*.span"),
    Section(
        views.Overview,
        "Overview",
        "views.overview",
        about="`wall`, `plugin` and `parts` are summaries over the steps. `parts` is our partition, `plugin` that "
        "of the TensorBoard plugin; each is exclusive, in the order of the two lists below, and sums to the "
        "step. `basis` is `device`, or `host` for a trace without device work, whose time is no idle time of "
        "a device. What the host did while devices were idle is no proof that the gap goes with it. Idle "
        "means that no device of the trace works.",
    ),
    Section(views.Summary, "Overview: a part over the steps", "views.overview[].wall, .parts, .plugin", ("overview",)),
    Section(views.StepBreakdown, "Overview: each step", "views.overview[].steps", ("steps",)),
    Section(
        _STEP_PARTS,
        "Overview: the parts of a step",
        "views.overview[].steps[].parts_ns, .plugin_ns",
        ("steps",),
        about="Of each moment the first part that fits, in this order. In `report.json` the parts are keys without "
        "`_ns`.",
    ),
    Section(trace.GpuProperties, "GPUs: what they are", "views.gpus[].gpu", ("gpus",)),
    Section(views.GpuSummary, "GPUs: how well they are used", "views.gpus", ("gpus",)),
    Section(views.Counter, "Counters over time", "views.counters", ("counters",)),
    Section(_COUNTER_POINT, "Counters over time: a bucket", "analyze --table counters", ("counters",)),
    Section(
        views.OperatorRow,
        "Operators",
        "views.operators",
        ("operators",),
        about="`tensor_core_eligible` says that the operator, or one it called, can end in a matrix product; not "
        "that its types and sizes suit. `place` is the line of yours that most of its device self time comes "
        "from (of the host's where there is none), `place.share` its part of that time; `place_exact` that it "
        "is the calling line and not where the function begins.",
    ),
    Section(views.CallStack, "Call stacks behind an operator", "analyze --table stacks", ("stacks",)),
    Section(views.KernelRow, "Kernels", "views.kernels", ("kernels",)),
    Section(sampled.Hotspots, "Hotspots", "`stepscope hotspots --json`"),
    Section(sampled.HotspotRow, "Hotspots: each", "`stepscope hotspots --json`, `rows`"),
    Section(sampled.SampledProcess, "Hotspots: processes", "`stepscope hotspots --json`, `processes`"),
    Section(sampled.LoaderWait, "Waiting for the loader", "views.sampled.waits"),
    Section(sampled.WaitPart, "Parts of a wait", "views.sampled.waits.parts"),
    Section(sampled.SlowSteps, "Slow steps", "views.sampled.slow_steps"),
    Section(sampled.SlowLine, "Lines of slow steps", "views.sampled.slow_steps.lines"),
    Section(sampled.RankLines, "Ranks against each other", "views.sampled.rank_lines"),
    Section(sampled.RankLine, "Lines in which ranks differ", "views.sampled.rank_lines.lines"),
    Section(sampled.SampledViews, "Phases of the sampled loop", "views.sampled"),
    Section(sampled.StageTime, "Stages of the run", "views.sampled.stages"),
    Section(sampled.FlameTree, "Flame graphs", "`stepscope flamegraph`"),
    Section(sampled.FlameGraph, "Flame graphs: all trees", "`stepscope flamegraph`"),
    Section(sampled.FlameFrame, "Flame graphs: frames", "`stepscope flamegraph`"),
    Section(compilers.CompilerFacts, "Compilers: each backend", "`views.compilers`, `backends`"),
    Section(
        compilers.CompilerCause,
        "Compilers: each cause",
        "`views.compilers`, `causes`",
        ("compiles", "graph-breaks", "transfers"),
    ),
    Section(
        compilers.Change,
        "Compilers: what changed",
        "`views.compilers`, `causes`, `changes`",
        about="`old` is what the compiled version expected, `new` what came, as the compiler writes them.",
    ),
    Section(
        _CAUSES_AS_A_TABLE,
        "Compilers: causes as a table",
        "columns of tables only",
        ("compiles", "graph-breaks", "transfers"),
    ),
    Section(compilers.CompilerSteps, "Compilers: steps by kind", "`views.compilers`, `steps`", ("compile-steps",)),
    Section(compilers.CompilerPoint, "Compilers: each step", "`views.compilers`, `points`", ("compile-steps",)),
    Section(
        compilers.CompilerMetric, "Compilers: metrics of torch_xla", "`views.compilers`, `metrics`", ("xla-metrics",)
    ),
    Section(_METRICS_AS_A_TABLE, "Compilers: percentiles as a table", "columns of tables only", ("xla-metrics",)),
    Section(compilers.CompilerWarning, "Compilers: warnings in torch_xla's words", "`views.compilers`, `warnings`"),
    Section(compilers.CompileStorm, "Compilers: how often", "`views.compilers`, `storms`"),
    Section(compilers.EagerAfterLimit, "Compilers: after the limit", "`views.compilers`, `limits`"),
    Section(memory.MemoryView, "Memory", "views.memory"),
    Section(memory.MemoryCurve, "Memory over time", "views.memory.curves", ("memory", "memory-curve")),
    Section(_MEMORY_POINT, "Memory over time: a moment", "analyze --table memory-curve", ("memory-curve",)),
    Section(memory.MemoryOperator, "Memory by operator", "views.memory.operators", ("memory-operators",)),
    Section(memory.MemoryLine, "Memory by line of your code", "views.memory.lines", ("memory-lines",)),
    Section(memory.MemoryBlock, "Memory: largest allocations", "views.memory.blocks", ("memory-blocks",)),
    Section(memory.MemoryState, "Memory when a snapshot was taken", "views.memory.states", ("memory-states",)),
    Section(memory.OutOfMemory, "Allocations that failed", "views.memory.out_of_memory", ("out-of-memory",)),
    Section(findings.Risk, "Risks", "risks"),
    Section(memory.MemoryGrowth, "Memory that grows with the steps", _MEMORY_LOSSES),
    Section(memory.GrowthLine, "Memory that grows: a line's part", _MEMORY_LOSSES),
    Section(memory.MemoryLimit, "The limit of memory that holds for a process", _MEMORY_LOSSES),
    Section(memory.MemoryPeak, "The most memory held of a device", _MEMORY_LOSSES),
    Section(memory.RetryFacts, "Steps with retries of the allocator", _MEMORY_LOSSES),
    Section(views.ModuleTree, "Modules", "views.modules"),
    Section(views.ModuleNode, "Modules: each", "views.modules.nodes", ("modules",)),
    Section(views.CollectiveRow, "Collectives of each rank", "views.communication", ("communication",)),
    Section(views.WorkerShare, "Workers: a mean step of each", "views.distributed.workers", ("distributed",)),
    Section(
        views.CollectiveOverWorkers,
        "Workers: collectives",
        "views.distributed.collectives",
        ("distributed-collectives",),
    ),
    Section(views.Distributed, "Workers together", "views.distributed"),
    Section(
        views.DiffRow,
        "Differences",
        "analyze --diff",
        ("diff",),
        about="A difference tells what changed, not whether it is more than noise. Values are per step where both "
        "sides know their steps, else totals. In the tree, steps are laid over each other and their parts "
        "matched in order by type and name; what finds no partner stands under `not matched`.",
    ),
    Section(machine.PauseFacts, "Garbage collections", "findings of system.garbage_collection"),
    Section(machine.PauseLine, "Garbage collections: a line", "findings of system.garbage_collection"),
    Section(machine.ChildrenFacts, "Processes of the script", "findings of system.children_hold_cores"),
    Section(
        machine.Child, "Processes of the script: alike in command and line", "findings of system.children_hold_cores"
    ),
    Section(machine.CpuFacts, "Cores", "findings of system.threads_beyond_cores and its neighbours"),
    Section(machine.MemoryPressureFacts, "Memory pressure", "findings of system.swapping_or_faults"),
    Section(machine.PageFaultFacts, "Page faults", "findings of memory.page_faults"),
    Section(machine.DriftFacts, "Drift of steps", "findings of host.step_drift"),
    Section(machine.DriftLine, "Drift of steps: a line", "findings of host.step_drift"),
    Section(machine.ProfilerFacts, "The script's own profiler", "findings of system.profiler_overhead"),
    Section(machine.EpochFacts, "Workers started for every epoch", "findings of input.first_batch"),
    Section(machine.WaveFacts, "Waves of waiting", "findings of input.prefetch_waves"),
    Section(machine.TraceLoader, "The loader of a trace", "findings of input.loader_bound"),
    Section(device_losses.DeviceLosses, "Devices: what profiled steps lose", _DEVICE_LOSSES),
    Section(device_losses.Loss, "Devices: one kind of loss", _DEVICE_LOSSES),
    Section(device_losses.LossLine, "Devices: a line's part of a loss", _DEVICE_LOSSES),
    Section(device_losses.Replay, "Devices: profiled steps played again", _REPLAYS),
    Section(device_losses.WhatIf, "Devices: profiled steps without one loss", _REPLAYS),
    Section(sampled.CallerLine, "Callers", "views.sampled.callers; behind `explains` of findings"),
    Section(
        device_losses.PassFacts,
        "Needless work: the training steps of a run's traces",
        _NEEDLESS,
        about="Times are wall time lost: without a device the host's, less what recording adds (the excess of the "
        "profiled step over the steady one, up to 1 us for each slice); on a device the time in which nothing "
        "else ran, and idle time while the host prepared it.",
    ),
    Section(device_losses.ExtraCall, "Needless work: calls of a trained module that train nothing", _NEEDLESS),
    Section(device_losses.ModelCopy, "Needless work: copies of the model", _NEEDLESS),
    Section(device_losses.Doubles, "Needless work: float64", _NEEDLESS),
    Section(device_losses.Recompute, "Needless work: forward operators run again in the backward pass", _NEEDLESS),
    Section(
        device_losses.WideGradients, "Needless work: whole tensors of zeros for the gradients of small parts", _NEEDLESS
    ),
    Section(device_losses.PassLine, "Needless work: a line's part", _NEEDLESS),
    Section(machine.RanksFacts, "Ranks side by side", _RANKS),
    Section(machine.RankWork, "Ranks side by side: each", _RANKS),
    Section(
        machine.Pipeline,
        "What steps wait for and share",
        "not in the report; behind ceilings of input, host, io and communication rules",
    ),
    Section(machine.RankWait, "What steps wait for: each rank", "not in the report; as above"),
    Section(run_facts.FileReads, "Files the loader reads", "views.loader.files"),
    Section(
        metrics.CurveSummary,
        "Curves of a run",
        "views.metrics.series; the dashboard's page of metrics; --group curve",
        ("metrics",),
        "In the report at most 100 that are stored, by name; `--table metrics` has every value of all.",
    ),
    Section(metrics.NonFinite, "What the run learned: the first value that is not finite", "views.metrics.non_finite"),
    Section(metrics.Spike, "What the run learned: spikes", "views.metrics.spikes"),
    Section(
        metrics.LevelChange,
        "What the run learned: another level",
        "views.metrics.changes",
        about="Of the loss, the gradient norm, the time of a step, samples per second, and the memory held.",
    ),
    Section(
        metrics.Happening,
        "What happened in the same steps",
        "views.metrics: happenings",
        about="What stands in the same steps need not be the cause. What is met in one of five stretches of such a "
        "length is left out.",
    ),
    Section(metrics.Clipping, "What the run learned: clipping", "views.metrics.clipping"),
    Section(metrics.Scaling, "What the run learned: GradScaler", "views.metrics.scaling"),
    Section(metrics.Accumulation, "What the run learned: several passes of an update", "views.metrics.accumulation"),
    Section(metrics.Watched, "What the run learned: watched", "views.metrics.zeros, .update_ratios"),
    Section(metrics.LoggingCost, "What logging takes", "views.logging"),
    Section(comparison.TrialFacts, "Knobs and seed of a run", "views.trial"),
    Section(comparison.AppliedKnob, "What became of a knob", f"views.trial.knobs, {_BOTH}"),
    Section(
        comparison.Measure,
        "A measured run",
        _BOTH,
        about="With traces of others the steps are those of `ProfilerStep`, none is dropped, and figures without a "
        "source are missing.",
    ),
    Section(comparison.SteadyStep, "The steady step of a measured run", _BOTH),
    Section(comparison.PhaseTime, "Parts of a measured step", _BOTH),
    Section(_CONDITIONS, "The machine during the measured steps", f"{_BOTH}: conditions"),
    Section(comparison.Effect, "An effect", _BOTH),
    Section(comparison.Verdict, "A verdict", _BOTH),
    Section(comparison.PhaseEffect, "What a phase changed by", _BOTH),
    Section(comparison.Equivalence, "Whether a candidate trains alike", _BOTH),
    Section(comparison.Change, "A change between two sides", "compare --json: changes"),
    Section(comparison.SideFacts, "A side of a comparison", "compare --json"),
    Section(comparison.Candidate, "A candidate", "experiment.json"),
    Section(comparison.ByHand, "A loss that no knob reaches", "experiment.json"),
    Section(comparison.Protocol, "How candidates are measured", "experiment.json"),
    Section(comparison.MainEffect, "What a knob does on average", "experiment.json"),
    Section(comparison.Noise, "What this machine can show", "experiment.json"),
    Section(comparison.Experiment, "An experiment", "experiment.json"),
    Section(machine.PoolFacts, "Threads of a training process", "findings of system.threads_beyond_cores"),
    Section(machine.GpuClocks, "Clocks of GPUs", "findings of system.gpu_clocks"),
    Section(machine.StorageFacts, "Storage", "evidence of findings of input.loader_bound"),
    Section(machine.StorageMount, "Storage: a file system", "evidence of findings of input.loader_bound"),
    Section(machine.NumaFacts, "Nodes of memory", "evidence of findings on cores and clocks"),
    Section(timeline.StepPhases, "Steps one by one", "the dashboard's page of steps"),
    Section(timeline.StepDistribution, "Distribution of step times", "the dashboard's page of steps"),
    Section(timeline.ProcessSteps, "Steps of each process", "the dashboard's page of steps"),
    Section(timeline.StepEvent, "Events in a step", "the dashboard's page of steps"),
    Section(timeline.LongStep, "The longest steps", "the dashboard's page of steps"),
    Section(timeline.TelemetrySeries, "Telemetry over time", "the dashboard's page of the system"),
    Section(timeline.Telemetry, "Telemetry over time: the axis", "the dashboard's page of the system"),
    Section(_CURVE_POINT, "Curves of a run: a value", "not in the report", ("metrics",)),
    Section(timeline.TimelineTrack, "Timeline: tracks", _TIMELINE),
    Section(timeline.TimelineStep, "Timeline: steps", _TIMELINE),
    Section(timeline.TimelineWindow, "Timeline: a window", _TIMELINE),
    Section(timeline.TrackSlices, "Timeline: slices of a window", _TIMELINE),
    Section(timeline.SliceDetail, "Timeline: one slice", _TIMELINE),
    Section(timeline.SliceFact, "Timeline: more about a slice", _TIMELINE),
    Section(timeline.SliceRef, "Timeline: slices that belong to another", _TIMELINE),
    Section(timeline.SearchHit, "Timeline: found by a search", _TIMELINE),
    Section(timeline.SearchResult, "Timeline: a search", _TIMELINE),
)


_HEAD = """# What each figure means

Every figure stepscope shows, by where it stands in `report.json`; tables of `stepscope analyze --table NAME` have the same
names (`--define` prints the meaning below a table). Names end in their unit. A `share` is a fraction from 0 to 1, a `pct` a
percentage from 0 to 100. A figure whose source is missing is null, never 0. This page is made by
`python -m stepscope.report.definitions`, and a test keeps it complete.
"""


def page() -> str:
    """docs/definitions.md."""
    return _HEAD + "".join(f"\n{line}" if line.startswith("#") else line for line in _lines())


def _lines() -> Iterator[str]:
    for section in SECTIONS:
        tables = ", ".join(f"`--table {name}`" for name in section.tables)
        yield f"## {section.title}\n"
        yield f"`{section.where}`" + (f"; {tables}\n" if tables else "\n")
        if section.about:
            yield f"\n{section.about}\n"
        yield "\n| figure | unit | meaning |\n|---|---|---|\n"
        for name, found in section.definitions.items():
            definition = found.definition.replace("|", "\\|")
            yield f"| `{name}` | {found.unit} | {definition} |\n"


if __name__ == "__main__":
    print(page(), end="")
