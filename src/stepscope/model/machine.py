"""What the machine and the loader's rhythm do to a run: clocks of GPUs, storage, nodes of memory, pauses, cores, drift.

At the end stand the steps of several ranks side by side, and what the steps of a run wait for and share. Times per step
are ms of a mean steady step unless a name says otherwise. A part is None where its source is missing.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place


class GpuClocks(Struct, frozen=True):
    """The clock of one GPU of the run, over readings in which it was not idle.

    readings: Readings of its clock between the first and the last steady step.
    busy_readings: Of these, without the driver's word that the GPU idled.
    utilization (share): Of the time, in which a kernel ran (NVML), mean over readings.
    clock_mhz: Mean SM clock of the busy readings.
    max_clock_mhz: The highest the driver tells.
    reasons (share): Of the busy readings, by reason for a lower clock that somebody could remove.
    lost_share: 1 - clock by highest clock where there is such a reason, else 0; mean over all readings.
    power_w: Mean power of the busy readings.
    power_limit_w: The limit in force.
    power_default_w: The limit as delivered.
    temperature_c: The highest of the busy readings.
    strangers: Processes on it that are not the run's, the most at one reading.
    strangers_bytes: Memory they hold, the most at one reading.
    """

    host: str
    device: str
    readings: int
    busy_readings: int
    utilization: float | None
    clock_mhz: float
    max_clock_mhz: float
    reasons: dict[str, float]
    lost_share: float
    power_w: float | None
    power_limit_w: float | None
    power_default_w: float | None
    temperature_c: float | None
    strangers: int | None  # None where own ones do not show
    strangers_bytes: int | None


class StorageMount(Struct, frozen=True):
    """A file system that holds data of the run.

    files: Files of the run's processes on it, summed over looks, or paths the command names.
    """

    kind: str
    path: str
    files: int
    source: str  # "open files" | "command line"


class StorageFacts(Struct, frozen=True):
    """Where the processes that load data read it from: loader workers, else the training processes. Summed over them.

    requested_bytes_per_s: Asked for by reads of loader workers, else of the training process.
    device_bytes_per_s: Of these and of mapped files, what storage had to bring.
    cold_share: The second by the first, at most 1; above 1 MB/s.
    late_cold_share: The same in the last third of the steady time.
    blocked_share: Of the readings of these processes, those that met one in state D.
    blocked_readings: These readings.
    io_delay_share: Of their time, waiting for block devices, where the kernel counts it.
    major_faults_per_s: Page faults of these processes that read a disk.
    pressure_pct: Of the time, in which something waited for storage (PSI).
    """

    role: str  # "loader_worker" | "rank"
    mounts: tuple[StorageMount, ...]  # the most files first
    requested_bytes_per_s: float | None
    device_bytes_per_s: float | None
    cold_share: float | None
    late_cold_share: float | None
    blocked_share: float | None
    blocked_readings: int
    io_delay_share: float | None
    major_faults_per_s: float | None
    pressure_pct: float | None


class NumaFacts(Struct, frozen=True):
    """Nodes of memory, on machines with several. Shares are of readings of the training processes' main threads.

    nodes: Nodes with processors.
    main_nodes (share): By node, of the readings of main threads of training processes.
    away_share: Of the readings, those on another node than a GPU of the process.
    """

    nodes: int
    main_nodes: dict[str, float]
    away_share: float | None


class PauseLine(Struct, frozen=True):
    """A line of the user's at which garbage collections struck inside steady steps.

    count: Collections that struck while the main thread was at the line.
    ms_per_step: Their time, by steady steps.
    """

    place: Place
    count: int
    ms_per_step: float


class PauseFacts(Struct, frozen=True):
    """Collections of Python's garbage collector inside steady steps. `lines` are in order of time; a line that asks for
    a collection holds all of its own.

    count: Collections that began in a steady training step: full ones, others above a millisecond.
    full: Of these, collections of all generations.
    collected: Objects they freed.
    steps: Steady training steps.
    steps_struck: Of these, steps in which a collection began.
    ms_per_step: Time of the collections inside their steps, by steady steps.
    longest_ms: The longest of them, as far as it lies in its step.
    """

    count: int
    full: int
    collected: int | None
    steps: int
    steps_struck: int
    ms_per_step: float
    longest_ms: float
    lines: tuple[PauseLine, ...]


class PoolFacts(Struct, frozen=True):
    """How all threads of a training process used its cores, mean over processes. The pool is all but the main one.

    What it loses is None where torch's threads fit, or are not known.

    main_cpu_share: Of the wall time, in which the main thread was on a core (schedstat).
    main_off_share: Of the wall time, in which it was neither on a core nor ready for one.
    used_cores: CPU time of all other threads of the process by wall time.
    ready_threads (threads): Time in which they were ready without a core, summed, by wall time.
    timeslices_per_step: How often a thread of the process was put on a core, per mean steady step.
    other_waits_share: Of the mean steady step, the main thread's wait for loader workers and files and its sleep.
    cores: Cores the process could have used: without what others and loader workers took.
    others_cores: CPU use of processes that are not the run's, and what a hypervisor took.
    lost_ms_per_step: The mean steady step less the step put together again with as many threads as cores: other waits,
        what the main thread did alone, and the pool's work over the cores. 6 us are taken out of the work for each time
        a thread was put on a core. At most what the main thread waited because of the pool.
    at_most_ms_per_step: The same with 15 us, at most all the main thread waited and 15 us for each time it was put on a
        core.
    """

    main_cpu_share: float
    main_off_share: float
    used_cores: float
    ready_threads: float
    timeslices_per_step: float
    other_waits_share: float
    cores: float
    others_cores: float | None
    lost_ms_per_step: float | None
    at_most_ms_per_step: float | None


# The source of a number of threads that neither the script nor the environment of the command asked for.
THREADS_FOUND = "rank.json, torch.get_num_threads when training began"


class CpuFacts(Struct, frozen=True):
    """How training shared its cores, mean over the steady time and over ranks.

    readings: Readings of telemetry between the first and the last steady step.
    seconds: From the first of them to the last.
    cores: Cores the run may use: affinity, cut by the cgroup's quota; of the smallest host.
    ranks_on_host: Training processes on the fullest host.
    threads: Threads of torch in each rank, as the script or the environment set them.
    own_cores: CPU use of all processes of the run on a host, mean over readings.
    run_delay_share: Of the wall time, in which a rank's main thread could run and had no core (schedstat), mean over
        ranks.
    throttled_share: Growth of the cgroup's throttled time by wall time; it is summed over cores, so it may be above 1.
    throttled_ms_per_step: That time or the main thread's wait, whichever is less, per mean steady step.
    own_ms_per_step: Of the wait without throttling, what others cannot have caused: they have only the cores they use,
        or where that is not read those the run leaves.
    main_cpu_share: Of the wall time, in which the main thread had a core, mean over ranks.
    waits_ms_per_step: Of the mean steady step, what the main thread waits for loader workers and files, or sleeps at a
        line.
    others_ms_per_step: Of the wait without throttling, what the run's other threads cannot have caused, at most what
        others had.
    involuntary_switches_per_s: How often the main thread was taken off its core.
    pressure_pct: Of the time, in which something waited for a core (PSI), the cgroup's if known.
    load: Mean load of the machine over a minute.
    migrations_per_s: How often the main thread was moved to another core.
    stolen_cores: What a hypervisor gave to other machines.
    """

    readings: int
    seconds: float
    cores: float
    ranks_on_host: int
    threads: int | None
    threads_place: Place | None
    threads_source: str
    own_cores: float
    run_delay_share: float
    throttled_share: float | None
    throttled_ms_per_step: float | None
    own_ms_per_step: float
    others_ms_per_step: float
    involuntary_switches_per_s: float | None
    pressure_pct: float | None
    load: float | None
    migrations_per_s: float | None = None
    stolen_cores: float | None = None
    pool: PoolFacts | None = None  # None in recordings without the counts of all threads, and of processes with one
    main_cpu_share: float | None = None
    waits_ms_per_step: float = 0.0


class Child(Struct, frozen=True):
    """Processes of the run that neither train nor load batches, alike in command and in the line that started them.

    processes: Processes that used a core in the steady time.
    cores: Their CPU use, mean over readings.
    """

    command: str
    how: str | None  # "subprocess.Popen", "multiprocessing.Process", "os.fork" …; None where nobody saw it start
    place: Place | None
    processes: int
    cores: float


class ChildrenFacts(Struct, frozen=True):
    """What processes that the script started take from the main thread, the largest first. Times are None without
    telemetry of the main thread.

    cores: CPU use of processes that neither train nor load batches, mean over readings.
    ms_per_step: Of what the main thread waited for a core, their part by the CPU use of all that ran beside it.
    at_most_ms_per_step: That wait, with what the main thread may have spun meanwhile; or the distance to the quickest
        hundredth of the steady steps, whichever is more.
    """

    groups: tuple[Child, ...]
    cores: float
    ms_per_step: float | None
    at_most_ms_per_step: float | None


class MemoryPressureFacts(Struct, frozen=True):
    """Page faults that read a disk, and the time something stood still for want of memory (PSI).

    seconds: Of telemetry between the first and the last steady step.
    major_faults_per_step: Page faults of a training process that read a disk, per mean steady step.
    stalled_pct: Of the time, in which something stood still for want of memory (PSI).
    rss_bytes: Highest resident size of a training process.
    """

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

    steps: Steady training steps whose faults are known.
    minor_per_step: Pages that the system had to map in a step, for all threads of the process; mean.
    main_share: Of the faults, those that the main thread had itself, by telemetry.
    kept_share: Of the faults, those by which the processes grew: no loss, and not in the cost.
    risen_share: Of the faults, those beyond what the first tenth of the steps had.
    page_bytes: Size of a page.
    threads: Threads that faulted at once when the cost was measured.
    ns_alone: Processor time of a fault on one thread alone, zeroing the page included.
    ns_beside: Of a fault to each thread where several fault at once.
    ns_returned: To give a page back.
    cost_ms_per_step: What the training thread paid: its own faults, and giving all pages back; at most the step's own
        work.
    at_most_ms_per_step: The same with all faults one after another.
    libc (text): C library of the machine, with its version.
    preloaded (text): LD_PRELOAD of the command.
    settings (text): Variables of the command that set the allocator.
    huge_pages (text): Whether the kernel gives pages of 2 MiB: always, on request (madvise) or never.
    installed (text): Allocators that LD_PRELOAD could load.
    largest_bytes: Largest allocation in a window that recorded memory.
    """

    steps: int
    minor_per_step: float
    main_share: float | None  # None without telemetry: then all are taken for shared evenly, which costs least
    kept_share: float | None
    page_bytes: int
    threads: int
    ns_alone: float | None
    ns_beside: float | None
    ns_returned: float | None
    cost_ms_per_step: float | None
    at_most_ms_per_step: float | None
    libc: str | None
    preloaded: str | None
    settings: dict[str, str]  # MALLOC_*, GLIBC_TUNABLES and THP_MEM_ALLOC_ENABLE as the command was given them
    huge_pages: str | None
    installed: tuple[str, ...]
    largest_bytes: int | None
    risen_share: float = 0.0


