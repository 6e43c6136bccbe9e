"""Every type that crosses a layer: frozen dataclasses, standard library only.

This file is also imported inside the user's training process, so it must run on Python 3.8: annotations are
strings, and nothing here is evaluated with newer syntax. Times are integer nanoseconds on the epoch clock unless a
name says otherwise; `None` means "not measured" and is never replaced by zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple

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
    line: Optional[int]
    function: Optional[str] = None
    share: Optional[float] = None


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
    where: Tuple[Place, ...]
    evidence: Tuple[Evidence, ...]
    fix: str
    falsified_by: str
    expected_gain: Optional[Interval] = None
    ranks: Tuple[int, ...] = ()
    caveat: str = ""
    learn: str = ""
    try_: Tuple[Try, ...] = ()
    explains: Tuple[str, ...] = ()


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

    findings: Tuple[Finding, ...]
    abstained: Tuple[Abstention, ...]
    ignored: Tuple[Ignored, ...] = ()


# ------------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True)
class RunFacts:
    """What ran, where, and how it ended. `exit_status` is the shell's (128 + n for a signal)."""

    folder: str
    name: str
    tags: Tuple[str, ...]
    command: Tuple[str, ...]
    cwd: str
    started_ns: Optional[int]
    ended_ns: Optional[int]
    exit_status: Optional[int]
    hosts: Tuple[str, ...]
    ranks: Tuple[int, ...]
    world_size: Optional[int]
    versions: Dict[str, str]
    hardware: Dict[str, Any]
    noise: Dict[str, Any]
    git: Optional[Dict[str, Any]]
    user_roots: Tuple[str, ...]  # folders whose files are the user's own code


@dataclass(frozen=True)
class Note:
    """A statement about what was lost, repaired or not seen. `level` is "info" or "warning"."""

    level: str
    text: str
    source: str


@dataclass(frozen=True)
class Quality:
    """Stated before any number: what was read, what was lost, who was not heard from."""

    counts: Dict[str, int]
    notes: Tuple[Note, ...]


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
    ranks: Tuple[int, ...]
    mean_ms: float
    median_ms: float
    p95_ms: float
    per_second: float
    samples_per_second: Optional[float]
    partition: Tuple[PartitionPart, ...]
    excluded: Dict[str, int]  # reason -> steps left out of the statistics
    first_batch_ms: Optional[float]  # mean wall of the first step of an epoch
    low_confidence: bool
    series: Tuple[Tuple[int, float], ...]  # (step, wall ms), thinned, stalls kept


@dataclass(frozen=True)
class FixedCosts:
    """Seconds a run pays once. None where the source was silent."""

    total_s: Optional[float]
    before_first_step_s: Optional[float]
    first_step_s: Optional[float]
    warmup_s: Optional[float]
    windows_s: Optional[float]


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
    ms_per_step: Optional[float]
    waiting_share: Optional[float]
    library_leaf: Optional[str]


@dataclass(frozen=True)
class StackFacts:
    """What the sampled stacks say. `source` is "py-spy" or "agent" (slower, in-process)."""

    source: str
    rate_hz: float
    samples: int
    skipped: int
    steady_samples: int
    by_phase: Dict[str, int]  # main threads of ranks, steady state
    hot_lines: Tuple[HotLine, ...]


@dataclass(frozen=True)
class LoaderFacts:
    """What is known of the DataLoader that feeds the training loop.

    The worker shares describe sampled worker time while the main process sat in data wait.
    """

    num_workers: Optional[int]
    batch_size: Optional[int]
    site: Optional[Place]
    arguments: Dict[str, Any]
    data_wait_ms: float
    data_wait_share: float
    in_main_process: bool
    lines: Tuple[HotLine, ...]  # of the data set, collate_fn or transform, hottest first
    workers_busy_share: Optional[float]
    workers_idle_share: Optional[float]
    cpu_limit: float  # cores this process may use: min(affinity, cgroup quota)
    suggested_workers: int
    # the outermost user lines below the loader: `__getitem__`, collate_fn. Their shares include what they call.
    entries: Tuple[HotLine, ...] = ()
    load_ms: Optional[float] = None  # work to make the batches of one step, summed over workers
    compute_ms: Optional[float] = None  # the step without its data wait
    cores_used: Optional[float] = None  # mean CPU use of the training process, in cores
    library_function: Optional[str] = None  # hottest function below the loader that is not the user's
    samples: int = 0  # sampled stacks the lines stand on
    threads: Optional[int] = None  # of torch on the CPU, where the script set them
    ranks_on_host: int = 1  # they share `cpu_limit`


