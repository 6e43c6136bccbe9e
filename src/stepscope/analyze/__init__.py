"""Tables to facts: pure functions, one file per question. Nothing here prints, reads a file or judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from stepscope.analyze import (
    device,
    device_lines,
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
from stepscope.analyze.places import NO_OPTIONS, CodeOptions, user_code, user_files
from stepscope.model import Analysis
from stepscope.tables.schema import Tables

__all__ = ["CodeOptions", "analyze", "user_files"]


def analyze(tables: Tables, sources: Mapping[str, str] | None = None, options: CodeOptions = NO_OPTIONS) -> Analysis:
    """All facts of a run, or of traces that others recorded.

    Args:
        sources: text of the user's files by absolute path, where at hand (`user_files` lists the useful ones). They
            turn "the function that begins here" into the exact line; everything works without.
        options: what the user says of which code is theirs.
    """
    sources = sources or {}
    code = user_code(tables, sources, options)
    labelled = steps.label(tables)
    step_facts = steps.facts(labelled)
    train = next((fact for fact in step_facts if fact.kind == "train"), None)
    mean_ms = train.mean_ms if train else None
    sampled = samples.prepare(tables, code, labelled)
    window = trace.prepare(tables, code, labelled)
    lines = Lines(sampled, sources)
    telemetry = system.summary(tables, labelled)
    loop_facts = loops.facts(window, lines, sampled, mean_ms)
    slices = device.slices(tables)
    trace_facts = device.traces(tables, slices)
    roots = (*tables.run.user_roots, *options.source_roots)
    return Analysis(
        run=dataclasses.replace(tables.run, user_roots=tuple(dict.fromkeys(roots))),
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
        traces=trace_facts,
        reading=device.reading(trace_facts),
        device_time=device.times(slices),
        device_lines=device_lines.facts(tables, slices, code, lines),
    )
