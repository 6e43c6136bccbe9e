"""`step()` of the user's torch profiler, as a mark of the step.

`profile.step` itself is not wrapped: our frame would then be on the stack when recording starts and end up in the
user's trace. It asks the profiler's schedule exactly once per step, before anything starts, so the schedule of each
profiler object is wrapped instead.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class _Schedule:
    """Stands in for a profiler's schedule; everything but the call goes to the original."""

    def __init__(self, probe: ProfilerStepProbe, original: Any) -> None:
        self._stepscope_probe = probe
        self.stepscope_original = original

    def __call__(self, step: int) -> Any:
        self._stepscope_probe.asked()
        return self.stepscope_original(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stepscope_original"], name)


class ProfilerStepProbe:
    """Marks a step each time a profiler that is not ours steps."""

    name = "profiler_step"

    def __init__(self) -> None:
        self._patches = PatchSet()
        self._profilers: list[Any] = []  # weak references

    def install(self, agent: Agent) -> None:
        """Wrap `torch.profiler.profile.__init__`, and the schedules of profilers seen before a suspension."""
        self._agent = agent
        self.asked = agent.guard.wrap(self.name, self._asked)
        pair = agent.guard.pair(self.name, _first_argument, self._after_init)

        def make() -> None:
            from torch.profiler import profile

            self._patches.around(profile, "__init__", pair)

        self._patches.install(make)
        for reference in self._profilers:
            profiler = reference()
            if profiler is not None and not isinstance(profiler.schedule, _Schedule):
                profiler.schedule = _Schedule(self, profiler.schedule)

    def uninstall(self) -> None:
        """Restore the originals, those of living profilers included."""
        self._patches.remove()
        for reference in self._profilers:
            profiler = reference()
            if profiler is not None and isinstance(profiler.schedule, _Schedule):
                profiler.schedule = profiler.schedule.stepscope_original

    def _after_init(self, profiler: Any, _result: Any, error: BaseException | None) -> None:
        if error is not None or profiler is None or self._agent.own_profiler_active:
            return
        if callable(getattr(profiler, "schedule", None)):
            self._profilers = [reference for reference in self._profilers if reference() is not None]
            self._profilers.append(weakref.ref(profiler))
            profiler.schedule = _Schedule(self, profiler.schedule)

    def _asked(self) -> None:
        agent = self._agent
        if agent.accepts():
            agent.steps.mark("profiler_step", agent.page_faults.now())


def _first_argument(profiler: Any, *_args: Any, **_kwargs: Any) -> Any:
    return profiler
