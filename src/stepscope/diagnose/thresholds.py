"""Every number a rule decides by, each with its reason. Shares are fractions of the mean steady step."""

from __future__ import annotations

from dataclasses import dataclass

# Below this share of the step no finding is made: runs of the same script on one machine differ by a few percent, so
# no experiment could confirm a smaller gain. A healthy run is one without a finding above it.
REPORT_FLOOR = 0.05


@dataclass(frozen=True)
class Severity:
    """Shares from which a finding is called a warning or critical, whatever its rule."""

    warning: float = 0.10  # where other trainers' diagnosers begin to warn about their phases
    critical: float = 0.25  # a quarter of the training time: worth stopping a running job for


@dataclass(frozen=True)
class Confidence:
    """How much evidence a sampled share needs. n samples give a share of 10 % a standard error of 0.3 / sqrt(n)."""

    few_samples: int = 30  # +- 5 points: enough to rank, not to quote
    many_samples: int = 100  # +- 3 points


@dataclass(frozen=True)
class Loader:
    """When the workers are the bottleneck and when something behind them is."""

    floor: float = REPORT_FLOOR
    idle: float = 0.6  # workers parked for most of their time make batches faster than they are taken
    lines_shown: int = 3  # of each kind; a share below `line_share` names nothing worth reading
    line_share: float = 0.05
    mostly: float = 0.5  # a function with more than half of the loading time is named in the title
    handover: float = 0.1  # of the load time: handing batches over, seen at 5 to 10 % for images of a few MB


@dataclass(frozen=True)
class Loop:
    """When many equal calls are a loop worth vectorising."""

    floor: float = REPORT_FLOOR
    operators_per_call: float = 1.0  # below it the iterations run no torch operator: plain Python, another rule
    steps_for_high: int = 3  # window steps from which a mean over them is no accident


@dataclass(frozen=True)
class Python:
    """When Python on the main thread counts."""

    floor: float = REPORT_FLOOR
    samples: int = 10  # fewer samples on a function are chance
    waiting: float = 0.5  # mostly parked: it sleeps or waits rather than computes
    lines_shown: int = 3


@dataclass(frozen=True)
class Io:
    """When file I/O inside a step counts."""

    floor: float = REPORT_FLOOR
    samples: int = 10


@dataclass(frozen=True)
class Compile:
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


@dataclass(frozen=True)
class Transfers:
    """When values read from the device count. They are ranked by their time: many cheap ones are no finding."""

    floor: float = REPORT_FLOOR
    per_step: float = 0.5  # over the whole run; torch_xla's debug profiler warns above it
    late_per_step: float = 1.0  # after warm-up: one logged loss per step is usual; chosen, untuned
    warmup_steps: int = 10  # torch_xla's own, of compilations


@dataclass(frozen=True)
class Unlowered:
    """When operators that run on the host count. Any that the steps keep using: what they cost is only partly timed."""

    per_step: float = 0.1  # calls; below it an operator belongs to the preparations; chosen, untuned
    operators_shown: int = 5


@dataclass(frozen=True)
class Execution:
    """When one execution of a compiled graph takes too long."""

    floor: float = REPORT_FLOOR
    slow_ms: float = 30_000  # torch_xla's debug profiler warns above it


@dataclass(frozen=True)
class Trace:
    """When a trace is too poor to be believed as it stands."""

    lost: float = 0.01  # of its events: a loss that could hide a whole kind of operator
    linked: float = 0.9  # of the device time launched in it; sound traces reach 0.99


@dataclass(frozen=True)
class Waves:
    """When the wait for data is a wave of all workers at once and not one per step."""

    floor: float = REPORT_FLOOR
    share: float = 0.7  # of the wait in one step of N: evenly spread waits put 1/N there
    regular: float = 0.7  # of the distances between waves that are N; an epoch's end breaks one


@dataclass(frozen=True)
class Epochs:
    """When starting workers anew for every epoch counts."""

    floor: float = REPORT_FLOOR


@dataclass(frozen=True)
class Pauses:
    """When garbage collections count."""

    floor: float = REPORT_FLOOR
    count: int = 3  # fewer in a whole run are no rhythm
    one_line: float = 0.9  # of their time at one line: it asks for them, since automatic ones strike anywhere
    lines_shown: int = 3


