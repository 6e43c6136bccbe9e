"""Knobs that are one setting of torch: what sets it, what reads it back, and whose own calls are answered with it.

Each is set when torch was imported and read back after the first step. What the script sets by torch's function is
replaced by the knob's value; what it sets by another way is set again after the first step.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any, Callable, NamedTuple

from stepscope.record.agent.frames import Place, user_place
from stepscope.record.agent.knobs.base import NO_DEVICE, KnobBase
from stepscope.record.agent.wrapper_importlib_bootstrap import Answer, Call


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
