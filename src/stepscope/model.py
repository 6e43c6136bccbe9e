"""Every type that crosses a layer: frozen dataclasses, standard library only.

This file is also imported inside the user's training process, so it must run on Python 3.8: annotations are
strings, and nothing here is evaluated with newer syntax. Times are integer nanoseconds on the epoch clock unless a
name says otherwise; `None` means "not measured" and is never replaced by zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RUN_SCHEMA = "stepscope.run/1"
RANK_SCHEMA = "stepscope.rank/1"
STEPS_SCHEMA = "stepscope.steps/1"
REPORT_SCHEMA = "stepscope.report/1"

PHASES = ("data_wait", "forward", "backward", "optimizer", "other")
CATEGORIES = (
    "input",
    "host",
    "sync",
    "launch",
    "compute",
    "memory",
    "transfer",
    "communication",
    "compile",
    "io",
    "system",
)
SEVERITIES = ("critical", "warning", "info")

# The columns of a row of rank-N/steps.jsonl, in order. The first line of the file repeats them, so a reader goes by
# name and a later version may append columns.
STEP_COLUMNS = (
    "step",  # 0-based, counted over the whole process
    "kind",  # "train" | "eval"
    "epoch",  # 0-based: how often the loader that feeds the step was started again; null without a loader
    "start_ns",
    "wall_ns",
    "data_wait_ns",
    "forward_ns",
    "backward_ns",
    "optimizer_ns",
    "other_ns",
    "device_ns",  # time between device events at the step's edges; null without a device
    "samples",  # rows of the batches fetched in the step; null when no batch was seen
    "fetches",  # loader fetches in the step (> 1 with gradient accumulation)
    "first_batch",  # 1 when the step holds the first fetch of an epoch
    "in_window",  # 1 when torch.profiler (ours or the user's) was on during the step
    "signal",  # what cut the step: "user" | "optimizer" | "loader" | "profiler_step" | "xla_sync" | "end"
)


# ---------------------------------------------------------------------------------------------------- findings


@dataclass(frozen=True)
class Place:
    """A line of the user's code. `share` is this line's part of the finding's cost (0 to 1), or None."""

    file: str
    line: int | None
    function: str | None = None
    share: float | None = None


@dataclass(frozen=True)
class Evidence:
    """One measured figure. `source` names the file and the method it comes from."""

    metric: str
    value: Any
    unit: str
    source: str


@dataclass(frozen=True)
class Try:
    """A knob an experiment may turn to test the finding."""

    knob: str
    value: str


@dataclass(frozen=True)
class Interval:
    """A prediction, as fractions of the mean steady step."""

    low: float
    high: float


@dataclass(frozen=True)
class Finding:
    """One ranked statement of a loss. Without evidence and cost there is no finding."""

    id: str
    rule: str
    category: str
    title: str
    severity: str
    confidence: str
    cost_ms_per_step: float
    share: float
    gain_ceiling: float
    where: tuple[Place, ...]
    evidence: tuple[Evidence, ...]
    fix: str
    falsified_by: str
    expected_gain: Interval | None = None
    ranks: tuple[int, ...] = ()
    caveat: str = ""
    learn: str = ""
    try_: tuple[Try, ...] = ()
    explains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Abstention:
    """A rule that could not be judged, and the inputs it lacked."""

    rule: str
    needs: str


@dataclass(frozen=True)
class Ignored:
    """A rule the user switched off by configuration, with the reason given there."""

    rule: str
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """What the rules said of a run, findings in order of cost."""

    findings: tuple[Finding, ...]
    abstained: tuple[Abstention, ...]
    ignored: tuple[Ignored, ...] = ()


# ------------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True)
class RunFacts:
    """What ran, where, and how it ended. `exit_status` is the shell's (128 + n for a signal)."""

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


@dataclass(frozen=True)
class Note:
    """A statement about what was lost, repaired or not seen. `level` is "info" or "warning"."""

    level: str
    text: str
    source: str


@dataclass(frozen=True)
class Quality:
    """Stated before any number: what was read, what was lost, who was not heard from."""

    counts: dict[str, int]
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class PartitionPart:
    """One exclusive category of the mean step. All parts sum to the mean step, shares to 1."""

    category: str
    ms: float
    share: float


@dataclass(frozen=True)
class StepFacts:
    """The steady steps of one kind of one run, mean over ranks where there are several.

    Steady means: after warm-up, not the first batch of an epoch, outside windows. `signal` names what cut the steps.
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
    excluded: dict[str, int]  # reason -> steps left out of the statistics
    first_batch_ms: float | None  # mean wall of the first step of an epoch
    low_confidence: bool
    series: tuple[tuple[int, float], ...]  # (step, wall ms), thinned, stalls kept


@dataclass(frozen=True)
class FixedCosts:
    """Seconds a run pays once. None where the source was silent."""

    total_s: float | None
    before_first_step_s: float | None
    first_step_s: float | None
    warmup_s: float | None
    windows_s: float | None


@dataclass(frozen=True)
class HotLine:
    """Sampled time on one line of the user's code.

    `self_samples` have this as the innermost user frame. `ms_per_step` spreads the thread's sampled wall time over
    the steps of the same period; `library_leaf` is the library function most often on top.
    """

    file: str
    line: int
    function: str
    role: str  # "rank" | "loader_worker" | "other"
    phase: str
    self_samples: int
    share: float  # of the samples of the same role's main threads during steps
    ms_per_step: float | None
    waiting_share: float | None
    library_leaf: str | None


@dataclass(frozen=True)
class StackFacts:
    """What the sampled stacks say. `source` is "py-spy" or "agent" (slower, in-process)."""

    source: str
    rate_hz: float
    samples: int
    skipped: int
    steady_samples: int
    by_phase: dict[str, int]  # main threads of ranks, steady state
    hot_lines: tuple[HotLine, ...]


@dataclass(frozen=True)
class LoaderFacts:
    """What is known of the DataLoader that feeds the training loop.

    The worker shares describe sampled worker time while the main process sat in data wait.
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
    cpu_limit: float  # cores this process may use: min(affinity, cgroup quota)
    suggested_workers: int
    # the outermost user lines below the loader: `__getitem__`, collate_fn. Their shares include what they call.
    entries: tuple[HotLine, ...] = ()
    load_ms: float | None = None  # work to make the batches of one step, summed over workers
    compute_ms: float | None = None  # the step without its data wait
    cores_used: float | None = None  # mean CPU use of the training process, in cores
    library_function: str | None = None  # hottest function below the loader that is not the user's
    samples: int = 0  # sampled stacks the lines stand on
    threads: int | None = None  # of torch on the CPU, where the script set them
    ranks_on_host: int = 1  # they share `cpu_limit`


