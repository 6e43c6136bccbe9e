"""What the script logs: the calls that frameworks and loggers take numbers by are listened to, in one table.

Read only: a call keeps its arguments, its result and its exception, and nothing is logged by us. Values are taken once
it has returned, a tensor by a copy on its device. A call inside another one passes the same values on, as a framework's
does to its loggers, and is left out; but what the user's own code logs there, as in a callback, counts where its names
are others. Each call's time and line go to a region "logging"; values of calls that do more than log are kept alone.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from functools import partial
from threading import get_ident
from types import CodeType
from typing import Any, Callable, Iterator, NamedTuple

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.frames import place_fields, place_of, user_frame
from stepscope.record.agent.marks import RegionSums
from stepscope.record.agent.patches import Patches, Probe, is_whole

LINES_LIMIT = 1_000  # lines that log, told apart
LARGEST = 1 << 1023  # whole numbers beyond are no floats
REGION = "logging"


def _values(values: Any) -> Any:
    return values


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
    read: Callable[..., Any] = _values
    timed: bool = True  # the call does nothing but log
    apart: Callable[..., Any] | None = None  # of what it takes: which of several, that may log other things by one name
    rest: bool = False  # only names that no other call tells
    filtered: str = ""  # attributes of its object: whether a loss that is not finite was replaced before


def _writer(module: str, folder: str) -> tuple[Tap, ...]:
    """A SummaryWriter; `folder` is where its files are."""
    scalar = Tap("tensorboard", module, "SummaryWriter", "add_scalar", "tag scalar_value self")
    scalar = scalar._replace(read=lambda tag, value, _: {tag: value}, apart=lambda _, __, own: getattr(own, folder))
    return scalar, scalar._replace(name="add_scalars", takes="main_tag tag_scalar_dict self")


def _lightning(package: str) -> tuple[Tap, ...]:
    """What loggers are given, called without one as well; and what is for the progress bar alone, or rarely logged."""
    module = f"{package}.trainer.connectors.logger_connector.logger_connector"
    log = Tap("Lightning", module, "_LoggerConnector", "log_metrics", "metrics")
    epoch = log._replace(name="update_train_epoch_metrics", takes="self", timed=False, rest=True)
    return log, epoch._replace(read=lambda connector: connector._callback_metrics)


def _history(owner: Any) -> Any:
    """What was logged last, which callbacks may have taken from what they were given."""
    logged = owner.state.log_history[-1:]
    return {name: value for name, value in logged[0].items() if name != "step"} if logged else {}


def _recorded(recorder: Any) -> Any:
    return dict(zip(recorder.metric_names, recorder.log))


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
    *_lightning("lightning.pytorch"),
    *_lightning("pytorch_lightning"),
    Tap("Fabric", "lightning.fabric.fabric", "Fabric", "log_dict", "metrics"),
    Tap("Fabric", "lightning_fabric.fabric", "Fabric", "log_dict", "metrics"),
    Tap("Accelerate", "accelerate.accelerator", "Accelerator", "log", "values"),
    Tap("Composer", "composer.loggers.logger", "Logger", "log_metrics", "metrics"),
    Tap("Keras", "keras.src.callbacks.callback_list", "CallbackList", "on_train_batch_end", "logs", timed=False),
    Tap("Keras", "keras.src.callbacks.callback_list", "CallbackList", "on_epoch_end", "logs", timed=False),
    Tap("fastai", "fastai.learner", "Recorder", "after_epoch", "self", _recorded, timed=False),
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


class _Call:
    """A call that is under way."""

    __slots__ = ("args", "frame", "kwargs", "line", "outer", "start_ns", "taken", "tap")

    def __init__(self, tap: Tap, taken: Callable[..., Any], args: Any, kwargs: Any, start_ns: int) -> None:
        self.tap = tap
        self.taken = taken
        self.args = args
        self.kwargs = kwargs
        self.start_ns = start_ns
        self.frame: int | None = None  # id of the user's frame that logs, alive while the call is
        self.line: Any = None
        self.outer: _Call | None = None

    def values(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of what was logged."""
        return _flat(self.tap.read(*self.taken(self.args, self.kwargs)), "")


class TapsProbe(Probe):
    """Keeps what log calls were given as metrics, and writes `region` events called "logging" with the user's line."""

    name = "taps"

    def __init__(self, agent: Agent, table: tuple[Tap, ...] = TAPS) -> None:
        super().__init__(agent)
        self._table = table
        self._seams: dict[Tap, Patches] = {}
        self._inside: dict[int, _Call] = {}  # by thread
        self._series: dict[tuple[str, str], int] = {}
        self._rest: set[tuple[str, str]] = set()  # series of names that no other call has told
        self._sources: dict[tuple[str, Any], str] = {}
        self._lines: dict[tuple[int, int], dict[str, Any]] = {}
        self._codes: list[CodeType] = []
        self._sums = RegionSums(agent)
        agent.add_finish_hook(self._sums.flush, self.name)

    def install(self) -> None:
        for module in {tap.module for tap in self._table}:
            if is_whole(module):
                self.module_imported(module)

    def uninstall(self) -> None:
        for patches in reversed(list(self._seams.values())):
            patches.remove()

    def module_imported(self, name: str) -> None:
        """Tap the calls of the module `name`; its code has been executed."""
        module = sys.modules.get(name)
        own = [tap for tap in self._table if tap.module == name and module is not None]
        for tap in own:
            owner = getattr(module, tap.owner, None) if tap.owner else module
            taken = _taker(getattr(owner, tap.name, None), tap.takes.split(), bool(tap.owner))
            if taken is not None:
                patches = self._seams.setdefault(tap, Patches(self._agent.guard, self.name))
                patches.install(partial(patches.look, owner, tap.name, self._before(tap, taken), self._ends))
        if own and self._seams.keys().isdisjoint(own):
            text = f"metrics: what is logged with this version of {own[0].source} is not recorded"
            self._agent.journal.write("mark", name=text)

    # --------------------------------------------------------------------------------------------------------- calls

    def _before(self, tap: Tap, taken: Callable[..., Any]) -> Callable[..., _Call | None]:
        now = self._agent.clock.now
        if not tap.timed:
            return lambda *args, **kwargs: _Call(tap, taken, args, kwargs, now())
        return lambda *args, **kwargs: self._begins(_Call(tap, taken, args, kwargs, now()))

    def _begins(self, call: _Call) -> _Call | None:
        thread = get_ident()
        outer = call.outer = self._inside.get(thread)
        frame = user_frame(sys._getframe(3))
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

    # -------------------------------------------------------------------------------------------------------- values

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
                series = metrics.series(name, source, **_about(call, name))
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


def _about(call: _Call, name: str) -> dict[str, Any]:
    """What is known of a series beside its name."""
    if not call.tap.filtered or name != "loss":
        return {}
    flag: Any = call.args[0]
    for attribute in call.tap.filtered.split("."):
        flag = getattr(flag, attribute, None)
    return {"filtered": True} if flag else {}


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
