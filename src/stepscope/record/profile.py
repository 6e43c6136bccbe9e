"""`stepscope.profile`: recording from code, with the keywords and methods of `torch.profiler.profile`.

    with stepscope.profile(enabled=args.profile) as prof:
        for batch in loader:
            train(batch)
            prof.step()

Disabled, by `enabled=False` or by STEPSCOPE_DISABLED=1 or STEPSCOPE=0 in the environment, it is a null object that
imports nothing. Under `stepscope run` it marks steps of the run that is being recorded; alone it records a run folder
of its own, whose path is `prof.run_folder`. Runs inside the training process: standard library only, Python 3.8.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from stepscope.record.profile_run import ProfiledRun

_OFF = ("0", "off", "false", "no")
_ON = ("1", "on", "true", "yes")


def profile(
    *,
    enabled: bool = True,
    out: str | None = None,
    name: str | None = None,
    watch: bool | None = None,
    activities: Iterable[Any] | None = None,
    schedule: Callable[[int], Any] | None = None,
    on_trace_ready: Callable[..., Any] | None = None,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
    with_flops: bool = False,
    with_modules: bool = False,
    experimental_config: Any = None,
    acc_events: bool = False,
    **later: Any,
) -> Profile:
    """A context manager that records what runs inside it; call its `step()` after every training step.

    `out` names the run folder (default: stepscope-runs/TIME-SCRIPT; numbered if it is taken), `name` the run. `watch`
    asks for monitors of gradients, weights, updates and activations, as `stepscope run --watch` does (default: as
    STEPSCOPE_WATCH says; a run that is being recorded already has its own choice). All other keywords are those of
    `torch.profiler.profile` and mean the same; `later` takes what newer versions of torch add. As soon as one of them
    is given, torch's profiler records as they say and its traces are kept in the run folder as well; without any, a few
    steady steps are traced. Raises what torch raises about them, nothing of its own.
    """
    if not enabled or disabled():
        return Profile()
    given = {
        "activities": activities,
        "schedule": schedule,
        "on_trace_ready": on_trace_ready,
        "record_shapes": record_shapes,
        "profile_memory": profile_memory,
        "with_stack": with_stack,
        "with_flops": with_flops,
        "with_modules": with_modules,
        "experimental_config": experimental_config,
        "acc_events": acc_events,
    }
    given = {key: value for key, value in given.items() if value is not None and value is not False}
    given.update(later)
    return _Recording(given, out=out, name=name, watch=watch)


def disabled() -> bool:
    """Whether the environment switches recording from code off."""
    environ = os.environ
    return environ.get("STEPSCOPE", "").lower() in _OFF or environ.get("STEPSCOPE_DISABLED", "").lower() in _ON


class Nothing(list):  # type: ignore[type-arg] # list[Any] is no base class on Python 3.8
    """The events of a profiler that recorded none: an empty list with the methods of torch's `EventList`."""

    self_cpu_time_total = 0

    def table(self, *_args: Any, **_kwargs: Any) -> str:
        """An empty table."""
        return ""

    def key_averages(self, *_args: Any, **_kwargs: Any) -> Nothing:
        """Itself: there is nothing to average."""
        return self

    def total_average(self, *_args: Any) -> None:
        """None: there is nothing to average, and nothing to write."""

    export_chrome_trace = export_stacks = total_average


def _of_torch(name: str) -> Callable[..., Any]:
    def method(self: Profile, *args: Any, **kwargs: Any) -> Any:
        """As of `torch.profiler.profile`; does nothing where torch's profiler does not record."""
        return None if self.torch_profiler is None else getattr(self.torch_profiler, name)(*args, **kwargs)

    return method