class DriftLine(Struct, frozen=True):
    """A line of the user's whose sampled time per step grew between the first and the last part of the run.

    early_ms_per_step: Sampled time at the line, per step of the first third of the steady time.
    late_ms_per_step: The same of the last third.
    samples: Samples at the line in the last third.
    """

    place: Place
    early_ms_per_step: float
    late_ms_per_step: float
    samples: int


class DriftFacts(Struct, frozen=True):
    """Whether steady steps became slower. `rising`: every part of the run is slower at its median than the one before,
    on every rank.

    steps: Steady training steps.
    parts: Parts the run is cut into.
    early_ms: The line through all steps (Theil and Sen) at the first one, mean over ranks.
    late_ms: The same at the last one.
    lost_ms_per_step: The mean of the parts' medians over the line's start.
    medians_ms: Median step of each part.
    phases (ms): By phase, the last part's median over the first part's.
    """

    steps: int
    parts: int
    rising: bool
    early_ms: float
    late_ms: float
    lost_ms_per_step: float
    medians_ms: tuple[float, ...]
    phases: dict[str, float]
    lines: tuple[DriftLine, ...]


class ProfilerFacts(Struct, frozen=True):
    """The steps of the script's own profiler against the steady ones outside, of the ranks that have both.

    `source`: "journal", or "trace" where the profiler recorded stacks, because nothing is journaled meanwhile.

    inside: Training steps it recorded.
    outside: Steady ones it did not.
    inside_ms: Mean step under it.
    outside_ms: Mean step outside.
    steps: All training steps of these ranks.
    lost_ms_per_step: What its steps took over those outside, by means or medians, whichever tells less; by all steps.
    total_ms_per_step: Mean of all steps.
    """

    inside: int
    outside: int
    inside_ms: float
    outside_ms: float
    steps: int
    lost_ms_per_step: float
    total_ms_per_step: float
    source: str