@dataclass(frozen=True)
class OperatorFacts:
    """An operator inside the window, per step of the window."""

    name: str
    calls_per_step: float
    host_self_ms_per_step: float
    host_total_ms_per_step: float
    place: Optional[Place]


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
    dimension: Optional[str]
    source: str
    loop_line: Optional[int] = None  # the line of the `for`, where the source text was at hand
    loop_end: Optional[int] = None  # its last line
    backward_ms_per_step: Optional[float] = None  # autograd nodes of the loop's operators; not in ms_per_step
    backward_calls_per_step: Optional[float] = None
    backward_node: Optional[str] = None
    exact_line: bool = False  # False: place.line is where the function begins
    low_confidence: bool = False
    window_steps: int = 0
    nested_in: Optional[Place] = None  # the loop whose iterations run this one
    samples: int = 0  # sampled stacks that stand in the loop
    time_source: str = ""  # where ms_per_step comes from


@dataclass(frozen=True)
class IoFacts:
    """Blocking file I/O of the main thread inside steady steps."""

    operation: str
    place: Place
    calls_per_step: Optional[float]
    ms_per_step: float
    source: str
    measured: bool = True  # False: estimated from sampled stacks
    count: int = 0  # events or samples it stands on
    detail: Optional[str] = None  # a path or the function on top


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
    waiting_share: Optional[float]
    python_fraction: Optional[float]
    library_leaf: Optional[str]
    source: str
    inside_loop: Optional[Place] = None  # the user's per-item loop whose iterations run this line


@dataclass(frozen=True)
class WindowFacts:
    """One torch.profiler window. `overhead_ratio` compares its steps with the steady ones outside."""

    rank: int
    trace: str
    owner: str  # "stepscope" | "user"
    steps: int
    low_confidence: bool
    reason: str
    stop_ms: Optional[float]
    export_ms: Optional[float]
    bytes: Optional[int]
    overhead_ratio: Optional[float]


@dataclass(frozen=True)
class Site:
    """Where the user constructed something a finding may speak of (a loader, an optimizer, DDP …)."""

    what: str
    place: Optional[Place]
    arguments: Dict[str, Any]
    rank: int


@dataclass(frozen=True)
class ProcessFacts:
    """A process of the run. `reported` is False for a torch process whose agent never wrote."""

    pid: int
    role: str
    command: str
    reported: bool
    remedy: Optional[str]


@dataclass(frozen=True)
class Analysis:
    """All facts of a run. A part is None when its source is missing; nothing here is a guess without a note."""

    run: RunFacts
    quality: Quality
    steps: Tuple[StepFacts, ...]  # one per kind, "train" first
    fixed: FixedCosts
    stacks: Optional[StackFacts]
    loader: Optional[LoaderFacts]
    operators: Optional[Tuple[OperatorFacts, ...]]
    loops: Optional[Tuple[LoopFacts, ...]]
    io: Optional[Tuple[IoFacts, ...]]
    windows: Tuple[WindowFacts, ...]
    sites: Tuple[Site, ...]
    processes: Tuple[ProcessFacts, ...]
    system: Dict[str, Any] = field(default_factory=dict)  # summary of telemetry, units in the names
    regions: Tuple[Dict[str, Any], ...] = ()  # {"name", "calls", "calls_per_step", "ms_per_step", "source"}
    python: Optional[Tuple[PythonFacts, ...]] = None  # needs stacks; None without them
    devices: Tuple[str, ...] = ()  # kinds of device the ranks trained on, "cpu" included


@dataclass(frozen=True)
class Report:
    """The one document every surface renders: `report.json` is this, key for key."""

    run: Dict[str, Any]
    quality: Dict[str, Any]
    steps: Optional[Dict[str, Any]]
    findings: Tuple[Dict[str, Any], ...]
    abstained: Tuple[Dict[str, Any], ...]
    ignored: Tuple[Dict[str, Any], ...]
    views: Dict[str, Any]
    schema: str = REPORT_SCHEMA
