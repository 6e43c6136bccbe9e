"""The facts of a run, each made when something first asks for it: a rule, a table, a page, the report.

What nobody asks for costs nothing: a report on the terminal needs neither the table of operators nor the tree of
modules. Facts that stand on the same costly preparation are made together, so that it can go as soon as they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from stepscope.analyze import (
    compilers,
    machine,
    memory_losses,
    profiler_windows,
    ranks,
    redundant,
    sites,
    step_times,
    trial,
)
from stepscope.analyze.context import Context
from stepscope.analyze.device import device_losses, device_time, replay
from stepscope.analyze.device.device_losses import TraceLosses
from stepscope.analyze.host import file_io, loops, python_time, regions, removable_calls, sampled_stacks, sampled_time
from stepscope.analyze.host import sampled_stacks as sampled_views
from stepscope.analyze.host.removable_calls import Calls
from stepscope.analyze.host.sampled_time import SampledTime
from stepscope.analyze.input import loader
from stepscope.analyze.machine import processes, readings
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
        return profiler_windows.profiler_windows(self._context.tables, self._context.labelled)

    @cached_property
    def sites(self) -> tuple[model.Site, ...]:
        return sites.facts(self._context.tables)

    @cached_property
    def processes(self) -> tuple[model.ProcessFacts, ...]:
        return processes.processes(self._context.tables)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({rank.device for rank in self._context.tables.ranks if rank.device}))

    @cached_property
    def system(self) -> dict[str, Any]:
        return readings.telemetry_summary(self._context.tables, self._context.labelled)

    @cached_property
    def settings(self) -> model.Settings | None:
        context = self._context
        feeding = loader.feeding_loader(context.tables, context.labelled)
        return sites.settings(context.tables, feeding, self._framework)

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
        return sampled_views.sampled_views(self._context, self._context.labelled, self._train)

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
        context = self._context
        tables, labelled, lines, sampled = context.tables, context.labelled, context.lines, context.sampled
        mean_ms = self._train.mean_ms if self._train else None
        window = host_calls.profiled_calls(tables, context.spans, context.code, labelled)
        found = loops.loops(window, lines, sampled, mean_ms, self._sampled_time)
        return _OfWindow(
            loops=found,
            io=file_io.file_io(tables, labelled, sampled, window, lines, mean_ms, self._calls),
            regions=regions.facts(tables, labelled, window),
            python=python_time.python_facts(sampled, window, lines, found, self._calls),
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
        context, cores = self._context, readings.cores_used(self.system)
        opened = self._of_window.opened_per_step
        return loader.loader_facts(
            context.tables, context.labelled, self._train, context.sampled, cores, context.lines, opened
        )

    @cached_property
    def machine(self) -> MachineFacts:
        context = self._context
        return machine.machine_facts(
            context, context.labelled, self._train, self.loader, self.io, self.python, self._calls
        )

    @cached_property
    def pipeline(self) -> Pipeline | None:
        return step_times.pipeline(self._context.labelled, self._train, self.loader, self.machine)

    @cached_property
    def ranks(self) -> RanksFacts | None:
        return ranks.facts(self._context, self._context.labelled, self.sites)

    @cached_property
    def compilers(self) -> CompilersView | None:
        return compilers.build(self._context, self._context.labelled)
