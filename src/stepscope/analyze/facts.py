"""The facts of a run, each made when something first asks for it: a rule, a table, a page, the report.

What nobody asks for costs nothing: a report on the terminal needs neither the table of operators nor the tree of
modules. Facts that stand on the same costly preparation are made together, so that it can go as soon as they are there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import msgspec

from stepscope.analyze import compilers, memory_losses, metrics, redundant, sites, step_times
from stepscope.analyze.context import Context
from stepscope.analyze.device import device_losses, device_time, replay
from stepscope.analyze.device.device_losses import TraceLosses
from stepscope.analyze.host import evaluation, loops, main_thread, sampled_stacks, sampled_time
from stepscope.analyze.host.sampled_time import Calls, SampledTime
from stepscope.analyze.input import loader
from stepscope.analyze.machine import cores, energy, hardware, readings
from stepscope.analyze.ranks import durations
from stepscope.analyze.views.select import LazyViews
from stepscope.engine import host_calls
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import Analysis, SourceFiles
from stepscope.model import run_facts as model
from stepscope.model.machine import NO_PRICES, EnergyFacts, MachineFacts, Prices
from stepscope.model.memory import MemoryRecording
from stepscope.model.views import Views
from stepscope.tables.schema import Tables

_Made = TypeVar("_Made")


def _made(make: Callable[[Facts], _Made]) -> _Made:
    """The fact that `make` makes once something asks for it."""
    return cast("_Made", cached_property(make))


class Facts(Analysis):
    """All facts of the run that `context` is of; `recordings` of memory were made beside it.

    `notes` stand before all others on quality. `known` facts are taken as they are.
    """

    _context: Context
    _recordings: Sequence[MemoryRecording]
    _prices: Prices
    _notes: tuple[model.Note, ...]

    def __init__(
        self,
        context: Context | None = None,
        recordings: Sequence[MemoryRecording] = (),
        prices: Prices = NO_PRICES,
        notes: Iterable[model.Note] = (),
        **known: Any,
    ) -> None:
        # what it inherits from is frozen
        self.__dict__.update(known, _context=context, _recordings=recordings, _prices=prices, _notes=tuple(notes))

    _tables: Tables = _made(lambda facts: facts._context.tables)
    _labelled: LabelledSteps = _made(lambda facts: facts._context.labelled)

    # ------------------------------------------------------------------------------------------ the run, its steps

    _framework: model.FrameworkFacts | None = _made(lambda facts: sites.framework(facts._tables, facts._train))

    @cached_property
    def run(self) -> model.RunFacts:
        run = self._tables.run
        roots = dict.fromkeys((*run.user_roots, *self._context.options.source_roots))
        return msgspec.structs.replace(run, user_roots=tuple(roots), framework=self._framework)

    @cached_property
    def quality(self) -> model.Quality:
        quality = self._tables.quality
        return msgspec.structs.replace(
            quality, notes=(*self._notes, *quality.notes, *sites.framework_notes(self._framework))
        )

    steps = _made(lambda facts: step_times.step_facts(facts._labelled))
    _train: model.StepFacts | None = _made(
        lambda facts: next((fact for fact in facts.steps if fact.kind == "train"), None)
    )
    fixed = _made(lambda facts: step_times.fixed_costs(facts._tables, facts._labelled))
    windows = _made(lambda facts: step_times.profiler_windows(facts._tables, facts._labelled))
    sites = _made(lambda facts: sites.facts(facts._tables))
    processes = _made(lambda facts: cores.processes(facts._tables))
    devices = _made(lambda facts: tuple(sorted({rank.device for rank in facts._tables.ranks if rank.device})))
    system = _made(lambda facts: readings.telemetry_summary(facts._tables, facts._labelled))

    @cached_property
    def settings(self) -> model.Settings | None:
        return sites.settings(self._tables, loader.feeding_loader(self._tables, self._labelled), self._framework)

    trial = _made(lambda facts: sites.trial(facts._tables))
    metrics = _made(lambda facts: metrics.facts(facts._tables, facts._labelled))
    source_files = _made(
        lambda facts: SourceFiles(
            facts._context.options.source_roots, facts._tables.run.source_hashes, facts._tables.run.user_roots
        )
    )

    # --------------------------------------------------------------------------------------------- sampled stacks

    stacks = _made(lambda facts: sampled_stacks.stack_facts(facts._tables, facts._context.sampled, facts._train))
    sampled = _made(lambda facts: sampled_stacks.sampled_views(facts._context, facts._train))
    _sampled_time: SampledTime | None = _made(
        lambda facts: sampled_time.sampled_time(facts._context.sampled, facts._train, facts._tables.quality)
    )
    _calls: Calls | None = _made(
        lambda facts: sampled_time.removable_calls(facts._context.sampled, facts._sampled_time)
    )

    logging = _made(lambda facts: main_thread.logging_costs(facts._context, facts._calls))

    # --------------------------------------------------------------------------------------- slices of the traces

    @cached_property
    def _of_window(self) -> dict[str, Any]:
        """What is asked of every host slice of the profiler windows.

        Made together: of a large trace the window and the device's slices need not be in memory at once.
        """
        context, calls = self._context, self._calls
        mean_ms = self._train.mean_ms if self._train else None
        window = host_calls.profiled_calls(context.tables, context.spans, context.code, context.labelled)
        found = loops.loops(context, window, mean_ms, self._sampled_time)
        return {
            "loops": found,
            "io": main_thread.file_io(context, window, mean_ms, calls),
            "regions": main_thread.regions(context, window),
            "python": main_thread.python_facts(context, window, found, calls),
            "opened_per_step": loader.opened_per_step(window),
        }

    loops = _made(lambda facts: facts._of_window["loops"])
    io = _made(lambda facts: facts._of_window["io"])
    regions = _made(lambda facts: facts._of_window["regions"])
    python = _made(lambda facts: facts._of_window["python"])
    traces = _made(lambda facts: device_time.trace_facts(facts._tables, facts._context.spans))
    reading = _made(lambda facts: device_time.reading_facts(facts.traces))
    device_time = _made(lambda facts: device_time.device_times(facts._context.spans))
    device_lines = _made(lambda facts: device_time.device_lines(facts._context.base))
    profiled = _made(lambda facts: facts._context.profiled)

    @cached_property
    def views(self) -> Views | None:
        base = self._context.base
        if not base.spans and not self._recordings:
            return None
        return LazyViews(base, self._recordings, self._context.code)

    # --------------------------------------------------------------------------------------------- what is lost

    _lost: tuple[TraceLosses, ...] = _made(lambda facts: device_losses.trace_losses(facts._context.base))
    device_losses = _made(lambda facts: device_losses.device_losses(facts._lost))
    replays = _made(lambda facts: replay.replays(facts._lost))
    memory_losses = _made(
        lambda facts: memory_losses.facts(facts._context, facts.views.memory if facts.views is not None else None)
    )
    passes = _made(lambda facts: redundant.facts(facts._context, facts._sampled_time))

    @cached_property
    def loader(self) -> model.LoaderFacts | None:
        cores_used = readings.cores_used(self.system)
        return loader.loader_facts(self._context, self._train, cores_used, self._of_window["opened_per_step"])

    @cached_property
    def machine(self) -> MachineFacts:
        tables, labelled = self._tables, self._labelled
        mean_ms = self._train.mean_ms if self._train is not None else None
        training, fed = readings.training_readings(tables, labelled), self.loader
        # of the mean step, what the main thread waits for workers and files, or sleeps: more cores change none
        waits_ms = fed.data_wait_ms if fed is not None and not fed.in_main_process else 0.0
        waits_ms += sum(one.ms_per_step for one in self.io or ())
        waits_ms += sum(one.ms_per_step * (one.waiting_share or 0.0) for one in self.python or ())
        cpu = cores.cpu_facts(tables, training, mean_ms, waits_ms)
        if cpu is not None and cpu.threads_place is None:  # set before torch was imported
            line = main_thread.only_line(self._context, re.compile(rf"_NUM_THREADS\W+{cpu.threads}\b"))
            cpu = msgspec.structs.replace(cpu, threads_place=line)
        return MachineFacts(
            journaled=tables.journal.height > 0,
            pauses=main_thread.gc_pauses(tables, labelled) if tables.journal.height else None,
            cpu=cpu,
            memory=cores.memory_pressure(tables, training, mean_ms),
            drift=sampled_stacks.drift(self._context, self._calls),
            profiler=step_times.profiler_cost(tables, labelled),
            hook=main_thread.python_hook(self._context),
            epochs=loader.epoch_facts(tables, labelled, fed),
            evaluation=evaluation.evaluation(self._context),
            waves=loader.periodic_waits(tables, labelled),
            trace_loaders=loader.trace_loaders(self._context.base) if fed is None else (),
            gpus=hardware.gpu_clocks(tables, training),
            storage=hardware.storage(tables, training),
            numa=hardware.numa(tables, training),
            children=cores.children(tables, labelled, training, cpu, mean_ms),
            page_faults=hardware.page_faults(tables, labelled, training),
            beside=sampled_stacks.beside(self._context),
        )

    @cached_property
    def energy(self) -> EnergyFacts | None:
        if self._tables.system.is_empty() and not self._prices:
            return None
        return energy.facts(self._tables, self._labelled.steady(), self._train, self.device_time, self._prices)

    pipeline = _made(lambda facts: step_times.pipeline(facts._labelled, facts._train, facts.loader, facts.machine))
    ranks = _made(lambda facts: durations.facts(facts._context, facts.sites))
    compilers = _made(lambda facts: compilers.build(facts._context))
