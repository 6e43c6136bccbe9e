"""The next module call, where the step cutter has to know of it: what a batch is for, where data wait ends.

A global module hook slows every module call down, so it is registered only after a step went by without a fetch or
where the cutter asks, takes itself out on its first call (of an evaluation, on its last), and is never used once
torch.compile was called: Dynamo would guard on it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.compiling import is_compiling_check

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.phases import StepRow


# Calls of an evaluation's modules that are heard while the first one with gradients is waited for.
CALLS_LIMIT = 20_000


class ModuleForwardProbe:
    """Registers a one-shot forward pre-hook at the boundaries of steps that had no loader, and on request."""

    name = "module_forward"

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._handle: Any = None
        self._calls = 0
        self._installed = False

    def install(self, agent: Agent) -> None:
        """Wait for step boundaries."""
        if self._agent is None:
            self._agent = agent
            self._called = agent.guard.wrap(self.name, self._call)
            self._is_compiling = is_compiling_check()
            agent.add_boundary_hook(self._at_boundary, self.name, unfed_only=True)
            agent.steps.ask_use = lambda: agent.guard.wrap(self.name, self._ask)() or False
        self._installed = True
        self._ask()

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
        if row is not None:
            self._ask()

    def _ask(self) -> bool:
        agent = self._agent
        if agent is None or not self._installed or agent.compile_used:
            return False
        if self._handle is None:
            from torch.nn.modules.module import register_module_forward_pre_hook

            is_compiling, called = self._is_compiling, self._called

            def first_forward(module: Any, _inputs: Any) -> None:
                if not is_compiling():
                    called(module)

            self._calls = 0
            self._handle = register_module_forward_pre_hook(first_forward)
        return True

    def _call(self, module: Any) -> None:
        agent = self._agent
        if agent is None or not agent.observes():
            return
        gradients = sys.modules["torch"].is_grad_enabled()
        self._calls += 1
        if self._calls > 1 and not gradients and self._calls < CALLS_LIMIT:
            return  # an evaluation goes on
        again = agent.steps.module_forward(agent.page_faults.now(), gradients, id(module))
        if not again or self._calls >= CALLS_LIMIT:
            self.remove()
