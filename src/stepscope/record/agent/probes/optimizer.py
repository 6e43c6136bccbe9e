"""Optimizer steps, by PyTorch's own global hooks: they reach every optimizer, whoever calls it.

Under torch.compile both hooks return at once, so that a compiled optimizer step has the same graphs as without us.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.compiling import is_compiling_check

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class OptimizerProbe:
    """Tells the step cutter where an optimizer step begins and ends."""

    name = "optimizer"

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def install(self, agent: Agent) -> None:
        """Register the global pre and post hooks."""
        from torch.optim import optimizer as module

        start = agent.guard.wrap(self.name, self._start)
        end = agent.guard.wrap(self.name, self._end)
        self._agent = agent
        is_compiling = is_compiling_check()

        def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling():
                start(optimizer)

        def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling():
                end(optimizer)

        self._handles = [
            module.register_optimizer_step_pre_hook(before_step),
            module.register_optimizer_step_post_hook(after_step),
        ]

    def uninstall(self) -> None:
        """Remove both hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _start(self, optimizer: Any) -> None:
        agent = self._agent
        if get_ident() == agent.training_thread or agent.accepts(strong=True):
            agent.optimizer_events += 1
            agent.steps.optimizer_start(id(optimizer), agent.clock.now())

    def _end(self, optimizer: Any) -> None:
        agent = self._agent
        if get_ident() == agent.training_thread or agent.accepts(strong=True):
            agent.steps.optimizer_end(id(optimizer), agent.clock.now())
