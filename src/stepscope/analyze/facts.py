"""The facts of a run, each made when something first asks for it: a rule, a table, a page, the report.

What nobody asks for costs nothing: a report on the terminal needs neither the table of operators nor the tree of
modules. Facts that stand on the same costly preparation are made together, so that it can go as soon as they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from stepscope.analyze import compilers, memory_losses, ranks, redundant, sites, step_times, trial
from stepscope.analyze.context import Context
from stepscope.analyze.device import device_losses, device_time, replay
from stepscope.analyze.device.device_losses import TraceLosses
from stepscope.analyze.host import (
    file_io,
    loops,
    python_time,
    removable_calls,
    sampled_stacks,
    sampled_time,
    slow_steps,
)
from stepscope.analyze.host.removable_calls import Calls
from stepscope.analyze.host.sampled_time import SampledTime
from stepscope.analyze.input import loader
from stepscope.analyze.machine import cores, hardware, readings
from stepscope.analyze.views.lazy_views import LazyViews
from stepscope.engine import host_calls
from stepscope.model import Analysis, SourceFiles
from stepscope.model import run_facts as model
from stepscope.model.comparison import TrialFacts
from stepscope.model.compilers import CompilersView
from stepscope.model.device_losses import DeviceLosses, PassesFacts, Replay
from stepscope.model.machine import MachineFacts
from stepscope.model.memory import MemoryLosses, MemoryRecording
from stepscope.model.ranks import Pipeline, RanksFacts
from stepscope.model.sampled import SampledViews
from stepscope.model.trace import DeviceLines, DeviceTime, ReadingFacts, TraceFacts
from stepscope.model.views import Views


class _OfWindow(NamedTuple):
    """What is asked of every host slice of the profiler windows."""

    loops: tuple[model.LoopFacts, ...] | None
    io: tuple[model.IoFacts, ...] | None
    regions: tuple[dict[str, Any], ...]
    python: tuple[model.PythonFacts, ...] | None
    opened_per_step: float | None


class Facts(Analysis):
    """All facts of the run that `context` is of; `recordings` of memory were made beside it.

    `known` facts are taken as they are.
    """

    _context: Context
    _recordings: Sequence[MemoryRecording]

    def __init__(
        self, context: Context | None = None, recordings: Sequence[MemoryRecording] = (), **known: Any
    ) -> None:
        self.__dict__.update(known, _context=context, _recordings=recordings)  # what it inherits from is frozen

    # ------------------------------------------------------------------------------------------ the run, its steps

    @cached_property
    def _framework(self) -> model.FrameworkFacts | None:
        return sites.framework(self._context.tables, self._train)

    @cached_property
    def run(self) -> model.RunFacts:
        run = self._context.tables.run
        roots = dict.fromkeys((*run.user_roots, *self._context.options.source_roots))
        return msgspec.structs.replace(run, user_roots=tuple(roots), framework=self._framework)

    @cached_property
    def quality(self) -> model.Quality:
        quality = self._context.tables.quality
        return msgspec.structs.replace(quality, notes=(*quality.notes, *sites.framework_notes(self._framework)))

    @cached_property
    def steps(self) -> tuple[model.StepFacts, ...]:
        return step_times.step_facts(self._context.labelled)

    @cached_property
    def _train(self) -> model.StepFacts | None:
        return next((fact for fact in self.steps if fact.kind == "train"), None)

    @cached_property
    def fixed(self) -> model.FixedCosts:
        return step_times.fixed_costs(self._context.tables, self._context.labelled)

    @cached_property
    def windows(self) -> tuple[model.WindowFacts, ...]:
        return step_times.profiler_windows(self._context.tables, self._context.labelled)

    @cached_property
    def sites(self) -> tuple[model.Site, ...]:
        return sites.facts(self._context.tables)

    @cached_property
    def processes(self) -> tuple[model.ProcessFacts, ...]:
        return cores.processes(self._context.tables)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({rank.device for rank in self._context.tables.ranks if rank.device}))

    @cached_property
    def system(self) -> dict[str, Any]:
        return readings.telemetry_summary(self._context.tables, self._context.labelled)

    @cached_property
    def settings(self) -> model.Settings | None:
        tables = self._context.tables
        return sites.settings(tables, loader.feeding_loader(tables, self._context.labelled), self._framework)

    @cached_property
    def trial(self) -> TrialFacts | None:
        return trial.facts(self._context.tables)

    @cached_property
    def source_files(self) -> SourceFiles:
        return SourceFiles(self._context.options.source_roots, self._context.tables.run.source_hashes)

    # --------------------------------------------------------------------------------------------- sampled stacks

    @cached_property
    def stacks(self) -> model.StackFacts | None:
        return sampled_stacks.stack_facts(self._context.tables, self._context.sampled, self._train)

    @cached_property
    def sampled(self) -> SampledViews | None:
        return sampled_stacks.sampled_views(self._context, self._train)

    @cached_property
    def _sampled_time(self) -> SampledTime | None:
        return sampled_time.sampled_time(self._context.sampled, self._train, self._context.tables.quality)

    @cached_property
    def _calls(self) -> Calls | None:
        return removable_calls.removable_calls(self._context.sampled, self._sampled_time)

    # --------------------------------------------------------------------------------------- slices of the traces

    @cached_property
    def _of_window(self) -> _OfWindow:
        """Made together: of a large trace the window and the device's slices need not be in memory at once."""
        context, calls = self._context, self._calls
        mean_ms = self._train.mean_ms if self._train else None
        window = host_calls.profiled_calls(context.tables, context.spans, context.code, context.labelled)
        found = loops.loops(context, window, mean_ms, self._sampled_time)
        return _OfWindow(
            loops=found,
            io=file_io.file_io(context, window, mean_ms, calls),
            regions=python_time.regions(context, window),
            python=python_time.python_facts(context, window, found, calls),
            opened_per_step=loader.opened_per_step(window),
        )

    @cached_property
    def loops(self) -> tuple[model.LoopFacts, ...] | None:
        return self._of_window.loops

    @cached_property
    def io(self) -> tuple[model.IoFacts, ...] | None:
        return self._of_window.io

    @cached_property
    def regions(self) -> tuple[dict[str, Any], ...]:
        return self._of_window.regions

    @cached_property
    def python(self) -> tuple[model.PythonFacts, ...] | None:
        return self._of_window.python

    @cached_property
    def traces(self) -> tuple[TraceFacts, ...]:
        return device_time.trace_facts(self._context.tables, self._context.spans)

    @cached_property
    def reading(self) -> ReadingFacts | None:
        return device_time.reading_facts(self.traces)

    @cached_property
    def device_time(self) -> tuple[DeviceTime, ...]:
        return device_time.device_times(self._context.spans)

    @cached_property
    def device_lines(self) -> DeviceLines | None:
        return device_time.device_lines(self._context.base)

    @cached_property
    def profiled(self) -> model.ProfiledFacts | None:
        return self._context.profiled

    @cached_property
    def views(self) -> Views | None:
        base = self._context.base
        if not base.spans and not self._recordings:
            return None
        return LazyViews(base, self._recordings, self._context.code)

    # --------------------------------------------------------------------------------------------- what is lost

    @cached_property
    def _lost(self) -> tuple[TraceLosses, ...]:
        return device_losses.trace_losses(self._context.base)

    @cached_property
    def device_losses(self) -> tuple[DeviceLosses, ...]:
        return device_losses.device_losses(self._lost)

    @cached_property
    def replays(self) -> tuple[Replay, ...]:
        return replay.replays(self._lost)

    @cached_property
    def memory_losses(self) -> MemoryLosses | None:
        return memory_losses.facts(self._context, self.views.memory if self.views is not None else None)

    @cached_property
    def passes(self) -> PassesFacts | None:
        return redundant.facts(self._context)

    @cached_property
    def loader(self) -> model.LoaderFacts | None:
        cores_used = readings.cores_used(self.system)
        return loader.loader_facts(self._context, self._train, cores_used, self._of_window.opened_per_step)

    @cached_property
    def machine(self) -> MachineFacts:
        context, tables, labelled = self._context, self._context.tables, self._context.labelled
        mean_ms = self._train.mean_ms if self._train is not None else None
        training = readings.training_readings(tables, labelled)
        cpu = cores.cpu_facts(tables, training, mean_ms, self._waits_ms())
        return MachineFacts(
            journaled=tables.journal.height > 0,
            pauses=python_time.gc_pauses(tables, labelled) if tables.journal.height else None,
            cpu=cpu,
            memory=cores.memory_pressure(tables, training, mean_ms),
            drift=slow_steps.drift(labelled, context.sampled, self._calls),
            profiler=step_times.profiler_cost(tables, labelled),
            epochs=loader.epoch_facts(tables, labelled, self.loader),
            waves=loader.periodic_waits(tables, labelled),
            trace_loaders=loader.trace_loaders(context.base) if self.loader is None else (),
            gpus=hardware.gpu_clocks(tables, training),
            storage=hardware.storage(tables, training),
            numa=hardware.numa(tables, training),
            children=cores.children(tables, labelled, training, cpu, mean_ms),
            page_faults=hardware.page_faults(tables, labelled, training),
        )

    def _waits_ms(self) -> float:
        """Of the mean step, what the main thread waits for workers and files, or sleeps: more cores change none."""
        fed = self.loader
        data = fed.data_wait_ms if fed is not None and not fed.in_main_process else 0.0
        asleep = sum(one.ms_per_step * (one.waiting_share or 0.0) for one in self.python or ())
        return data + sum(one.ms_per_step for one in self.io or ()) + asleep

    @cached_property
    def pipeline(self) -> Pipeline | None:
        return step_times.pipeline(self._context.labelled, self._train, self.loader, self.machine)

    @cached_property
    def ranks(self) -> RanksFacts | None:
        return ranks.facts(self._context, self.sites)

    @cached_property
    def compilers(self) -> CompilersView | None:
        return compilers.build(self._context)
