"""What is measured of a recorded run, one dataclass per question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field

from stepscope.model.findings import Place


class FrameworkFacts(Struct, frozen=True):
    """The training framework whose loop ran, recognised by its own modules' names (`docs/frameworks.md`)."""

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
    steps_counted: int | None = None  # by the framework, over the training steps that have its number; None without any
    steps_cut: int | None = None  # of the same kind, by us
    parted_at: int | None = None  # the first step where the two differ


class RunFacts(Struct, frozen=True):
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
    source_hashes: dict[str, str] = field(default_factory=dict)  # see `SourceFiles`
    framework: FrameworkFacts | None = None  # None: a loop of the script's own


class SourceFiles(Struct, frozen=True):
    """Which of the files that a run names may be quoted: those below `roots`, and those whose content has its hash.

    `roots` are folders the reader named. `hashes` are SHA-256 in hexadecimal of what ran, by absolute path.
    """

    roots: tuple[str, ...] = ()
    hashes: Mapping[str, str] = field(default_factory=dict)

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
    """Stated before any number: what was read, what was lost, who was not heard from."""

    counts: dict[str, int]
    notes: tuple[Note, ...]


class PartitionPart(Struct, frozen=True):
    """One exclusive category of the mean step. All parts sum to the mean step, shares to 1."""

    category: str
    ms: float
    share: float


class StepFacts(Struct, frozen=True):
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
    by_rank: tuple[int, ...] = ()  # steady steps of each of `ranks`; `count` is their sum


class ProfiledFacts(Struct, frozen=True):
    """The training steps that traces hold, as the views of traces count and time them.

    `steady_ms` is the mean steady step outside of them, None where there is none: every step was profiled.
    """

    steps: int
    mean_ms: float
    steady_ms: float | None


class FixedCosts(Struct, frozen=True):
    """Seconds a run pays once. None where the source was silent."""

    total_s: float | None
    before_first_step_s: float | None
    first_step_s: float | None
    warmup_s: float | None
    windows_s: float | None


class HotLine(Struct, frozen=True):
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


class StackFacts(Struct, frozen=True):
    """What the sampled stacks say. `source` is "py-spy" or "agent" (slower, in-process)."""

    source: str
    rate_hz: float
    samples: int
    skipped: int
    steady_samples: int
    by_phase: dict[str, int]  # main threads of ranks, steady state
    hot_lines: tuple[HotLine, ...]


class FileReads(Struct, frozen=True):
    """What opening and reading files takes of making batches, by `samples` stacks of it."""

    share: float
    samples: int
    files_per_item: float | None  # opened by the training process in the window; None where it could not be seen


class BatchContent(Struct, frozen=True):
    """What one batch of the loader holds, median of `batches` that were looked at while training."""

    tensors: float
    bytes: float
    objects: float  # numbers, texts, containers
    batches: int
    per_step: float = 1.0  # batches that a training step fetches


class LoaderFacts(Struct, frozen=True):
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
    batch: BatchContent | None = None  # what a worker would hand over
    threads: int | None = None  # of torch on the CPU, where the script set them
    ranks_on_host: int = 1  # they share `cpu_limit`
    files: FileReads | None = None


class LoopFacts(Struct, frozen=True):
    """A Python loop of the user's that calls the same thing once per item, seen in the window.

    `dimension` is the tensor dimension the calls equal, e.g. "256 = dim 1 of (8, 256)", or two that do; or None.
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
    at_most_ms_per_step: float | None = None  # of ms_per_step, as far as chance moves samples
    operators_ms_per_step: float | None = None  # its operators in the window, as recorded: slower than in steady steps
    calls_per_invocation: int = 0  # items of one pass through the loop, median


class IoFacts(Struct, frozen=True):
    """Blocking file I/O of the main thread inside steady steps.

    The place is a library's where the user's line, `entry`, only leads to the training that the library does.
    """

    operation: str
    place: Place
    calls_per_step: float | None
    ms_per_step: float
    source: str
    measured: bool = True  # False: estimated from sampled stacks
    count: int = 0  # events or samples it stands on
    detail: str | None = None  # a path or the function on top
    entry: Place | None = None
    call: Place | None = None  # the call in the loop that holds it and trains nothing
    call_ms_per_step: float | None = None  # of that call, all that runs in it
    call_at_most_ms_per_step: float | None = None  # the same, as far as chance moves samples


class PythonFacts(Struct, frozen=True):
    """A line on the main thread whose time is Python (or C code of other libraries), not torch.

    The user's; a library's where the user's line, `entry`, only leads to the training that the library does.
    `python_fraction` is the part of the sampled function that ran outside torch operators in the window; None where no
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
    unknown_ms_per_step: float = 0.0  # of it, what nothing could tell from torch operators
    entry: Place | None = None
    inside_loop: Place | None = None  # the user's per-item loop whose iterations run this line
    call: Place | None = None  # the call in the loop or the model that holds it and trains nothing
    call_ms_per_step: float | None = None  # of that call, all that runs in it
    call_at_most_ms_per_step: float | None = None  # the same, as far as chance moves samples
    sampling: float = 1.0  # by how much chance may make the call's Python time larger


class WindowFacts(Struct, frozen=True):
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


class Site(Struct, frozen=True):
    """Where the user constructed something a finding may speak of (a loader, an optimizer, DDP …).

    `via` is the file of the installed package that the user's line called and that constructed it, where one did.
    """

    what: str
    place: Place | None
    arguments: dict[str, Any]
    rank: int
    via: str | None = None


class Settings(Struct, frozen=True):
    """The line that tells a training framework its settings: `TrainingArguments(...)`, Lightning's `Trainer(...)`.

    `framework` is one of `analyze.sites.FRAMEWORKS`. With `loaders` it also builds the DataLoader that feeds
    training from them; otherwise that is the user's own.
    """

    framework: str
    place: Place | None
    loaders: bool = False


class ProcessFacts(Struct, frozen=True):
    """A process of the run. `reported` is False for a torch process whose agent never wrote."""

    pid: int
    role: str
    command: str
    reported: bool
    remedy: str | None
