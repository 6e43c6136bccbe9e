"""The finder `sitecustomize` puts first: wakes the agent once torch has been imported, and knows where stepscope is.

Until then it costs a comparison per import and loads nothing. The tool's own site-packages never come onto sys.path:
`stepscope` alone is found, by its folder, so the agent and an `import stepscope` in the user's script share one copy.
This file is executed on its own, before the package can be imported: it must import nothing of stepscope.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Callable

HOOKED = ("torch", "torch_xla")
# Where training frameworks have their seams and settings and loggers their calls, as in the tables of
# `probes/frameworks.py` and `probes/side_events.py`, which a test compares; and FSDP, which clips by itself. Known from
# the start: such a module may import torch in the middle of its own import, which is over only later.
_LIGHTNING = "loops.evaluation_loop loops.fit_loop trainer.connectors.logger_connector.logger_connector trainer.trainer"
_MODULES = {
    "accelerate": "accelerator",
    "composer": "callbacks.checkpoint_saver loggers.logger trainer.trainer",
    "deepspeed": "monitor.monitor runtime.engine runtime.pipe.engine",
    "fastai": "learner optimizer",
    "ignite": "engine.engine handlers.checkpoint metrics.metric",
    "keras.src": "backend.torch.trainer callbacks.callback_list models.model optimizers.base_optimizer "
    "trainers.trainer",
    "lightning.fabric": "fabric",
    "lightning.pytorch": _LIGHTNING,
    "lightning_fabric": "fabric",
    "mlflow.tracking": "client fluent",
    "pytorch_lightning": _LIGHTNING,
    "skorch": "history net",
    "tensorboardX": "writer",
    "torch.distributed.fsdp": "fully_sharded_data_parallel",
    "torch.utils.tensorboard": "writer",
    "torchtitan.components": "checkpoint checkpointer.base metrics validate",
    "torchtitan": "train trainer",
    "trackio": "run",
    "transformers": "trainer training_args",
    "ultralytics": "engine.trainer",
    "wandb.sdk": "wandb_run",
}
FRAMEWORK_MODULES = frozenset(f"{package}.{name}" for package, names in _MODULES.items() for name in names.split())


class Finder:
    """A meta path finder that finds only `stepscope`, and wraps the loader of modules that are waited for.

    `wake` is told of those of HOOKED and FRAMEWORK_MODULES, and may raise.
    """

    def __init__(self, package: str, wake: Callable[[str], Any]) -> None:
        self._package = package
        self._wake = wake
        self.waiting = {*HOOKED, *FRAMEWORK_MODULES}  # others may be added

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of stepscope, or of a hooked module with its loader prepared; None for everything else."""
        if name == "stepscope" and self._foreign() is None:
            return importlib.util.spec_from_file_location(
                name, os.path.join(self._package, "__init__.py"), submodule_search_locations=[self._package]
            )
        if name not in self.waiting:
            return None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is not self and find_spec is not None:
                spec: ModuleSpec | None = find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        self._prepare(name, spec.loader)
                    return spec
        return None

    def start_now(self) -> None:
        """Start for modules that were imported before us."""
        for name in HOOKED:
            if name in sys.modules and name in self.waiting:
                self.waiting.discard(name)
                self._tell(name)

    def _foreign(self) -> str | None:
        """The script's own module by our name, where it has one: it gets that one, and is not recorded."""
        spec = PathFinder.find_spec("stepscope", sys.path)
        if spec is None or spec.origin is None:  # nor is a folder without code, as a clone of ours beside the script
            return None
        return None if os.path.isdir(os.path.join(os.path.dirname(spec.origin), "record", "agent")) else spec.origin

    def _tell(self, name: str) -> None:
        if name in FRAMEWORK_MODULES and "stepscope.record.agent.core" not in sys.modules:
            return  # torch, and with it the agent, is still to come
        try:
            foreign = self._foreign()
            if foreign is None:
                self._wake(name)
            elif name == "torch":
                _leave_word(foreign)
        except Exception:  # noqa: BLE001 - before the agent's guard exists; the user's import must not fail because of us
            return

    def _prepare(self, name: str, loader: Any) -> None:
        """Have `_tell(name)` called after this one loader object has executed the module."""
        original: Any = getattr(loader, "exec_module", None)
        attributes: dict[str, Any] = getattr(loader, "__dict__", {"exec_module": None})
        if original is None or "exec_module" in attributes:
            return

        def exec_module(module: ModuleType) -> None:
            attributes.pop("exec_module", None)
            original(module)
            if name in self.waiting:
                self.waiting.discard(name)
                self._tell(name)

        attributes["exec_module"] = exec_module


def _leave_word(foreign: str) -> None:
    """Say in the launcher's folder what keeps the agent out of this process, which else says nothing."""
    from json import dumps, loads

    record = {"time_ns": time.time_ns(), "pid": os.getpid(), "torch": "", "foreign": foreign}
    with open(os.path.join(loads(os.environ["STEPSCOPE_RECORD"])["host_dir"], "agents.jsonl"), "a") as file:
        file.write(dumps(record) + "\n")
