"""Knobs of the process and of torch, each one setting: processors, the garbage collector, and what torch is set to.

A worker inherits the mask of the process that forks it. It is put back on the CPUs the process had at first, unless the
second knob says which it may use. Workers that are spawned or started by a server are not reached.

Of a setting of torch the table says what sets it, what reads it back, and whose own calls are answered with it.
Each is set when torch was imported and read back after the first step. What the script sets by torch's function is
replaced by the knob's value; what it sets by another way is set again after the first step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from functools import partial
from typing import Any, Callable, NamedTuple

from stepscope.record.agent.frames import Place, user_place
from stepscope.record.agent.knobs import cpu_list, cpu_text
from stepscope.record.agent.knobs.base import NO_DEVICE, KnobBase
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.window import NOISY_STEPS, is_steady
from stepscope.record.agent.wrapper_importlib_bootstrap import Answer, Call

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


class _Setting(NamedTuple):
    """Where it is in torch. Without a `setter`, `getter` is an attribute."""

    home: str
    getter: str
    setter: str = ""
    convert: Callable[[str], Any] = str
    needs: str = ""  # what must be so for it to mean anything: a device in use, or a torch built for one
    differs: str = "torch does not keep it"  # why, where torch has another value after the first step
    without_device: str = ""  # what else is to be said where no device is in use
    default: str = ""  # what gives the choice back to torch; "" for the value there was before


IN_USE, BUILT = "in use", "built"
_truth = "true".__eq__
_OTHER_THREADS = "torch has another number of threads once it trains"

SETTINGS = {
    "matmul_precision": _Setting(
        "torch", "get_float32_matmul_precision", "set_float32_matmul_precision",
        without_device="; without a CUDA device only oneDNN heeds it, where it can",
    ),
    "cudnn.allow_tf32": _Setting("torch.backends.cudnn", "allow_tf32", "", _truth, IN_USE),
    "cudnn.benchmark": _Setting("torch.backends.cudnn", "benchmark", "", _truth, IN_USE),
    "cuda.linalg_library": _Setting(
        "torch.backends.cuda", "preferred_linalg_library", "preferred_linalg_library", str, BUILT,
        "torch prefers another one", default="default",
    ),
    "torch.num_threads": _Setting("torch", "get_num_threads", "set_num_threads", int, differs=_OTHER_THREADS),
    "torch.num_interop_threads": _Setting(
        "torch", "get_num_interop_threads", "set_num_interop_threads", int, differs=_OTHER_THREADS
    ),
}  # fmt: skip


class Setting(KnobBase):
    """One of `SETTINGS`, by its name."""

    _is_set = False

    def install(self) -> None:
        torch = sys.modules["torch"]
        self._setting = setting = SETTINGS[self.name]
        self._home: Any = sys.modules[setting.home]
        self._wish = setting.convert(self.value)
        self._place: Place | None = None  # of the script's own call
        if setting.needs:
            self.missed = NO_DEVICE
        if setting.needs == BUILT and not (torch.version.cuda or getattr(torch.version, "hip", None)):
            self.report(False, reason="this torch is built without CUDA")
            return
        self._before = setting.default or self._read()
        self._set: Callable[[Any], Any] = (
            getattr(self._home, setting.setter) if setting.setter else partial(setattr, self._home, setting.getter)
        )
        try:
            self._set(self._wish)
        except RuntimeError as error:
            if setting.needs != BUILT:
                raise
            self.report(False, reason=str(error).splitlines()[0][:200])
            return
        self._is_set = True
        self._own = os.path.dirname(torch.__file__ or "") + os.sep
        if setting.setter:
            self._patches.change(self._home, setting.setter, self._called)

    def uninstall(self) -> None:
        """Set it back, unless the script has its own by now; threads stay, their number cannot matter any more."""
        super().uninstall()
        is_set, self._is_set = self._is_set, False
        if is_set and self._setting.convert is not int and self._holds(self._read()):
            self._set(self._before)

    def at_first_step(self) -> None:
        """Read it back, and set it again where the script has used another way than torch's function."""
        setting = self._setting
        if not self._is_set:
            return
        if setting.needs and not self.agent.device.in_use:
            self.report(False, reason=NO_DEVICE)
            return
        if setting.home == "torch.backends.cudnn" and not self._home.is_available():
            self.report(False, reason="this torch has no cuDNN")
            return
        late = setting.convert is not int and not self._holds(self._read())
        if late:
            self._set(self._wish)
        found = self._read()
        if setting.convert is int:
            words = str(found) if self._place is None else f"{found}, against the script's own {setting.setter}"
        else:
            words = f"{setting.home}.{setting.getter}{'()' if setting.setter else ''} is {found}"
        if late:
            words += "; the script had set it otherwise in the first step"
        if not self.agent.device.in_use:
            words += setting.without_device
        holds = self._holds(found)
        self.report(holds, words, None if holds else setting.differs, self._place)

    def _read(self) -> Any:
        found = getattr(self._home, self._setting.getter)
        return found() if callable(found) else found

    def _holds(self, found: Any) -> bool:
        """Whether it is as wished; a library is named by a member of an enumeration."""
        return bool(found == self._wish) or (self._setting.default != "" and self._wish in str(found).lower())

    def _called(self, *args: Any, **kwargs: Any) -> Call | Answer | None:
        setting = self._setting
        if setting.getter == setting.setter and not args and not kwargs:
            return None  # it only asks
        if setting.convert is int:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_name == "stepscope_wrapper":  # of this knob and of a probe
                frame = frame.f_back
            is_torch = frame.f_code.co_filename.startswith(self._own)  # in its loader workers, where it pins memory
            if is_torch or not (len(args) == 1 and args[0].__class__ is int and args[0] > 0):
                return None  # or an argument that torch will not take
        self._place = self._place or user_place()
        return Answer() if setting.getter == "get_num_interop_threads" else Call((self._wish,), {})
