"""Definitions of the figures that replays of a step without one loss stand on."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

SECTIONS = (
    Section(
        "Pipeline",
        "What steps wait for and share",
        "not in the report; behind ceilings of input, host, io and communication rules",
        metrics(
            mean_ms=("ms", "The mean steady step."),
            wait_ms=("ms", "Of it, the wait for data."),
            wait_at_most_ms=(
                "ms",
                "The wait's part of the step in the quarter of the run where it was largest, times the mean step.",
            ),
            workers=("count", "Worker processes of the DataLoader; 0 loads in the training process."),
            workers_ms=("ms", "Work of all of them for one step."),
            cores=("count", "Cores of one rank: those the process may use by the ranks of its host."),
            contended_ms=(
                "ms",
                "In a mean step, what the main thread could run but had no core, held by the run's own threads.",
            ),
        ),
    ),
    Section(
        "RankWait",
        "What steps wait for: each rank",
        "not in the report; as above",
        metrics(
            rank=("count", "Number of the rank."),
            wall_ms=("ms", "Its mean steady step."),
            wait_ms=("ms", "Of it, the wait for data."),
        ),
    ),
    Section(
        "FileReads",
        "Files the loader reads",
        "views.loader.files",
        metrics(
            share=("share", "Samples of making batches that stand in opening and reading files."),
            samples=("count", "All samples of making batches."),
            files_per_item=("count", "Files the training process opened in the window, by the items of its steps."),
        ),
    ),
)
