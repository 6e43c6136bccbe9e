"""What sampled stacks say: sampled time joined with steps, the deepest functions, flame graphs."""

from __future__ import annotations

from msgspec import Struct, field

from stepscope.model.findings import Place


class WaitPart(Struct, frozen=True):
    """A part of the time in which the main process is in its loader. Parts of one rank exclude each other.

    `kind`: "worker_busy" (a worker makes batches, at `place`), "worker_start" (no worker works yet, one is starting),
    "workers_idle" (no worker works and nothing is under way), "transfer" (a batch is packed, sent or unpacked),
    "pinning", "loading_here" (the main process works in its loader itself, at `place`: it has no workers, or runs a
    sampler), "unknown" (no sample of the workers at that time).

    `place` is the innermost line of the user's below the loader, None where there is none or the part sums up several;
    `lines` says how many there are. `leaf` is the library function most often on top, as "file:function".
    """

    kind: str
    place: Place | None
    ms_per_step: float | None
    share: float  # of the wait
    samples: int  # of the main thread in its loader, as many as the share stands for
    lines: int = 0
    leaf: str | None = None


class LoaderWait(Struct, frozen=True):
    """How a rank's wait for its loader is made up. `simultaneous`: workers and main process were seen at the same time.

    Otherwise worker samples of the same period stand for what workers did meanwhile, each worker by itself.
    """

    rank: int
    process: str
    wait_ms_per_step: float | None
    wait_share: float | None  # of the sampled time of the main thread's loop
    simultaneous: bool
    parts: tuple[WaitPart, ...]
    source: str
    samples: int = 0  # of the main thread in its loader
    loop_samples: int = 0  # of the main thread's loop
    idle_sampled: bool | None = None  # False: waiting threads were left out, so the wait is understated


class SlowLine(Struct, frozen=True):
    """A line of the user's, sampled in slow steps and in typical ones, in ms of the main thread per step of either."""

    place: Place
    phase: str
    slow_ms_per_step: float
    typical_ms_per_step: float
    extra_ms_per_step: float  # slow - typical
    only_slow: bool  # hardly ever sampled in typical steps
    samples: int  # in slow steps
    leaf: str | None  # the function most often on top, as "file:function"; None where it is the line itself


class SlowSteps(Struct, frozen=True):
    """Lines that make the slow steps slow. `threshold_ms`: wall time from which a step counts as slow."""

    slow_steps: int
    typical_steps: int
    threshold_ms: float
    median_ms: float
    slow_mean_ms: float
    typical_mean_ms: float
    lines: tuple[SlowLine, ...]
    source: str


class StageTime(Struct, frozen=True):
    """Sampled main-thread time of all ranks in one stage of the run.

    `stage`: "import", "compile", "startup" (before the first step, neither of the two), "warmup" (steps in which
    something compiled included), "steady" (first batches of epochs included), "other" (between steps, profiled steps,
    evaluation, after the last step).
    """

    stage: str
    samples: int
    share: float
    waiting_share: float | None


class RankLine(Struct, frozen=True):
    """A line of the user's in which ranks differ: its ms per step (or share of samples) by rank."""

    place: Place
    phase: str | None
    by_rank: dict[int, float]
    spread: float  # largest - smallest
    most: int  # the rank that spends most there
    waiting: bool  # the time there is time in which ranks wait for each other
    leaf: str | None


class RankLines(Struct, frozen=True):
    """Where ranks differ. `unit`: "ms per step" or "share of samples". `verdict` names straggler and waiters."""

    unit: str
    ranks: tuple[int, ...]
    lines: tuple[RankLine, ...]
    straggler: int | None
    straggler_place: Place | None
    waiters: tuple[int, ...]
    waiter_place: Place | None
    verdict: str
    source: str


class CallerLine(Struct, frozen=True):
    """A line of the user's below which another of theirs was sampled. `share`: of the inner line's samples."""

    caller: Place
    callee: Place
    samples: int
    share: float


class SampledViews(Struct, frozen=True):
    """What sampled stacks say beyond hot lines. `absent` gives the reason for every part that is None or empty."""

    stages: tuple[StageTime, ...]
    phases: dict[str, float]  # phase -> share of the steady loop's samples, main threads of ranks
    waits: tuple[LoaderWait, ...]
    slow_steps: SlowSteps | None
    rank_lines: RankLines | None
    absent: dict[str, str]
    callers: tuple[CallerLine, ...] = ()  # in the loop, on the main threads of ranks


