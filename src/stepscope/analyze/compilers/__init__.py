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
    rows, steps = prepare(tables, context.labelled)
    told = xla_reports.latest(tables)
    used = backends.backends(rows, steps, told, bool(quotes))
    causes = groups(rows, steps, context.code)
    found = tuple(backends.facts(tables, one) for one in used)
    by_backend = [backends.compiling_steps(one, known) for one, known in zip(used, found, strict=True)]
    rates = {one.name: backends.article_rate(one) for one in used}
    storms = (backends.storm(one, rates[one.name], own) for one, own in zip(used, by_backend, strict=True))
    all_steps = tuple(kind for own in by_backend for kind in own)
    return CompilersView(
        backends=found,
        causes=tuple(cause for cause, _ in causes),
        steps=all_steps,
        points=backends.points(rows, steps),
        metrics=xla_reports.metrics(told),
        warnings=xla_reports.together(quotes, xla_reports.made(told, rates)),
        limits=backends.limits(used, causes),
        storms=tuple(storm for storm in storms if storm is not None),
        notes=tuple(dict.fromkeys(backends.notes(rows, found, all_steps))),
    )
