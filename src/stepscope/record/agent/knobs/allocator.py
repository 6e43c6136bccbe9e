"""allocator.conf: settings of torch's allocator of CUDA memory, which reads them from the environment when it starts.

The launcher sets the variables before the command starts; the agent looks whether they arrived. The older variable is
what every version of torch reads, the newer one is what newer versions ask for.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.knobs.cudnn import NO_DEVICE

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.knobs.base import Report

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def variables(value: str) -> dict[str, str]:
    """What the launcher sets in the environment of the command."""
    return dict.fromkeys(VARIABLES, value)


class AllocatorConf(KnobBase):
    """Looks after the first step, when the allocator has been started if it ever is."""

    missed = NO_DEVICE

    def install(self, agent: Agent, value: str, report: Report) -> None:
        """`value`: the settings."""
        self._agent, self._value, self._report = agent, value, report

    def at_first_step(self) -> None:
        """Read back what the allocator itself says of its settings, where it does."""
        if not self._agent.device.in_use:
            self._report(False, reason=NO_DEVICE)
            return
        if self._value not in [os.environ.get(name) for name in VARIABLES]:
            self._report(False, reason=f"the process does not see it in {VARIABLES[0]}")
            return
        settings = _settings()
        told = settings.get(VARIABLES[0]) or settings.get(VARIABLES[1])
        if told is not None and told != self._value:
            self._report(False, f"the allocator has {told}", "the script sets its own")
            return
        words = ", ".join(f"{name} is {settings[name]}" for name in _names(self._value) if name in settings)
        self._report(True, f"the allocator says {words}" if words else f"{VARIABLES[0]} is set in the process")


def _names(conf: str) -> list[str]:
    return [part.partition(":")[0] for part in conf.split(",") if ":" in part]


def _settings() -> dict[str, Any]:
    """Of the allocator, by name; {} where this torch does not tell them."""
    memory: Any = sys.modules["torch"].cuda.memory
    snapshot = getattr(memory, "_snapshot", None)
    found = snapshot().get("allocator_settings") if snapshot is not None else None
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}
