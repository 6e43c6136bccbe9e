"""Optimizer steps, by PyTorch's own global hooks: they reach every optimizer, whoever calls it.

Under torch.compile both hooks return at once, so that a compiled optimizer step has the same graphs as without us.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.compiling import is_dynamo_compiling_check

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

        steps, source, offset_ns = agent.steps, agent.clock.source, agent.clock.epoch_offset_ns
        is_compiling = is_dynamo_compiling_check()

        def start(optimizer: Any) -> None:
            if get_ident() == agent.training_thread or agent.accepts(strong=True):
                agent.optimizer_events += 1
                steps.optimizer_start(id(optimizer), source() + offset_ns)

        def end(optimizer: Any, _result: Any, _error: BaseException | None) -> None:
            if get_ident() == agent.training_thread or agent.accepts(strong=True):
                steps.optimizer_end(id(optimizer), source() + offset_ns)

        pair = agent.guard.pair(self.name, start, end)
        switch, before, after = pair.switch, pair.before, pair.after

        def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling() and not switch.off:
                try:
                    before(optimizer)
                except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                    pair.trip(defect)

        def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling() and not switch.off:
                try:
                    after(optimizer, None, None)
                except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                    pair.trip(defect)

        self._handles = [
            module.register_optimizer_step_pre_hook(before_step),
            module.register_optimizer_step_post_hook(after_step),
        ]

    def uninstall(self) -> None:
        """Remove both hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
