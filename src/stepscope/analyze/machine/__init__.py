"""What the machine, the loader's rhythm and profilers do to a run, in one bundle; each question has its own file."""

from __future__ import annotations

from collections.abc import Iterable

from stepscope.analyze import profiler_windows
from stepscope.analyze.context import Context
from stepscope.analyze.host import python_time, slow_steps
from stepscope.analyze.host.removable_calls import Calls
from stepscope.analyze.input import loader_epochs
from stepscope.analyze.machine import cores, hardware, processes, readings
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import IoFacts, LoaderFacts, PythonFacts, StepFacts
from stepscope.model.machine import MachineFacts


def machine_facts(
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
    training = readings.training_readings(tables, labelled)
    cpu = cores.cpu_facts(tables, labelled, mean_ms, waits_ms(loader, io or (), python or ()))
    return MachineFacts(
        journaled=journaled,
        pauses=python_time.gc_pauses(tables, labelled) if journaled else None,
        cpu=cpu,
        memory=cores.memory_pressure(tables, labelled, mean_ms),
        drift=slow_steps.drift(labelled, context.sampled, calls),
        profiler=profiler_windows.profiler_cost(tables, labelled),
        epochs=loader_epochs.epoch_facts(tables, labelled, loader),
        waves=loader_epochs.periodic_waits(tables, labelled),
        trace_loaders=loader_epochs.trace_loaders(context.base) if loader is None else (),
        gpus=hardware.gpu_clocks(tables, training),
        storage=hardware.storage(tables, training),
        numa=hardware.numa(tables, training),
        children=processes.children(tables, labelled, training, cpu, mean_ms),
        page_faults=hardware.page_faults(tables, labelled, training),
    )


def waits_ms(loader: LoaderFacts | None, io: Iterable[IoFacts], python: Iterable[PythonFacts]) -> float:
    """Of the mean step, what the main thread waits for workers and files, or sleeps: more cores change none of it."""
    data = loader.data_wait_ms if loader is not None and not loader.in_main_process else 0.0
    asleep = sum(one.ms_per_step * (one.waiting_share or 0.0) for one in python)
    return data + sum(one.ms_per_step for one in io) + asleep