class EpochFacts(Struct, frozen=True):
    """What starting a loader's iterators again cost, for one loader with workers. Medians are over the later epochs.

    num_workers: The loader's setting.
    restarts: Iterators made during training, without the first.
    make_ms: Median time to make one of them.
    first_wait_ms: Median wait for their first batch.
    usual_wait_ms: Median wait for their other batches.
    batch_ms: Work to make one batch, from sampled stacks of the workers.
    lost_ms_per_step: Time to make these iterators, and what first batches waited beyond usual_wait_ms and batch_ms
        (only where batch_ms is known), by all training steps.
    at_most_ms_per_step: Time to make these iterators, as much again at most for the gap before (the old workers end),
        and what the first steps of these epochs took beyond the faster quarter of the second halves; by all training
        steps.
    total_ms_per_step: Wall time of all training steps and of changing iterators, by training steps.
    """

    site: Place | None
    num_workers: int
    persistent: bool | None
    kind: str  # of the steps it feeds
    remade: bool  # whether the loader itself was made anew for them
    restarts: int
    make_ms: float
    first_wait_ms: float
    usual_wait_ms: float
    batch_ms: float | None
    lost_ms_per_step: float
    at_most_ms_per_step: float
    total_ms_per_step: float


class EvaluationFacts(Struct, frozen=True):
    """Evaluation between the training steps of a run, of steps that are steady or begin an epoch.

    times: How often it was done between training steps.
    steps: Batches of it that a loader brought; missing where it lies in the training steps that it follows.
    each_ms: Mean time of one.
    samples: Sampled stacks of its lines.
    lost_ms_per_step: Its time by these training steps.
    total_ms_per_step: Mean wall time of these training steps, with the evaluation between them.
    """

    places: tuple[Place, ...]  # the user's lines that call it, with their share of its sampled time
    times: int
    steps: int | None
    each_ms: float
    samples: int
    lost_ms_per_step: float
    total_ms_per_step: float


