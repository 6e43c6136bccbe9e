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

    ms_per_step: The part's share of the measured data wait of a mean steady step.
    share: Of the wait; the parts exclude each other and sum to 1. Where times are known and waits last longer than the
        time between samples, each moment goes to the first that holds of: pinning, a batch on its way, busy workers (in
        equal parts), starting workers, idle workers. Elsewhere samples of the same period stand for the moments,
        threads taken as independent.
    samples: The share of the wait's samples, in whole numbers that sum to them.
    lines: Lines of the user's in it: 0 or 1, or as many as were summed up.
    """

    kind: str
    place: Place | None
    ms_per_step: float | None
    share: float
    samples: int
    lines: int = 0
    leaf: str | None = None


class LoaderWait(Struct, frozen=True):
    """How a rank's wait for its loader is made up. `simultaneous`: workers and main process were seen at the same time.

    rank: The rank that waits.
    wait_ms_per_step: Measured data wait of the rank's mean steady step; missing where no step tells it.
    wait_share: Of the sampled time of the main thread's loop, what it spends in its loader's `__next__`.
    samples: Samples of the main thread in its loader.
    loop_samples: Samples of the main thread's loop: segments that steady steps fill; without steps, the user's function
        that fetches batches and calls the model, from the line of the fetch on, imports and compilation left out.
    """

    rank: int
    process: str
    wait_ms_per_step: float | None
    wait_share: float | None
    simultaneous: bool
    parts: tuple[WaitPart, ...]
    source: str
    samples: int = 0
    loop_samples: int = 0
    idle_sampled: bool | None = None  # False: waiting threads were left out, so the wait is understated


class SlowLine(Struct, frozen=True):
    """A line of the user's, sampled in slow steps and in typical ones, in ms of the main thread per step of either.

    slow_ms_per_step: The line's share of the sampled time inside slow steps, times the mean slow step.
    typical_ms_per_step: The same of typical steps.
    extra_ms_per_step: The difference. Lines are named where it is at least 2 % of what a slow step takes more, and half
        the time between samples.
    samples: Samples of the line in slow steps, by the time between samples; at least 10.
    """

    place: Place
    phase: str
    slow_ms_per_step: float
    typical_ms_per_step: float
    extra_ms_per_step: float
    only_slow: bool  # hardly ever sampled in typical steps
    samples: int
    leaf: str | None  # the function most often on top, as "file:function"; None where it is the line itself


class SlowSteps(Struct, frozen=True):
    """Lines that make the slow steps slow.

    slow_steps: Sampled steady steps above the threshold.
    typical_steps: All other sampled steady steps.
    threshold_ms: 1.5 medians, or the median and 5 spreads where that is more; the spread is that of the faster half,
        which slow steps cannot widen.
    median_ms: Median wall time of the steady steps of all ranks.
    slow_mean_ms: Mean wall time of the slow steps.
    typical_mean_ms: Mean wall time of the typical steps.
    """

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

    samples: Samples of the main threads of ranks in this stage; over all stages they are all such samples.
    share: Of the samples of all stages. Imports and compilation are told by frames and come first; then what lies
        before the first step, in warm-up, in steady steps (first batches of epochs included); the rest, profiled steps
        and evaluation too, is `other`.
    waiting_share: Of the stage's samples, those in a known wait.
    """

    stage: str
    samples: int
    share: float
    waiting_share: float | None


class RankLine(Struct, frozen=True):
    """A line of the user's in which ranks differ: its ms per step (or share of samples) by rank.

    by_rank (ms or share): rank -> the line's share of the rank's loop, times the rank's mean steady step where steps
        are known (`unit` says which).
    spread (ms or share): Largest minus smallest of the ranks. Lines are named where their shares differ by at least 2 %
        and 4 standard deviations of chance.
    most: The rank with the largest figure.
    """

    place: Place
    phase: str | None
    by_rank: dict[int, float]
    spread: float
    most: int
    waiting: bool  # the time there is time in which ranks wait for each other
    leaf: str | None


class RankLines(Struct, frozen=True):
    """Where ranks differ. `unit`: "ms per step" or "share of samples". `verdict` names straggler and waiters.

    ranks: Ranks with at least 50 samples in their loop, which were compared.
    straggler: The rank that waits least for the others: at least 5 % of its loop and 4 standard deviations of chance
        less than their median; missing where none does, where waiting was not sampled, and where nothing shows that
        ranks exchange gradients.
    waiters: Ranks that wait at least half of that difference longer than the straggler.
    """

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
    """A line of the user's below which another of theirs was sampled.

    samples: Samples of the steady loop in which the inner line was the innermost of the user's, below the outer one.
    share: The same by all samples of the inner line; pairs below one half are left out.
    """

    caller: Place
    callee: Place
    samples: int
    share: float


