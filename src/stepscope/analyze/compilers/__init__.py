"""What compilers did to a run: compiles, recompiles, graph breaks, fallbacks and transfers, from typed tables.

`prepared` puts the events into steps once for all, and measures time as a union. `causes` says why it compiled,
`per_step` what it took of steps, when, how often and after the limit, `reports` what torch_xla says of itself, `facts`
what each backend did, what was not seen, and what a check in CI asks.
"""

from __future__ import annotations

from stepscope.analyze.compilers import causes, facts, per_step, reports
from stepscope.analyze.compilers.facts import CHECKS, checks
from stepscope.analyze.compilers.prepared import TORCH_XLA, prepare
from stepscope.analyze.context import Context
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model.compilers import CompilersView, CompileStorm

__all__ = ["CHECKS", "build", "checks"]


def build(context: Context, labelled: LabelledSteps) -> CompilersView | None:
    """All of it; None where the run holds no compile event, no counters and no warning of a log."""
    tables = context.tables
    quotes = reports.quoted(tables)
    if tables.compiles.is_empty() and tables.counters.is_empty() and not quotes:
        return None
    prepared = prepare(tables, labelled)
    told = reports.latest(tables)
    names = facts.backends(prepared, told, bool(quotes))
    processes = {name: facts.processes(prepared, name, told) for name in names}
    own = {name: told if name == TORCH_XLA else () for name in names}
    groups = causes.groups(prepared, context.code)
    steps = {name: per_step.facts(prepared, name, own[name], processes[name]) for name in names}
    rates = {name: per_step.article_rate(prepared, name, own[name], processes[name]) for name in names}
    found: list[CompileStorm] = []
    for name in names:
        storm = per_step.storm(prepared, name, own[name], processes[name], steps[name])
        if storm is not None:
            found.append(storm)
    backends = tuple(facts.facts(tables, prepared, name, own[name], processes[name]) for name in names)
    all_steps = tuple(kind for one in backends for kind in per_step.known(steps[one.backend], one))
    return CompilersView(
        backends=backends,
        causes=tuple(group.cause for group in groups),
        steps=all_steps,
        points=per_step.points(prepared),
        metrics=reports.metrics(told),
        warnings=reports.together(quotes, reports.made(told, rates)),
        limits=per_step.limits(prepared, groups),
        storms=tuple(found),
        notes=facts.notes(prepared, backends, all_steps),
    )
