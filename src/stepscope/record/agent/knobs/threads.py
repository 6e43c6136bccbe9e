"""Knobs of torch's CPU threads: within an operator, and between operators.

Both are set at once, and the script's own later calls are answered with the knob's value; what torch itself sets, in
its loader workers and in the thread that pins memory, stays as torch wants it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.frames import user_place
from stepscope.record.agent.knobs.base import KnobBase, Report
from stepscope.record.agent.patches import CallPatches
from stepscope.record.agent.wrapper_importlib_bootstrap import Answer, Call

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class _Threads(KnobBase):
    setter = ""
    getter = ""

    def install(self, agent: Agent, value: str, report: Report) -> None:
        torch: Any = sys.modules["torch"]
        self._count, self._report, self._torch = int(value), report, torch
        self._overridden: tuple[Any, ...] | None = None
        self._own = os.path.dirname(torch.__file__) + os.sep
        getattr(torch, self.setter)(self._count)
        self._calls = CallPatches(agent.guard, "knob." + self.name)
        self._calls.change(torch, self.setter, self._change)

    def uninstall(self) -> None:
        """Take the wrapper out; the number of threads stays, it cannot matter any more."""
        self._calls.remove()

    def at_first_step(self) -> None:
        count = getattr(self._torch, self.getter)()
        text = str(count)
        if self._overridden is not None:
            text += f", against the script's own {self.setter}"
        reason = None if count == self._count else "torch has another number of threads once it trains"
        self._report(count == self._count, text, reason, self._overridden)

    def _is_torch(self) -> bool:
        """Whether torch is calling; between it and us are wrappers, of this knob and of a probe."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_name == "stepscope_wrapper":
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(self._own)

    def _change(self, *_args: Any, **_kwargs: Any) -> Call | Answer | None:
        raise NotImplementedError


def _is_count(args: tuple[Any, ...]) -> bool:
    """Whether torch would take the script's own call; it may say itself what it would not."""
    return len(args) == 1 and args[0].__class__ is int and args[0] > 0


class NumThreads(_Threads):
    """`torch.set_num_threads`."""

    setter = "set_num_threads"
    getter = "get_num_threads"

    def _change(self, *args: Any, **_kwargs: Any) -> Call | Answer | None:
        if self._is_torch() or not _is_count(args):
            return None
        self._overridden = user_place()
        return Call((self._count,), {})


class NumInteropThreads(_Threads):
    """`torch.set_num_interop_threads`, which torch takes only once: the script's own call is not made."""

    setter = "set_num_interop_threads"
    getter = "get_num_interop_threads"

    def _change(self, *args: Any, **_kwargs: Any) -> Call | Answer | None:
        if self._is_torch() or not _is_count(args):
            return None
        self._overridden = user_place()
        return Answer(None)
