"""cudnn.allow_tf32 and cudnn.benchmark: flags of `torch.backends.cudnn`, in force where a CUDA device is in use."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.knobs.values import TRUTHS

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.knobs.base import Report

NO_DEVICE = "no CUDA device is in use"


class _Flag(KnobBase):
    """Set before the script's own code, and again after the first step should the script have set its own."""

    flag = ""
    missed = NO_DEVICE

    def install(self, agent: Agent, value: str, report: Report) -> None:
        """`value`: true or false."""
        self._agent, self._value, self._report = agent, TRUTHS[value], report
        home = _cudnn()
        self._before = bool(getattr(home, self.flag))
        setattr(home, self.flag, self._value)

    def uninstall(self) -> None:
        """Set it back."""
        before = getattr(self, "_before", None)
        if before is not None:
            setattr(_cudnn(), self.flag, before)

    def at_first_step(self) -> None:
        """Read it back, where it means anything."""
        home = _cudnn()
        if not self._agent.device.in_use:
            self._report(False, reason=NO_DEVICE)
            return
        if not home.is_available():
            self._report(False, reason="this torch has no cuDNN")
            return
        late = getattr(home, self.flag) != self._value
        if late:
            setattr(home, self.flag, self._value)
        found = bool(getattr(home, self.flag))
        words = "; the script had set it otherwise in the first step" if late else ""
        reason = None if found == self._value else "torch does not keep it"
        self._report(found == self._value, f"torch.backends.cudnn.{self.flag} is {found}{words}", reason)


class AllowTf32(_Flag):
    """Whether convolutions of float32 may use TF32."""

    flag = "allow_tf32"


class Benchmark(_Flag):
    """Whether cuDNN tries its algorithms for each new shape and keeps the fastest."""

    flag = "benchmark"


def _cudnn() -> Any:
    return sys.modules["torch"].backends.cudnn
