"""Step boundaries of torch_xla: `torch_xla.sync` and the older `xm.mark_step`; one may call the other.

Where torch_xla is used, its counters are read at every boundary; see `xla_counters`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.probes.xla_counters import XlaCounters


class XlaProbe:
    """Marks a step at each outermost sync. Does nothing while torch_xla is not imported."""

    name = "xla"

    def __init__(self) -> None:
        self._patches = PatchSet()
        self._depth = 0
        self._counters: XlaCounters | None = None

    def install(self, agent: Agent) -> None:
        """Wrap what this version of torch_xla has; called again when torch_xla has been imported."""
        self._agent = agent
        if "torch_xla" not in sys.modules:
            return
        pair = agent.guard.pair(self.name, self._before, self._after)

        def make() -> None:
            self._patches.around(sys.modules["torch_xla"], "sync", pair)
            model = sys.modules.get("torch_xla.core.xla_model")
            if model is not None:
                self._patches.around(model, "mark_step", pair)

        self._patches.install(make)
        agent.guard.wrap("xla_counters", self._count)()

    def uninstall(self) -> None:
        """Restore the originals."""
        self._patches.remove()
        if self._counters is not None:
            self._counters.stop()

    def _count(self) -> None:
        from stepscope.record.agent.probes.xla_counters import XlaCounters, find_api

        if self._counters is None:
            api = find_api()
            self._counters = XlaCounters(self._agent, api) if api is not None else None
        if self._counters is not None:
            self._counters.start()

    def _before(self, *_args: Any, **_kwargs: Any) -> bool:
        self._depth += 1
        return True

    def _after(self, begun: bool | None, _result: Any, _error: BaseException | None) -> None:
        if not begun:
            return
        self._depth -= 1
        agent = self._agent
        if self._depth == 0 and agent.accepts():
            agent.steps.mark("xla_sync", agent.page_faults.now())
