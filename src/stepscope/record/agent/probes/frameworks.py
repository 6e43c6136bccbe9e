"""Training frameworks and their seams: the one table of what is patched in whose loop, and what it means.

Read against the versions named in `checked`; in any other version the same seams are tried, and what is not there is
said. Nothing here is a clock: steps are cut by the step cutter alone. `docs/frameworks.md` is this table for users, and
`imports.FRAMEWORK_MODULES` names its modules for the import hook; tests compare both with it.

What the script logs is taken by a second table: the calls that frameworks and loggers take numbers by. Read only: a
call keeps its arguments, its result and its exception, and nothing is logged by us. Values are taken once it has
returned, a tensor by a copy on its device. A call inside another one passes the same values on, as a framework's does
to its loggers, and is left out; but what the user's own code logs there, as in a callback, counts where its names are
others. Each call's time and line go to a region "logging"; values of calls that do more than log are kept alone.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from operator import attrgetter
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any, Callable, Iterator, NamedTuple

from stepscope.record.agent import marks, metrics
from stepscope.record.agent.agent import Agent
from stepscope.record.agent.frames import place_fields, place_of, user_frame
from stepscope.record.agent.guard import After, Before
from stepscope.record.agent.marks import RegionSums
from stepscope.record.agent.patches import Patches, Probe, is_whole
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
    return tuple(
        Seam(meaning, module, owner, name, path, unless) for meaning, names in methods.items() for name in names.split()
    )


def _lightning(package: str, top: str) -> Framework:
    return Framework("Lightning", top, ("2.6",), (
        *_at(f"{package}.trainer.trainer", "Trainer", train="fit", checkpoint="save_checkpoint"),
        *_at(f"{package}.loops.fit_loop", "_FitLoop", "trainer.callbacks", callbacks="run"),
        *_at(f"{package}.loops.evaluation_loop", "_EvaluationLoop", evaluation="run"),
    ), counter="global_step", counts="optimizer steps")  # fmt: skip


def _fabric(package: str, top: str) -> Framework:
    seams = _at(f"{package}.fabric", "Fabric", "_callbacks", call="backward", checkpoint="save")
    return Framework("Fabric", top, ("2.6",), seams)


# A framework that trains through another one stands before it: the first that trains names the run.
FRAMEWORKS: tuple[Framework, ...] = (
    Framework("HF Trainer", "transformers", ("5.23",), _at(
        "transformers.trainer", "Trainer", "callback_handler.callbacks", train="train", evaluation="evaluate predict",
        checkpoint="_save_checkpoint save_model",
    ), counter="state.global_step"),
    _lightning("lightning.pytorch", "lightning"),
    _lightning("pytorch_lightning", "pytorch_lightning"),
    _fabric("lightning.fabric", "lightning"),
    _fabric("lightning_fabric", "lightning_fabric"),
    Framework("fastai", "fastai", ("2.8",), (
        *_at("fastai.learner", "Learner", "cbs", train="_do_fit", evaluation="_do_epoch_validate", checkpoint="save"),
        *_at("fastai.optimizer", "Optimizer", optimizer="step"),
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
        *_at("skorch.net", "NeuralNet", "callbacks_", train="fit_loop", checkpoint="save_params"),
        *_at("skorch.net", "NeuralNet", unless="training", evaluation="run_single_epoch"),
    )),
    Framework("Composer", "composer", ("0.33",), (
        *_at("composer.trainer.trainer", "Trainer", "state.callbacks", train="fit", evaluation="_eval_loop"),
        *_at("composer.callbacks.checkpoint_saver", "CheckpointSaver", checkpoint="_save_checkpoint"),
    ), counter="state.timestamp.batch.value",
        hooks=("run_event", "before_", "after_", "fit_", "iteration_", "epoch_", "batch_", "eval_")),
    Framework("Ultralytics", "ultralytics", ("8.4",), (
        *_at("ultralytics.engine.trainer", "BaseTrainer", train="_do_train"),
        *_at("ultralytics.engine.trainer", "BaseTrainer", "callbacks", event="run_callbacks"),
        *_at("ultralytics.engine.trainer", "BaseTrainer", evaluation="validate", checkpoint="save_model"),
    )),
    Framework("torchtitan", "torchtitan", ("0.2",), (
        *_at("torchtitan.trainer", "Trainer", train="train"),
        *_at("torchtitan.train", "Trainer", train="train"),
        *_at("torchtitan.components.validate", "Validator", evaluation="validate"),
        *_at("torchtitan.components.checkpointer.base", "BaseCheckpointManager", checkpoint="save"),
        *_at("torchtitan.components.checkpoint", "CheckpointManager", checkpoint="save"),
    ), counter="step", begun=True),
    Framework("DeepSpeed", "deepspeed", ("0.19",), (
        *_at("deepspeed.runtime.engine", "DeepSpeedEngine", call="backward step"),
        *_at("deepspeed.runtime.pipe.engine", "PipelineEngine", call="train_batch", evaluation="eval_batch"),
        *_at("deepspeed.runtime.engine", "DeepSpeedEngine", checkpoint="save_checkpoint"),
    ), counter="global_steps"),
    Framework("Accelerate", "accelerate", ("1.15",), _at(
        "accelerate.accelerator", "Accelerator", call="backward", checkpoint="save_state save_model",
    )),
)  # fmt: skip

# Distributions that work inside a framework's loop; named where the object that trains, or its model, is of them.
ON_TOP = ("trl", "peft", "accelerate", "deepspeed")


CALLBACKS_LIMIT = 500  # methods that are wrapped
BASES = ("Callback", "TrainerCallback")


# ---------------------------------------------------------------------------------------------- what the script logs

LINES_LIMIT = 1_000  # lines that log, told apart
LARGEST = 1 << 1023  # whole numbers beyond are no floats
REGION = "logging"


def _pair(key: Any, value: Any) -> Any:
    return {key: value}


class Tap(NamedTuple):
    """`owner.name` of `module`, a method, or a function of the module; `takes` are parameters of it, by name.

    What they hold, `read` makes a mapping of. Without any the call is timed, and what is called inside counts.
    """

    source: str
    module: str
    owner: str
    name: str
    takes: str = ""
    read: Callable[..., Any] = lambda values: values
    timed: bool = True  # the call does nothing but log
    apart: Callable[..., Any] | None = None  # of what it takes: which of several, that may log other things by one name
    rest: bool = False  # only names that no other call tells
    filtered: str = ""  # attributes of its object: whether a loss that is not finite was replaced before


def _writer(module: str, folder: str) -> tuple[Tap, ...]:
    """A SummaryWriter; `folder` is where its files are."""
    scalar = Tap("tensorboard", module, "SummaryWriter", "add_scalar", "tag scalar_value self")
    scalar = scalar._replace(read=lambda tag, value, _: {tag: value}, apart=lambda _, __, own: getattr(own, folder))
    return scalar, scalar._replace(name="add_scalars", takes="main_tag tag_scalar_dict self")


def _lightning_taps(package: str) -> tuple[Tap, ...]:
    """What loggers are given, called without one as well; and what is for the progress bar alone, or rarely logged."""
    module = f"{package}.trainer.connectors.logger_connector.logger_connector"
    log = Tap("Lightning", module, "_LoggerConnector", "log_metrics", "metrics")
    epoch = log._replace(name="update_train_epoch_metrics", takes="self", timed=False, rest=True)
    return log, epoch._replace(read=lambda connector: connector._callback_metrics)


def _history(owner: Any) -> Any:
    """What was logged last, which callbacks may have taken from what they were given."""
    logged = owner.state.log_history[-1:]
    return {name: value for name, value in logged[0].items() if name != "step"} if logged else {}


def _completed(engine: Any, name: Any) -> Any:
    value = engine.state.metrics.get(name)
    return value if isinstance(value, Mapping) else {name: value}


_TITAN = "torchtitan.components.metrics"
_MLFLOW = "mlflow.tracking"

TAPS: tuple[Tap, ...] = (
    Tap("wandb", "wandb.sdk.wandb_run", "Run", "_log", "data"),  # `wandb.log` is bound to `log` when a run begins
    *_writer("torch.utils.tensorboard.writer", "log_dir"),
    *_writer("tensorboardX.writer", "logdir"),
    Tap("mlflow", f"{_MLFLOW}.fluent", "", "log_metric", "key value", _pair),
    Tap("mlflow", f"{_MLFLOW}.fluent", "", "log_metrics", "metrics"),
    Tap("mlflow", f"{_MLFLOW}.client", "MlflowClient", "log_metric", "key value", _pair),
    Tap("mlflow", f"{_MLFLOW}.client", "MlflowClient", "log_batch", "metrics",
        lambda metrics: {metric.key: metric.value for metric in metrics}),
    Tap("trackio", "trackio.run", "Run", "log", "metrics"),
    Tap("HF Trainer", "transformers.trainer", "Trainer", "log", "self", _history,
        filtered="args.logging_nan_inf_filter"),
    *_lightning_taps("lightning.pytorch"),
    *_lightning_taps("pytorch_lightning"),
    Tap("Fabric", "lightning.fabric.fabric", "Fabric", "log_dict", "metrics"),
    Tap("Fabric", "lightning_fabric.fabric", "Fabric", "log_dict", "metrics"),
    Tap("Accelerate", "accelerate.accelerator", "Accelerator", "log", "values"),
    Tap("Composer", "composer.loggers.logger", "Logger", "log_metrics", "metrics"),
    Tap("Keras", "keras.src.callbacks.callback_list", "CallbackList", "on_train_batch_end", "logs", timed=False),
    Tap("Keras", "keras.src.callbacks.callback_list", "CallbackList", "on_epoch_end", "logs", timed=False),
    Tap("fastai", "fastai.learner", "Recorder", "after_epoch", "self", timed=False,
        read=lambda recorder: dict(zip(recorder.metric_names, recorder.log))),
    Tap("ignite", "ignite.metrics.metric", "Metric", "completed", "engine name", _completed, timed=False,
        apart=lambda engine, _: id(engine)),
    Tap("skorch", "skorch.history", "History", "record", "attr value", _pair, timed=False),
    Tap("Ultralytics", "ultralytics.engine.trainer", "BaseTrainer", "save_metrics", "metrics"),
    Tap("torchtitan", _TITAN, "MetricsProcessor", "log"),
    *(Tap("torchtitan", _TITAN, owner, "log", "metrics")
      for owner in ("BaseLogger", "LoggerContainer", "TensorBoardLogger", "WandBLogger")),
    Tap("DeepSpeed", "deepspeed.monitor.monitor", "MonitorMaster", "write_events", "event_list",
        lambda events: {name: value for name, value, *_ in events}),
)  # fmt: skip


class _SeamsProbe(Probe):
    """Wraps methods of other packages, each as soon as its module was imported, and takes out one by one what is in."""

    def __init__(self, agent: Agent, modules: set[str]) -> None:
        super().__init__(agent)
        self._modules = modules
        self._seams: dict[Any, Patches] = {}

    def install(self) -> None:
        for module in self._modules:
            if is_whole(module):
                self.module_imported(module)

    def uninstall(self) -> None:
        for patches in reversed(list(self._seams.values())):
            patches.remove()

    def _wrap(self, seam: Any, owner: Any, name: str, before: Before, after: After | None) -> None:
        patches = self._seams.setdefault(seam, Patches(self._agent.guard, self.name))
        patches.install(partial(patches.look, owner, name, before, after))


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


class FrameworkSeamsProbe(_SeamsProbe):
    """Writes `framework` once per framework that trains, `region` with the source "framework", and numbers steps."""

    name = "framework_seams"

    def __init__(self, agent: Agent, table: tuple[Framework, ...] = FRAMEWORKS) -> None:
        super().__init__(agent, {seam.module for framework in table for seam in framework.seams})
        self._table = table
        self._callbacks: dict[tuple[type, str], Patches] = {}
        self._training: _Training | None = None
        self._open: set[str] = set()  # regions we are in
        self._written: set[tuple[str, type]] = set()
        self._sums = marks.RegionSums(agent)
        self._rates = agent.guard.wrap(metrics.NAME, agent.metrics.update_begins)

        def step_cut(row: StepRow | None, _now_ns: int) -> None:
            if self._training is not None and row is not None and row.kind == "train":
                self._write_framework(self._training)

        agent.add_boundary_hook(step_cut, self.name)
        agent.add_finish_hook(self._finish, self.name)

    def install(self) -> None:
        super().install()
        for (cls, name), patches in self._callbacks.items():  # a training went on while the probes were out
            self._wrap_callback(patches, cls, name)

    def uninstall(self) -> None:
        for patches in self._callbacks.values():
            patches.remove()
        super().uninstall()

    def module_imported(self, name: str) -> None:
        """Patch the seams in the module `name`, if it is loaded; its code has been executed."""
        module = sys.modules.get(name)
        for framework in self._table:
            for seam in framework.seams:
                owner = getattr(module, seam.owner, None) if seam.module == name else None
                if isinstance(owner, type) and callable(getattr(owner, seam.name, None)):
                    self._wrap((framework.package, seam), owner, seam.name, *self._hooks(framework, seam))

    def _wrap_callback(self, patches: Patches, cls: type, name: str) -> None:
        def begins(callback: Any, *_args: Any, **_kwargs: Any) -> tuple[str, int] | None:
            return self._region_begins("callback:" + type(callback).__name__)

        patches.install(lambda: patches.look(cls, name, begins, self._region_ends))

    def _hooks(self, framework: Framework, seam: Seam) -> tuple[Before, After | None]:
        if seam.meaning in (TRAIN, CALL, ENGINE):
            begins = self._training_begins
            return lambda owner, *_args, **_kwargs: begins(framework, seam, owner), self._training_ends
        if seam.meaning == CALLBACKS:
            return lambda owner, *_args, **_kwargs: self._watch_callbacks(framework, owner, seam.path), None
        if seam.meaning == OPTIMIZER:
            return self._update_begins, self._update_ends
        if seam.meaning == EVENT:
            handlers = attrgetter(seam.path)

            def event_begins(owner: Any, event: Any, *_args: Any, **_kwargs: Any) -> tuple[str, int] | None:
                called = (handlers(owner) or {}).get(event)
                return self._region_begins(f"callback:{getattr(event, 'name', event)}") if called else None

            return event_begins, self._region_ends
        name, unless = seam.meaning, seam.unless
        return lambda *_args, **kwargs: None if kwargs.get(unless) else self._region_begins(name), self._region_ends

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

    def _finish(self) -> None:
        training = self._training
        if training is not None and self._agent.optimizer_events > training.optimizer_events:
            self._write_framework(training)  # its only step was never cut between two steps
        self._sums.flush()

    def _write_framework(self, training: _Training) -> None:
        framework, cls = training.framework, training.cls
        if (framework.package, cls) in self._written:
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
        self._sums.add(name, start, now, "framework")

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

    def _on_training_thread(self) -> bool:
        return self._agent.training_thread in (None, get_ident())

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


@dataclass
class _Call:
    """A call that is under way."""

    tap: Tap
    taken: Callable[..., Any]
    args: Any
    kwargs: Any
    start_ns: int
    frame: int | None = None  # id of the user's frame that logs, alive while the call is
    line: Any = None
    outer: _Call | None = None

    def values(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of what was logged."""
        return _flat(self.tap.read(*self.taken(self.args, self.kwargs)), "")