class HotspotRow(Struct, frozen=True):
    """The samples whose innermost frame this is, by what `Hotspots.by` groups.

    Where a row merges several frames, what they differ in is None. The library columns name the innermost frame of the
    chosen library on the way there, itself included; None where there is none. `waiting`: the innermost frame is a
    known wait; waiting and working are never merged. `kind` and `phase` are those that hold most of its samples.
    """

    name: str | None
    path: str | None
    line: int | None
    library_function_name: str | None
    library_function_path: str | None
    library_function_line: int | None
    samples: int
    proportion: float  # of the selected samples
    waiting: bool
    kind: str  # "python" | "module" (top-level code) | "import" | "compile" | "native" | "none" (no frame was seen)
    module: str  # the module of the user's code, or the package of a library; "" where that is unknown
    phase: str | None  # the phase of the main threads of ranks; None for all other threads
    seconds: float | None  # of threads: samples / rate
    ms_per_step: float | None  # of the main thread of a rank, mean over ranks; None without steps
    roles: dict[str, int]  # role of the process -> samples


class SampledProcess(Struct, frozen=True):
    """A process that selected samples come from. `rank` is None for one that belongs to no rank.

    `pid` is None where the file does not tell processes apart, and `threads` where it does not tell threads apart.
    """

    host: str
    pid: int | None
    role: str
    rank: int | None
    threads: int | None
    samples: int
    waiting_samples: int


class Hotspots(Struct, frozen=True):
    """Rows, most samples first. `samples` + `skipped_samples` is the files' own sum whatever was selected.

    `selected_samples` and the values of `left_out` add up to `samples`.
    """

    samples: int
    skipped_samples: int
    unit: str  # of all counts: "samples", or the "us" or "bytes" of files that hold weights
    by: str  # "line" | "function" | "file" | "module"
    library: str  # what the library columns look for: a name or path, or "your own code"
    selected_samples: int  # what proportions are of
    waiting_samples: int  # of the selected
    left_out: dict[str, int]  # reason -> samples that were not selected
    rows: tuple[HotspotRow, ...]
    working_rows: int  # how many there are, of which `rows` may hold the first only
    waiting_rows: int
    kinds: dict[str, int]  # kind of the innermost frame -> selected samples
    processes: tuple[SampledProcess, ...]
    files: int
    formats: tuple[str, ...]
    idle: bool | None  # whether waiting threads were sampled too; None where nothing tells
    idle_source: str | None  # "recorded", or "inferred" from the threads that only ever wait
    rate_hz: float | None  # None where it is unknown or differs between files
    wall_s: float | None  # that sampling lasted
    wall_source: str | None  # "recorded", or "nominal": the samples of the busiest thread at the rate
    steps: int  # steady training steps behind `ms_per_step`, of all ranks
    mean_step_ms: float | None
    warnings: tuple[str, ...]


class FlameFrame(Struct, frozen=True):
    """A frame as it is drawn. `kind` decides its colour.

    `file` is named from the root of the user's code, or of its package, on. Where one box stands for all lines of a
    function, `line` is the one sampled most.

    Kinds: "user" (the user's own code), "library", "import", "native", "operator" (of torch, from a trace), "kernel"
    (on a device, from a trace), "wait" (a known wait), "root".
    """

    name: str
    file: str
    line: int | None
    kind: str


class FlameTree(Struct, frozen=True):
    """One tree. Node 0 is the root; parents come before children. Values include what lies below.

    `value` is in `unit`; `base` holds the other side of a difference, node by node (0 where the path is not there), in
    the same unit, and is None outside differences. `source` says where the figures come from.
    """

    key: str  # "all", "phase:forward", "process:workers", "rank:0", "outside", "gpu", ...
    label: str
    unit: str  # "ms per step" | "samples" | "us" | "bytes"
    parent: tuple[int, ...]  # -1 at the root
    frame: tuple[int, ...]  # index into the graph's `frames`
    value: tuple[float, ...]
    base: tuple[float, ...] | None
    source: str
    hidden: float = (
        0.0  # value of paths too thin or too deep to be kept, drawn nowhere; in the root's value all the same
    )


class FlameGraph(Struct, frozen=True):
    """Trees over one list of frames; `notes` say what the reader must know before the picture is believed."""

    title: str
    frames: tuple[FlameFrame, ...]
    trees: tuple[FlameTree, ...]
    notes: tuple[str, ...]
    sides: tuple[str, str] | None = None  # of a difference: (this, what it is compared with)
    source: dict[int, str] = field(default_factory=dict)  # text of the user's lines, by frame, where at hand
