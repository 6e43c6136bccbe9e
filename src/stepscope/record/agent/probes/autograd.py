"""Backward passes: `Tensor.backward` and `torch.autograd.backward`, nested calls counted once."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class AutogradProbe:
    """Tells the step cutter where backward begins and ends."""

    name = "autograd"

    def __init__(self) -> None:
        self._patches = PatchSet()

    def install(self, agent: Agent) -> None:
        """Wrap `torch.autograd.backward`, which `Tensor.backward` calls as well."""
        self._agent = agent
        pair = agent.guard.pair(self.name, self._before, self._after)

        def make() -> None:
            import torch

            self._patches.around(torch.autograd, "backward", pair)

        self._patches.install(make)

    def uninstall(self) -> None:
        """Restore the original."""
        self._patches.remove()

    def _before(self, *_args: Any, **_kwargs: Any) -> bool:
        agent = self._agent
        if get_ident() != agent.training_thread and not agent.accepts(strong=True):
            return False
        agent.steps.backward_start(agent.clock.now())
        return True

    def _after(self, begun: bool | None, _result: Any, _error: BaseException | None) -> None:
        if begun:
            self._agent.steps.backward_end(self._agent.clock.now())
