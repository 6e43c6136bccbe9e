"""Every limit of a comparison, each with its reason. Fractions are of the baseline's figure."""

from __future__ import annotations

from msgspec import Struct


class Alpha(Struct, frozen=True):
    """The p-value below which a figure is certain. Two figures may decide, so that each gets less than 0.05."""

    mean: float  # of samples per second too, where they are compared
    median: float


# Effects and verdicts ------------------------------------------------------------------------------------------------
CONFIDENCE = 0.95
# Chosen by simulation: mean and median together call at most 5.9 % of equal programs different, with spikes of 30 to
# 400 ms, runs that differ by 0.3 to 2 %, and six or more pairs (6.5 % with four of the noisiest). The median gets more
# of it because it finds more for it. `benchmarks/statistics.py` has the part with runs that differ by 1 %.
FIXED_ALPHA = Alpha(mean=0.035, median=0.045)  # where the number of pairs was fixed beforehand
LOOKING_ALPHA = Alpha(mean=0.025, median=0.03)  # where pairs end as soon as the interval is narrow
BLURRED = 1.4  # times the median's spread: half of the mean's variance is not in the typical step, so it is in stalls
INTERVAL_PAIRS = 3  # fewer give no interval: Student's factor is 12.7 for two pairs, 4.3 for three
WIDTH = 0.02  # pairs end when the interval's half-width is below it: three hours' training more or less in a week
THRESHOLD = 0.01  # an effect below 1 % is not worth a changed script, however certain it is
LEAST_PAIRS = 5  # before the width is looked at; experiment/schedule.py has the reason
MOST_PAIRS = 10  # 2 % at a spread of 2.8 % between pairs; a machine noisier than that needs quiet, not pairs
MOST_PAIRS_WORTH_NAMING = 100  # a comparison that needs more is not going to be run
ANOTHER_BATCH = 0.01  # samples per step differ by more: the step is another one, so samples per second are compared

# Warm-up -------------------------------------------------------------------------------------------------------------
WARMUP_SHARE = 1 / 3  # of the run at most: a slow third is how the run is
WARMUP_WINDOW = 8  # steps of a moving median; even, so that steps that alternate between two lengths have one level
WARMUP_SPREADS = 3.0  # the level counts as reached within as many robust standard deviations of the later levels
WARMUP_LEAST_CHANGE = 0.02  # a level this near is reached on the quietest machine too
WARMUP_SLOW_STEP = 1.1  # a first step is slow beyond this many times what 95 % of the later steps stay below
WARMUP_EXTREME_STEP = 3.0  # slower than the slowest later step by this factor (a compilation): dropped wherever it is

# Equivalence ---------------------------------------------------------------------------------------------------------
LOSS_BAND = 0.05  # another order of rounding or augmentation moves the mean of 100 losses by 1 to 3 %, a defect by tens
LEAST_LOSSES = 10  # steps with a loss on both sides; fewer say nothing about where training goes
LOSS_NOISE = 4.0  # standard errors that a mean loss may be off by chance; they are estimated from few steps themselves
LOSS_CONFIDENCE = 0.99  # that pairs whose losses differ by chance alone are not told from that
LOSS_SPREADS = 2.0  # times the largest difference between two baselines
LOSS_WIDEST_BAND = 0.5  # where equal runs may differ by half, that a candidate does not says nothing
LOSS_PROGRESS = 0.5  # of what the baseline learnt; a candidate that missed more of it does not learn the same


class Limits(Struct, frozen=True):
    """What counts as a difference; fractions of the baseline."""

    threshold: float = THRESHOLD
    width: float = WIDTH
    loss_band: float = LOSS_BAND


# Changes -------------------------------------------------------------------------------------------------------------
CHANGE_FLOOR = 0.005  # of the mean step: what moves less explains nothing that THRESHOLD lets matter
SAME_SHARE = 0.05  # of the amount itself, where few pairs give no interval: clocks and neighbours move kernels by 1-3 %
SAMPLING_SIGMAS = 3.0  # of counting samples; of a few hundred rows one passes by chance
SHARE_FLOOR = 1.0  # percentage points of all samples, where no step is known to measure by
UTILISATION_FLOOR = 2.0  # percentage points; means of windows of a few steps move by one
CORES_FLOOR = 0.1  # of a core, the resolution of sampling a few seconds of CPU time
LOAD_FLOOR = 1.0  # of the load average at the start: one more busy process

# Flags ---------------------------------------------------------------------------------------------------------------
LEAST_STEPS = 10  # a mean over fewer moves by several percent from run to run
STEPS_SHARE = 0.5  # of the steps asked for: a mean over fewer has another length of warm-up and epochs in it
LEAST_READINGS = 3  # of telemetry, one a second: the first and the last lie anywhere in a step
THROTTLED_READINGS = 2  # a single one may be the moment in which a board found its clock
THROTTLED_SHARE = 0.05  # of the readings in which the GPU was not idle; the step is longer by less than that
OTHERS_SHARE = 0.25  # of the cores; the recorder takes 0.02 to 0.05 of one, a shared machine seldom less than a tenth
OTHERS_DELAY = 0.10  # of the time without a core: the machine has none to spare for others
CROWDED_SHARE = 0.25  # of the cores more than during the other runs: one run had less of a machine than the rest
GPU_CLOCK_SHARE = 0.05  # below the clock of the other runs; boost and power limits move a mean over seconds by 1 to 3 %
CPU_CLOCK_SHARE = 0.10  # the same; of few readings with idle cores in them the mean moves by some percent
COLD_RATIO = 4.0  # times what the other runs read: the cache holds all of it or none, seldom a half
COLD_BYTES_PER_S = 5e6  # more than they read: logs, checkpoints and imports are below it, a data set is not
COLD_FAULTS = 1.0  # per step more than in the other runs, each as long as a disk takes
MAPPED_FAULTS = 1000.0  # per step more than in the other runs: at half a microsecond or more each, half a millisecond
MAPPED_RATIO = 1.25  # times those of the other runs; runs of one program come closer than that or far apart
MAPPED_LONGER = 1.02  # times the step of the other runs: what two equal runs differ by
WORKERS_START_S = 1.0  # between two workers of one iterator; they are forked in a row
WORKER_ALONE_S = 5.0  # telemetry sees a worker end up to a second late, and the last batches of an epoch take some
