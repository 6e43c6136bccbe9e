"""Tables to facts: pure functions, one file per question. Nothing here prints, reads a file or judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from stepscope.analyze import (
    calls,
    compilers,
    device,
    device_lines,
    device_losses,
    fixed,
    framework,
    host,
    io,
    loader,
    loader_files,
    loops,
    machine,
    memory_losses,
    operators,
    passes,
    pipeline,
    processes,
    ranks,
    regions,
    replay,
    sampled_time,
    sites,
    steps,
    system,
    trace,
    trial,
    windows,
)
from stepscope.analyze.context import Context
from stepscope.analyze.places import NO_OPTIONS, CodeOptions, user_files
from stepscope.analyze.sampled import hot_lines
from stepscope.analyze.sampled import views as sampled_views
from stepscope.analyze.views.build import build
from stepscope.model import Analysis, SourceFiles
from stepscope.model.views.memory import MemoryRecording
from stepscope.tables.schema import Tables

# Slices up to which the views are made beside the other facts, on a second thread: NumPy and Polars leave the lock to
# others, a third of the time is saved, and what both hold at once is still small.
SIDE_BY_SIDE = 1_000_000

__all__ = ["CodeOptions", "Context", "analyze", "facts", "user_files"]


def analyze(tables: Tables, sources: Mapping[str, str] | None = None, options: CodeOptions = NO_OPTIONS) -> Analysis:
    """All facts of a run, or of traces that others recorded.

    Args:
        sources: text of the user's files by absolute path, where at hand (`user_files` lists the useful ones). They
            turn "the function that begins here" into the exact line; everything works without.
        options: what the user says of which code is theirs.
    """
    return facts(Context(tables, sources, options))


def facts(context: Context, recordings: Sequence[MemoryRecording] = ()) -> Analysis:
    """All facts of the run that `context` is of; `recordings` of memory were made beside it."""
    base, code = context.base, context.code
    if context.tables.events.height > SIDE_BY_SIDE:
        found = dataclasses.replace(_facts(context), views=build(base, recordings, code))
        return _with_losses(context, found)
    with ThreadPoolExecutor(1, thread_name_prefix="stepscope-views") as pool:
        views = pool.submit(build, base, recordings, code)
        found = _facts(context)
        found = dataclasses.replace(found, views=views.result())
    return _with_losses(context, found)


def _with_losses(context: Context, found: Analysis) -> Analysis:
    """With what stands on the views, or on as much memory as they need."""
    memory = memory_losses.facts(context, found.views.memory if found.views is not None else None)
    lost, replays = device_losses.facts(context.base), replay.facts(context.base)
    found = dataclasses.replace(found, device_losses=lost, memory_losses=memory, replays=replays)
    return dataclasses.replace(found, passes=passes.facts(context))


def _facts(context: Context) -> Analysis:
    """All facts but the views."""
    tables, code, labelled, lines = context.tables, context.code, context.labelled, context.lines
    step_facts = steps.facts(labelled)
    train = next((fact for fact in step_facts if fact.kind == "train"), None)
    mean_ms = train.mean_ms if train else None
    sampled = context.sampled
    window = trace.prepare(tables, code, labelled)
    telemetry = system.summary(tables, labelled)
    timed = sampled_time.prepare(sampled, train, tables.quality)
    call_paths = calls.prepare(sampled, timed)
    loop_facts = loops.facts(window, lines, sampled, mean_ms, timed)
    operator_facts = operators.facts(window, lines)
    io_facts = io.facts(tables, labelled, sampled, window, lines, mean_ms, call_paths)
    region_facts = regions.facts(tables, labelled, window)
    python_facts = host.facts(sampled, window, lines, loop_facts, call_paths)
    opened = loader_files.opened_per_step(window)
    del window  # of a large trace it and the device's slices need not be in memory together
    loader_facts = loader.facts(tables, labelled, train, sampled, system.cores_used(telemetry), lines, opened)
    slices = device.slices(tables)
    site_facts = sites.facts(tables)
    trace_facts = device.traces(tables, slices)
    machine_facts = machine.facts(context, labelled, train, loader_facts, io_facts, python_facts, call_paths)
    given = context.options.source_roots
    roots = (*tables.run.user_roots, *given)
    trained_by = framework.facts(tables, train)
    notes = (*tables.quality.notes, *framework.notes(trained_by))
    return Analysis(
        run=dataclasses.replace(tables.run, user_roots=tuple(dict.fromkeys(roots)), framework=trained_by),
        quality=dataclasses.replace(tables.quality, notes=notes),
        steps=step_facts,
        fixed=fixed.facts(tables, labelled),
        stacks=hot_lines.facts(tables, sampled, train),
        loader=loader_facts,
        operators=operator_facts,
        loops=loop_facts,
        io=io_facts,
        windows=windows.facts(tables, labelled),
        sites=site_facts,
        processes=processes.facts(tables),
        system=telemetry,
        regions=region_facts,
        python=python_facts,
        devices=tuple(sorted({rank.device for rank in tables.ranks if rank.device})),
        traces=trace_facts,
        reading=device.reading(trace_facts),
        device_time=device.times(slices),
        device_lines=device_lines.facts(tables, slices, context.origins, lines),
        sampled=sampled_views.build(context, labelled, train),
        compilers=compilers.build(context, labelled),
        ranks=ranks.facts(context, labelled, site_facts),
        pipeline=pipeline.facts(labelled, train, loader_facts, machine_facts),
        machine=machine_facts,
        settings=sites.settings(tables, loader.feeding_loader(tables, labelled), trained_by),
        trial=trial.facts(tables),
        profiled=context.profiled,
        source_files=SourceFiles(given, tables.run.source_hashes),
    )
