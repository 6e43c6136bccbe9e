"""cuda.linalg_library: which library `torch.linalg` prefers on a CUDA device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.frames import Place, user_place
from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.knobs.cudnn import NO_DEVICE
from stepscope.record.agent.patches import CallPatches
from stepscope.record.agent.wrapper_importlib_bootstrap import Call

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.knobs.base import Report


class LinalgLibrary(KnobBase):
    """Set when the knob is installed; a library this torch was not built with is refused by torch itself."""

    missed = NO_DEVICE

    def install(self, agent: Agent, value: str, report: Report) -> None:
        """`value`: cusolver, magma or default."""
        self._agent, self._value, self._report = agent, value, report
        self._place: Place | None = None
        home = _home()
        build = sys.modules["torch"].version
        if getattr(build, "cuda", None) is None and getattr(build, "hip", None) is None:
            report(False, reason="this torch is built without CUDA")
            return
        try:
            home.preferred_linalg_library(value)
        except RuntimeError as error:
            report(False, reason=str(error).splitlines()[0][:200])
            return
        self._patches = CallPatches(agent.guard, "knob." + self.name)
        self._patches.change(home, "preferred_linalg_library", self._changed)

    def uninstall(self) -> None:
        """Give the choice back to torch."""
        patches = getattr(self, "_patches", None)
        if patches is not None:
            patches.remove()
            _home().preferred_linalg_library("default")

    def at_first_step(self) -> None:
        """Read it back."""
        if getattr(self, "_patches", None) is None:
            return
        if not self._agent.device.in_use:
            self._report(False, reason=NO_DEVICE)
            return
        found = str(_home().preferred_linalg_library())
        applied = self._value in found.lower()
        reason = None if applied else "torch prefers another one"
        self._report(applied, f"torch.backends.cuda.preferred_linalg_library() is {found}", reason, self._place)

    def _changed(self, backend: Any = None) -> Call | None:
        if backend is None:
            return None  # it only asks
        if self._place is None:
            self._place = user_place()
        return Call((self._value,), {})


def _home() -> Any:
    return sys.modules["torch"].backends.cuda