@dataclass(frozen=True)
class Cores:
    """When a main thread that waits for a core counts. Others need more: our own recorder is among them, with up to
    2 %, and a scheduler makes any thread wait a few percent."""

    floor: float = REPORT_FLOOR
    others_floor: float = 0.10
    others_readings: int = 30  # half a minute: a shorter burst of others says nothing of the next run
    readings_for_high: int = 30


@dataclass(frozen=True)
class MemoryPressure:
    """When the machine runs out of memory during steps."""

    floor: float = REPORT_FLOOR
    faults_per_step: float = 1.0  # that read a disk; below it pressure is that of others; chosen, untuned


@dataclass(frozen=True)
class Drift:
    """When steps that grow slower count. How a drift is told from noise stands in `analyze/drift.py`."""

    floor: float = REPORT_FLOOR
    phase: float = 0.5  # a phase with more than half of the growth is named


@dataclass(frozen=True)
class Profiler:
    """When the script's own profiler counts."""

    floor: float = REPORT_FLOOR
    steps: int = 3  # in it: fewer are chance
    steps_for_high: int = 10


@dataclass(frozen=True)
class TracedLoader:
    """When the loader of a trace without a journal counts: time in it while the device idles."""

    floor: float = REPORT_FLOOR  # torch-tb-profiler warned at the same share, of the loader's whole time
    steps_for_high: int = 10
    steps_for_medium: int = 3


@dataclass(frozen=True)
class Device:
    """When a loss of the devices in profiled steps counts. The limits of a gap stand in `analyze/device_losses`."""

    floor: float = REPORT_FLOOR
    recurring: float = 0.5  # of the mean: with a median below it few steps make the loss, and the median counts
    steps_for_median: int = 3  # of fewer steps the median says nothing else than the mean
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    lines_shown: int = 3


@dataclass(frozen=True)
class Launch:
    """When the device waits for launches. Kernels count as short when the host takes longer to launch one."""

    gaps: float = 20  # launches per step that the device waited for; fewer are no pattern; chosen, untuned
    part: float = 0.2  # of the idle time: a part of the step, as the optimizer, that is worth its own advice
    mostly: float = 0.5


@dataclass(frozen=True)
class TensorCores:
    """What mixed precision gives. NVIDIA reports 1.5 to 3 times for whole training steps."""

    gain: float = 2.0  # of products in 16 bits at least: half of the bytes, and from Volta on twice the rate or more
    peak: float = 16.0  # tensor cores by ordinary ones in 32 bits, data sheets of A100 and H100
    peak_volta: float = 8.0  # the same of V100 and T4
    bytes: float = 2.0  # what 16 bits can give all other kernels, which move data


@dataclass(frozen=True)
class Ranks:
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


@dataclass(frozen=True)
class Collectives:
    """When communication costs more than it has to."""

    floor: float = REPORT_FLOOR
    exposed: float = 0.10  # of the step, where PyTorch's TensorBoard plugin begins to warn
    waiting: float = 0.5  # of the communication: then it is the ranks' unequal work, not the network
    small_bytes: int = 1 << 20  # DistributedDataParallel's first bucket; smaller messages do not fill a link
    calls: int = 10  # per step; buckets of the smallest models and a few reduced metrics are fewer; chosen, untuned
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    kinds_shown: int = 3


SEVERITY = Severity()
CONFIDENCE = Confidence()
LOADER = Loader()
LOOP = Loop()
PYTHON = Python()
IO = Io()
COMPILE = Compile()
TRANSFERS = Transfers()
UNLOWERED = Unlowered()
EXECUTION = Execution()
TRACE = Trace()
DEVICE = Device()
LAUNCH = Launch()
TENSOR_CORES = TensorCores()
WAVES = Waves()
EPOCHS = Epochs()
PAUSES = Pauses()
CORES = Cores()
MEMORY_PRESSURE = MemoryPressure()
DRIFT = Drift()
PROFILER = Profiler()
TRACED_LOADER = TracedLoader()
RANKS = Ranks()
COLLECTIVES = Collectives()
