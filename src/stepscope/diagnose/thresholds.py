"""Every number a rule decides by, each with its reason. Shares are fractions of the mean steady step."""

from __future__ import annotations

from msgspec import Struct

# Below this share of the step no finding is made: runs of the same script on one machine differ by a few percent, so
# no experiment could confirm a smaller gain. A healthy run is one without a finding above it.
REPORT_FLOOR = 0.05


class Severity(Struct, frozen=True):
    """Shares from which a finding is called a warning or critical, whatever its rule."""

    warning: float = 0.10  # where other trainers' diagnosers begin to warn about their phases
    critical: float = 0.25  # a quarter of the training time: worth stopping a running job for


SEVERITY = Severity()


class Confidence(Struct, frozen=True):
    """How much evidence a sampled share needs. n samples give a share of 10 % a standard error of 0.3 / sqrt(n)."""

    few_samples: int = 30  # +- 5 points: enough to rank, not to quote
    many_samples: int = 100  # +- 3 points


class Trace(Struct, frozen=True):
    """When a trace is too poor to be believed as it stands."""

    lost: float = 0.01  # of its events: a loss that could hide a whole kind of operator
    linked: float = 0.9  # of the device time launched in it; sound traces reach 0.99


class Causes(Struct, frozen=True):
    """When one finding explains another."""

    part: float = 0.5  # of the other's cost that lies in the cause's code, and that the cause's cost could hold: most


class Silence(Struct, frozen=True):
    """When "nothing worth fixing" may be said."""

    # of the step that nobody explained: from there on a finding of the same size would have been a warning. Healthy
    # runs left 0 to 4 %: our own sampling, the scheduler, readings that begin and end within a step
    unexplained: float = SEVERITY.warning


class Agreement(Struct, frozen=True):
    """When two sources that tell the same quantity disagree."""

    sigmas: float = 4.0  # standard errors of a sampled share: a handful of comparisons, so chance speaks in no run
    share: float = 0.10  # of the step at least: less changes neither the order of findings nor the advice
    slowed: float = 1.5  # a window's step by the steady one: profilers with stacks add a third; chosen, untuned
    utilization: float = 0.20  # NVML counts a sixth of a second to a second as busy where any kernel ran in it


CONFIDENCE = Confidence()
TRACE = Trace()
CAUSES = Causes()
AGREEMENT = Agreement()
SILENCE = Silence()


class Loader(Struct, frozen=True):
    """When the workers are the bottleneck and when something behind them is."""

    floor: float = REPORT_FLOOR
    idle: float = 0.6  # workers parked for most of their time make batches faster than they are taken
    lines_shown: int = 3  # of each kind; a share below `line_share` names nothing worth reading
    line_share: float = 0.05
    mostly: float = 0.5  # a function with more than half of the loading time is named in the title
    files: float = 0.3  # of the loading: with less, packing the items gains less than other advice; chosen, untuned
    file_samples: int = 30  # as CONFIDENCE.few_samples
    files_per_item: float = 0.5  # below it items share files already; chosen, untuned
    handover: float = 0.1  # of the load time: handing batches over, seen at 5 to 10 % for images of a few MB
    handover_ms: float = 1.0  # of a small batch: a queue, a descriptor and two processes that wake; chosen, untuned
    # Processor time at least, of each of the two processes, to hand over a batch: measured with one worker that has
    # them ready (torch 2.13, two virtual cores, other load beside): 0.10 to 0.15 for a batch, 0.13 to 0.25 for each
    # tensor (a file descriptor over a socket, a mapping), 0.38 to 1.1 for a MB (pages of shared memory touched anew).
    handover_batch_ms: float = 0.1
    handover_tensor_ms: float = 0.1
    handover_mb_ms: float = 0.25
    threads_of_a_core: float = 2.0  # logical cores; two ranks on such a pair were seen to compute no faster than one
    crowded: float = 0.05  # of the time without a core: then nothing can be promised of more processes


class TracedLoader(Struct, frozen=True):
    """When the loader of a trace without a journal counts: time in it while the device idles."""

    floor: float = REPORT_FLOOR  # torch-tb-profiler warned at the same share, of the loader's whole time
    steps_for_high: int = 10
    steps_for_medium: int = 3


class Waves(Struct, frozen=True):
    """When the wait for data is a wave of all workers at once and not one per step."""

    share: float = 0.7  # of the wait in one step of N: evenly spread waits put 1/N there
    regular: float = 0.7  # of the distances between waves that are N; an epoch's end breaks one


class Epochs(Struct, frozen=True):
    """When starting workers anew for every epoch counts."""

    floor: float = REPORT_FLOOR


