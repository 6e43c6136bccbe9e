"""Tables to facts: pure functions, one file per question. Nothing here prints, reads a file or judges."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.analyze import (
    fixed,
    host,
    io,
    loader,
    loops,
    operators,
    processes,
    regions,
    samples,
    sites,
    stacks,
    steps,
    system,
    trace,
    windows,
)
from stepscope.analyze.lines import Lines
from stepscope.analyze.places import user_code, user_files
from stepscope.model import Analysis
from stepscope.tables.schema import Tables

__all__ = ["analyze", "user_files"]


def analyze(tables: Tables, sources: Mapping[str, str] | None = None) -> Analysis:
    """All facts of a run.

    Args:
        sources: text of the user's files by absolute path, where at hand (`user_files` lists the useful ones). They
            turn "the function that begins here" into the exact line; everything works without.
    """
    sources = sources or {}
    code = user_code(tables, sources)
    labelled = steps.label(tables)
    step_facts = steps.facts(labelled)
    train = next((fact for fact in step_facts if fact.kind == "train"), None)
    mean_ms = train.mean_ms if train else None
    sampled = samples.prepare(tables, code, labelled)
    window = trace.prepare(tables, code, labelled)
    lines = Lines(sampled, sources)
    telemetry = system.summary(tables, labelled)
    loop_facts = loops.facts(window, lines, sampled, mean_ms)
    return Analysis(
        run=tables.run,
        quality=tables.quality,
        steps=step_facts,
        fixed=fixed.facts(tables, labelled),
        stacks=stacks.facts(tables, sampled, train),
        loader=loader.facts(tables, labelled, train, sampled, system.cores_used(telemetry)),
        operators=operators.facts(window, lines),
        loops=loop_facts,
        io=io.facts(tables, labelled, sampled, window, lines, mean_ms),
        windows=windows.facts(tables, labelled),
        sites=sites.facts(tables),
        processes=processes.facts(tables),
        system=telemetry,
        regions=regions.facts(tables, labelled, window),
        python=host.facts(sampled, window, lines, loop_facts, mean_ms),
        devices=tuple(sorted({rank.device for rank in tables.ranks if rank.device})),
    )