class TapsProbe(_SeamsProbe):
    """Keeps what log calls were given as metrics, and writes `region` events called "logging" with the user's line."""

    name = "taps"

    def __init__(self, agent: Agent, table: tuple[Tap, ...] = TAPS) -> None:
        super().__init__(agent, {tap.module for tap in table})
        self._table = table
        self._inside: dict[int, _Call] = {}  # by thread
        self._series: dict[tuple[str, str], int] = {}
        self._rest: set[tuple[str, str]] = set()  # series of names that no other call has told
        self._sources: dict[tuple[str, Any], str] = {}
        self._lines: dict[tuple[int, int], dict[str, Any]] = {}
        self._codes: list[CodeType] = []
        self._sums = RegionSums(agent)
        agent.add_finish_hook(self._sums.flush, self.name)

    def module_imported(self, name: str) -> None:
        """Tap the calls of the module `name`; its code has been executed."""
        module = sys.modules.get(name)
        own = [tap for tap in self._table if tap.module == name and module is not None]
        for tap in own:
            owner = getattr(module, tap.owner, None) if tap.owner else module
            taken = _taker(getattr(owner, tap.name, None), tap.takes.split(), bool(tap.owner))
            if taken is not None:
                self._wrap(tap, owner, tap.name, partial(self._begins, tap, taken), self._ends)
        if own and self._seams.keys().isdisjoint(own):
            text = f"metrics: what is logged with this version of {own[0].source} is not recorded"
            self._agent.journal.write("mark", name=text)

    def _begins(self, tap: Tap, taken: Callable[..., Any], /, *args: Any, **kwargs: Any) -> _Call | None:
        call = _Call(tap, taken, args, kwargs, self._agent.clock.now())
        if not tap.timed:
            return call
        thread = get_ident()
        outer = call.outer = self._inside.get(thread)
        frame = user_frame(sys._getframe(2))
        if frame is not None:
            call.frame = id(frame)
            code = frame.f_code
            call.line = (id(code), frame.f_lasti)  # a code object's own hash goes over all that it holds
            if call.line not in self._lines and len(self._lines) < LINES_LIMIT:
                self._codes.append(code)  # kept alive, and its number its own
                self._lines[call.line] = place_fields(place_of(frame))
        if outer is not None and outer.tap.takes and outer.frame == call.frame:
            return None
        self._inside[thread] = call
        return call

    def _ends(self, call: _Call, _result: Any, error: BaseException | None) -> None:
        agent, tap, outer = self._agent, call.tap, call.outer
        end_ns, thread = agent.clock.now(), get_ident()
        if outer is not None:
            self._inside[thread] = outer
        elif tap.timed:
            self._inside.pop(thread, None)
            if agent.training_thread in (None, thread):
                self._sums.add(REGION, call.start_ns, end_ns, tap.source, self._lines.get(call.line))
        if error is None and tap.takes:
            self._keep(call)

    def _keep(self, call: _Call) -> None:
        metrics, source = self._agent.metrics, self._source(call)
        outer = call.outer
        known = {name for name, _ in outer.values()} if outer is not None and outer.tap.takes else ()
        for name, value in call.values():
            value = _number(value)
            if value is None or name in known:
                continue
            key = (source, name)
            series = self._series.get(key)
            if call.tap.rest:
                if series is not None and key not in self._rest:
                    continue
                self._rest.add(key)
            elif self._rest:
                self._rest.discard(key)
            if series is None:
                flag: Any = call.args[0] if call.tap.filtered and name == "loss" else None
                for attribute in call.tap.filtered.split("."):
                    flag = getattr(flag, attribute, None)
                series = metrics.series(name, source, **({"filtered": True} if flag else {}))
                if series is not None:
                    self._series[key] = series
            metrics.keep(series, call.start_ns, value)

    def _source(self, call: _Call) -> str:
        """What was logged with; of several that may log other things by the same names, the next have names of their
        own."""
        source, apart = call.tap.source, call.tap.apart
        if apart is None:
            return source
        which = apart(*call.taken(call.args, call.kwargs))
        known = self._sources.get((source, which))
        if known is None:
            number = sum(name == source for name, _ in self._sources)
            is_path = isinstance(which, (str, os.PathLike))
            own = os.path.basename(str(which).rstrip("/")) if is_path else str(number + 1)
            known = self._sources[source, which] = f"{source} {own}" if number else source
        return known


