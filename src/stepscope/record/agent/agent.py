"""The agent of a training process: owns the clock, the guard, the journal, the step cutter and the probes.

Nothing here imports torch, a probe or a knob: which there are is handed in, and they add themselves by the methods
below. The rank folder is claimed only when the process first trains or iterates a loader.
"""

from __future__ import annotations

import os
import platform
import sys
from functools import partial
from importlib import import_module
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, Callable, Optional, Tuple

from stepscope.record.agent.alarms import Alarms
from stepscope.record.agent.batches import Batches, BatchLog
from stepscope.record.agent.config import Clock
from stepscope.record.agent.guard import Guard, HookList
from stepscope.record.agent.journal import Journal, append_line, masked_command, rank_identity
from stepscope.record.agent.metrics import Metrics
from stepscope.record.agent.patches import Probe
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.step_queue import QueuedCutter
from stepscope.record.agent.step_readings import DeviceTimer, FrameworkSteps, PageFaults

if TYPE_CHECKING:
    from weakref import ref

    from stepscope.record.agent.config import Config
    from stepscope.record.agent.knobs.base import KnobSet


StepListener = Callable[[Optional[StepRow], int], Any]
# (module of `probes`, class, package it is for) of each, installed in this order, taken out in reverse
ProbeTable = Tuple[Tuple[str, str, str], ...]

# Stays in while the others are suspended: it is the one that notices the end of the user's profiler.
PERMANENT = "user_profiler"


