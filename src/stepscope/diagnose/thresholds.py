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