def _taker(
    function: Any, names: list[str], is_method: bool
) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]] | None:
    """What finds the parameters called `names` in a call of `function`; None where it has no such parameter."""
    if not callable(function):
        return None
    parameters = inspect.signature(function).parameters.values()
    places = {known.name: (position, known.name, known.default) for position, known in enumerate(parameters)}
    if all(known.kind in (known.VAR_POSITIONAL, known.VAR_KEYWORD) for known in parameters):  # a decorator's, of any
        places = {name: (position, name, None) for position, name in enumerate(names, is_method)}
    if not all(name in places for name in names):
        return None
    wanted = [places[name] for name in names]

    def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [
            args[position] if position < len(args) else kwargs.get(name, default) for position, name, default in wanted
        ]

    return take


def _flat(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of nested mappings, the names of the outer ones before a slash."""
    if not isinstance(values, Mapping):
        return
    for name, value in values.items():
        if value.__class__ is not float and isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _number(value: Any) -> Any:
    """A number as float, a tensor as it is, None of everything else."""
    if value.__class__ is float:
        return value
    if isinstance(value, float):  # numpy's, among others
        return float(value)
    if isinstance(value, int):
        return float(value) if -LARGEST < value < LARGEST else None
    if isinstance(value, sys.modules["torch"].Tensor):
        return value
    dtype = getattr(value, "dtype", None)
    if type(value).__module__ == "numpy" and getattr(dtype, "kind", "") in "biuf" and value.size == 1:
        return float(value.item())
    return None