class ProbeSet:
    """All probes of an agent, installed, suspended and resumed together."""

    def __init__(self, agent: Agent, table: ProbeTable) -> None:
        self._agent = agent
        self._table = table
        self._probes: list[Probe] = []
        self.suspended = False  # the probes are out because the user's profiler records stacks

    def get(self, name: str) -> Probe | None:
        """The installed probe called `name`, or None."""
        return next((probe for probe in self._probes if probe.name == name), None)

    def install_all(self) -> None:
        """Make and install the probes of all packages that have been imported."""
        for package in ("torch", "torch_xla"):
            if package in sys.modules:
                self.install_for(package)

    def install_for(self, package: str) -> None:
        """The same of one package; a probe that fails is reported and left out."""
        for module, class_name, needs in self._table:
            probe = self._guarded(class_name, self._make, module, class_name) if needs == package else None
            if probe is not None:
                self._probes.append(probe)
                if not self.suspended:
                    self._guarded(probe.name, probe.install)

    def add(self, probe: Any) -> None:
        """Take in a probe that is installed already, so that it is suspended and resumed with the others."""
        self._probes.append(probe)

    def module_imported(self, name: str) -> None:
        """Told of modules that probes wait for."""
        for probe in self._probes:
            if isinstance(probe, Probe):  # the sampler is none: it waits for no module
                self._guarded(probe.name, probe.module_imported, name)

    def suspend(self, reason: str) -> None:
        """Take all probes out (except the permanent ones) and close the step that cannot be followed any further."""
        if self.suspended:
            return
        self.suspended = True
        self._agent.journal.write("suspended", reason=reason)
        self._agent.steps.interrupt(self._agent.clock.now())
        for probe in reversed(self._probes):
            if probe.name != PERMANENT:
                self._take_out(probe)

    def resume(self) -> None:
        """Put the probes back in; steps are cut again from the next boundary on."""
        if not self.suspended:
            return
        self.suspended = False
        for probe in self._probes:
            if probe.name != PERMANENT:
                self._guarded(probe.name, probe.install)

    def uninstall_all(self) -> None:
        for probe in reversed(self._probes):
            self._take_out(probe)
        self._probes.clear()

    def _make(self, module: str, class_name: str) -> Probe:
        probe: Probe = getattr(import_module("stepscope.record.agent.probes." + module), class_name)(self._agent)
        return probe

    def _take_out(self, probe: Probe) -> None:
        # A switch of its own: a probe that failed is off, and its wrappers must leave torch all the same.
        self._guarded(probe.name + ".uninstall", probe.uninstall)

    def _guarded(self, name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        return self._agent.guard.wrap(name, action, inject=False)(*arguments)


class Agent:
    """What probes, listeners and marks work with. See the attributes; all of them are safe on the training thread."""

    def __init__(self, config: Config, probes: ProbeTable = ()) -> None:
        self.config = config
        self.clock = Clock(config.epoch_offset_ns)
        self.guard = Guard(self._report_fault, config.faults)
        self.started_ns = self.clock.now()
        self.page_faults = PageFaults(self.clock.now)
        self.steps = QueuedCutter(self.page_faults.now, self._on_row, self._on_rows)
        describe = partial(_describe_process, self.started_ns)
        self.journal = Journal(config.run, config.host_dir, self.clock, describe, self.steps.current_step)
        self.device = DeviceTimer(self.guard, self.journal, lambda: self.user_profiler_active)
        self.probes = ProbeSet(self, probes)
        self.knobs: KnobSet | None = None
        self.flush_regions: Callable[[], Any] = list  # writes those summed up so far, once there are marks
        self.before_compile: list[Callable[[], None]] = []  # called when torch.compile is, on the guard of its caller
        self.after_compile: list[Callable[[], Any]] = []
        self.own_profiler_active = False  # a profiler of ours is being made or is recording
        self.user_profiler_active = False
        self.memory_question: str | None = None  # what readings of memory leave open, and a window would tell
        self.last_compile_step: int | None = None
        self.last_save_step: int | None = None  # torch.save was called in it
        self.making_loader = False  # workers forked now are the loader's
        self.compile_used = False  # torch.compile was called in this process
        self.optimizer_events = 0  # optimizer steps seen, nested ones included
        self.regions_written = False  # since the last step was cut
        self.framework_steps: FrameworkSteps | None = None  # once a framework trains that counts its steps
        self._write_row = self.guard.wrap("journal", self._row_cut)
        self._write_rows = self.guard.wrap("journal", lambda rows: self.journal.write_steps(rows))
        self._at_boundary = HookList(self.guard)
        self._every_step: list[Callable[[], bool | None]] = []  # ask whether a listener needs the next step at once
        self._finish_hooks: list[Callable[[], None]] = []
        self._end_hooks: list[Callable[[], None]] = []
        self._owner: int | None = None  # the thread whose steps are cut
        self.training_thread: int | None = None  # the owner once it trains; hooks compare with it before they ask
        self._counted = {"train": 0, "eval": 0}  # steps, towards the limit
        self._limit_reached = False
        self.faults: dict[str, str] = {}  # what a probe has failed with
        self._finished = False
        self.batches = Batches()
        self.metrics = Metrics(self)
        # Called before and after an optimizer's step, guarded: by monitors, in the steps that carry one.
        self.around_update: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None
        self.first_model: ref[Any] | None = None  # the outermost module that was called first with gradients
        self.alarms = Alarms(self)
        self.batch_log = BatchLog(self)

    def abandon(self) -> bool:
        """In a forked child: touch no file of the parent's. False where recording had ended before."""
        was_recording, self._finished = not self._finished, True
        if was_recording:
            self.journal.abandon()
        return was_recording

    def finish(self, reason: str = "atexit") -> None:
        """Close the last step and write the exit event. Idempotent."""
        if self._finished:
            return
        self._finished = True
        self._run_end_hooks()
        for hook in self._finish_hooks:
            hook()
        self.steps.finish(self.clock.now())
        self.alarms.finish()
        self.batch_log.finish()
        self.journal.flush()
        self.device.drain()
        self.flush_regions()
        if self.journal.folder is not None:
            self.journal.write("exit", reason=reason, step=None)
            self.journal.close()
        elif self.faults:
            # Nobody claimed a folder, perhaps because of these very faults: say so where the process is announced.
            record = {"time_ns": self.clock.now(), "pid": os.getpid(), "probe_errors": self.faults}
            append_line(os.path.join(self.config.host_dir, "agents.jsonl"), record)
        self.uninstall()

    def uninstall(self) -> None:
        """Take probes and knobs out of torch."""
        self.probes.uninstall_all()
        if self.knobs is not None:
            self.guard.wrap("knobs.uninstall", self.knobs.uninstall_all, inject=False)()

    def announce(self, role: str) -> None:
        """Say in the launcher's folder that this process exists."""
        identity = rank_identity()
        record = {
            "time_ns": self.clock.now(),
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "argv": masked_command(),
            "executable": sys.executable,
            "python": platform.python_version(),
            "torch": _torch_version(),
            **{name: identity[name] for name in ("rank", "local_rank", "world_size")},
            "role": role,
        }
        append_line(os.path.join(self.config.host_dir, "agents.jsonl"), record)

    def add_step_listener(
        self, listener: StepListener, probe: str, every_step: Callable[[], bool] | None = None
    ) -> None:
        """Call `listener(row, now_ns)` between two steps, on the training thread, right after a step was cut.

        `row` is None when a loop starts instead. Time spent in listeners is in no step. Short steps may be cut several
        at a time, and listeners then hear of the last of them alone, unless `every_step()` says they need each; it is
        asked after every call of the listeners.
        """
        self._at_boundary.add(probe, listener)
        if every_step is not None:
            self._every_step.append(self.guard.wrap(probe, every_step, inject=False))

    def add_finish_hook(self, hook: Callable[[], None], probe: str) -> None:
        """Call `hook` when recording ends, before the last step is closed."""
        self._finish_hooks.append(self.guard.wrap(probe, hook, inject=False))

    def add_end_hook(self, hook: Callable[[], None], probe: str) -> None:
        """Call `hook` once: after the last step of `max_steps`, before the launcher hears of it, or at the end."""
        self._end_hooks.append(self.guard.wrap(probe, hook, inject=False))

    def add_boundary_hook(self, hook: StepListener, probe: str) -> None:
        """Like a listener, for probes: cheap, called before the listeners."""
        self._at_boundary.add(probe, hook, first=True)

    def note_compile(self) -> None:
        """torch.compile is used from now on: global module hooks would make Dynamo compile anew."""
        self.compile_used = True
        for hook in self.before_compile:
            hook()

    def note_compiled(self) -> None:
        """torch.compile has returned: Dynamo is loaded now, and the first compilation is still to come."""
        for hook in self.after_compile:
            hook()

    def accepts(self, strong: bool = False) -> bool:
        """Whether the calling thread is the one whose steps are cut.

        The first thread that fetches, trains or marks is. A thread that prefetches batches for another one is not:
        `strong` activity (backward, optimizer) elsewhere takes over as long as the owner has shown none itself.
        """
        thread = get_ident()
        if thread == self._owner:
            if strong:
                self.training_thread = thread
            return True
        if self._owner is None:
            self._owner = thread
            self.training_thread = thread if strong else None
            self.journal.claim()
            return True
        if not strong:
            return False
        if self.training_thread is not None:
            # Autograd runs hooks of device tensors (an optimizer inside backward) on threads of its own.
            return self.steps.in_backward
        self.steps.handed_over(self.clock.now())
        self._owner = self.training_thread = thread
        return True

    def observes(self) -> bool:
        """Whether the calling thread is the one whose steps are cut, or may become it; claims nothing."""
        return self._owner is None or get_ident() == self._owner

    def _run_end_hooks(self) -> None:
        hooks, self._end_hooks = self._end_hooks, []
        for hook in hooks:
            hook()

    def _on_row(self, row: StepRow | None, live: bool, now_ns: int) -> None:
        if row is not None:
            if self.framework_steps is not None:
                row = self.framework_steps.filled(row, now_ns) or row
            (row,) = self.page_faults.fill([row])
            self._write_row(row)
        if live:
            self._at_boundary.call(row, now_ns)
            # Steps may be cut late where nothing must happen right when one ends.
            self.steps.patient = not (
                self.config.max_steps is not None
                or self.own_profiler_active
                or self.user_profiler_active
                or self.device.wants(now_ns)
                or any(wanted() for wanted in self._every_step)
            )

    def _on_rows(self, rows: list[StepRow]) -> None:
        """Rows of steps cut late, none of which something happens after."""
        if self.framework_steps is not None:
            rows = [self.framework_steps.filled(row, row.start_ns + row.wall_ns) or row for row in rows]
        self._write_rows(self.page_faults.fill(rows))

    def _row_cut(self, row: StepRow) -> None:
        self.journal.write_steps([row])
        if self.device.possible:
            self.device.step_edge(row)
        if self.regions_written:
            self.regions_written = False
            self.flush_regions()
        if self.config.max_steps is not None and not self._limit_reached:
            self._counted[row.kind] += 1
            steps = self._counted["train"] or self._counted["eval"]
            if steps >= self.config.max_steps:
                self._limit_reached = True
                self._run_end_hooks()
                self.journal.write("exit", reason="max_steps", step=None)
                told = {"time_ns": self.clock.now(), "pid": os.getpid(), "steps": steps}
                append_line(os.path.join(self.config.host_dir, "max-steps"), told)

    def _report_fault(self, probe: str, error: str) -> None:
        self.faults[probe] = error
        self.steps.hurry()  # what a failed hook has left behind is put in order at the next boundary
        self.journal.write("probe_error", probe=probe, error=error)


def _torch_version() -> str | None:
    version = getattr(sys.modules.get("torch"), "__version__", None)
    return None if version is None else str(version)


def _describe_process(started_ns: int) -> dict[str, Any]:
    """The fields of rank.json that are no identity."""
    torch = sys.modules.get("torch")
    build = getattr(torch, "version", None)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    versions = {"python": platform.python_version(), "torch": _torch_version()}
    versions.update({name: getattr(build, name, None) for name in ("cuda", "hip")})
    threads, cuda = getattr(torch, "get_num_threads", None), getattr(torch, "cuda", None)
    initialised = cuda is not None and cuda.is_initialized()  # none is initialised to tell
    try:
        folder: str | None = os.getcwd()
    except OSError:  # it was removed under the process
        folder = None
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "argv": masked_command(),
        "main_file": os.path.abspath(main) if main else None,
        "cwd": folder,
        "versions": {name: str(value) for name, value in versions.items() if value is not None},
        "device": None if torch is None else "xla" if "torch_xla" in sys.modules else "cuda" if initialised else "cpu",
        "threads": None if threads is None else int(threads()),  # of each operator on the CPU, when training begins
        "hook": _python_hook(),
        "started_ns": started_ns,
    }


def _python_hook() -> str | None:
    """What is called at every call or line of Python: a profiler or tracer of the script's, or a debugger."""
    for hook in (sys.getprofile(), sys.gettrace()):
        if hook is not None and type(hook).__name__ != "TraceContext":  # torch's profiler is told apart
            named = hook if isinstance(hook, FunctionType) else type(hook)
            return f"{named.__module__}.{named.__qualname__}"
    monitoring = getattr(sys, "monitoring", None)  # cProfile's way from Python 3.12 on
    return None if monitoring is None else monitoring.get_tool(monitoring.PROFILER_ID)
