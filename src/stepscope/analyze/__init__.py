"""Tables to facts: pure functions, one file per question. Nothing here prints, reads a file or judges."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.analyze.context import Context
from stepscope.analyze.facts import Facts
from stepscope.engine.user_code import NO_OPTIONS, CodeOptions, user_files
from stepscope.model import Analysis
from stepscope.model.machine import NO_PRICES, Prices
from stepscope.tables.schema import Tables

__all__ = ["CodeOptions", "Context", "Facts", "analyze", "user_files"]


def analyze(
    tables: Tables,
    sources: Mapping[str, str] | None = None,
    options: CodeOptions = NO_OPTIONS,
    prices: Prices = NO_PRICES,
) -> Analysis:
    """All facts of a run, or of traces that others recorded.

    Args:
        sources: text of the user's files by absolute path, where at hand (`user_files` lists the useful ones). They
            turn "the function that begins here" into the exact line; everything works without.
        options: what the user says of which code is theirs.
        prices: of energy and GPUs.
    """
    return Facts(Context(tables, sources, options), prices=prices)
