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
        steps, source, offset_ns = agent.steps, agent.clock.source, agent.clock.epoch_offset_ns

        # Closures: what they need is at hand, where every attribute would be looked up with cold caches.
        def before(*_args: Any, **_kwargs: Any) -> bool:
            if get_ident() != agent.training_thread and not agent.accepts(strong=True):
                return False
            steps.backward_start(source() + offset_ns)
            return True

        def after(begun: bool | None, _result: Any, _error: BaseException | None) -> None:
            if begun:
                steps.backward_end(source() + offset_ns)

        pair = agent.guard.pair(self.name, before, after)

        def make() -> None:
            import torch

            self._patches.around(torch.autograd, "backward", pair)

        self._patches.install(make)

    def uninstall(self) -> None:
        """Restore the original."""
        self._patches.remove()