class WaveFacts(Struct, frozen=True):
    """Whether the wait for data comes in one step of `period`.

    period: Workers of the loader that feeds training.
    waves: Steady steps by the period: so many steps with the longest waits are looked at.
    share: Of all data wait of the first rank's steady steps, what lies in these steps.
    regular (share): Of the distances between neighbouring ones, those that are the period.
    wave_wait_ms: Median data wait in them.
    other_wait_ms: Median data wait in the other steps.
    """

    period: int
    waves: int
    share: float
    regular: float
    wave_wait_ms: float
    other_wait_ms: float


class TraceLoader(Struct, frozen=True):
    """The loader of one run of traces without a journal. `workers`: "none", "some", or None where no name tells.

    fetches: Ranges of the loader's `__next__` in the traces of the run.
    fetch_ms: Mean time of one.
    """

    run: str
    workers: str | None
    call: Place | None  # the user's line that asks for the batch
    entries: tuple[Place, ...]  # the outermost lines of the user's below it, with their share of its time
    fetches: int
    fetch_ms: float


class HookFacts(Struct, frozen=True):
    """A profiler or tracer of Python that was on when training began: a function, or its class."""

    name: str
    place: Place | None  # the line that switches it on, where one alone does


class MachineFacts(Struct, frozen=True):
    journaled: bool = False  # a journal of events exists: what is not in it did not happen
    pauses: PauseFacts | None = None
    cpu: CpuFacts | None = None
    memory: MemoryPressureFacts | None = None
    drift: DriftFacts | None = None
    profiler: ProfilerFacts | None = None
    hook: HookFacts | None = None
    epochs: tuple[EpochFacts, ...] | None = None
    evaluation: EvaluationFacts | None = None
    waves: WaveFacts | None = None
    trace_loaders: tuple[TraceLoader, ...] = ()
    gpus: tuple[GpuClocks, ...] = ()  # that the run computes on
    storage: StorageFacts | None = None
    numa: NumaFacts | None = None  # of a machine with several nodes of memory
    children: ChildrenFacts | None = None  # None without telemetry of the training time
    page_faults: PageFaultFacts | None = None  # None in recordings without them
    beside: Place | None = None  # the user's line at which other threads of the training ran most; share of all theirs


