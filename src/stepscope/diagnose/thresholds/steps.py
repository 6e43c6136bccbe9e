"""Losses told by the steps of a run: input, host, files, ranks, work that training does not need."""

from __future__ import annotations

from msgspec import Struct

from stepscope.diagnose.thresholds.shares import REPORT_FLOOR


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