class Loop(Struct, frozen=True):
    """When many equal calls are a loop worth vectorising."""

    floor: float = REPORT_FLOOR
    operators_per_call: float = 1.0  # below it the iterations run no torch operator: plain Python, another rule
    steps_for_high: int = 3  # window steps from which a mean over them is no accident


class Python(Struct, frozen=True):
    """When Python on the main thread counts."""

    floor: float = REPORT_FLOOR
    samples: int = 10  # fewer samples on a function are chance
    waiting: float = 0.5  # mostly parked: it sleeps or waits rather than computes
    lines_shown: int = 3
    of_call: float = 0.2  # of all that runs in the call: with less the call is not about Python; chosen, untuned
    unknown: float = 0.5  # of the cost: with more of it not told from operators nobody knows that it is Python
    doubtful: float = 0.2  # of the cost: with less the answer is the same either way; chosen, untuned


class Io(Struct, frozen=True):
    """When file I/O inside a step counts."""

    floor: float = REPORT_FLOOR
    samples: int = 10
    of_call: float = 0.2  # as for Python; chosen, untuned


class Drift(Struct, frozen=True):
    """When steps that grow slower count. How a drift is told from noise stands in `analyze/drift.py`."""

    floor: float = REPORT_FLOOR
    phase: float = 0.5  # a phase with more than half of the growth is named


class Profiler(Struct, frozen=True):
    """When the script's own profiler counts."""

    floor: float = REPORT_FLOOR
    steps: int = 3  # in it: fewer are chance
    steps_for_high: int = 10


class Passes(Struct, frozen=True):
    """When work that training does not need counts."""

    floor: float = REPORT_FLOOR
    recurring: float = 0.5  # of the profiled steps; a call in fewer is made every few steps already; chosen, untuned
    nearly_all: float = 0.9  # of them, for more than medium confidence; chosen, untuned
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    samples: int = 10  # of copies; fewer are chance
    lines_shown: int = 3


class Doubles(Struct, frozen=True):
    """What float32 gives in place of float64."""

    saved: float = 0.5  # half of the bytes, and twice as many numbers to an instruction, on CPUs and on every GPU
    most: float = 0.6  # of the same: data that fits a cache in float32 alone gains more; chosen, untuned
    most_slow: float = 0.97  # of GPUs with one unit for float64 to 32 or 64 for float32
    fast_capabilities: tuple[str, ...] = ("6.0", "7.0", "8.0", "9.0", "10.0")  # NVIDIA's, with one unit to two


class Recompute(Struct, frozen=True):
    """When activation checkpointing counts."""

    full: float = 0.7  # of the device's memory: kept activations would hardly fit; chosen, untuned
    most: float = 1.1  # of the time of the work that is done again: keeping random states and hooks; chosen, untuned


class Ranks(Struct, frozen=True):
    """When one rank keeps the others waiting, rather than jitter or a slow moment."""

    floor: float = REPORT_FLOOR
    persistent: float = 0.8  # of the steps one rank is the slowest; TraceML names a cause from as much coverage on
    every_quarter: float = (
        0.5  # of the mean excess, in each quarter of the run: else something else was busy for a while
    )
    waited: float = 0.5  # of the excess: ranks that do not wait for each other as long are not in step
    agree: float = 0.75  # waiting by excess, either way; both are measured, so sound runs lie near 1
    unequal: float = 1.1  # samples by the others' median: fewer are the remainder of a data set; chosen, untuned
    mostly: float = 0.5  # of the excess in the data wait: an input problem
    steps_for_high: int = 20  # as TraceML asks for to call a difference critical
    lines_shown: int = 3
    line_share: float = 0.1  # of the excess; a phase with less explains nothing
    ranks_shown: int = 4


class Pipeline(Struct, frozen=True):
    """How far a replay of a run's step may be trusted. Ceilings are raised by what it does not know."""

    certain: float = 0.9  # of a time beside the main thread: busy shares and profiled kernels are known to some percent
    # What the rest of a step takes longer on a CPU behind Python that made batches or records: 0 to 0.3 ms, and 0 to
    # 20 % of it, measured in three small models against the same steps without that Python.
    cold_ms: float = 0.3
    cold: float = 0.2
    # The same behind a call of the model on other data, of the shorter of call and rest: medians of up to 24 % in
    # five models (benchmarks/cold_caches.py); 24 % where the model and a batch alone fit a core's own cache.
    cold_tensors: float = 0.25
    # The same behind a copy of the model, which also leaves the allocator other blocks, and the next step pages to map:
    # medians of up to 50 % and upper quartiles of up to 67 % of the shorter of both in eight models, by the CPU time of
    # one thread (benchmarks/cold_caches.py measures it as the rows "copy").
    cold_copies: float = 0.75
    contended: float = 0.02  # of the step without a core because of the run itself: more slows what runs beside, too


