"""What happens beside the steps: garbage collections, `torch.save`, processes started, NVTX ranges, our being traced.

All but the last are written as events, with the line of the user's code they struck or were called from.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing.process
import os
import subprocess
import sys
import threading
from functools import partial, wraps
from inspect import unwrap
from typing import Any, Callable, Tuple

from stepscope.record.agent import marks
from stepscope.record.agent.agent import Agent
from stepscope.record.agent.frames import Place, caller, place_fields, user_place
from stepscope.record.agent.masking import MASK, is_secret_name, mask_argv, mask_text
from stepscope.record.agent.patches import Probe, is_compiling_check, is_whole, scaler_home

SHORTEST_NS = 1_000_000  # shorter collections of the young generations are only counted


class CollectorProbe(Probe):
    """Python's garbage collector: writes `gc` for full collections and those above a millisecond."""

    name = "collector"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._callback = agent.guard.wrap(self.name, self._called)
        self._start: int | None = None
        user_place()  # loads what it needs: an import from within a collection can break the import it interrupts

    def install(self) -> None:
        gc.callbacks.append(self._callback)

    def uninstall(self) -> None:
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        now = self._agent.clock.now()
        if phase == "start":
            self._start = now
            return
        start, self._start = self._start, None
        generation = info.get("generation", 0)
        if start is None or (generation < 2 and now - start < SHORTEST_NS):
            return
        fields = place_fields(user_place())
        self._agent.journal.write(
            "gc", start, now - start, generation=generation, collected=info.get("collected"), **fields
        )


class SavesProbe(Probe):
    """Writes a `save` event per call of `torch.save`."""

    name = "saves"

    def _wrap_all(self) -> None:
        import torch

        now = self._agent.clock.now
        self._around(torch, "save", lambda _obj=None, f=None, *_args, **_kwargs: (now(), f), self._after)

    def _after(self, token: tuple[int, Any], _result: Any, error: BaseException | None) -> None:
        if error is not None:
            return
        start, target = token
        end = self._agent.clock.now()
        path = os.path.abspath(os.fsdecode(target)) if isinstance(target, (str, bytes, os.PathLike)) else None
        size = os.path.getsize(path) if path is not None and os.path.isfile(path) else None
        self._agent.last_save_step = self._agent.steps.current_step()
        self._agent.journal.write("save", start, end - start, path=path, bytes=size, **place_fields(user_place()))


EVENTS_PER_PLACE = 100  # a line that starts a process in every step is written so many times, then no more
PLACES_LIMIT = 200
COMMAND_LENGTH = 300

_Token = Tuple[int, str, str, Any]  # when it began, how, the command, what stands for it


class ChildrenProbe(Probe):
    """Writes a `child` event for each process that is started."""

    name = "children"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._written: dict[Place | None, int] = {}
        self._starting = threading.local()  # `inside`: a process is being started that will be written with its number

        def before_fork() -> None:
            if not (agent.making_loader or getattr(self._starting, "inside", False)) and self._patches.enabled:
                self._write(agent.clock.now(), "os.fork", None, None)

        # `os.fork` is not wrapped: Python warns there, and the warning names the line that called.
        os.register_at_fork(before=agent.guard.wrap(self.name, before_fork))

    def _wrap_all(self) -> None:
        # The number of the process is known afterwards: by the object that stands for it, or by what the call returns.
        def program(popen: Any, args: Any = (), *_args: Any, **_kwargs: Any) -> _Token | None:
            return self._begin("subprocess.Popen", _command(args), popen)

        def process(made: Any) -> _Token | None:
            name = getattr(getattr(made, "_target", None), "__qualname__", None) or type(made).__qualname__
            return None if self._agent.making_loader else self._begin("multiprocessing.Process", str(name), made)

        def spawn(path: Any, argv: Any = (), *_args: Any, **_kwargs: Any) -> _Token | None:
            return self._begin("os.posix_spawn", _command(argv or path), None)

        def system(command: Any = "", *_args: Any, **_kwargs: Any) -> None:  # waits for the command's end
            self._write(self._agent.clock.now(), "os.system", _command(command), None)

        self._around(subprocess.Popen, "__init__", program, self._after)
        self._around(multiprocessing.process.BaseProcess, "start", process, self._after)
        self._around(os, "posix_spawn", spawn, self._after)
        self._around(os, "posix_spawnp", spawn, self._after)
        self._around(os, "system", system)

    def _begin(self, how: str, command: str, started: Any) -> _Token | None:
        if getattr(self._starting, "inside", False):
            return None  # Popen may call os.posix_spawn
        self._starting.inside = True
        return self._agent.clock.now(), how, command, started

    def _after(self, token: _Token, result: Any, error: BaseException | None) -> None:
        self._starting.inside = False
        time_ns, how, command, started = token
        pid = result if started is None else getattr(started, "pid", None)
        if error is None and isinstance(pid, int):
            self._write(time_ns, how, command, pid)

    def _write(self, time_ns: int, how: str, command: str | None, pid: int | None) -> None:
        place = user_place()
        count = self._written.get(place, 0)
        if count < EVENTS_PER_PLACE and (count or len(self._written) < PLACES_LIMIT):
            self._written[place] = count + 1
            self._agent.journal.write("child", time_ns, pid=pid, how=how, command=command, **place_fields(place))


