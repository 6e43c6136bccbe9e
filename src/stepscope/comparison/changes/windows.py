"""Which steps the figures of each side are of: how many, what was left out or profiled. Equal or not, a row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.analyze.views.diff import DiffSide
from stepscope.comparison.changes.rows import CHANGED, GONE, NEW, SAME
from stepscope.model import Analysis
from stepscope.model.comparison import Change, Measure

SHOWN_STEPS = 12  # numbers of profiled steps that are named one by one


def of_run(analysis: Analysis, measure: Measure | None) -> dict[str, str]:
    """Of the journal: steps measured and left out, windows, sampled stacks."""
    found: dict[str, str] = {}
    if measure is not None:
        found["measured steps"] = str(measure.steps)
        found["warm-up steps left out"] = str(measure.dropped)
        if measure.signal:
            found["steps cut by"] = measure.signal
    steps = analysis.steps[0] if analysis.steps else None
    if steps is not None and measure is not None:
        found["steps in windows, left out"] = str(steps.excluded.get("window", 0))
    if analysis.stacks is not None:
        found["sampled stacks"] = f"{analysis.stacks.source}, {analysis.stacks.rate_hz:g} Hz"
    return found


def of_trace(side: DiffSide) -> dict[str, str]:
    """Of the traces: which steps were profiled, and whether they hold work of a device."""
    steps = [step.step for one in side.overviews if one.has_steps for step in one.steps]
    if not side.overviews:
        return {}
    found = {"traces hold": ", ".join(sorted({one.basis for one in side.overviews}))}
    if len({one.span for one in side.overviews}) > 1:
        found["traces"] = str(len({one.span for one in side.overviews}))
    named = ", ".join(steps[:SHOWN_STEPS]) + (" …" if len(steps) > SHOWN_STEPS else "")
    found["profiled steps"] = f"{len(steps)} ({named})" if steps else "none marked"
    dropped = sum(one.dropped_steps for one in side.overviews)
    if dropped:
        found["profiled steps left out, cut at the end"] = str(dropped)
    return found


def changes(baseline: Sequence[Mapping[str, str]], candidate: Sequence[Mapping[str, str]]) -> list[Change]:
    """A row for each name that a side knows."""
    found = []
    for name in dict.fromkeys(name for side in (*baseline, *candidate) for name in side):
        before, after = (_together(side, name) for side in (baseline, candidate))
        status = SAME if before == after else NEW if before is None else GONE if after is None else CHANGED
        found.append(Change("window", name, before, after, None, "", status))
    return found


def _together(side: Sequence[Mapping[str, str]], name: str) -> str | None:
    known = dict.fromkeys(run[name] for run in side if name in run)
    return "; ".join(known) if known else None
