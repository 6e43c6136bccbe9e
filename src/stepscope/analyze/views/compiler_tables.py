"""The tables of compilers in full, from what the analysis found: causes, changes, steps, metrics. No trace is needed.

A row is one level, so that it is a line of a CSV file: places become a file and a line of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.model.compilers import CompilerCause, CompilerMetric, CompilersView
from stepscope.model.findings import Place

NO_COMPILER = (
    "no compiler was seen: record with `stepscope run` a script that uses torch.compile or torch_xla, or give a report "
    "of torch_xla"
)
NO_COMPILE = "nothing was compiled"
NO_CHANGE = "the compiler told of no change of a value, shape or type"
NO_STEPS = "no step is known in which something was compiled"
NO_BREAK = "no graph broke"
BREAKS_UNSEEN = "graph breaks were not watched: they are told by torch.compile in a recording of `stepscope run`"
NO_TRANSFER = "nothing was moved to the host by what was watched"
TRANSFERS_UNSEEN = "transfers were not watched: they are told by traces and by reports of torch_xla"
NO_METRICS = "no report of torch_xla was read, and torch_xla was not used in the run"

COMPILES = ("compile", "recompile", "limit_hit", "failure")
MOVES = ("transfer", "fallback")


def causes(view: CompilersView) -> list[dict[str, Any]]:
    """Causes of compiles, most expensive first."""
    return [_cause(cause) for cause in view.causes if cause.kind in COMPILES]


def changes(view: CompilersView) -> list[dict[str, Any]]:
    """What changed, a row per change that was kept."""
    return [
        {
            "backend": cause.backend,
            "kind": cause.kind,
            "cause": cause.cause,
            "step": change.step,
            "subject": change.subject or cause.subject,
            "old": change.old,
            "new": change.new,
            **_place("", cause.place),
            "function": cause.function,
        }
        for cause in view.causes
        for change in cause.changes
    ]


def breaks(view: CompilersView) -> list[dict[str, Any]]:
    """Causes of graph breaks."""
    return [_cause(cause) for cause in view.causes if cause.kind == "graph_break"]


def transfers(view: CompilersView) -> list[dict[str, Any]]:
    """Causes of transfers to the host, and operators that ran there because the backend has no code for them."""
    return [_cause(cause) for cause in view.causes if cause.kind in MOVES]


def metrics(view: CompilersView) -> list[dict[str, Any]]:
    """Metrics and counters of torch_xla, each percentile in a column of its own."""
    return [dict(_metric(metric)) for metric in view.metrics]


def breaks_absent(view: CompilersView) -> str:
    """Why there is no graph break."""
    return NO_BREAK if any(facts.graph_breaks is not None for facts in view.backends) else BREAKS_UNSEEN


def transfers_absent(view: CompilersView) -> str:
    """Why there is no transfer."""
    return NO_TRANSFER if any(facts.transfers is not None for facts in view.backends) else TRANSFERS_UNSEEN


def _cause(cause: CompilerCause) -> dict[str, Any]:
    first = cause.changes[0] if cause.changes else None
    last = cause.changes[-1] if cause.changes else None
    return {
        "backend": cause.backend,
        "kind": cause.kind,
        "cause": cause.cause,
        "subject": cause.subject,
        "old": first.old if first else None,
        "new": last.new if last else None,
        "operator": cause.operator,
        "count": cause.count,
        "total_ms": cause.total_ms,
        "longest_ms": cause.longest_ms,
        "in_main_steps_ms": cause.in_main_steps_ms,
        "step_count": cause.step_count,
        "first_step": cause.first_step,
        "last_step": cause.last_step,
        "steps_of": ", ".join(cause.kinds) or None,
        **_place("", cause.place),
        "function": cause.function,
        **_place("definition_", cause.definition),
        **_place("call_", cause.call),
        "cache_entries": cause.cache_entries,
        "limit": cause.limit,
        "ranks": ", ".join(str(rank) for rank in cause.ranks),
        "text": cause.text,
        "hint": cause.hint,
        "source": cause.source,
        "id": cause.id,
    }


def _place(prefix: str, place: Place | None) -> dict[str, Any]:
    return {f"{prefix}file": place.file if place else None, f"{prefix}line": place.line if place else None}


def _metric(metric: CompilerMetric) -> Iterator[tuple[str, Any]]:
    yield "rank", metric.rank
    yield "name", metric.name
    yield "kind", metric.kind
    yield "unit", metric.unit
    yield "samples", metric.samples
    yield "total", metric.total
    yield "per_second", metric.per_second
    yield "value_per_second", metric.value_per_second
    for percent, value in metric.percentiles:
        yield f"p{percent:g}", value
