"""Definitions of the figures of comparisons and experiments, and of what a run was started with for one."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

_BOTH = "compare --json, experiment.json"
_LIMITS = "95 % interval, from the differences between pairs; missing with fewer than three of them."

SECTIONS = (
    Section(
        "TrialFacts",
        "Knobs, seed and losses of a run",
        "views.trial",
        metrics(
            losses=(
                "loss",
                "(step, value) of the tensor that `backward` was called on, of a step's several calls the mean. What is no "
                "finite number is the text nan, inf or -inf.",
            ),
            seed=("count", "The number that the generators of Python, numpy and torch were started from."),
            losses_rank=("count", "Rank that the losses are of, the first that has any."),
            skipped=("count", "Entries of the recording about knobs and losses that make no sense."),
        ),
    ),
    Section(
        "AppliedKnob",
        "What became of a knob",
        "views.trial.knobs, " + _BOTH,
        metrics(
            line=("count", "Number of the user's line that the knob stands for."),
            rank=("count", "Rank of the process that reported it; missing where none did."),
        ),
    ),
    Section(
        "Measure",
        "A measured run",
        _BOTH,
        metrics(
            steps=(
                "count",
                "Measured steps: all after warm-up but those under a profiler, each counted once for all ranks.",
            ),
            dropped=(
                "count",
                "Steps before them, dropped as warm-up: until the step time is at the level of the later steps.",
            ),
            mean_ms=(
                "ms",
                "Mean wall time of the measured steps, stalls and first batches of epochs included, mean over ranks; with "
                "the time between two steps that iterating the loader again took.",
            ),
            median_ms=("ms", "Median of the measured steps, without the time between steps."),
            p95_ms=("ms", "95th percentile of the same."),
            samples_per_step=("count", "Mean rows of the batches of a measured step, summed over ranks."),
            samples_per_second=("1/s", "The same by the mean step."),
            fixed_cost_s=("s", "From the start of the command to the first step."),
            losses=("loss", "(step, value) of the first rank that has any, over all steps."),
            started_ns=("ns", "Start of the recording, since the epoch."),
            warmup_s=("s", "How much longer the dropped steps took than as many measured ones."),
            conditions=("mixed", "Figures of the machine during the measured steps, see below."),
            steady=("mixed", "The steady step of the same run as `analyze` tells it, see below."),
        ),
        about="With traces of others the steps are those of `ProfilerStep`, none is dropped, and figures without a "
        "source are missing.",
    ),
    Section(
        "SteadyStep",
        "The steady step of a measured run",
        _BOTH,
        metrics(
            steps=("count", "Steady steps: what `steps.count` of the run's report is."),
            of=("count", "All steps of the kind, those left out included."),
            mean_ms=(
                "ms",
                "Mean of the steady steps, as in the report; `mean_ms` of the measure has stalls in it too.",
            ),
            median_ms=("ms", "Their median, as in the report."),
            p95_ms=("ms", "Their 95th percentile, as in the report."),
        ),
    ),
    Section(
        "PhaseTime",
        "Parts of a measured step",
        _BOTH,
        metrics(
            ms=(
                "ms",
                "Mean time of the part. Parts exclude each other and sum to the mean step: the phases of the journal, what "
                "of the step is of no known phase (unattributed), and between steps ending a loader's workers and making "
                "its next iterator (loader_restart). Of traces, the parts of the overview.",
            ),
        ),
    ),
    Section(
        "Conditions",
        "The machine during the measured steps",
        _BOTH + ": conditions",
        metrics(
            cores=("cores", "Cores the run may use: affinity, cut by the cgroup's quota."),
            others_cores=(
                "cores",
                "Of these, in use by others or taken by a hypervisor. The recorder itself is among the others.",
            ),
            run_delay_share=("share", "Of the time, in which a rank's main thread could run and had no core."),
            read_bytes_per_step=("bytes", "What training processes and loader workers brought from storage, by steps."),
            major_faults_per_step=("count", "Their page faults that read a disk, by steps."),
            minor_faults_per_step=("count", "Pages that the measured steps had the system map; mean, by the journal."),
            cpu_frequency_mhz=("MHz", "Mean clock of the CPU."),
            gpu_clock_mhz=("MHz", "Mean clock of the run's GPUs while they were not idle."),
        ),
    ),
    Section(
        "Effect",
        "An effect",
        _BOTH,
        metrics(
            ratio=("ratio", "Candidate over baseline: the geometric mean over pairs. Below 1 a time is shorter."),
            low=("ratio", "Lower end of the 95 % interval, by Student of the log ratios; missing with too few pairs."),
            high=("ratio", "Upper end of the same."),
            pairs=("count", "Pairs of runs, one of each side, that lie next to each other."),
            spread=("ratio", "Standard deviation of the log ratios; missing of a single pair."),
            p_value=(
                "probability",
                "Of a log ratio as far from 0 as this or farther if there were no effect, corrected for the number of "
                "candidates (Holm).",
            ),
        ),
    ),
    Section(
        "Verdict",
        "A verdict",
        _BOTH,
        metrics(
            resolution=("ratio", "X of `no difference larger than X`, as a fraction of the baseline."),
            pairs_needed=("count", "Further pairs that would decide it, if the spread stays what it is."),
        ),
    ),
    Section(
        "PhaseEffect",
        "What a phase changed by",
        _BOTH,
        metrics(
            baseline_ms=("ms", "Mean of the phase in the baseline's runs."),
            candidate_ms=("ms", "The same in the candidate's."),
            difference_ms=("ms", "Candidate less baseline, mean over pairs."),
            low_ms=("ms", "Lower end of its " + _LIMITS),
            high_ms=("ms", "Upper end of its " + _LIMITS),
        ),
    ),
    Section(
        "Equivalence",
        "Whether a candidate trains alike",
        _BOTH,
        metrics(
            difference=("ratio", "Relative difference of the mean loss over the compared steps."),
            band=("ratio", "The most that is accepted; wider where the baseline's runs differ among themselves."),
            steps=("count", "Steps whose losses were compared."),
        ),
    ),
    Section(
        "comparison.Change",
        "A change between two sides",
        "compare --json: changes",
        metrics(
            difference=("mixed", "Candidate less baseline, in the row's unit."),
            line=("count", "Number of the user's line that the row is about."),
        ),
    ),
    Section(
        "SideFacts",
        "A side of a comparison",
        "compare --json",
        metrics(
            figures=(
                "mixed",
                "Means over its compared runs, by the names of a measured run's figures; also percentiles of their steps.",
            )
        ),
    ),
    Section(
        "Candidate",
        "A candidate",
        "experiment.json",
        metrics(ceiling=("ratio", "The most that the diagnosis allows it to gain, as a fraction of the mean step.")),
    ),
    Section(
        "ByHand",
        "A loss that no knob reaches",
        "experiment.json",
        metrics(
            line=("count", "Number of the user's line to change."),
            ceiling=("ratio", "The most that the diagnosis allows it to gain, as a fraction of the mean step."),
        ),
    ),
    Section(
        "Protocol",
        "How candidates are measured",
        "experiment.json",
        metrics(
            warmup_steps=("count", "Steps that may be dropped as warm-up, at most."),
            measured_steps=("count", "Steps to measure after them."),
            least_pairs=("count", "Pairs before the interval's width is looked at."),
            most_pairs=("count", "Pairs after which a candidate is left undecided."),
            width=("ratio", "Pairs end when half of the interval is narrower."),
            threshold=("ratio", "Effects below it are not worth a verdict."),
            loss_band=("ratio", "Relative difference of the mean loss up to which two runs train alike."),
            seed=("count", "Seed of the first block of runs; each further block has the next."),
            budget_s=("s", "Time after which no further run is started; missing without a budget."),
            rate_hz=("Hz", "Samples of stacks per second."),
        ),
    ),
    Section(
        "MainEffect",
        "What a knob does on average",
        "experiment.json",
        metrics(
            ratio=("ratio", "With the knob over without it, mean over all settings of the other knobs."),
            low=("ratio", "Lower end of the 95 % interval."),
            high=("ratio", "Upper end of the same."),
            runs=("count", "Runs that it stands on."),
            ceiling=("ratio", "The most that the diagnosis allows it to gain, as a fraction of the mean step."),
        ),
    ),
    Section(
        "Noise",
        "What this machine can show",
        "experiment.json",
        metrics(
            smallest_effect=(
                "ratio",
                "Half of the interval between equal runs: smaller effects cannot be told from none.",
            ),
            pairs=("count", "Pairs of equal runs that it stands on."),
        ),
    ),
    Section(
        "Experiment",
        "An experiment",
        "experiment.json",
        metrics(
            runs=("count", "Runs that were made, the unusable ones included."),
            wall_s=("s", "Time that the experiment took, breaks not counted."),
        ),
    ),
)
