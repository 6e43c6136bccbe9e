"""matmul_precision: how exactly matrices of float32 are multiplied (`torch.set_float32_matmul_precision`).

It says what kernels may do, and is the same setting as TF32 of cuBLAS. Without a CUDA device it only reaches what
oneDNN computes, on processors with instructions for shorter numbers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.frames import Place, user_place
from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.patches import CallPatches
from stepscope.record.agent.wrapper_importlib_bootstrap import Call

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.knobs.base import Report


class MatmulPrecision(KnobBase):
    """Sets it at once, keeps the script from setting it otherwise, and reads it back after the first step."""

    def install(self, agent: Agent, value: str, report: Report) -> None:
        """`value`: highest, high or medium."""
        import torch

        self._agent, self._value, self._report = agent, value, report
        self._place: Place | None = None
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(value)
        self._patches = CallPatches(agent.guard, "knob." + self.name)
        self._patches.change(torch, "set_float32_matmul_precision", self._changed)

    def uninstall(self) -> None:
        """Set it back, unless the script has set its own by another way."""
        patches = getattr(self, "_patches", None)
        if patches is None:
            return
        patches.remove()
        torch: Any = sys.modules["torch"]
        if torch.get_float32_matmul_precision() == self._value:
            torch.set_float32_matmul_precision(self._before)

    def at_first_step(self) -> None:
        """Set it again where the script has used another way, and read it back."""
        torch: Any = sys.modules["torch"]
        if torch.get_float32_matmul_precision() != self._value:
            torch.set_float32_matmul_precision(self._value)
        found = str(torch.get_float32_matmul_precision())
        note = "" if self._agent.device.in_use else "; without a CUDA device only oneDNN heeds it, where it can"
        observed = f"torch.get_float32_matmul_precision() is {found}{note}"
        reason = None if found == self._value else "the script sets its own"
        self._report(found == self._value, observed, reason, self._place)

    def _changed(self, *_args: Any, **_kwargs: Any) -> Call:
        if self._place is None:
            self._place = user_place()
        return Call((self._value,), {})
