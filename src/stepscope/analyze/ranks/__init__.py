"""The ranks of one run beside each other: from their steps and stacks, and for many ranks from reduced tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.model.ranks import RanksVerdict
    from stepscope.tables.reduced import Reduced


def judge(reduced: Reduced) -> RanksVerdict:
    """Who holds the others up, why, at which line, and what it costs, from reduced tables alone."""
    from stepscope.analyze.ranks import verdict

    return verdict.judge(reduced)
