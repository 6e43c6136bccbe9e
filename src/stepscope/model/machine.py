"""What the machine and the loader's rhythm do to a run: clocks of GPUs, storage, nodes of memory, pauses, cores, drift.

Times per step are ms of a mean steady step unless a name says otherwise. A part is None where its source is missing.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place


class GpuClocks(Struct, frozen=True):
    """The clock of one GPU of the run, over readings in which it was not idle.

    `reasons`: why it ran below its highest clock -> share of the readings. `lost_share` is the mean of 1 - clock by
    highest clock over all readings of the training time, 0 in those without a reason that somebody could remove.
    """

    host: str
    device: str
    readings: int  # of the training time
    busy_readings: int  # of these, not idle
    utilization: float | None  # share of the time in which a kernel ran
    clock_mhz: float
    max_clock_mhz: float
    reasons: dict[str, float]
    lost_share: float
    power_w: float | None
    power_limit_w: float | None  # enforced now
    power_default_w: float | None  # as delivered
    temperature_c: float | None  # highest
    strangers: int | None  # processes on it that are not the run's, most at a time; None where own ones do not show
    strangers_bytes: int | None


class StorageMount(Struct, frozen=True):
    """A file system that holds data of the run. `files` were open in looks, or named on the command line."""

    kind: str
    path: str
    files: int
    source: str  # "open files" | "command line"


class StorageFacts(Struct, frozen=True):
    """Where the processes that load data read it from: loader workers, else the training processes. Summed over them.

    `cold_share` is the part of the bytes they asked for that came from a device and not from the page cache;
    `early_cold_share` and `late_cold_share` are of the first and the last third of the training time.
    """

    role: str  # "loader_worker" | "rank"
    mounts: tuple[StorageMount, ...]  # the most files first
    requested_bytes_per_s: float | None
    device_bytes_per_s: float | None
    cold_share: float | None
    early_cold_share: float | None
    late_cold_share: float | None
    blocked_share: float | None  # of readings in which a process slept where nothing can wake it: mostly for a disk
    blocked_readings: int
    io_delay_share: float | None  # of their time, waiting for a disk, where the kernel counts it
    major_faults_per_s: float | None
    pressure_pct: float | None  # of the time, in which something waited for a disk or network storage (PSI)


class NumaFacts(Struct, frozen=True):
    """Nodes of memory, on machines with several. Shares are of readings of the training processes' main threads."""

    nodes: int
    main_nodes: dict[str, float]  # node -> share of the readings
    gpu_nodes: dict[str, int]  # GPU -> node next to it
    away_share: float | None  # of the readings, on another node than the process's GPU; None where that is not known


class PauseLine(Struct, frozen=True):
    """A line of the user's at which garbage collections struck inside steady steps."""

    place: Place
    count: int
    ms_per_step: float


class PauseFacts(Struct, frozen=True):
    """Collections of Python's garbage collector inside steady steps: full ones, and others above a millisecond.

    `lines` are in order of time; a line that asks for a collection holds all of its own.
    """

    count: int
    full: int  # of all generations
    collected: int | None  # objects
    steps: int
    steps_struck: int
    ms_per_step: float
    longest_ms: float
    lines: tuple[PauseLine, ...]


class PoolFacts(Struct, frozen=True):
    """How all threads of a training process used its cores, mean over processes. Shares are of wall time.

    The pool is all threads but the main one: `used_cores` and `ready_threads` are theirs. `lost_ms_per_step` is what
    the mean step would be shorter with as many threads as cores, at most what the main thread waited because of the
    pool; `at_most_ms_per_step` bounds it from above. Both are None where torch's threads fit, or are not known.
    """

    main_cpu_share: float
    main_off_share: float  # neither on a core nor ready for one
    used_cores: float
    ready_threads: float  # ready for a core, without one
    timeslices_per_step: float  # how often a thread was put on a core
    other_waits_share: float  # for data, files or sleep: what more cores would not shorten
    cores: float  # that the process could have used
    others_cores: float | None  # used by processes that are not the run's
    lost_ms_per_step: float | None
    at_most_ms_per_step: float | None


