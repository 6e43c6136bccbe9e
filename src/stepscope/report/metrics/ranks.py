"""Definitions of the figures of several ranks side by side."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

SECTIONS = (
    Section(
        "RanksFacts",
        "Ranks side by side",
        "not in the report; behind the communication rules",
        metrics(
            steps=(
                "count",
                "Training steps that are steady on all ranks: the n-th step of each rank stands beside the n-th of the others.",
            ),
            slowest=("count", "The rank whose own work is longest, mean over steps."),
            excess_ms=(
                "ms",
                "Own work of the slowest rank less the median of the others' in the same step, mean over steps.",
            ),
            least_excess_ms=("ms", "The smallest of that mean over the four quarters of the steps."),
            slow=("count", "Ranks with at least half of the slowest one's excess over the median of the others."),
            most_excess_ms=("ms", "Its part of the step in the quarter where that was largest, times the mean step."),
            longest_own_ms=("ms", "Own work of whichever rank works longest in a step, mean over steps."),
            waited_ms=(
                "ms",
                "Median over the other ranks of their time in phases of the exchange, less that of the slowest rank; mean over steps.",
            ),
            slowest_share=("share", "Steps in which the slowest rank's own work was the longest of all."),
            excess_by_phase_ms=("ms", "phase of own work -> the slowest rank's time less the median of the others'."),
        ),
    ),
    Section(
        "RankWork",
        "Ranks side by side: each",
        "not in the report; behind the communication rules",
        metrics(
            rank=("count", "Number of the rank."),
            wall_ms=("ms", "Mean step: the sum of its phases."),
            own_ms=("ms", "Mean time in phases in which it waits for no other rank."),
            exchange_ms=("ms", "Mean time in the other phases: own work, transfer and waiting together."),
            phases_ms=("ms", "phase -> mean time."),
            samples=("count", "Mean samples of a step; missing where a step's are unknown."),
        ),
    ),
)
