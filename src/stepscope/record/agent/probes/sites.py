"""Where the user builds what findings speak of: loaders, optimizers, DDP, torch.compile, thread counts, scalers.

Of a framework, what it is told its settings by. Each construction is written once with its line and its arguments in
short: numbers, flags, short strings and class names, secrets masked; never the content of a tensor, a data set or a
module.
"""

from __future__ import annotations

import sys
from inspect import unwrap
from typing import Any, Callable

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.frames import caller, place_fields
from stepscope.record.agent.imports import when_imported
from stepscope.record.agent.masking import MASK, is_secret_name, mask_text
from stepscope.record.agent.patches import Probe, is_whole, scaler_home

EVENTS_PER_SITE = 5  # a constructor inside a loop is written a few times, then no more
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

        self._optimizer = Optimizer
        self._wrap(DataLoader, "__init__", "DataLoader")
        self._wrap(Optimizer, "__init__", None, self._optimizer_made)
        self._wrap(torch.nn.DataParallel, "__init__", "DataParallel")
        parallel = getattr(torch.nn.parallel, "DistributedDataParallel", None)
        if parallel is not None:
            self._wrap(parallel, "__init__", "DistributedDataParallel")
        self._wrap(scaler_home(torch).GradScaler, "__init__", "GradScaler")
        self._wrap(torch, "compile", "torch.compile", self._agent.note_compile, self._agent.note_compiled)
        self._wrap(torch, "set_num_threads", "set_num_threads")
        self._wrap(torch.cuda, "set_per_process_memory_fraction", "set_per_process_memory_fraction")
        for setting in SETTINGS:
            self._wrap_setting(*setting)

    def _wrap_setting(self, module: str, name: str, method: str, what: str) -> None:
        """Now, or once the framework has been imported."""

        def wrap() -> None:
            owner = getattr(sys.modules.get(module), name, None)
            if owner is not None and self._patches.enabled:
                self._wrap(owner, method, what)

        if is_whole(module):
            wrap()
        else:
            when_imported(module, self._agent.guard.wrap(f"{self.name}.{module}", wrap, inject=False))

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
            self._write(kind, function, args, kwargs)
            return told_after

        self._around(owner, name, before, lambda told, _result, _error: told())

    def _optimizer_made(self) -> None:
        if self._agent.observes():
            self._agent.steps.optimizer_created(self._agent.clock.now())

    def _write(self, what: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
        probe: Any = self._agent.probes.get("loader")
        if what == "DataLoader" and probe is not None:
            fields["id"] = probe.serial_of(args[0])
            fields["dataset"] = probe.serial_of(kwargs.get("dataset", args[1] if len(args) > 1 else None))
        self._agent.journal.write("site", what=what, arguments=shown, **fields)