@dataclass(frozen=True)
class OperatorFacts:
    """An operator inside the window, per step of the window."""

    name: str
    calls_per_step: float
    host_self_ms_per_step: float
    host_total_ms_per_step: float
    place: Place | None


@dataclass(frozen=True)
class LoopFacts:
    """A Python loop of the user's that calls the same thing once per item, seen in the window.

    `dimension` is the tensor dimension the calls equal, e.g. "256 = dim 1 of (8, 256)", or None.
    """

    callee: str
    calls_per_step: float
    ms_per_step: float
    operators_per_call: float
    place: Place
    dimension: str | None
    source: str
    loop_line: int | None = None  # the line of the `for`, where the source text was at hand
    loop_end: int | None = None  # its last line
    backward_ms_per_step: float | None = None  # autograd nodes of the loop's operators; not in ms_per_step
    backward_at_most_ms_per_step: float | None = None  # the same, were the window's slowing proportional
    backward_calls_per_step: float | None = None
    backward_node: str | None = None
    exact_line: bool = False  # False: place.line is where the function begins
    low_confidence: bool = False
    window_steps: int = 0
    nested_in: Place | None = None  # the loop whose iterations run this one
    samples: int = 0  # sampled stacks that stand in the loop
    time_source: str = ""  # where ms_per_step comes from


@dataclass(frozen=True)
class IoFacts:
    """Blocking file I/O of the main thread inside steady steps."""

    operation: str
    place: Place
    calls_per_step: float | None
    ms_per_step: float
    source: str
    measured: bool = True  # False: estimated from sampled stacks
    count: int = 0  # events or samples it stands on
    detail: str | None = None  # a path or the function on top


@dataclass(frozen=True)
class PythonFacts:
    """A line of the user's on the main thread whose time is Python (or C code of other libraries), not torch.

    `python_fraction` is the part of the line's function that ran outside torch operators in the window; None where no
    window saw it and the sampled leaf alone decided.
    """

    place: Place
    phase: str
    ms_per_step: float
    share: float  # of the mean steady step
    samples: int
    waiting_share: float | None
    python_fraction: float | None
    library_leaf: str | None
    source: str
    inside_loop: Place | None = None  # the user's per-item loop whose iterations run this line


@dataclass(frozen=True)
class WindowFacts:
    """One torch.profiler window. `overhead_ratio` compares its steps with the steady ones outside."""

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


@dataclass(frozen=True)
class Site:
    """Where the user constructed something a finding may speak of (a loader, an optimizer, DDP …)."""

    what: str
    place: Place | None
    arguments: dict[str, Any]
    rank: int


@dataclass(frozen=True)
class ProcessFacts:
    """A process of the run. `reported` is False for a torch process whose agent never wrote."""

    pid: int
    role: str
    command: str
    reported: bool
    remedy: str | None


@dataclass(frozen=True)
class Analysis:
    """All facts of a run. A part is None when its source is missing; nothing here is a guess without a note."""

    run: RunFacts
    quality: Quality
    steps: tuple[StepFacts, ...]  # one per kind, "train" first
    fixed: FixedCosts
    stacks: StackFacts | None
    loader: LoaderFacts | None
    operators: tuple[OperatorFacts, ...] | None
    loops: tuple[LoopFacts, ...] | None
    io: tuple[IoFacts, ...] | None
    windows: tuple[WindowFacts, ...]
    sites: tuple[Site, ...]
    processes: tuple[ProcessFacts, ...]
    system: dict[str, Any] = field(default_factory=dict)  # summary of telemetry, units in the names
    regions: tuple[dict[str, Any], ...] = ()  # {"name", "calls", "calls_per_step", "ms_per_step", "source"}
    python: tuple[PythonFacts, ...] | None = None  # needs stacks; None without them
    devices: tuple[str, ...] = ()  # kinds of device the ranks trained on, "cpu" included


@dataclass(frozen=True)
class Report:
    """The one document every surface renders: `report.json` is this, key for key."""

    run: dict[str, Any]
    quality: dict[str, Any]
    steps: dict[str, Any] | None
    findings: tuple[dict[str, Any], ...]
    abstained: tuple[dict[str, Any], ...]
    ignored: tuple[dict[str, Any], ...]
    views: dict[str, Any]
    schema: str = REPORT_SCHEMA