class SampledViews(Struct, frozen=True):
    """What sampled stacks say beyond hot lines. `absent` gives the reason for every part that is None or empty.

    phases (share): phase -> its share of the samples of the main threads' loop, all ranks.
    """

    stages: tuple[StageTime, ...]
    phases: dict[str, float]
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

    line: Line of the innermost frame; missing where it is unknown or several were merged.
    library_function_line: Line of the innermost frame of the library on the way there.
    samples: Selected samples with this innermost frame.
    proportion (share): samples by selected_samples: of the time of all selected threads together.
    seconds: samples by the rate, summed over threads; of files in us the sum itself; missing where a rate is unknown.
    ms_per_step: Per rank the share of its main thread's samples in steady steps, times its mean steady step; the mean
        over ranks. Missing without such samples.
    roles: role of the process -> samples.
    """

    name: str | None
    path: str | None
    line: int | None
    library_function_name: str | None
    library_function_path: str | None
    library_function_line: int | None
    samples: int
    proportion: float
    waiting: bool
    kind: str  # "python" | "module" (top-level code) | "import" | "compile" | "native" | "none" (no frame was seen)
    module: str  # the module of the user's code, or the package of a library; "" where that is unknown
    phase: str | None  # the phase of the main threads of ranks; None for all other threads
    seconds: float | None
    ms_per_step: float | None
    roles: dict[str, int]


class SampledProcess(Struct, frozen=True):
    """A process that selected samples come from.

    pid: Process id; missing where the file names none.
    rank: Rank it belongs to. In files of others ranks are numbered by file and process id.
    threads: Threads with selected samples; missing where the file does not tell threads apart.
    samples: Selected samples of the process.
    waiting_samples: Of them those in a known wait.
    """

    host: str
    pid: int | None
    role: str
    rank: int | None
    threads: int | None
    samples: int
    waiting_samples: int


class Hotspots(Struct, frozen=True):
    """Rows, most samples first.

    samples: Samples read from all files, whatever became of them; with skipped_samples they are the files' own sum. In
        the unit of `unit`: samples, or the us or bytes of files that hold weights.
    skipped_samples: Samples of records that could not be read.
    selected_samples: Samples that rows are made of; with the values of left_out they sum to samples.
    waiting_samples: Selected samples whose innermost Python frame is a known wait.
    left_out: reason -> samples that were not selected, by the first reason that holds: launchers, helper processes,
        other ranks, other processes, other phases, parked threads (a known thread other than the main one, in a known
        wait), torn or the recorder's own.
    kinds: kind of the innermost frame -> selected samples.
    working_rows: Rows that work, before any limit.
    waiting_rows: Rows that wait, before any limit.
    files: Files or segments with samples.
    rate_hz: Samples per second and thread; missing where unknown or different between files.
    wall_s: How long sampling lasted: the union of the segments' times; else the longest a file states; else the samples
        of the busiest thread by the rate (`wall_source` nominal), which is less where waiting was not sampled.
    steps: Steady steps behind ms_per_step, of all ranks.
    mean_step_ms: Mean over ranks of the mean steady step.
    """

    samples: int
    skipped_samples: int
    unit: str  # of all counts: "samples", or the "us" or "bytes" of files that hold weights
    by: str  # "line" | "function" | "file" | "module"
    library: str  # what the library columns look for: a name or path, or "your own code"
    selected_samples: int
    waiting_samples: int
    left_out: dict[str, int]
    rows: tuple[HotspotRow, ...]
    working_rows: int
    waiting_rows: int
    kinds: dict[str, int]
    processes: tuple[SampledProcess, ...]
    files: int
    formats: tuple[str, ...]
    idle: bool | None  # whether waiting threads were sampled too; None where nothing tells
    idle_source: str | None  # "recorded", or "inferred" from the threads that only ever wait
    rate_hz: float | None
    wall_s: float | None
    wall_source: str | None  # "recorded", or "nominal": the samples of the busiest thread at the rate
    steps: int
    mean_step_ms: float | None
    warnings: tuple[str, ...]


class FlameFrame(Struct, frozen=True):
    """A frame as it is drawn. `kind` decides its colour.

    `file` is named from the root of the user's code, or of its package, on.

    Kinds: "user" (the user's own code), "library", "import", "native", "operator" (of torch, from a trace), "kernel"
    (on a device, from a trace), "wait" (a known wait), "root".

    line: Line; of a box that stands for several, the one sampled most.
    """

    name: str
    file: str
    line: int | None
    kind: str


class FlameTree(Struct, frozen=True):
    """One tree. Node 0 is the root; parents come before children. Values include what lies below.

    `value` is in `unit`; `base` holds the other side of a difference, node by node (0 where the path is not there), in
    the same unit, and is None outside differences. `source` says where the figures come from.

    parent: The box above, by its number; -1 at the root.
    frame: The frame of the box, by its number.
    value: In `unit`, what was sampled or traced in the box and all below it. In ms per step: the share of the rank's
        main-thread samples in steady steps, times the rank's mean step; samples of its other threads count the same;
        over several ranks, their mean. In samples, us or bytes: as the files count. In trees of device and operator
        time: durations inside profiled windows, by their steps.
    base: The same of the other side of a difference, 0 where the path is not there; per step where both sides know
        steps, else scaled to the same total.
    hidden: Of the root's value, what belongs to paths below --min-share (0.05 % of the tree), beyond 20,000 boxes or
        1,000 levels. It stays in the boxes that lead there.
    """

    key: str  # "all", "phase:forward", "process:workers", "rank:0", "outside", "gpu", ...
    label: str
    unit: str  # "ms per step" | "samples" | "us" | "bytes"
    parent: tuple[int, ...]
    frame: tuple[int, ...]
    value: tuple[float, ...]
    base: tuple[float, ...] | None
    source: str
    hidden: float = 0.0


class FlameGraph(Struct, frozen=True):
    """Trees over one list of frames; `notes` say what the reader must know before the picture is believed.

    source: frame -> text of the line, where it is at hand.
    """

    title: str
    frames: tuple[FlameFrame, ...]
    trees: tuple[FlameTree, ...]
    notes: tuple[str, ...]
    sides: tuple[str, str] | None = None  # of a difference: (this, what it is compared with)
    source: dict[int, str] = field(default_factory=dict)
