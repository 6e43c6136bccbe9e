"""What is measured of a recorded run, one struct per question; all facts in one bundle, and the report made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from stepscope.model.findings import Place
from stepscope.model.ranks import HangVerdict, RanksRead, RanksVerdict
from stepscope.model.trace import DeviceLines, DeviceTime, ReadingFacts, TraceFacts
from stepscope.schema import REPORT_SCHEMA

if TYPE_CHECKING:
    from stepscope.model.comparison import TrialFacts
    from stepscope.model.compilers import CompilersView
    from stepscope.model.device_losses import DeviceLosses, PassesFacts, Replay
    from stepscope.model.machine import EnergyFacts, MachineFacts, Pipeline, RanksFacts
    from stepscope.model.memory import MemoryLosses
    from stepscope.model.metrics import LoggingCost, MetricFacts
    from stepscope.model.sampled import SampledViews
    from stepscope.model.views import Views


class FrameworkFacts(Struct, frozen=True):
    """The training framework whose loop ran, recognised by its own modules' names (`docs/frameworks.md`).

    steps_counted: What the framework's own counter grew by over the training steps that have it; missing without any.
    steps_cut: The same by the recorder: training steps, or their batches where it counts batches.
    parted_at: The first step in which the two differ.
    """

    name: str
    package: str
    version: str | None
    supported: bool  # the seams were read in this version
    checked: tuple[str, ...]  # versions they were read in
    seams: tuple[str, ...]  # "meaning: Class.method", those that were found
    missing: tuple[str, ...]
    counter: str | None  # where the framework keeps its number of steps; None: it keeps none
    counts: str | None  # "updates", "batches" or "optimizer steps"
    trainer: str  # the class that trains
    on_top: tuple[str, ...] = ()  # "trl 1.16.0"
    also: tuple[str, ...] = ()  # further frameworks that trained in the run
    cut_by: str | None = None  # what cut the training steps: `StepFacts.signal`
    steps_counted: int | None = None
    steps_cut: int | None = None
    parted_at: int | None = None


class JobStep(Struct, frozen=True):
    """A job or a step of it, in one of its attempts, as the scheduler's accounting has it.

    id (text): As SLURM writes it: 17 is the job, 17.0 its first step.
    state (text): How it stands or ended: COMPLETED, NODE_FAIL, OUT_OF_MEMORY ...
    exit_status: What it ended with; missing where the accounting has none.
    exit_signal: The signal that ended it; 0 where none did.
    max_rss_bytes: Memory of the largest of its tasks; missing where it was not measured.
    max_rss_node (text): Where that task ran.
    nodes (text): Where it ran.
    elapsed_s: How long it took.
    """

    id: str
    state: str
    exit_status: int | None = None
    exit_signal: int | None = None
    max_rss_bytes: int | None = None
    max_rss_node: str = ""
    nodes: str = ""
    elapsed_s: float | None = None


class JobFacts(Struct, frozen=True):
    """The job of a scheduler, or of a launcher such as torchrun, that the run was recorded in.

    `topology` says by node where it lies in the network, from the top down, where SLURM tells it; `topology_pattern`
    what each part is. `absent` says why there is no accounting, and is empty where there is.

    id (text): The job's number; missing outside of SLURM.
    step (text): The step's; missing in a batch script.
    attempt: How often it had been started before.
    members: Tasks that the step has.
    nodes (text): Names of the job's nodes, the list expanded.
    requeues: Attempts of the job before its last one; missing without accounting.
    node_failures: Attempts of the job that ended by the failure of a node; missing without accounting.
    steps: The job and its steps; of every attempt.
    """

    kind: str
    id: str | None
    step: str | None
    attempt: int
    members: int | None
    cluster: str = ""
    partition: str = ""
    nodes: tuple[str, ...] = ()
    topology: dict[str, str] = {}
    topology_pattern: str = ""
    requeues: int | None = None
    node_failures: int | None = None
    steps: tuple[JobStep, ...] = ()
    absent: str = ""


class RunFacts(Struct, frozen=True):
    """What ran, where, and how it ended.

    started_ns: Start of the recording, since the epoch.
    ended_ns: Its end; missing where the recorder was killed.
    exit_status: What the command ended with, as a shell says it: 128 + n for signal n.
    ranks: Numbers of the training processes that were heard of.
    world_size: How many there should be, by the launcher's word.
    """

    folder: str
    name: str
    tags: tuple[str, ...]
    command: tuple[str, ...]
    cwd: str
    started_ns: int | None
    ended_ns: int | None
    exit_status: int | None
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    world_size: int | None
    versions: dict[str, str]
    hardware: dict[str, Any]
    noise: dict[str, Any]
    git: dict[str, Any] | None
    user_roots: tuple[str, ...]  # folders whose files are the user's own code
    source_hashes: dict[str, str] = field(default_factory=dict)  # see `SourceFiles`
    framework: FrameworkFacts | None = None  # None: a loop of the script's own
    job: JobFacts | None = None  # None: not started by a scheduler or launcher that says so


class SourceFiles(Struct, frozen=True):
    """Which of the files that a run names may be quoted: those below `roots`, and those whose content has its hash.

    `roots` are folders the reader named. `hashes` are SHA-256 in hexadecimal of what ran, by absolute path. `folders`
    held the code of the run: what is no longer there is looked for below `roots`.
    """

    roots: tuple[str, ...] = ()
    hashes: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()

    @staticmethod
    def agreed(hashes: Iterable[tuple[str, str]]) -> dict[str, str]:
        """By path, of (path, hash) pairs of several ranks or runs; one that differs between them holds for none."""
        found: dict[str, set[str]] = {}
        for file, hashed in hashes:
            found.setdefault(file, set()).add(hashed)
        return {file: hashed for file, (hashed, *others) in found.items() if not others}


class Note(Struct, frozen=True):
    """A statement about what was lost, repaired or not seen. `level` is "info" or "warning"."""

    level: str
    text: str
    source: str


class Quality(Struct, frozen=True):
    """Stated before any number: what was read, what was lost, who was not heard from.

    counts: Records read, lost, salvaged and missing, by kind. Missing is said, never made zero.
    """

    counts: dict[str, int]
    notes: tuple[Note, ...]


class PartitionPart(Struct, frozen=True):
    """One exclusive category of the mean step. All parts sum to the mean step, shares to 1.

    ms: Mean time of the part in a steady step, on the host's clock. The parts exclude each other and sum to the mean
        step. data_wait is time in the loader's `__next__`; of steps that ask no loader, before_forward is what lies
        before the first forward pass.
    share: The same by the mean step; the shares sum to 1.
    """

    category: str
    ms: float
    share: float


class StepFacts(Struct, frozen=True):
    """The steady steps of one kind of one run, mean over ranks where there are several. `signal` names what cut them.

    count: Steady steps: after warm-up, not the first batch of an epoch, outside profiler windows.
    mean_ms: Mean wall time of the steady steps, those of all ranks together.
    median_ms: Median of the same.
    p95_ms: 95th percentile of the same: one step in twenty takes longer.
    per_second: Steady steps per second: 1 by the mean.
    samples_per_second: Rows of the batches by wall time of the steps, summed over ranks.
    excluded: Steps left out of the statistics, by reason.
    first_batch_ms: Mean wall time of the first step of an epoch, which starts workers and fills queues.
    ranks: Ranks the figures are of.
    series (ms): (step, wall time) of the first rank, thinned so that stalls stay.
    by_rank: Steady steps of each of `ranks`; `count` is their sum.
    """

    kind: str
    count: int
    signal: str
    ranks: tuple[int, ...]
    mean_ms: float
    median_ms: float
    p95_ms: float
    per_second: float
    samples_per_second: float | None
    partition: tuple[PartitionPart, ...]
    excluded: dict[str, int]
    first_batch_ms: float | None
    low_confidence: bool
    series: tuple[tuple[int, float], ...]
    by_rank: tuple[int, ...] = ()


class ProfiledFacts(Struct, frozen=True):
    """The training steps that traces hold, as the views of traces count and time them.

    steps: Steps that the traces name and hold whole: what their totals are divided by.
    mean_ms: Their mean, as the overview cuts them: with the device work that they launched.
    steady_ms: The mean steady step outside of them; missing where every step was profiled.
    """

    steps: int
    mean_ms: float
    steady_ms: float | None


class FixedCosts(Struct, frozen=True):
    """Seconds a run pays once. None where the source was silent.

    total_s: What a run pays once, apart from steady steps: before the first step, warm-up and windows, as far as they
        are known; the first step counts only where no warm-up is known.
    before_first_step_s: From the start of the process to its first step: imports, data, model.
    first_step_s: The whole first step: allocation, compilation, autotuning.
    warmup_s: What the warm-up steps, the first one and what it compiles included, took beyond as many steady ones; mean
        over processes.
    windows_s: Stopping profiler windows and writing their traces, and what the steps in which the script's own profiler
        starts or stops took beyond steady ones; of the process that spent most.
    """

    total_s: float | None
    before_first_step_s: float | None
    first_step_s: float | None
    warmup_s: float | None
    windows_s: float | None


class HotLine(Struct, frozen=True):
    """Sampled time on one line of the user's code. `library_leaf` is the library function most often on top.

    line: Line in the file.
    self_samples: Samples in which this is the innermost line of the user's.
    share: Of the samples of main threads of the same role during steps.
    ms_per_step: Its share of the samples of the main thread times the mean step.
    waiting_share: Samples of the line in which the thread waited: for a lock, a file, a device.
    """

    file: str
    line: int
    function: str
    role: str  # "rank" | "loader_worker" | "other"
    phase: str
    self_samples: int
    share: float
    ms_per_step: float | None
    waiting_share: float | None
    library_leaf: str | None


class StackFacts(Struct, frozen=True):
    """What the sampled stacks say. `source` is "py-spy" or "agent" (slower, in-process).

    rate_hz (1/s): Samples a second: the median over segments of the main source.
    samples: Sampled stacks of all processes and threads.
    skipped: Samples torn or not parsed.
    steady_samples: Samples of the ranks' main threads in steps.
    by_phase: Steady samples of main threads, by phase of the step.
    """

    source: str
    rate_hz: float
    samples: int
    skipped: int
    steady_samples: int
    by_phase: dict[str, int]
    hot_lines: tuple[HotLine, ...]


class FileReads(Struct, frozen=True):
    """What opening and reading files takes of making batches, by `samples` stacks of it.

    share: Samples of making batches that stand in opening and reading files.
    samples: All samples of making batches.
    files_per_item: Files the training process opened in the window, by the items of its steps.
    """

    share: float
    samples: int
    files_per_item: float | None


class BatchContent(Struct, frozen=True):
    """What one batch of the loader holds, median of `batches` that were looked at while training.

    tensors: Tensors in a batch, median of the batches that were looked at.
    bytes: Their bytes; what a worker hands over.
    objects: Numbers, texts and containers in it.
    batches: Batches of the training loader that were looked at.
    per_step: Batches that a training step fetches.
    """

    tensors: float
    bytes: float
    objects: float
    batches: int
    per_step: float = 1.0


class LoaderFacts(Struct, frozen=True):
    """What is known of the DataLoader that feeds the training loop.

    The worker shares describe sampled worker time while the main process sat in data wait.

    num_workers: Worker processes of the DataLoader; 0 loads in the training process.
    batch_size: Rows of a batch.
    data_wait_ms: Mean time in the loader's __next__ in a steady step.
    data_wait_share: The same by the mean step.
    workers_busy_share: Sampled time the workers worked while the training process waited for data.
    workers_idle_share: Sampled time they waited meanwhile.
    cpu_limit: Cores the process may use: affinity or cgroup quota, whichever is less.
    suggested_workers: Workers suggested, from these cores.
    load_ms: Work to make the batches of one step, summed over workers.
    compute_ms: The step without its data wait.
    cores_used (count): Mean CPU use of the training process, in cores.
    samples: Sampled stacks the lines stand on.
    threads: Threads of torch on the CPU, where the script set them.
    ranks_on_host: Ranks that share the cores.
    """

    num_workers: int | None
    batch_size: int | None
    site: Place | None
    arguments: dict[str, Any]
    data_wait_ms: float
    data_wait_share: float
    in_main_process: bool
    lines: tuple[HotLine, ...]  # of the data set, collate_fn or transform, hottest first
    workers_busy_share: float | None
    workers_idle_share: float | None
    cpu_limit: float
    suggested_workers: int
    # the outermost user lines below the loader: `__getitem__`, collate_fn. Their shares include what they call.
    entries: tuple[HotLine, ...] = ()
    load_ms: float | None = None
    compute_ms: float | None = None
    cores_used: float | None = None
    # what a library does below the hottest of these lines, or below the loader where none is the user's: its functions
    # from where their ways part, as the transforms of a composition do
    library: tuple[Place, ...] = ()
    via: str | None = None  # the installed file that the site's line called and that made the loader, where one did
    samples: int = 0
    batch: BatchContent | None = None  # what a worker would hand over
    threads: int | None = None
    ranks_on_host: int = 1
    files: FileReads | None = None
    iterable: bool = False  # its data set gives items in an order of its own; every worker reads it from the start
    anew: bool = False  # an iterator for each batch, of which it would give more


class LoopFacts(Struct, frozen=True):
    """A Python loop of the user's that calls the same thing once per item, seen in the window.

    `dimension` is the tensor dimension the calls equal, e.g. "256 = dim 1 of (8, 256)", or two that do; or None.

    calls_per_step: Calls of the callee from the loop in a step.
    ms_per_step: Forward time of the loop in a steady step; time_source says where it comes from.
    operators_per_call: Torch operators that each call runs.
    loop_line: Line of the `for`, where the source was at hand.
    loop_end: Its last line.
    carried: What each call takes of the one before it, by the source, e.g. `state`; None where none is seen.
    backward_ms_per_step: Autograd nodes of the loop's operators; not in ms_per_step.
    backward_at_most_ms_per_step: The same if the window slowed all nodes alike: an upper bound.
    backward_calls_per_step: Calls of these nodes in a step.
    window_steps: Profiled steps it was seen in.
    samples: Sampled stacks that stand in the loop.
    at_most_ms_per_step: Of ms_per_step where samples tell it, with what chance (95 %) and missed samples may add.
    operators_ms_per_step: Its operators in a profiled step, as recorded, not scaled.
    calls_per_invocation: Items of one pass through the loop, median.
    """

    callee: str
    calls_per_step: float
    ms_per_step: float
    operators_per_call: float
    place: Place
    dimension: str | None
    source: str
    loop_line: int | None = None
    loop_end: int | None = None
    carried: str | None = None
    backward_ms_per_step: float | None = None
    backward_at_most_ms_per_step: float | None = None
    backward_calls_per_step: float | None = None
    backward_node: str | None = None
    exact_line: bool = False  # False: place.line is where the function begins
    low_confidence: bool = False
    window_steps: int = 0
    nested_in: Place | None = None  # the loop whose iterations run this one
    samples: int = 0
    time_source: str = ""  # where ms_per_step comes from
    at_most_ms_per_step: float | None = None
    operators_ms_per_step: float | None = None
    calls_per_invocation: int = 0

    @property
    def both_passes_ms(self) -> float:
        """Forward and backward, ms in a steady step."""
        return self.ms_per_step + (self.backward_ms_per_step or 0.0)


class IoFacts(Struct, frozen=True):
    """Blocking file I/O of the main thread inside steady steps.

    The place is a library's where the user's line, `entry`, only leads to the training that the library does.

    calls_per_step: Calls in a steady step.
    ms_per_step: Time the main thread is blocked by it, in a steady step.
    count: Events or samples it stands on.
    call_ms_per_step: Of the call that holds it and trains nothing: all that runs in it, as sampled.
    call_at_most_ms_per_step: The same with what chance (95 %) and missed samples may add.
    """

    operation: str
    place: Place
    calls_per_step: float | None
    ms_per_step: float
    source: str
    measured: bool = True  # False: estimated from sampled stacks
    count: int = 0
    detail: str | None = None  # a path or the function on top
    entry: Place | None = None
    call: Place | None = None  # the call in the loop that holds it and trains nothing
    call_ms_per_step: float | None = None
    call_at_most_ms_per_step: float | None = None


class PythonFacts(Struct, frozen=True):
    """A line on the main thread whose time is Python (or C code of other libraries), not torch.

    The user's; a library's where the user's line, `entry`, only leads to the training that the library does.

    ms_per_step: Sampled time in a steady step.
    share: The same by the mean step.
    samples: Samples it stands on.
    waiting_share: Of these, samples in which the thread waited.
    python_fraction: Of the sampled function, what ran outside torch operators in the window.
    unknown_ms_per_step: Of it, what nothing could tell from torch operators.
    call_ms_per_step: Of the call that holds it and trains nothing: all that runs in it, as sampled.
    call_at_most_ms_per_step: The same with what chance (95 %) and missed samples may add.
    sampling (ratio): By how much chance may make the sampled Python time of the call larger (95 %).
    """

    place: Place
    phase: str
    ms_per_step: float
    share: float
    samples: int
    waiting_share: float | None
    python_fraction: float | None
    library_leaf: str | None
    source: str
    unknown_ms_per_step: float = 0.0
    entry: Place | None = None
    inside_loop: Place | None = None  # the user's per-item loop whose iterations run this line
    call: Place | None = None  # the call in the loop or the model that holds it and trains nothing
    call_ms_per_step: float | None = None
    call_at_most_ms_per_step: float | None = None
    sampling: float = 1.0


class WindowFacts(Struct, frozen=True):
    """One torch.profiler window.

    rank: Rank that recorded it.
    steps: Steps in it.
    stop_ms: Stopping the profiler.
    export_ms: Writing the trace.
    bytes: Size of the trace file.
    overhead_ratio: Mean wall time of its steps by that of steady steps outside: 1.3 is 30 % slower.
    """

    rank: int
    trace: str
    owner: str  # "stepscope" | "user"
    steps: int
    low_confidence: bool
    reason: str
    stop_ms: float | None
    export_ms: float | None
    bytes: int | None
    overhead_ratio: float | None


class Site(Struct, frozen=True):
    """Where the user constructed something a finding may speak of (a loader, an optimizer, DDP …).

    `via` is the file of the installed package that the user's line called and that constructed it, where one did.

    rank: Rank that made it.
    """

    what: str
    place: Place | None
    arguments: dict[str, Any]
    rank: int
    via: str | None = None


class Settings(Struct, frozen=True):
    """The line that tells a training framework its settings: `TrainingArguments(...)`, Lightning's `Trainer(...)`.

    `framework` is one of `analyze.sites.FRAMEWORKS`. With `loaders` it also builds the DataLoader that feeds
    training from them; otherwise that is the user's own. `called`: the name of a class by that of the user's subclass
    of it, as TRL's are of `TrainingArguments`.
    """

    framework: str
    place: Place | None
    loaders: bool = False
    called: dict[str, str] = {}


class ProcessFacts(Struct, frozen=True):
    """A process of the run. `reported` is False for a torch process whose agent never wrote.

    pid: Number of the process on its host.
    """

    pid: int
    role: str
    command: str
    reported: bool
    remedy: str | None


@dataclasses.dataclass(frozen=True)
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
    system: dict[str, Any] = dataclasses.field(default_factory=dict)  # summary of telemetry, units in the names
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
    machine: MachineFacts = dataclasses.field(kw_only=True)  # pauses, cores, drift, profilers, the loader's rhythm
    energy: EnergyFacts | None = None  # what the run drew; None without telemetry
    settings: Settings | None = None  # of the training framework; None where none was seen to be told any
    trial: TrialFacts | None = None  # knobs and seed; None of a run without either
    logging: tuple[LoggingCost, ...] | None = None  # by tool and line; None without stacks
    many_ranks: RanksVerdict | None = None  # who holds the others up, where ranks were judged by reduced tables
    ranks_read: RanksRead | None = None  # which of these ranks all other facts are of
    hang: HangVerdict | None = None  # who does not come to which call; None without dumps of flight recorders and RAS
    metrics: MetricFacts | None = None  # what the run learned, and how its steps changed; None without either
    source_files: SourceFiles = dataclasses.field(default_factory=SourceFiles)


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