class Prices(Struct, frozen=True):
    """What the user pays, in whatever currency. None of what was not given.

    kwh (currency): A kWh.
    gpu_hour (currency): A GPU for an hour.
    co2_g_per_kwh (g): CO2 of a kWh.
    """

    kwh: float | None = None
    gpu_hour: float | None = None
    co2_g_per_kwh: float | None = None

    def __bool__(self) -> bool:
        return any(price is not None for price in (self.kwh, self.gpu_hour, self.co2_g_per_kwh))


NO_PRICES = Prices()


class EnergyCost(Struct, frozen=True):
    """What energy and GPUs cost at the user's prices: a run, or 1,000 steps of it. None of what has no price or figure.

    cost (currency): Energy and GPUs together; missing where one that has a price is not known.
    energy (currency): kWh by their price.
    gpus (currency): Hours of the run's GPUs by their price.
    gpu_hours (h): Hours of the run's GPUs: a GPU counts whether it works or waits.
    co2_g (g): kWh by the CO2 of one.
    """

    cost: float | None
    energy: float | None
    gpus: float | None
    gpu_hours: float | None
    co2_g: float | None


class EnergyDomain(Struct, frozen=True):
    """What one board, processor or memory drew in the run. `counted`: it is in the run's figures, else `why` not.

    `source` is "counter", "RAPL" or "sampled power"; `shared` says whether others used it, None where nobody tells.

    joules (J): From the start of the run to its end, as far as readings reach; missing where they do not tell.
    wh (Wh): The same.
    mean_w: The same by the time that readings reach over.
    seconds: Of the run, between the first reading and the last.
    sampled_ratio: Sampled power, summed, by the counter over the same time.
    longest_gap_s: Longest time between two readings.
    """

    host: str
    device: str
    kind: str  # "gpu" | "package" | "dram"
    name: str | None
    source: str
    joules: float | None
    wh: float | None
    mean_w: float | None
    seconds: float
    counted: bool
    shared: bool | None
    why: str | None
    sampled_ratio: float | None
    longest_gap_s: float


class StepEnergy(Struct, frozen=True):
    """Energy of some training steps, summed over devices; a step shorter than a second has an average, no figure of its
    own. `absent` says why there is none.

    steps: Steps that lie between the first reading and the last, each counted once for all ranks.
    joules_per_step (J): Energy while the steps ran, by steps.
    joules_per_sample (J): The same by the rows of the batches of all ranks.
    gpu_joules_per_step (J): Of the energy of a step, that of the GPUs.
    """

    steps: int = 0
    joules_per_step: float | None = None
    joules_per_sample: float | None = None
    gpu_joules_per_step: float | None = None
    absent: str | None = None


