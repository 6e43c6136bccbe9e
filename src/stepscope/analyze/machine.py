"""What the machine, the loader's rhythm and profilers do to a run, in one bundle; each question has its own file."""

from __future__ import annotations

from stepscope.analyze import cores, drift, epochs, pauses, profiled, trace_loader
from stepscope.analyze.context import Context
from stepscope.analyze.steps import LabelledSteps
from stepscope.model import LoaderFacts, StepFacts
from stepscope.model.facts_machine import MachineFacts


def facts(
    context: Context, labelled: LabelledSteps, train: StepFacts | None, loader: LoaderFacts | None
) -> MachineFacts:
    """A part is None where its source is missing."""
    tables = context.tables
    mean_ms = train.mean_ms if train is not None else None
    journaled = tables.journal.height > 0
    return MachineFacts(
        journaled=journaled,
        pauses=pauses.facts(tables, labelled) if journaled else None,
        cpu=cores.facts(tables, labelled, mean_ms),
        memory=cores.memory(tables, labelled, mean_ms),
        drift=drift.facts(labelled, context.sampled),
        profiler=profiled.facts(tables, labelled),
        epochs=epochs.facts(tables, labelled, loader),
        waves=epochs.waves(tables, labelled),
        trace_loaders=trace_loader.facts(context.base) if loader is None else (),
    )
