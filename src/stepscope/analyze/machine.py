"""What the machine, the loader's rhythm and profilers do to a run, in one bundle; each question has its own file."""

from __future__ import annotations

from collections.abc import Iterable

from stepscope.analyze import (
    children,
    cores,
    drift,
    epochs,
    gpu_clocks,
    numa,
    page_faults,
    pauses,
    profiled,
    readings,
    storage,
    trace_loader,
)
from stepscope.analyze.calls import Calls
from stepscope.analyze.context import Context
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import IoFacts, LoaderFacts, PythonFacts, StepFacts
from stepscope.model.machine import MachineFacts


def facts(
    context: Context,
    labelled: LabelledSteps,
    train: StepFacts | None,
    loader: LoaderFacts | None,
    io: Iterable[IoFacts] | None = None,
    python: Iterable[PythonFacts] | None = None,
    calls: Calls | None = None,
) -> MachineFacts:
    """A part is None where its source is missing. `io` and `python` tell what the main thread waits for besides."""
    tables = context.tables
    mean_ms = train.mean_ms if train is not None else None
    journaled = tables.journal.height > 0
    training = readings.training(tables, labelled)
    cpu = cores.facts(tables, labelled, mean_ms, waits_ms(loader, io or (), python or ()))
    return MachineFacts(
        journaled=journaled,
        pauses=pauses.facts(tables, labelled) if journaled else None,
        cpu=cpu,
        memory=cores.memory(tables, labelled, mean_ms),
        drift=drift.facts(labelled, context.sampled, calls),
        profiler=profiled.facts(tables, labelled),
        epochs=epochs.facts(tables, labelled, loader),
        waves=epochs.waves(tables, labelled),
        trace_loaders=trace_loader.facts(context.base) if loader is None else (),
        gpus=gpu_clocks.facts(tables, training),
        storage=storage.facts(tables, training),
        numa=numa.facts(tables, training),
        children=children.facts(tables, labelled, training, cpu, mean_ms),
        page_faults=page_faults.facts(tables, labelled, training),
    )


def waits_ms(loader: LoaderFacts | None, io: Iterable[IoFacts], python: Iterable[PythonFacts]) -> float:
    """Of the mean step, what the main thread waits for workers and files, or sleeps: more cores change none of it."""
    data = loader.data_wait_ms if loader is not None and not loader.in_main_process else 0.0
    asleep = sum(one.ms_per_step * (one.waiting_share or 0.0) for one in python)
    return data + sum(one.ms_per_step for one in io) + asleep