class EnergyFacts(Struct, frozen=True):
    """What the run drew, and what that costs. `sources` say what is in the sums, `absent` why there are none.

    joules (J): Of the run, summed over the devices that are counted, each once.
    wh (Wh): The same.
    mean_w: The same by the time that readings reach over, summed over devices.
    seconds: Of the run, that readings reach over: of the device with the fewest.
    run_s: The run.
    boards: GPUs of the run; missing where it is not known which ones it used.
    idle_share: Of profiled time, in which the GPUs of a trace did nothing.
    idle_joules_per_step (J): The GPUs' energy of a step by that share: an estimate, and the most it may be, as a GPU
        that waits draws less than the mean, and the profiler lets it wait longer.
    """

    domains: tuple[EnergyDomain, ...]
    sources: tuple[str, ...]
    joules: float | None
    wh: float | None
    mean_w: float | None
    seconds: float | None
    run_s: float | None
    boards: int | None
    per_step: StepEnergy
    idle_share: float | None
    idle_joules_per_step: float | None
    absent: str | None
    warnings: tuple[str, ...]  # what makes a figure doubtful
    notes: tuple[str, ...]
    prices: Prices
    cost: EnergyCost | None  # of the run; None without prices
    cost_per_1000_steps: EnergyCost | None


class RankWork(Struct, frozen=True):
    """One rank's mean step.

    rank: Number of the rank.
    wall_ms: Mean step: the sum of its phases.
    own_ms: Mean time in phases in which it waits for no other rank.
    exchange_ms: Mean time in the other phases: own work, transfer and waiting together.
    phases_ms: phase -> mean time.
    samples: Mean samples of a step; missing where a step's are unknown.
    """

    rank: int
    wall_ms: float
    own_ms: float
    exchange_ms: float
    phases_ms: dict[str, float]
    samples: float | None


class RanksFacts(Struct, frozen=True):
    """Steady training steps that all ranks took, the n-th of each beside the n-th of the others.

    `exchange` are the phases in which ranks wait for each other, `exchange_source` how that is known.

    steps: Training steps that are steady on all ranks: the n-th step of each rank stands beside the n-th of the others.
    slowest: The rank whose own work is longest, mean over steps.
    excess_ms: Own work of the slowest rank less the median of the others' in the same step, mean over steps.
    least_excess_ms: The smallest of that mean over the four quarters of the steps.
    slow: Ranks with at least half of the slowest one's excess over the median of the others.
    most_excess_ms: Its part of the step in the quarter where that was largest, times the mean step.
    longest_own_ms: Own work of whichever rank works longest in a step, mean over steps.
    waited_ms: Median over the other ranks of their time in phases of the exchange, less that of the slowest rank; mean
        over steps.
    slowest_share: Steps in which the slowest rank's own work was the longest of all.
    excess_by_phase_ms: phase of own work -> the slowest rank's time less the median of the others'.
    """

    ranks: tuple[RankWork, ...]
    steps: int
    exchange: tuple[str, ...]
    exchange_source: str
    slowest: int
    excess_ms: float
    least_excess_ms: float
    waited_ms: float
    slowest_share: float
    excess_by_phase_ms: dict[str, float]
    most_excess_ms: float = 0.0
    slow: tuple[int, ...] = ()
    longest_own_ms: float = 0.0

    def of(self, rank: int) -> RankWork:
        return next(work for work in self.ranks if work.rank == rank)


class RankWait(Struct, frozen=True):
    """One rank's mean step, and its wait for data.

    rank: Number of the rank.
    wall_ms: Its mean steady step.
    wait_ms: Of it, the wait for data.
    """

    rank: int
    wall_ms: float
    wait_ms: float


class Pipeline(Struct, frozen=True):
    """The chain behind a steady training step: loader workers, the main thread, the other ranks.

    mean_ms: The mean steady step.
    wait_ms: Of it, the wait for data.
    wait_at_most_ms: The wait's part of the step in the quarter of the run where it was largest, times the mean step.
    workers: Worker processes of the DataLoader; 0 loads in the training process.
    workers_ms: Work of all of them for one step.
    cores (count): Cores of one rank: those the process may use by the ranks of its host.
    contended_ms: In a mean step, what the main thread could run but had no core, held by the run's own threads.
    """

    mean_ms: float
    wait_ms: float | None
    wait_at_most_ms: float | None
    workers: int | None
    workers_ms: float | None
    cores: float | None
    contended_ms: float | None
    ranks: tuple[RankWait, ...]
