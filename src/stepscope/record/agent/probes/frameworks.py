"""Training frameworks and their seams: the one table of what is patched in whose loop, and what it means.

Read against the versions named in `checked`; in any other version the same seams are tried, and what is not there is
said. Nothing here is a clock: steps are cut by the step cutter alone. `docs/frameworks.md` is this table for users, and
`imports.FRAMEWORK_MODULES` names its modules for the import hook; tests compare both with it.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from operator import attrgetter
from threading import get_ident
from types import FunctionType
from typing import Any, Iterator, NamedTuple

from stepscope.record.agent import marks, metrics
from stepscope.record.agent.agent import Agent
from stepscope.record.agent.guard import After, Before
from stepscope.record.agent.patches import Patches, Probe
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.step_readings import FrameworkSteps, reader

# What a seam means. A call of TRAIN lasts as long as the training; one of CALL happens in each step of a loop that is
# the user's own; a call of ENGINE is training, and evaluation where it runs inside another one. At CALLBACKS the
# callbacks are known; EVENT calls handlers of the event that is its first argument. OPTIMIZER updates the parameters
# where that is none of torch's optimizers, whose hooks tell. The others are regions, by name.
TRAIN, CALL, ENGINE, CALLBACKS, EVENT, OPTIMIZER = "train", "call", "engine", "callbacks", "event", "optimizer"
EVALUATION = "evaluation"


class Seam(NamedTuple):
    """`owner.name` of `module`, a method."""

    meaning: str
    module: str
    owner: str
    name: str
    path: str = ""  # from the method's object to the callbacks; EVENT: to the dictionary of handlers by event
    unless: str = ""  # the keyword argument that, when true, makes it something else

    @property
    def place(self) -> str:
        """`train: Trainer.train`."""
        return f"{self.meaning}: {self.owner}.{self.name}"


class Framework(NamedTuple):
    """`package` is what is imported; its `__version__` begins with one of `checked` where the seams were read."""

    name: str
    package: str
    checked: tuple[str, ...]
    seams: tuple[Seam, ...]
    counter: str = ""  # from the object that trains to its own number of completed steps; "" where it keeps none
    counts: str = "updates"  # or "batches": what the counter counts; "optimizer steps" where each optimizer's is one
    begun: bool = False  # the counter says the step that runs, counted when it begins
    hooks: tuple[str, ...] = ("on_",)  # what methods of callbacks begin with


def _at(module: str, owner: str, path: str = "", unless: str = "", **methods: str) -> tuple[Seam, ...]:
    """Seams of one class: by what they mean, its methods."""
    return tuple(
        Seam(meaning, module, owner, name, path, unless) for meaning, names in methods.items() for name in names.split()
    )


def _lightning(package: str, top: str) -> Framework:
    connector = f"{package}.trainer.connectors.logger_connector.logger_connector"
    return Framework("Lightning", top, ("2.6",), (
        *_at(f"{package}.trainer.trainer", "Trainer", train="fit"),
        *_at(f"{package}.loops.fit_loop", "_FitLoop", "trainer.callbacks", callbacks="run"),
        *_at(f"{package}.loops.evaluation_loop", "_EvaluationLoop", evaluation="run"),
        *_at(f"{package}.trainer.trainer", "Trainer", checkpoint="save_checkpoint"),
        *_at(connector, "_LoggerConnector", logging="log_metrics"),
    ), counter="global_step", counts="optimizer steps")  # fmt: skip


def _fabric(package: str, top: str) -> Framework:
    seams = _at(f"{package}.fabric", "Fabric", "_callbacks", call="backward", checkpoint="save", logging="log_dict")
    return Framework("Fabric", top, ("2.6",), seams)


# A framework that trains through another one stands before it: the first that trains names the run.
FRAMEWORKS: tuple[Framework, ...] = (
    Framework("HF Trainer", "transformers", ("5.23",), _at(
        "transformers.trainer", "Trainer", "callback_handler.callbacks", train="train", evaluation="evaluate predict",
        checkpoint="_save_checkpoint save_model", logging="log",
    ), counter="state.global_step"),
    _lightning("lightning.pytorch", "lightning"),
    _lightning("pytorch_lightning", "pytorch_lightning"),
    _fabric("lightning.fabric", "lightning"),
    _fabric("lightning_fabric", "lightning_fabric"),
    Framework("fastai", "fastai", ("2.8",), (
        *_at("fastai.learner", "Learner", "cbs", train="_do_fit", evaluation="_do_epoch_validate"),
        *_at("fastai.optimizer", "Optimizer", optimizer="step"),
        *_at("fastai.learner", "Learner", checkpoint="save"),
    ), counter="train_iter", counts="batches", hooks=("before_", "after_")),
    Framework("ignite", "ignite", ("0.5",), (
        *_at("ignite.engine.engine", "Engine", engine="run"),
        *_at("ignite.engine.engine", "Engine", "_event_handlers", event="_fire_event"),
        *_at("ignite.handlers.checkpoint", "Checkpoint", checkpoint="__call__"),
    ), counter="state.iteration", counts="batches"),
    Framework("Keras", "keras", ("3.15",), (
        *_at("keras.src.backend.torch.trainer", "TorchTrainer", train="fit", evaluation="evaluate predict"),
        *_at("keras.src.callbacks.callback_list", "CallbackList", "callbacks", callbacks="on_train_begin"),
        *_at("keras.src.optimizers.base_optimizer", "BaseOptimizer", optimizer="apply"),
        *_at("keras.src.models.model", "Model", checkpoint="save save_weights"),
        # `iterations` divides it by the accumulation, on the device
    ), counter="optimizer._iterations", counts="batches"),
    Framework("skorch", "skorch", ("1.4",), (
        *_at("skorch.net", "NeuralNet", "callbacks_", train="fit_loop"),
        *_at("skorch.net", "NeuralNet", unless="training", evaluation="run_single_epoch"),
        *_at("skorch.net", "NeuralNet", checkpoint="save_params"),
    )),
    Framework("Composer", "composer", ("0.33",), (
        *_at("composer.trainer.trainer", "Trainer", "state.callbacks", train="fit", evaluation="_eval_loop"),
        *_at("composer.callbacks.checkpoint_saver", "CheckpointSaver", checkpoint="_save_checkpoint"),
        *_at("composer.loggers.logger", "Logger", logging="log_metrics"),
    ), counter="state.timestamp.batch.value",
        hooks=("run_event", "before_", "after_", "fit_", "iteration_", "epoch_", "batch_", "eval_")),
    Framework("Ultralytics", "ultralytics", ("8.4",), (
        *_at("ultralytics.engine.trainer", "BaseTrainer", train="_do_train"),
        *_at("ultralytics.engine.trainer", "BaseTrainer", "callbacks", event="run_callbacks"),
        *_at("ultralytics.engine.trainer", "BaseTrainer", evaluation="validate", checkpoint="save_model",
             logging="save_metrics"),
    )),
    Framework("torchtitan", "torchtitan", ("0.2",), (
        *_at("torchtitan.trainer", "Trainer", train="train"),
        *_at("torchtitan.train", "Trainer", train="train"),
        *_at("torchtitan.components.validate", "Validator", evaluation="validate"),
        *_at("torchtitan.components.checkpointer.base", "BaseCheckpointManager", checkpoint="save"),
        *_at("torchtitan.components.checkpoint", "CheckpointManager", checkpoint="save"),
        *_at("torchtitan.components.metrics", "MetricsProcessor", logging="log"),
    ), counter="step", begun=True),
    Framework("DeepSpeed", "deepspeed", ("0.19",), (
        *_at("deepspeed.runtime.engine", "DeepSpeedEngine", call="backward step"),
        *_at("deepspeed.runtime.pipe.engine", "PipelineEngine", call="train_batch", evaluation="eval_batch"),
        *_at("deepspeed.runtime.engine", "DeepSpeedEngine", checkpoint="save_checkpoint"),
        *_at("deepspeed.monitor.monitor", "MonitorMaster", logging="write_events"),
    ), counter="global_steps"),
    Framework("Accelerate", "accelerate", ("1.15",), _at(
        "accelerate.accelerator", "Accelerator", call="backward", checkpoint="save_state save_model", logging="log",
    )),
)  # fmt: skip

# Distributions that work inside a framework's loop; named where the object that trains, or its model, is of them.
ON_TOP = ("trl", "peft", "accelerate", "deepspeed")


SHORTEST_NS = 200_000  # shorter regions are summed up
SUM_NS = 2_000_000  # and written once they come to so much: a hundredth of it is what writing takes
CALLBACKS_LIMIT = 500  # methods that are wrapped
BASES = ("Callback", "TrainerCallback")


@dataclass
class _Training:
    """A framework at work. `owner`: a weak reference to its object that trains, which may hold models.

    `endless`: in a loop of the user's own, whose end nobody tells.
    """

    framework: Framework
    owner: weakref.ref[Any]
    cls: type
    endless: bool
    optimizer_events: int  # as many as there were before
    written: bool = False


class FrameworkSeamsProbe(Probe):
    """Writes `framework` once per framework that trains, `region` with the source "framework", and numbers steps."""

    name = "framework_seams"

    def __init__(self, agent: Agent, table: tuple[Framework, ...] = FRAMEWORKS) -> None:
        super().__init__(agent)
        self._table = table
        self._seams: dict[tuple[str, Seam], Patches] = {}
        self._callbacks: dict[tuple[type, str], Patches] = {}
        self._training: _Training | None = None
        self._open: set[str] = set()  # regions we are in
        self._written: set[tuple[str, type]] = set()
        self._sums: dict[str, list[int]] = {}  # name -> [calls, duration, first start]
        self._rates = agent.guard.wrap(metrics.NAME, agent.metrics.update_begins)
        agent.add_boundary_hook(self._step_cut, self.name)
        agent.add_finish_hook(self._finish, self.name)

    def install(self) -> None:
        for module in {seam.module for framework in self._table for seam in framework.seams}:
            if not getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False):
                self.module_imported(module)
        for (cls, name), patches in self._callbacks.items():  # a training went on while the probes were out
            self._wrap_callback(patches, cls, name)

    def uninstall(self) -> None:
        for patches in (*self._callbacks.values(), *self._seams.values()):
            patches.remove()

    def module_imported(self, name: str) -> None:
        """Patch the seams in the module `name`, if it is loaded; its code has been executed."""
        module = sys.modules.get(name)
        for framework in self._table:
            for seam in framework.seams:
                owner = getattr(module, seam.owner, None) if seam.module == name else None
                if isinstance(owner, type) and callable(getattr(owner, seam.name, None)):
                    patches = self._seams.setdefault((framework.package, seam), Patches(self._agent.guard, self.name))
                    patches.install(partial(patches.look, owner, seam.name, *self._hooks(framework, seam)))

    # ---------------------------------------------------------------------------------------------- what is patched

    def _wrap_callback(self, patches: Patches, cls: type, name: str) -> None:
        patches.install(lambda: patches.look(cls, name, self._callback_begins, self._region_ends))

    def _hooks(self, framework: Framework, seam: Seam) -> tuple[Before, After | None]:
        """What to do before and after a call."""
        if seam.meaning in (TRAIN, CALL, ENGINE):
            begins = self._training_begins
            return lambda owner, *_args, **_kwargs: begins(framework, seam, owner), self._training_ends
        if seam.meaning == CALLBACKS:
            return lambda owner, *_args, **_kwargs: self._watch_callbacks(framework, owner, seam.path), None
        if seam.meaning == OPTIMIZER:
            return self._update_begins, self._update_ends
        if seam.meaning == EVENT:
            handlers = attrgetter(seam.path)
            return lambda owner, event, *_args, **_kwargs: self._event(handlers(owner), event), self._region_ends
        name, unless = seam.meaning, seam.unless
        return lambda *_args, **kwargs: None if kwargs.get(unless) else self._region_begins(name), self._region_ends

    # --------------------------------------------------------------------------------------------------- who trains

    def _training_begins(self, framework: Framework, seam: Seam, owner: Any) -> Any:
        agent, training = self._agent, self._training
        if not self._on_training_thread():
            return None
        if training is not None and not (training.endless and seam.meaning != CALL):
            # Whoever trains inside another framework's training is a part of it, an engine inside an engine evaluates.
            inside = seam.meaning == ENGINE and training.owner() is not owner
            return self._region_begins(EVALUATION) if inside else None
        endless = seam.meaning == CALL
        training = _Training(framework, weakref.ref(owner), type(owner), endless, agent.optimizer_events)
        self._training = training
        if framework.counter:
            if agent.framework_steps is None:
                agent.framework_steps = FrameworkSteps(agent.guard)
            agent.framework_steps.begin(reader(owner, framework.counter), framework.begun, agent.clock.now())
        if seam.path:
            self._watch_callbacks(framework, owner, seam.path)
        return training

    def _training_ends(self, token: Any, _result: Any, _error: BaseException | None) -> None:
        if isinstance(token, tuple):
            self._region_ends(token, None, None)
        elif not token.endless:
            if self._agent.framework_steps is not None:
                self._agent.framework_steps.end(self._agent.clock.now())
            self._finish()
            self._training = None
            # A class of the user's is left as it was found: it may be pickled by value.
            for patches in self._callbacks.values():
                patches.remove()
            self._callbacks.clear()

    def _step_cut(self, row: StepRow | None, _now_ns: int) -> None:
        training = self._training
        if training is not None and row is not None and row.kind == "train":
            self._write_framework(training)

    def _finish(self) -> None:
        training = self._training
        if training is not None and self._agent.optimizer_events > training.optimizer_events:
            self._write_framework(training)  # its only step was never cut between two steps
        for name in list(self._sums):
            self._write_sum(name)

    def _write_framework(self, training: _Training) -> None:
        framework, cls = training.framework, training.cls
        was_written, training.written = training.written, True
        if was_written or (framework.package, cls) in self._written:
            return
        self._written.add((framework.package, cls))
        version = version_of(framework.package)
        patched = {seam for package, seam in self._seams if package == framework.package}
        found = [seam for seam in framework.seams if seam in patched]
        meanings = {seam.meaning for seam in found}
        model = getattr(training.owner(), "__dict__", {}).get("model")  # no property, which may do anything
        packages = {part.__module__.partition(".")[0] for known in (cls, type(model)) for part in known.__mro__}
        missing = [seam for seam in framework.seams if seam.meaning not in meanings and not _is_unused(seam.module)]
        on_top = [name for name in ON_TOP if name != framework.package and name in packages]
        self._agent.journal.write(
            "framework",
            step=None,
            name=framework.name,
            package=framework.package,
            version=version,
            supported=any(f"{version}.".startswith(checked + ".") for checked in framework.checked),
            checked=list(framework.checked),
            seams=[seam.place for seam in found],
            missing=[seam.place for seam in missing],
            counter=framework.counter or None,
            counts=framework.counts if framework.counter else None,
            trainer=f"{cls.__module__}.{cls.__qualname__}",
            on_top=[{"name": name, "version": version_of(name)} for name in on_top],
        )

    # ------------------------------------------------------------------------------------------------------ regions

    def _region_begins(self, name: str) -> tuple[str, int] | None:
        agent = self._agent
        if name in self._open or not self._on_training_thread():
            return None  # `save_model` inside `_save_checkpoint`, a method that calls its parent's
        now = agent.clock.now()
        self._open.add(name)
        if name == EVALUATION:
            agent.steps.evaluation_start(now)
        return name, now

    def _region_ends(self, token: tuple[str, int], _result: Any, _error: BaseException | None) -> None:
        agent = self._agent
        name, start = token
        self._open.discard(name)
        now = agent.clock.now()
        if name == EVALUATION:
            agent.steps.evaluation_end(now)
        if now - start >= SHORTEST_NS:
            marks.record_region(name, start, now, "framework")
            return
        total = self._sums.setdefault(name, [0, 0, start])
        total[0] += 1
        total[1] += now - start
        if total[1] >= SUM_NS:
            self._write_sum(name)

    def _update_begins(self, optimizer: Any, *_args: Any, **_kwargs: Any) -> int | None:
        agent = self._agent
        if self._training is None or not agent.accepts(strong=True):
            return None
        agent.optimizer_events += 1
        now = agent.clock.now()
        agent.steps.optimizer_start(id(optimizer), now)
        self._rates(optimizer, now)
        return id(optimizer)

    def _update_ends(self, optimizer_id: int, _result: Any, _error: BaseException | None) -> None:
        self._agent.steps.optimizer_end(optimizer_id, self._agent.clock.now())
        self._agent.metrics.update_ended(optimizer_id)

    def _event(self, handlers: Any, event: Any) -> tuple[str, int] | None:
        called = bool(handlers) and bool(handlers.get(event))
        return self._region_begins(f"callback:{getattr(event, 'name', event)}") if called else None

    def _write_sum(self, name: str) -> None:
        count, duration, start = self._sums.pop(name)
        self._agent.journal.write("region", start, duration, name=name, source="framework", count=count)

    def _on_training_thread(self) -> bool:
        return self._agent.training_thread in (None, get_ident())

    # ---------------------------------------------------------------------------------------------------- callbacks

    def _watch_callbacks(self, framework: Framework, owner: Any, path: str) -> None:
        """Wrap, on their classes, what callbacks do at events; the framework's base class does nothing there."""
        try:
            callbacks = list(attrgetter(path)(owner) or ())
        except AttributeError:
            return
        for callback in callbacks:
            if isinstance(callback, tuple):  # (name, callback)
                callback = callback[-1]
            for cls, name in _events(type(callback), framework):
                if (cls, name) not in self._callbacks and len(self._callbacks) < CALLBACKS_LIMIT:
                    patches = self._callbacks[cls, name] = Patches(self._agent.guard, self.name)
                    self._wrap_callback(patches, cls, name)

    def _callback_begins(self, callback: Any, *_args: Any, **_kwargs: Any) -> tuple[str, int] | None:
        return self._region_begins("callback:" + type(callback).__name__)


def version_of(package: str) -> str | None:
    """The version of an imported package: what it says itself, else what its installation says."""
    version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(version, str) and version[:1].isdigit():
        return version
    try:
        from importlib.metadata import version as installed

        return installed(package)
    except Exception:  # noqa: BLE001 - not installed, or metadata that cannot be read: then it is unknown
        return None


def _is_unused(module: str) -> bool:
    """Whether `module` exists and was not imported: what it is for was not used."""
    if module in sys.modules:
        return False
    parts = module.split(".")
    path = getattr(sys.modules.get(parts[0]), "__path__", None)
    for end in range(2, len(parts) + 1):
        spec = None if path is None else PathFinder.find_spec(".".join(parts[:end]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _events(cls: type, framework: Framework) -> Iterator[tuple[type, str]]:
    """(class, method) of a callback's classes but the framework's base, which does nothing at any event."""
    for each in cls.__mro__:
        if each.__name__ in BASES and each.__module__.partition(".")[0] == framework.package:
            continue
        for name, value in list(vars(each).items()):
            if isinstance(value, FunctionType) and name.startswith(framework.hooks):
                yield each, name
