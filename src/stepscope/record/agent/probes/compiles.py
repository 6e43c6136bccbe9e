"""torch.compile: in which steps it compiled, from Dynamo's own counters, read at step boundaries only.

No callback is registered with Dynamo: an exception in one would surface in the user's code.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.phases import StepRow


class CompilesProbe:
    """Writes `compile` {count} for a step in which frames were compiled, and sets `agent.last_compile_step`."""

    name = "compiles"

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._seen = 0
        self._installed = False

    def install(self, agent: Agent) -> None:
        """Wait for step boundaries."""
        if self._agent is None:
            self._agent = agent
            agent.add_boundary_hook(self._at_boundary, self.name)
        self._installed = True

    def uninstall(self) -> None:
        """Stop reading."""
        self._installed = False

    def _at_boundary(self, row: StepRow | None, now: int) -> None:
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None or not self._installed or self._agent is None:
            return
        frames = dynamo.counters.get("frames")
        total = int(frames.get("total", 0)) if frames else 0
        count, self._seen = total - self._seen, total
        if count > 0:
            step = row.step if row is not None else None
            if step is not None:
                self._agent.last_compile_step = step
            start = row.start_ns if row is not None else now
            self._agent.events.write("compile", start, None, step=step, count=count)
