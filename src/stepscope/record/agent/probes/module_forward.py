"""The first module call of a step, for loops without a DataLoader: what comes before it is data wait.

A global module hook slows every module call down, so it is registered only after a step went by without a fetch, takes
itself out on its first call, and is never used once torch.compile was called: Dynamo would guard on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.record.agent.compiling import is_compiling_check

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.phases import StepRow


class ModuleForwardProbe:
    """Registers a one-shot forward pre-hook at the boundaries of steps that had no loader."""

    name = "module_forward"

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._handle: Any = None
        self._installed = False

    def install(self, agent: Agent) -> None:
        """Wait for step boundaries."""
        if self._agent is None:
            self._agent = agent
            self._called = agent.guard.wrap(self.name, self._first_call)
            self._is_compiling = is_compiling_check()
            agent.add_boundary_hook(self._at_boundary, self.name, unfed_only=True)
        self._installed = True

    def uninstall(self) -> None:
        """Remove the hook if it is waiting."""
        self._installed = False
        self.remove()

    def remove(self) -> None:
        """Remove the waiting hook; called at once when torch.compile is used."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _at_boundary(self, row: StepRow | None, _now: int) -> None:
        agent = self._agent
        if agent is None or not self._installed or self._handle is not None or agent.compile_used:
            return
        if row is not None:
            from torch.nn.modules.module import register_module_forward_pre_hook

            is_compiling, called = self._is_compiling, self._called

            def first_forward(_module: Any, _inputs: Any) -> None:
                if not is_compiling():
                    called()

            self._handle = register_module_forward_pre_hook(first_forward)

    def _first_call(self) -> None:
        self.remove()
        agent = self._agent
        if agent is not None and agent.accepts():
            agent.steps.module_forward(agent.clock.now())