LOADER = Loader()
TRACED_LOADER = TracedLoader()
WAVES = Waves()
EPOCHS = Epochs()
LOOP = Loop()
PYTHON = Python()
IO = Io()
DRIFT = Drift()
PROFILER = Profiler()
PASSES = Passes()
DOUBLES = Doubles()
RECOMPUTE = Recompute()
RANKS = Ranks()
PIPELINE = Pipeline()


class Device(Struct, frozen=True):
    """When a loss of the devices in profiled steps counts. The limits of a gap stand in `analyze/device_losses`."""

    floor: float = REPORT_FLOOR
    recurring: float = 0.5  # of the mean: with a median below it few steps make the loss, and the median counts
    steps_for_median: int = 3  # of fewer steps the median says nothing else than the mean
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    lines_shown: int = 3


class Replayed(Struct, frozen=True):
    """When a replay tells so much less than the cost that it is worth a word."""

    close: float = 0.01  # of the step: titles and shares are shown to a percent
    unexplained: float = 0.10  # of the step, as much as makes a finding a warning; sound traces stay below 0.05


class Launch(Struct, frozen=True):
    """When the device waits for launches. Kernels count as short when the host takes longer to launch one."""

    gaps: float = 20  # launches per step that the device waited for; fewer are no pattern; chosen, untuned
    filling: float = 0.5  # of the kernels' time with a block for every multiprocessor: below it the device has room
    mostly: float = 0.5  # of an optimizer's launches: the way it updates most of its parameters


class TensorCores(Struct, frozen=True):
    """What mixed precision gives. NVIDIA reports 1.5 to 3 times for whole training steps."""

    gain: float = 2.0  # of products in 16 bits at least: half of the bytes, and from Volta on twice the rate or more
    peak: float = 16.0  # tensor cores by ordinary ones in 32 bits, data sheets of A100 and H100
    peak_volta: float = 8.0  # the same of V100 and T4
    bytes: float = 2.0  # what 16 bits can give all other kernels, which move data


class Layout(Struct, frozen=True):
    """Whose layout is converted."""

    at_input: float = 0.8  # of the conversions at a step's first convolution: the rest of the model agrees with itself


class Collectives(Struct, frozen=True):
    """When communication costs more than it has to."""

    floor: float = REPORT_FLOOR
    exposed: float = 0.10  # of the step, where PyTorch's TensorBoard plugin begins to warn
    waiting: float = 0.5  # of the communication: then it is the ranks' unequal work, not the network
    small_bytes: int = 1 << 20  # DistributedDataParallel's first bucket; smaller messages do not fill a link
    calls: int = 10  # per step; buckets of the smallest models and a few reduced metrics are fewer; chosen, untuned
    sync_batch_norms: float = 20  # layers per step, from which Ascend's msprof-analyze advises to have fewer
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    kinds_shown: int = 3


DEVICE = Device()
REPLAY = Replayed()
LAUNCH = Launch()
TENSOR_CORES = TensorCores()
LAYOUT = Layout()
COLLECTIVES = Collectives()


class Pauses(Struct, frozen=True):
    """When garbage collections count."""

    floor: float = REPORT_FLOOR
    count: int = 3  # fewer in a whole run are no rhythm
    one_line: float = 0.9  # of their time at one line: it asks for them, since automatic ones strike anywhere
    lines_shown: int = 3


class Cores(Struct, frozen=True):
    """When a main thread that waits for a core counts. Others need more: our own recorder is among them, with up to
    2 %, and a scheduler makes any thread wait a few percent."""

    floor: float = REPORT_FLOOR
    others_floor: float = 0.10
    others_readings: int = 30  # half a minute: a shorter burst of others says nothing of the next run
    readings_for_high: int = 30
    child_cores: float = 0.1  # of what all children use: those below are not named
    shared_core: float = 0.4  # of its own time a thread may lose to a busy sibling on its core, and to cold caches: two
    # hyperthreads of one core do 1.2 to 1.3 times the work of one; 15 ms of a step beside three processes were 10 alone
    command_shown: int = 60  # characters of a child's command in a title
    away: float = 0.5  # of the readings on another node than the GPU: then binding is worth a try


class Clocks(Struct, frozen=True):
    """When a GPU below its highest clock counts."""

    floor: float = REPORT_FLOOR
    readings: int = 10  # in which it was not idle: ten seconds, more than a board takes to find its clock