class CpuFacts(Struct, frozen=True):
    """How training shared its cores, mean over the steady time and over ranks.

    `run_delay_share` is the part of the wall time in which a rank's main thread could run and had no core. Of it,
    `throttled_ms_per_step` is bounded by the time the cgroup was throttled. Others can only
    take what they use of the run's processors, or where that was not read what the run leaves of its cores:
    `own_ms_per_step` is the rest of the wait, which the run's own threads and processes caused; `others_ms_per_step` is
    less than the wait by what these could have taken, and at most what others took.
    """

    readings: int
    seconds: float
    cores: float  # this host's cores that the run may use
    ranks_on_host: int
    threads: int | None  # of torch in each rank, where script or environment set them
    threads_place: Place | None
    threads_source: str
    own_cores: float  # CPU use of the whole run
    run_delay_share: float
    throttled_share: float | None  # growth of the cgroup's throttled time by wall time; summed over cores
    throttled_ms_per_step: float | None
    own_ms_per_step: float
    others_ms_per_step: float
    involuntary_switches_per_s: float | None
    pressure_pct: float | None
    load: float | None
    voluntary_switches_per_s: float | None = None
    migrations_per_s: float | None = None  # of the main thread, from core to core
    stolen_cores: float | None = None  # a hypervisor gave to others
    pool: PoolFacts | None = None  # None in recordings without the counts of all threads, and of processes with one
    main_cpu_share: float | None = None  # of the wall time, in which the main thread had a core
    waits_ms_per_step: float = 0.0  # in which it is known to wait for data or files, or to sleep by its own will


class Child(Struct, frozen=True):
    """Processes of the run that neither train nor load batches, alike in command and in the line that started them."""

    command: str
    how: str | None  # "subprocess.Popen", "multiprocessing.Process", "os.fork" …; None where nobody saw it start
    place: Place | None
    processes: int
    cores: float  # processor time by wall time of the steady steps


class ChildrenFacts(Struct, frozen=True):
    """What the processes that the script started take from the main thread; those that use most first.

    `ms_per_step` is their part of what the main thread waited for a core: by the processor time of all that ran beside
    it. `at_most_ms_per_step` is all that can be gained without them: the wait, and computing that only looked for work
    while other threads of the process had no core; or the distance to the run's quickest steps. Both are None where
    no telemetry of the main thread exists.
    """

    groups: tuple[Child, ...]
    cores: float
    ms_per_step: float | None
    at_most_ms_per_step: float | None


class MemoryPressureFacts(Struct, frozen=True):
    """Page faults that read a disk, and the time something stood still for want of memory (PSI)."""

    seconds: float
    major_faults_per_step: float
    stalled_pct: float | None  # the cgroup's where it is known, else the machine's
    stalled_of: str  # "cgroup" | "machine"
    rss_bytes: int | None


class PageFaultFacts(Struct, frozen=True):
    """Pages that steady training steps had the system map, and what that took; means over steps and ranks.

    A fault costs the thread that has it. Telemetry tells which part `main_share` of them the training thread had
    itself: what it has alone is paid one after another, what threads of an operator have at once is paid together.
    Giving a page back is the training thread's work in any case. The cost is never more than the step's own work.
    """

    steps: int
    minor_per_step: float
    main_share: float | None  # None without telemetry: then all are taken for shared evenly, which costs least
    kept_share: float | None  # of them, by how much the ranks grew meanwhile: those pages were not there before
    page_bytes: int
    threads: int  # that the calibration let fault at once
    ns_alone: float | None  # of a fault, of one thread alone; None where nothing was measured on the machine
    ns_beside: float | None  # of a fault, to each of `threads` at once
    ns_returned: float | None  # of a page that is given back
    cost_ms_per_step: float | None
    at_most_ms_per_step: float | None  # with all faults one after another
    libc: str | None  # such as "glibc 2.36"
    preloaded: str | None  # LD_PRELOAD
    settings: dict[str, str]  # MALLOC_*, GLIBC_TUNABLES and THP_MEM_ALLOC_ENABLE as the command was given them
    huge_pages: str | None  # "always" | "madvise" | "never"
    installed: tuple[str, ...]  # allocators that can be loaded instead
    largest_bytes: int | None  # of a tensor that an operator of the training thread put out, in a window


