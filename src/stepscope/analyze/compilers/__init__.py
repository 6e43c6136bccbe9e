"""What compilers did to a run: compiles, recompiles, graph breaks, fallbacks and transfers, from typed tables.

`prepared` puts the events into steps once for all, and measures time as a union. `causes` says why it compiled,
`per_step` what it took of steps, when, how often and after the limit, `xla_reports` what torch_xla says of itself,
`backends` what each backend did, what was not seen, and what a check in CI asks.
"""

from __future__ import annotations

from stepscope.analyze.compilers import backends, causes, per_step, xla_reports
from stepscope.analyze.compilers.backends import CHECKS, checks
from stepscope.analyze.compilers.prepared import prepare
from stepscope.analyze.context import Context
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model.compilers import CompilersView

__all__ = ["CHECKS", "build", "checks"]


def build(context: Context, labelled: LabelledSteps) -> CompilersView | None:
    """All of it; None where the run holds no compile event, no counters and no warning of a log."""
    tables = context.tables
    quotes = xla_reports.quoted(tables)
    if tables.compiles.is_empty() and tables.counters.is_empty() and not quotes:
        return None
    prepared = prepare(tables, labelled)
    told = xla_reports.latest(tables)
    used = backends.backends(prepared, told, bool(quotes))
    groups = causes.groups(prepared, context.code)
    steps = {one.name: per_step.facts(one) for one in used}
    rates = {one.name: per_step.article_rate(one) for one in used}
    storms = (per_step.storm(one, rates[one.name], steps[one.name]) for one in used)
    found = tuple(backends.facts(tables, one) for one in used)
    all_steps = tuple(kind for one in found for kind in per_step.known(steps[one.backend], one))
    return CompilersView(
        backends=found,
        causes=tuple(group.cause for group in groups),
        steps=all_steps,
        points=per_step.points(prepared),
        metrics=xla_reports.metrics(told),
        warnings=xla_reports.together(quotes, xla_reports.made(told, rates)),
        limits=per_step.limits(used, groups),
        storms=tuple(storm for storm in storms if storm is not None),
        notes=backends.notes(prepared, found, all_steps),
    )
