"""What compilers did to a run: compiles, recompiles, graph breaks, fallbacks and transfers, from typed tables.

`prepared` puts the events into steps once for all, measures time as a union, and says why it compiled; `xla_reports` is
what torch_xla says of itself; `backends` says what each backend did and took of the steps, when, how often and after
the limit, what was not seen, and what a check in CI asks.
"""

from __future__ import annotations

from stepscope.analyze.compilers import backends, xla_reports
from stepscope.analyze.compilers.backends import CHECKS, checks
from stepscope.analyze.compilers.prepared import groups, prepare
from stepscope.analyze.context import Context
from stepscope.model.compilers import CompilersView

__all__ = ["CHECKS", "build", "checks"]


def build(context: Context) -> CompilersView | None:
    """All of it; None where the run holds no compile event, no counters and no warning of a log."""
    tables = context.tables
    quotes = xla_reports.quoted(tables)
    if tables.compiles.is_empty() and tables.counters.is_empty() and not quotes:
        return None
    events = prepare(tables, context.labelled)
    told = xla_reports.latest(tables)
    used = backends.backends(events, told, bool(quotes))
    causes = groups(events, context.code)
    steps = {one.name: backends.compiling_steps(one) for one in used}
    rates = {one.name: backends.article_rate(one) for one in used}
    storms = (backends.storm(one, rates[one.name], steps[one.name]) for one in used)
    found = tuple(backends.facts(tables, one) for one in used)
    all_steps = tuple(kind for one in found for kind in backends.known(steps[one.backend], one))
    return CompilersView(
        backends=found,
        causes=tuple(group.cause for group in causes),
        steps=all_steps,
        points=backends.points(events),
        metrics=xla_reports.metrics(told),
        warnings=xla_reports.together(quotes, xla_reports.made(told, rates)),
        limits=backends.limits(used, causes),
        storms=tuple(storm for storm in storms if storm is not None),
        notes=backends.notes(events, found, all_steps),
    )
