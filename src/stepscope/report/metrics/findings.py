"""Definitions of the figures of findings beside their cost: sources that disagree, and who calls whom."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

SECTIONS = (
    Section(
        "CallerLine",
        "Callers",
        "views.sampled.callers; behind `explains` of findings",
        metrics(
            samples=(
                "count",
                "Samples of the steady loop in which the inner line was the innermost of the user's, below the outer one.",
            ),
            share=("share", "The same by all samples of the inner line; pairs below one half are left out."),
        ),
    ),
)