class DriftLine(Struct, frozen=True):
    """A line of the user's whose sampled time per step grew between the first and the last part of the run."""

    place: Place
    early_ms_per_step: float
    late_ms_per_step: float
    samples: int  # in the last part


class DriftFacts(Struct, frozen=True):
    """Whether steady steps became slower. Levels are on the straight line through all steps (Theil and Sen).

    `rising`: every part of the run is slower at its median than the one before, on every rank.
    """

    steps: int
    parts: int
    rising: bool
    early_ms: float
    late_ms: float
    lost_ms_per_step: float  # mean of the line over its start
    medians_ms: tuple[float, ...]  # of the parts
    phases: dict[str, float]  # phase -> ms by which the last part's median is above the first one's
    lines: tuple[DriftLine, ...]


class ProfilerFacts(Struct, frozen=True):
    """The steps of the script's own profiler against the steady ones outside, of the ranks that have both.

    `source`: "journal", or "trace" where the profiler recorded stacks, because nothing is journaled meanwhile.
    """

    inside: int
    outside: int
    inside_ms: float
    outside_ms: float
    steps: int  # all training steps of these ranks
    lost_ms_per_step: float  # over all of them
    total_ms_per_step: float  # their mean wall time
    source: str


class EpochFacts(Struct, frozen=True):
    """What starting a loader's iterators again cost, for one loader with workers. Medians are over the later epochs."""

    site: Place | None
    num_workers: int
    persistent: bool | None
    kind: str  # of the steps it feeds
    restarts: int  # iterators after the first
    make_ms: float  # median time to make an iterator
    first_wait_ms: float  # median wait for the first batch
    usual_wait_ms: float  # median wait in the other steps it feeds
    batch_ms: float | None  # work to make one batch, which a new epoch needs in any case
    lost_ms_per_step: float  # of all restarts, over the run's training steps
    at_most_ms_per_step: float  # with the end of the old workers, and all by which an epoch's first steps are slower
    total_ms_per_step: float  # mean wall time of all training steps, with what changing iterators took


class WaveFacts(Struct, frozen=True):
    """Whether the wait for data comes in one step of `period`. `share`: the part of the wait that these steps hold."""

    period: int
    waves: int
    share: float
    regular: float  # of the distances between neighbouring waves, those that are the period
    wave_wait_ms: float  # median wait in a wave
    other_wait_ms: float  # median wait in the other steps


class TraceLoader(Struct, frozen=True):
    """The loader of one run of traces without a journal. `workers`: "none", "some", or None where no name tells."""

    run: str
    workers: str | None
    call: Place | None  # the user's line that asks for the batch
    entries: tuple[Place, ...]  # the outermost lines of the user's below it, with their share of its time
    fetches: int
    fetch_ms: float  # mean time of one


class MachineFacts(Struct, frozen=True):
    """All of the above."""

    journaled: bool  # a journal of events exists: what is not in it did not happen
    pauses: PauseFacts | None
    cpu: CpuFacts | None
    memory: MemoryPressureFacts | None
    drift: DriftFacts | None
    profiler: ProfilerFacts | None
    epochs: tuple[EpochFacts, ...] | None
    waves: WaveFacts | None
    trace_loaders: tuple[TraceLoader, ...]
    gpus: tuple[GpuClocks, ...] = ()  # that the run computes on
    storage: StorageFacts | None = None
    numa: NumaFacts | None = None  # of a machine with several nodes of memory
    children: ChildrenFacts | None = None  # None without telemetry of the training time
    page_faults: PageFaultFacts | None = None  # None in recordings without them