def _command(args: Any) -> str:
    """What is started, secrets masked: a text for a shell, a path, or the arguments of a program.

    Anything else than a list or a tuple of them is left alone: an iterator can be read only once, and not by us.
    """
    parts = args if isinstance(args, (list, tuple)) else [args]
    known = [os.fsdecode(part) if isinstance(part, (str, bytes, os.PathLike)) else "?" for part in parts]
    return " ".join(mask_argv(known))[:COMMAND_LENGTH]


class NvtxProbe(Probe):
    """Times `torch.cuda.nvtx.range_push` to `range_pop`, nested, per thread; only the training thread's are written."""

    name = "nvtx"

    def _wrap_all(self) -> None:
        import torch.cuda.nvtx as nvtx

        agent, local, is_compiling = self._agent, threading.local(), is_compiling_check()

        def pushed(msg: Any) -> None:
            local.__dict__.setdefault("stack", []).append((str(msg), agent.clock.now()))

        def popped() -> None:
            stack = getattr(local, "stack", None)
            if stack:
                name, start = stack.pop()
                if agent.accepts():
                    marks.record_region(name, start, agent.clock.now(), "nvtx")

        def then(told: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def nvtx_range(*args: Any, **kwargs: Any) -> Any:  # which Dynamo can fold
                result = original(*args, **kwargs)
                if not is_compiling():
                    told(*args, **kwargs)
                return result

            return nvtx_range

        for name, hook in (("range_push", pushed), ("range_pop", popped)):
            self._patches.replace(nvtx, name, partial(then, agent.guard.wrap(self.name, hook)))


_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def allow_tracing() -> None:
    """Declare this process traceable by others of the same user; without Yama the kernel just declines."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


EVENTS_PER_SITE = 20  # a constructor inside a loop, as over folds, is written a few times, then no more
SITES_LIMIT = 500
ARGUMENTS_LIMIT = 30

# Whose arguments or methods a framework takes its settings from: (module, class, method that every one of them runs,
# the name in the event). A data class of settings may be inherited by another that has an `__init__` of its own.
SETTINGS: tuple[tuple[str, str, str, str], ...] = (
    ("transformers.training_args", "TrainingArguments", "__post_init__", "transformers.TrainingArguments"),
    ("accelerate.accelerator", "Accelerator", "__init__", "accelerate.Accelerator"),
    ("lightning.pytorch.trainer.trainer", "Trainer", "__init__", "lightning.Trainer"),
    ("pytorch_lightning.trainer.trainer", "Trainer", "__init__", "lightning.Trainer"),
    ("lightning.fabric.fabric", "Fabric", "__init__", "lightning.Fabric"),
    ("lightning_fabric.fabric", "Fabric", "__init__", "lightning.Fabric"),
    ("fastai.learner", "Learner", "__init__", "fastai.Learner"),
    ("skorch.net", "NeuralNet", "__init__", "skorch.NeuralNet"),
    ("ignite.engine.engine", "Engine", "__init__", "ignite.Engine"),
    ("composer.trainer.trainer", "Trainer", "__init__", "composer.Trainer"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "__init__", "deepspeed.initialize"),
    ("ultralytics.engine.trainer", "BaseTrainer", "__init__", "ultralytics.train"),
    ("keras.src.trainers.trainer", "Trainer", "compile", "keras.compile"),
)


def short_repr(value: Any) -> str:
    """A few characters that say what `value` is without looking into it."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)[:40]
    if isinstance(value, str):
        return mask_text(value if len(value) <= 80 else value[:77] + "...")
    if isinstance(value, (list, tuple)) and len(value) <= 4 and all(isinstance(x, (bool, int, float)) for x in value):
        return repr(value)[:80]
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))[:80]
    return str(type(value).__qualname__)[:80]


