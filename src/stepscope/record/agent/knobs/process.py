"""Knobs of the process: the CPUs of the training and of its loader's workers, and Python's garbage collector.

A worker inherits the mask of the process that forks it. It is put back on the CPUs the process had at first, unless the
second knob says which it may use. Workers that are spawned or started by a server are not reached.
"""

from __future__ import annotations

import gc
import os
import re
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.knobs import cpu_list, cpu_text
from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.window_plan import NOISY_STEPS, is_steady

if TYPE_CHECKING:
    from stepscope.record.agent.steps import StepRow

_LOADERS_LOOKED_AT = 20  # a script that starts workers again for every epoch has told enough by then


class _Masks:
    """What both knobs must agree on: the CPUs this process had before any of them, and what workers get."""

    def __init__(self, _knob: KnobBase) -> None:
        self.original = frozenset(os.sched_getaffinity(0))
        self.workers: frozenset[int] | None = None


class _Affinity(KnobBase):
    _cpus: frozenset[int] | None = None

    def usable(self, value: str) -> frozenset[int] | None:
        """The CPUs of `value`, or None, reported, where this process may not use them all."""
        if not hasattr(os, "sched_setaffinity"):
            self.report(False, reason="this system has no CPU affinity")
            return None
        cpus, allowed = cpu_list(value), self.shared(_Masks).original
        if not cpus <= allowed:
            self.report(False, cpu_text(allowed), f"this process may use CPUs {cpu_text(allowed)} only")
            return None
        return cpus

    def in_loader_worker(self) -> None:
        """Also of the other knob, which may come first or last."""
        if self._cpus is not None:
            masks = self.shared(_Masks)
            os.sched_setaffinity(0, masks.workers or masks.original)


class MainAffinity(_Affinity):
    """The training process: all its threads, those to come, and processes it starts that are no loader workers."""

    def install(self, value: str) -> None:
        self._cpus = self.usable(value)
        if self._cpus is not None:
            _set_all_threads(self._cpus)

    def uninstall(self) -> None:
        cpus, self._cpus = self._cpus, None
        if cpus is not None:
            _set_all_threads(self.shared(_Masks).original)

    def at_first_step(self) -> None:
        if self._cpus is not None:
            now = frozenset(os.sched_getaffinity(0))
            reason = None if now == self._cpus else "the script or a library has set another affinity since"
            self.report(now == self._cpus, cpu_text(now), reason)


class WorkerAffinity(_Affinity):
    """Forked workers of loaders; what each of them got is read once a step was cut, by when they have worked."""

    missed = "the script started no loader workers"

    def install(self, value: str) -> None:
        self._left = _LOADERS_LOOKED_AT
        self._waiting: list[list[int]] = []  # process ids of the workers of an iterator
        self._cpus = self.usable(value)
        if self._cpus is None:
            return
        self.shared(_Masks).workers = self._cpus
        from torch.utils.data import DataLoader

        self._patches.look(DataLoader, "_get_iterator", lambda _loader: None, self._after_iterator)
        self.agent.add_boundary_hook(self._at_boundary, self.probe)

    def uninstall(self) -> None:
        super().uninstall()
        if self._cpus is not None:
            self.shared(_Masks).workers = None

    def at_end(self) -> None:
        self._look()

    def _after_iterator(self, _token: Any, iterator: Any, _error: BaseException | None) -> None:
        processes = [worker.pid for worker in getattr(iterator, "_workers", ())]
        if processes and self._left > 0:
            self._left -= 1
            self._waiting.append(processes)

    def _at_boundary(self, row: StepRow | None, _now_ns: int) -> None:
        if self._waiting and row is not None:
            self._look()

    def _look(self) -> None:
        waiting, self._waiting = self._waiting, []
        for processes in waiting:
            masks = {mask for mask in map(_allowed_cpus, processes) if mask is not None}
            if not masks or self._cpus is None:
                continue
            wanted = cpu_text(self._cpus)
            reason = None if masks == {wanted} else "its workers are not forked, or set their affinity themselves"
            self.report(masks == {wanted}, " and ".join(sorted(masks)), reason)


def _set_all_threads(cpus: frozenset[int]) -> None:
    """For the threads there are; later ones inherit it from the thread that starts them."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:  # it has ended meanwhile
            continue


def _allowed_cpus(process: int) -> str | None:
    """The CPUs a process may use, as the kernel lists them; None when it has ended."""
    try:
        with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
            found = re.search(r"^Cpus_allowed_list:(.*)$", file.read(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found is not None else None


_SOONER_OR_LATER = NOISY_STEPS  # steps that never get steady are no reason to wait any longer


class Collector(KnobBase):
    """`gc.freeze`, `gc.disable` or `gc.set_threshold`, between two steps."""

    _done = False
    missed = f"training was over before its steps were steady, or {_SOONER_OR_LATER} of them done"

    def install(self, value: str) -> None:
        self._value = value
        self._walls: list[int] = []
        self._before = (gc.isenabled(), gc.get_threshold())
        self._over = False
        self.agent.add_step_listener(self._count, self.probe, lambda: not self._done)

    def uninstall(self) -> None:
        if not self._done:
            return
        self._done = False
        enabled, threshold = self._before
        if self._value == "freeze":
            gc.unfreeze()
        elif self._value == "off" and enabled:
            gc.enable()
        elif self._value != "off":
            gc.set_threshold(*threshold)

    def at_end(self) -> None:
        self._over = True  # a script may go on for some steps until it is told to end
        if self._done and not self._holds():
            self.report(False, _state(), "the script has set the collector otherwise since")

    def _count(self, row: StepRow | None, _now_ns: int) -> None:
        if self._done or self._over or row is None or row.kind != "train":
            return
        self._walls.append(row.wall_ns)
        if is_steady(self._walls) or len(self._walls) >= _SOONER_OR_LATER:
            self._apply()

    def _apply(self) -> None:
        self._done = True
        self._before = (gc.isenabled(), gc.get_threshold())
        if self._value == "freeze":
            gc.collect()
            gc.freeze()
        elif self._value == "off":
            gc.disable()
        else:
            gc.set_threshold(int(self._value), *gc.get_threshold()[1:])
        holds = self._holds()
        self.report(holds, _state(), None if holds else "Python did not take it")

    def _holds(self) -> bool:
        if self._value == "freeze":
            return gc.get_freeze_count() > 0
        if self._value == "off":
            return not gc.isenabled()
        return gc.isenabled() and gc.get_threshold()[0] == int(self._value)


def _state() -> str:
    """The collector in words: what is read back."""
    first = "on" if gc.isenabled() else "off"
    return f"{first}, threshold {gc.get_threshold()[0]}, {gc.get_freeze_count()} objects frozen"
