"""Knobs of the process: the CPUs of the training and of its loader's workers, and Python's garbage collector.

A worker inherits the mask of the process that forks it. It is put back on the CPUs the process had at first, unless the
second knob says which it may use. Workers that are spawned or started by a server are not reached.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from typing import Any

from stepscope.record.agent.knobs import cpu_list, cpu_text
from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.window import NOISY_STEPS, is_steady

_LOADERS_LOOKED_AT = 20  # a script that starts workers again for every epoch has told enough by then


class _Masks:
    """What both knobs must agree on: the CPUs this process had before any of them, and what workers get."""

    def __init__(self, _knob: KnobBase) -> None:
        self.original = self.workers = frozenset(os.sched_getaffinity(0))


class _Affinity(KnobBase):
    _cpus: frozenset[int] | None = None

    def install(self) -> None:
        """Have `_take` called, unless this process may not use all the CPUs asked for."""
        cpus, allowed = cpu_list(self.value), self.shared(_Masks).original
        if cpus <= allowed:
            self._cpus = cpus
            self._take(cpus)
        else:
            self.report(False, cpu_text(allowed), f"this process may use CPUs {cpu_text(allowed)} only")

    def _take(self, cpus: frozenset[int]) -> None:
        raise NotImplementedError

    def in_loader_worker(self) -> None:
        """Also of the other knob, which may come first or last."""
        if self._cpus is not None:
            os.sched_setaffinity(0, self.shared(_Masks).workers)


class MainAffinity(_Affinity):
    """The training process: all its threads, those to come, and processes it starts that are no loader workers."""

    def _take(self, cpus: frozenset[int]) -> None:
        """For the threads there are; later ones inherit it from the thread that starts them."""
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), cpus)
            except ProcessLookupError:  # it has ended meanwhile
                continue

    def uninstall(self) -> None:
        cpus, self._cpus = self._cpus, None
        if cpus is not None:
            self._take(self.shared(_Masks).original)

    def at_first_step(self) -> None:
        if self._cpus is not None:
            now = frozenset(os.sched_getaffinity(0))
            reason = None if now == self._cpus else "the script or a library has set another affinity since"
            self.report(reason is None, cpu_text(now), reason)


class WorkerAffinity(_Affinity):
    """Forked workers of loaders; what each of them got is read once a step was cut, by when they have worked."""

    missed = "the script started no loader workers"

    def _take(self, cpus: frozenset[int]) -> None:
        from torch.utils.data import DataLoader

        self._left = _LOADERS_LOOKED_AT
        self._waiting: list[list[int]] = []  # process ids of the workers of an iterator
        self.shared(_Masks).workers = cpus
        self._patches.look(DataLoader, "_get_iterator", lambda loader: loader, self._after_iterator)
        self.agent.add_boundary_hook(self._at_boundary, self.probe)

    def uninstall(self) -> None:
        super().uninstall()
        if self._cpus is not None:
            masks = self.shared(_Masks)
            masks.workers = masks.original

    def at_end(self) -> None:
        if self._cpus is not None:
            self._look(cpu_text(self._cpus))

    def _after_iterator(self, _loader: Any, iterator: Any, _error: BaseException | None) -> None:
        processes = [worker.pid for worker in getattr(iterator, "_workers", ())]
        if processes and self._left > 0:
            self._left -= 1
            self._waiting.append(processes)

    def _at_boundary(self, row: StepRow | None, _now_ns: int) -> None:
        if self._waiting and row is not None:
            self.at_end()

    def _look(self, wanted: str) -> None:
        waiting, self._waiting = self._waiting, []
        for processes in waiting:
            masks = set()  # the CPUs that they may use, as the kernel lists them
            for process in processes:
                with contextlib.suppress(OSError), open(f"/proc/{process}/status", errors="replace") as file:
                    found = re.search(r"^Cpus_allowed_list:(.*)$", file.read(), re.MULTILINE)
                    masks |= {found.group(1).strip()} if found is not None else set()
            if masks:
                reason = None if masks == {wanted} else "its workers are not forked, or set their affinity themselves"
                self.report(reason is None, " and ".join(sorted(masks)), reason)


_SOONER_OR_LATER = NOISY_STEPS  # steps that never get steady are no reason to wait any longer


class Collector(KnobBase):
    """`gc.freeze`, `gc.disable` or `gc.set_threshold`, between two steps."""

    _done = False
    _over = False
    missed = f"training was over before its steps were steady, or {_SOONER_OR_LATER} of them done"

    def install(self) -> None:
        self._walls: list[int] = []
        self.agent.add_step_listener(self._count, self.probe, lambda: not self._done)

    def uninstall(self) -> None:
        if not self._done:
            return
        self._done = False
        enabled, threshold = self._before
        if self.value == "freeze":
            gc.unfreeze()
        elif self.value != "off":
            gc.set_threshold(*threshold)
        elif enabled:
            gc.enable()

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
        if self.value == "freeze":
            gc.collect()
            gc.freeze()
        elif self.value == "off":
            gc.disable()
        else:
            gc.set_threshold(int(self.value), *gc.get_threshold()[1:])
        holds = self._holds()
        self.report(holds, _state(), None if holds else "Python did not take it")

    def _holds(self) -> bool:
        if self.value == "freeze":
            return gc.get_freeze_count() > 0
        if self.value == "off":
            return not gc.isenabled()
        return gc.isenabled() and gc.get_threshold()[0] == int(self.value)


def _state() -> str:
    first = "on" if gc.isenabled() else "off"
    return f"{first}, threshold {gc.get_threshold()[0]}, {gc.get_freeze_count()} objects frozen"