class Storage(Struct, frozen=True):
    """When reads are worth telling beside a slow loader, and when they reach a device rather than the page cache."""

    bytes_per_s: float = 1e6  # below it a page cache and any disk are alike
    faults_per_s: float = 10.0  # of a millisecond each they would take 1 %
    readings: int = 20  # of the state of a process: 5 points per look
    cold: float = 0.5  # of the bytes asked for; chosen, untuned
    warm: float = 0.1  # the same in the last third; chosen, untuned


class MemoryPressure(Struct, frozen=True):
    """When the machine runs out of memory during steps."""

    floor: float = REPORT_FLOOR
    faults_per_step: float = 1.0  # that read a disk; below it pressure is that of others; chosen, untuned


class Memory(Struct, frozen=True):
    """When memory costs, or may end a run. How growth is told from noise stands in `analyze/memory_losses`."""

    floor: float = REPORT_FLOOR
    near: float = 0.92  # of the limit, in tensors at the peak; TraceML warns there
    full: float = 0.97  # TraceML calls it critical
    fragmented: float = 2.0  # held by what tensors took, both at their peaks; TraceML's
    held: float = 0.8  # of the limit: a process far below it may hold what it likes; chosen, untuned
    grown_bytes: int = 64 << 20  # of the host: one arena of glibc's allocator, which may fill for reasons of its own
    grown_device_bytes: int = 16 << 20  # torch counts exactly; a smaller sum may be one new shape; chosen, untuned
    confirmed_bytes: int = 1 << 30  # where no limit is known; TraceML's to call growth confirmed
    traced_bytes: int = 1 << 20  # per step, seen in a trace alone: as much in a thousand steps
    horizon_s: float = 86_400  # few jobs run longer than some days, and a slower growth than full in one is no haste
    soon_s: float = 3_600
    readings_for_high: int = 30
    traced_steps: int = 6  # levels that rise six times in a row do so by chance once in 720 traces
    lines_shown: int = 3


class PageFaults(Struct, frozen=True):
    """When pages mapped anew in every step count."""

    floor: float = REPORT_FLOOR
    faults_per_step: float = 256.0  # 1 MiB of pages: fewer are Python's and torch's own small change; chosen, untuned


PAUSES = Pauses()
PAGE_FAULTS = PageFaults()
CORES = Cores()
CLOCKS = Clocks()
STORAGE = Storage()
MEMORY_PRESSURE = MemoryPressure()
MEMORY = Memory()


class Compile(Struct, frozen=True):
    """When compiling during training counts. The rates per step of the run-level rules stand in `analyze/compilers`."""

    floor: float = REPORT_FLOOR
    close: float = 0.75  # of the limit of versions: 6 of torch's default 8; chosen, untuned
    same_cause: int = 3  # times: twice may be training and evaluation; chosen, untuned
    explained: float = 0.8  # of the lost time: what is left is no second loss; chosen, untuned
    slow_ms: float = 300_000  # one compilation; torch_xla's debug profiler warns above it
    share_warning: float = 0.20  # of the steps after warm-up; below it `compile.share` is info; chosen, untuned
    every: float = 0.8  # of the steps between first and last: then a cause is said to change "every step"
    eager: float = REPORT_FLOOR  # a median that grew by less is chance
    part: float = 0.2  # of the compilations: a smaller cause is not worth advice; chosen, untuned
    few_steps: int = 10  # fewer recorded steps make every compilation look expensive; torch_xla's own warm-up
    places_shown: int = 5
    changes_shown: int = 3


class Transfers(Struct, frozen=True):
    """When values read from the device count. They are ranked by their time: many cheap ones are no finding."""

    floor: float = REPORT_FLOOR
    per_step: float = 0.5  # over the whole run; torch_xla's debug profiler warns above it
    late_per_step: float = 1.0  # after warm-up: one logged loss per step is usual; chosen, untuned
    warmup_steps: int = 10  # torch_xla's own, of compilations


class Unlowered(Struct, frozen=True):
    """When operators that run on the host count. Any that the steps keep using: what they cost is only partly timed."""

    per_step: float = 0.1  # calls; below it an operator belongs to the preparations; chosen, untuned
    operators_shown: int = 5


class Execution(Struct, frozen=True):
    """When one execution of a compiled graph takes too long."""

    floor: float = REPORT_FLOOR
    slow_ms: float = 30_000  # torch_xla's debug profiler warns above it


COMPILE = Compile()
TRANSFERS = Transfers()
UNLOWERED = Unlowered()
EXECUTION = Execution()
