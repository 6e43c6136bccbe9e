"""The ranks of one run beside each other: from their steps and stacks, and for many ranks from reduced tables."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stepscope.model import Note

if TYPE_CHECKING:
    from stepscope.model.ranks import RanksRead, RanksVerdict
    from stepscope.tables.reduced import Reduced


def judge(reduced: Reduced) -> RanksVerdict:
    """Who holds the others up, why, at which line, and what it costs, from reduced tables alone."""
    from stepscope.analyze.ranks import verdict

    with warnings.catch_warnings():
        # NumPy warns where the middle of nothing is asked for, which stays NaN: missing
        warnings.filterwarnings("ignore", "All-NaN|Mean of empty", RuntimeWarning)
        return verdict.judge(reduced)


MOST_PROBLEMS = 3  # told one by one


def rank_notes(read: RanksRead | None, damaged: str) -> Iterator[Note]:
    """What of a run of many ranks was left out, in the order in which it matters.

    Args:
        damaged: why reduced tables that are there were not used; else empty.
    """
    if damaged:
        yield Note("warning", damaged, "reduced")
    if read is None:
        return
    if read.not_reduced:
        text = (
            f"{read.not_reduced} recorded ranks were not judged, because their hosts were not reduced "
            f"({read.not_reduced_ranks}): run `stepscope reduce RUN` on these hosts"
        )
        yield Note("warning", text, "reduced")
    for text in read.problems[:MOST_PROBLEMS]:
        yield Note("warning", f"reduced tables: {text}", "reduced")
    more = len(read.problems) - MOST_PROBLEMS
    if more > 0:
        yield Note("warning", f"reduced tables: {more} more such problems; report.json has them", "reduced")
