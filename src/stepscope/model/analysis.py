"""All facts of a run in one bundle, and the document every surface renders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from stepscope.model.run_facts import (
    FixedCosts,
    IoFacts,
    LoaderFacts,
    LoopFacts,
    ProcessFacts,
    ProfiledFacts,
    PythonFacts,
    Quality,
    RunFacts,
    Settings,
    Site,
    SourceFiles,
    StackFacts,
    StepFacts,
    WindowFacts,
)
from stepscope.model.trace import DeviceLines, DeviceTime, ReadingFacts, TraceFacts
from stepscope.schema import REPORT_SCHEMA

if TYPE_CHECKING:
    from stepscope.model.comparison import TrialFacts
    from stepscope.model.compilers import CompilersView
    from stepscope.model.device_losses import DeviceLosses, PassesFacts, Replay
    from stepscope.model.machine import MachineFacts
    from stepscope.model.memory import MemoryLosses
    from stepscope.model.ranks import Pipeline, RanksFacts
    from stepscope.model.sampled import SampledViews
    from stepscope.model.views import Views


@dataclass(frozen=True)
class Analysis:
    """All facts of a run. A part is None when its source is missing; nothing here is a guess without a note."""

    run: RunFacts
    quality: Quality
    steps: tuple[StepFacts, ...]  # one per kind, "train" first
    fixed: FixedCosts
    stacks: StackFacts | None
    loader: LoaderFacts | None
    loops: tuple[LoopFacts, ...] | None
    io: tuple[IoFacts, ...] | None
    windows: tuple[WindowFacts, ...]
    sites: tuple[Site, ...]
    processes: tuple[ProcessFacts, ...]
    system: dict[str, Any] = field(default_factory=dict)  # summary of telemetry, units in the names
    regions: tuple[dict[str, Any], ...] = ()  # {"name", "calls", "calls_per_step", "ms_per_step", "source"}
    python: tuple[PythonFacts, ...] | None = None  # needs stacks; None without them
    devices: tuple[str, ...] = ()  # kinds of device the ranks trained on, "cpu" included
    traces: tuple[TraceFacts, ...] = ()
    reading: ReadingFacts | None = None  # of all traces; None without any
    device_time: tuple[DeviceTime, ...] = ()  # two per trace with device slices, one per scope
    device_lines: DeviceLines | None = None  # operator time of the host where no trace holds device slices
    profiled: ProfiledFacts | None = None  # the steps that the views of traces are of; None where a trace names none
    views: Views | None = None  # of traces and recordings of memory
    sampled: SampledViews | None = None  # what sampled stacks say beyond hot lines; None without any
    device_losses: tuple[DeviceLosses, ...] = ()  # of profiled steps with device work, one for each run
    replays: tuple[Replay, ...] = ()  # of the same steps, one for each run whose traces can be replayed
    compilers: CompilersView | None = None  # of torch.compile and torch_xla; None where neither was used
    ranks: RanksFacts | None = None  # steady steps of several ranks side by side; None for one
    memory_losses: MemoryLosses | None = None  # growth, peaks and retries; None where nothing tells of memory
    passes: PassesFacts | None = None  # work of training steps that is not needed; None without traces and stacks
    pipeline: Pipeline | None = None  # what the steps wait for and share; None without training steps
    machine: MachineFacts | None = None  # pauses, cores, drift, profilers, the loader's rhythm
    settings: Settings | None = None  # of the training framework; None where none was seen to be told any
    trial: TrialFacts | None = None  # knobs, seed and losses; None of a run without any of them
    source_files: SourceFiles = field(default_factory=SourceFiles)


class Report(Struct, frozen=True):
    """The one document every surface renders: `report.json` is this, key for key."""

    run: dict[str, Any]
    quality: dict[str, Any]
    steps: dict[str, Any] | None
    findings: tuple[dict[str, Any], ...]
    abstained: tuple[dict[str, Any], ...]
    ignored: tuple[dict[str, Any], ...]
    views: Mapping[str, Any]  # those that nobody asks for need not be made
    schema: str = REPORT_SCHEMA
    risks: tuple[dict[str, Any], ...] = ()  # without a measured cost, so not among the findings
    unexplained: dict[str, Any] | None = None  # what of the step nobody explained; None without training steps
