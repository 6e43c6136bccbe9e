"""Sees the user's own profiler before it opens, while it records and when it is done; adopts the traces it writes.

Two torch profilers in one process crash it or empty the user's trace, so a window of ours gives way to any profiler of
the script. All patches sit where torch is *not* recording when they run: a frame of ours that is on the stack while a
session with stacks begins would be an event in the user's trace. For the same reason `torch.profiler.profile.start` and
`torch.autograd.profiler.profile.__enter__` themselves are left alone where both pass through `_prepare_trace`, which
returns before recording starts.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import weakref
from functools import partial, wraps
from typing import Any, Callable

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.patches import Probe
from stepscope.record.agent.window_session import in_our_call, in_shared_call

NAME = "user_profiler"
MAKING = "the script made a profiler of its own"
OPENING = "the script's own profiler opens"
SUSPENDED = "user profiler records stacks"


class UserProfilerProbe(Probe):
    """`busy()` says why no window may be opened; `foreign_calls` moves whenever somebody else touches a session."""

    name = NAME

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.foreign_calls = 0
        # make_room(why, wait): closes the window of ours, if one is open. `wait` from another thread for a bounded time
        self.make_room: Callable[[str, bool], Any] = lambda _why, _wait: None
        self._unfinished: weakref.WeakSet[Any] = weakref.WeakSet()
        self.recording = 0  # sessions of the user that record now, on any thread
        self._suspender = False
        self._exporting = threading.local()

    def busy(self) -> str | None:
        """Why no window of ours may be opened now, or None."""
        if not self._patches.enabled:
            return "the script's own profilers cannot be seen"
        if self.recording:
            return "the script's own profiler records"
        return "the script has a profiler of its own" if self._unfinished else None

    def _wrap_all(self) -> None:
        import torch.autograd.profiler as low
        import torch.profiler.profiler as high

        guarded = partial(self._agent.guard.wrap, NAME)
        opening = partial(self._before, guarded(self._note_opening))
        self._replace(low, "_run_on_profiler_start", partial(self._before, guarded(self._note_start)))
        self._replace(low, "_run_on_profiler_stop", partial(self._on_stop, guarded(self._note_stop)))
        self._replace(low.profile, "_prepare_trace", opening)  # without it no window of ours opens either
        tracker = getattr(low, "KinetoStepTracker", None)
        self._replace_tracker(tracker, "init_step_count", guarded(self._note_made), high.profile)
        self._replace_tracker(tracker, "erase_step_count", guarded(self._unfinished.discard), high.profile)
        exported = partial(self._on_export, guarded(self._adopt))
        self._replace(high._KinetoProfile, "export_chrome_trace", exported)
        self._replace(low.profile, "export_chrome_trace", exported)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        if vars(owner).get(name) is not None:
            self._patches.replace(owner, name, lambda original: wraps(original)(make(original)))

    def _replace_tracker(self, tracker: Any, name: str, note: Callable[[Any], Any], kind: type) -> None:
        """The last call of `profile.__init__` and of `profile.__exit__`: wrapping those would move their warnings."""
        original = getattr(tracker, name, None)
        if original is None:
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_locals.get("self")
            if isinstance(caller, kind):
                note(caller)
            return original(*args, **kwargs)

        self._patches.replace(tracker, name, lambda _descriptor: staticmethod(wraps(original)(call)))

    def _before(self, note: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not in_our_call():
                note(sys._getframe(1).f_locals.get("self"))
                self.foreign_calls += 1
            return original(*args, **kwargs)

        return call

    def _on_stop(self, note: Callable[[], Any], original: Callable[[], Any]) -> Callable[[], Any]:
        def _run_on_profiler_stop() -> Any:
            if in_our_call():
                return original()
            self.foreign_calls += 1
            result = original()
            note()
            return result

        return _run_on_profiler_stop

    def _on_export(self, note: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def export_chrome_trace(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if in_our_call() or getattr(self._exporting, "inside", False):  # one of the two may call the other
                return original(profiler, *args, **kwargs)
            self._exporting.inside = True
            try:
                result = original(profiler, *args, **kwargs)
            finally:
                self._exporting.inside = False
            note(args[0] if args else kwargs.get("path"))
            return result

        return export_chrome_trace

    def _note_made(self, profiler: Any) -> None:
        self.make_room(MAKING, False)
        self._unfinished.add(profiler)
        # `stop` ends in the action listed for (current action, None), run after torch has stopped recording.
        actions = getattr(profiler, "action_map", None)
        kinds = getattr(sys.modules.get("torch.profiler.profiler"), "ProfilerAction", None)
        if isinstance(actions, dict) and kinds is not None:
            living = weakref.ref(profiler)
            told = self._agent.guard.wrap(NAME, lambda: self._unfinished.discard(living()))
            for kind in kinds:
                actions[(kind, None)] = [*(actions.get((kind, None)) or []), told]

    def _note_opening(self, caller: Any) -> None:
        """A session of the user's is being prepared; `caller` is the object whose method asked for it."""
        self.make_room(OPENING, True)
        if hasattr(caller, "action_map"):  # it may be started again after a stop
            self._unfinished.add(caller)

    def _note_start(self, session: Any) -> None:
        self.make_room(OPENING, True)
        self.recording += 1
        agent = self._agent
        agent.user_profiler_active = True
        agent.steps.window(True)
        if getattr(session, "with_stack", False) and not in_shared_call() and not agent.probes.suspended:
            agent.journal.claim()  # of training that lies within it all, no step may ever be seen
            agent.probes.suspend(SUSPENDED)
            self._suspender = True

    def _note_stop(self) -> None:
        self.recording = max(0, self.recording - 1)
        agent = self._agent
        if self.recording:
            return
        agent.user_profiler_active = False
        if self._suspender:
            self._suspender = False
            agent.probes.resume()
        agent.steps.window(agent.own_profiler_active)

    def _adopt(self, path: Any) -> None:
        if path is not None and not in_shared_call():
            self._agent.journal.write("user_trace", path=os.path.abspath(os.fspath(path)))


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

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return copy.copy, (self.stepscope_original,)  # a copy of a profiler has the schedule of the script


class ProfilerStepProbe(Probe):
    """Marks a step each time a profiler that is not ours steps."""

    name = "profiler_step"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._profilers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.asked = agent.guard.wrap(self.name, self._asked)

    def install(self) -> None:
        """Wrap `torch.profiler.profile.__init__`, and the schedules of profilers seen before a suspension."""
        super().install()
        for profiler in list(self._profilers):
            if not isinstance(profiler.schedule, _Schedule):
                profiler.schedule = _Schedule(self, profiler.schedule)

    def uninstall(self) -> None:
        """Restore the originals, those of living profilers included."""
        super().uninstall()
        for profiler in list(self._profilers):
            if isinstance(profiler.schedule, _Schedule):
                profiler.schedule = profiler.schedule.stepscope_original

    def _wrap_all(self) -> None:
        from torch.profiler import profile

        def made(profiler: Any, _result: Any, error: BaseException | None) -> None:
            is_scripts = error is None and not self._agent.own_profiler_active
            if is_scripts and callable(getattr(profiler, "schedule", None)):
                self._profilers.add(profiler)
                profiler.schedule = _Schedule(self, profiler.schedule)

        self._around(profile, "__init__", lambda profiler, *_args, **_kwargs: profiler, made)

    def _asked(self) -> None:
        if self._agent.accepts():
            self._agent.steps.mark("profiler_step", self._agent.page_faults.now())