def short_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Arguments of a call by name; positional ones get the names of the function's signature."""
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    named = {names[i] if i < len(names) else f"argument_{i}": value for i, value in enumerate(args)}
    named.update(kwargs)
    named.pop("self", None)
    short = {}
    for name, value in list(named.items())[:ARGUMENTS_LIMIT]:
        short[str(name)] = MASK if isinstance(value, str) and is_secret_name(str(name)) else short_repr(value)
    return short


class SitesProbe(Probe):
    """Writes `site` events and tells the agent of optimizers and torch.compile."""

    name = "sites"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._written: dict[Any, int] = {}
        self._optimizer: Any = None

    def _wrap_all(self) -> None:
        import torch
        from torch.optim import Optimizer
        from torch.utils.data import DataLoader

        def optimizer_made() -> None:
            if self._agent.observes():
                self._agent.steps.optimizer_created(self._agent.clock.now())

        self._optimizer = Optimizer
        self._wrap(DataLoader, "__init__", "DataLoader")
        self._wrap(Optimizer, "__init__", None, optimizer_made)
        self._wrap(torch.nn.DataParallel, "__init__", "DataParallel")
        parallel = getattr(torch.nn.parallel, "DistributedDataParallel", None)
        if parallel is not None:
            self._wrap(parallel, "__init__", "DistributedDataParallel")
        self._wrap(scaler_home(torch).GradScaler, "__init__", "GradScaler")
        self._wrap(torch, "compile", "torch.compile", self._agent.note_compile, self._agent.note_compiled)
        self._wrap(torch, "set_num_threads", "set_num_threads")
        self._wrap(torch.cuda, "set_per_process_memory_fraction", "set_per_process_memory_fraction")
        for module in {setting[0] for setting in SETTINGS}:
            if is_whole(module):
                self.module_imported(module)

    def module_imported(self, name: str) -> None:
        """Wrap what the framework whose module it is takes its settings by."""
        for module, cls, method, what in SETTINGS:
            owner = getattr(sys.modules[name], cls, None) if module == name else None
            if owner is not None:
                self._wrap(owner, method, what)

    def _wrap(
        self,
        owner: Any,
        name: str,
        what: str | None,
        told: Callable[[], None] | None = None,
        told_after: Callable[[], None] | None = None,
    ) -> None:
        found: Any = getattr(owner, name, None)
        function = unwrap(found)  # a knob may have wrapped it before us

        def before(*args: Any, **kwargs: Any) -> Callable[[], None] | None:
            if told is not None:
                told()
            # A subclass that builds its base: the line is the user's either way, the name is the subclass's.
            kind = what if what is not None else type(args[0]).__name__
            if owner is self._optimizer:
                # What a subclass hands on: its own arguments are the defaults of the parameter groups.
                defaults = args[2] if len(args) > 2 else kwargs.get("defaults")
                args, kwargs = args[:1], dict(defaults) if isinstance(defaults, dict) else {}
            self._write(kind, function, args, kwargs, owner)
            return told_after

        self._around(owner, name, before, lambda told, _result, _error: told())

    def _write(self, what: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owner: Any) -> None:
        place, via = caller()
        key = (what, place)
        count = self._written.get(key, 0)
        if count >= EVENTS_PER_SITE or (count == 0 and len(self._written) >= SITES_LIMIT):
            return
        self._written[key] = count + 1
        shown = short_arguments(function, args, kwargs)
        fields = place_fields(place)
        if via is not None:
            fields["via"] = via
        if "." in what and isinstance(owner, type) and type(args[0]) is not owner:  # of a subclass, as TRL's are
            fields["called"] = type(args[0]).__name__
        probe: Any = self._agent.probes.get("loader")
        if what == "DataLoader" and probe is not None:
            fields["id"] = probe.serial_of(args[0])
            fields["dataset"] = probe.serial_of(kwargs.get("dataset", args[1] if len(args) > 1 else None))
        self._agent.journal.write("site", what=what, arguments=shown, **fields)
