"""Definitions of the figures of steps one by one, and of telemetry over time."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

SECTIONS = (
    Section(
        "StepPhases",
        "Steps one by one",
        "the dashboard's page of steps",
        metrics(
            steps=("count", "Numbers of the steps, thinned so that the longest stay."),
            wall_ms=("ms", "Wall time of each of them, on the host's clock."),
            parts_ms=("ms", "phase -> its time in each of them; `unattributed` is what no phase explains."),
            total=("count", "Steps before thinning."),
        ),
    ),
    Section(
        "StepDistribution",
        "Distribution of step times",
        "the dashboard's page of steps",
        metrics(
            edges_ms=("ms", "Edges of the bins, equally wide; the last bin also holds all longer steps."),
            steady=("count", "Steady steps in each bin: the ones that statistics stand on."),
            others=("count", "All other steps in each bin: warm-up, first batches, under a profiler, compiling."),
            longest_ms=("ms", "The longest step."),
        ),
    ),
    Section(
        "ProcessSteps",
        "Steps of each process",
        "the dashboard's page of steps",
        metrics(
            rank=("count", "Rank of the process."),
            steps=("count", "All steps of the kind."),
            steady=("count", "Of these, steady ones."),
            mean_ms=("ms", "Mean wall time of the steady steps of this process."),
            median_ms=("ms", "Median of the same."),
            p95_ms=("ms", "95th percentile of the same: one step in twenty takes longer."),
            longest_ms=("ms", "The longest of all its steps, steady or not."),
        ),
    ),
    Section(
        "StepEvent",
        "Events in a step",
        "the dashboard's page of steps",
        metrics(ms=("ms", "Time that the event took.")),
    ),
    Section(
        "LongStep",
        "The longest steps",
        "the dashboard's page of steps",
        metrics(
            step=("count", "Number of the step, counted from 0 in its process."),
            wall_ms=("ms", "Wall time of the step."),
            extra_ms=("ms", "The same above the median of the steady steps of this process and kind."),
            phase_extra_ms=("ms", "Of the phase that is longest above its own median, by how much."),
        ),
    ),
    Section(
        "TelemetrySeries",
        "Telemetry over time",
        "the dashboard's page of the system",
        metrics(
            values=(
                "in the name",
                "Readings, or the mean of those of a point's time; of counters the growth per second. docs/run_folder.md says what each metric is.",
            ),
        ),
    ),
    Section(
        "Telemetry",
        "Telemetry over time: the axis",
        "the dashboard's page of the system",
        metrics(
            time_s=("s", "Of each point, since the start of the run."),
            bucket_s=("s", "How long a point stands for; missing where each is one reading."),
            readings=("count", "Moments at which telemetry was read."),
            dropped=("count", "Series of further processes or devices that are left out."),
            step_time_s=("s", "When each step of the first training process began, since the start of the run."),
            step_ms=("ms", "Wall time of these steps."),
        ),
    ),
)