class Profile:
    """What `stepscope.profile` returns; as it stands the null object, every call of which does nothing.

    `run_folder` is where the run is recorded, None when it is not. `torch_profiler` is torch's own profiler object
    while there is one.
    """

    run_folder: str | None = None
    torch_profiler: Any = None
    step_num = 0
    current_action: Any = None

    def __enter__(self) -> Profile:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop(kind, error, traceback)

    def start(self) -> None:
        """Begin recording; `with` does it."""

    def stop(self) -> None:
        """End recording; leaving the `with` block does it."""
        self._stop(None, None, None)

    def _stop(self, *error: Any) -> None:
        pass

    def step(self) -> None:
        """A training step has ended."""

    def key_averages(self, *args: Any, **kwargs: Any) -> Any:
        """torch's averages over operators, as `torch.profiler.profile.key_averages`."""
        return Nothing() if self.torch_profiler is None else self.torch_profiler.key_averages(*args, **kwargs)

    def events(self) -> Any:
        """torch's events, as `torch.profiler.profile.events`."""
        return Nothing() if self.torch_profiler is None else self.torch_profiler.events()

    export_chrome_trace = _of_torch("export_chrome_trace")
    export_stacks = _of_torch("export_stacks")
    export_memory_timeline = _of_torch("export_memory_timeline")
    add_metadata = _of_torch("add_metadata")
    add_metadata_json = _of_torch("add_metadata_json")
    preset_metadata_json = _of_torch("preset_metadata_json")
    toggle_collection_dynamic = _of_torch("toggle_collection_dynamic")

    def __getattr__(self, name: str) -> Any:
        """What else torch's profiler has, now or in a later version."""
        profiler = self.__dict__.get("torch_profiler")
        if profiler is None or name.startswith("__"):
            raise AttributeError(f"stepscope.profile has no attribute {name!r}")
        return getattr(profiler, name)


class _Recording(Profile):
    """Records. What torch's profiler raises reaches the caller, what stepscope raises never does."""

    def __init__(self, given: dict[str, Any], *, out: str | None, name: str | None, watch: bool | None) -> None:
        self._given = given
        self._watch = watch
        self._out = out
        self._name = name
        self._run: ProfiledRun | None = None
        self._steps = 0
        self._started = False

    # torch's own step number and action where its profiler runs, else the steps counted here and None
    @property
    def step_num(self) -> int:  # type: ignore[override]
        """How often `step` was called since the start."""
        return self._steps if self.torch_profiler is None else int(self.torch_profiler.step_num)

    @property
    def current_action(self) -> Any:
        """torch's current `ProfilerAction`, None without torch's profiler."""
        return None if self.torch_profiler is None else self.torch_profiler.current_action

    def start(self) -> None:
        if self._started:
            return
        from stepscope.record.profile_run import ProfiledRun

        self._started = True
        self._run = ProfiledRun(traced=bool(self._given), out=self._out, name=self._name, watch=self._watch)
        self.run_folder = self._run.folder
        try:
            self.torch_profiler = self._make_torch_profiler(self._run)
            if self.torch_profiler is not None:
                with self._run.torch_call():
                    self.torch_profiler.__enter__()
            self._run.torch_acted(self.torch_profiler)
        except BaseException:
            self._run.end()
            raise

    def step(self) -> None:
        run = self._run
        if run is None or not self._started:
            return
        self._steps += 1
        run.step()
        if self.torch_profiler is not None:
            with run.torch_call():
                self.torch_profiler.step()
            run.torch_acted(self.torch_profiler)

    def _stop(self, *error: Any) -> None:
        if not self._started or self._run is None:
            return
        self._started = False
        try:
            if self.torch_profiler is not None:
                with self._run.torch_call():
                    self.torch_profiler.__exit__(*error)
        finally:
            self._run.end()

    def _make_torch_profiler(self, run: ProfiledRun) -> Any:
        if not self._given:
            return None
        import torch.profiler

        from stepscope.record.profile_run import Exports

        arguments = dict(self._given)
        handler = arguments.pop("on_trace_ready", None)

        def on_trace_ready(profiler: Any) -> None:
            exports.renew()
            if handler is not None:
                handler(profiler)
            run.keep_trace(exports)

        profiler = torch.profiler.profile(on_trace_ready=on_trace_ready, **arguments)
        exports = Exports(profiler)
        return profiler
