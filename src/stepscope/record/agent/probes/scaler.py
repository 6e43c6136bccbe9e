"""GradScaler.step: on an overflow the optimizer is never called, and without this its iteration would be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class ScalerProbe:
    """Tells the step cutter of optimizer steps a GradScaler left out, and writes `scaler_skip`."""

    name = "scaler"

    def __init__(self) -> None:
        self._patches = PatchSet()

    def install(self, agent: Agent) -> None:
        """Wrap `step` of torch.amp's GradScaler, or of torch.cuda.amp's where that is all there is (before 2.3)."""
        self._agent = agent
        pair = agent.guard.pair(self.name, self._before, self._after)

        def make() -> None:
            import torch

            home = torch.amp if hasattr(torch.amp, "GradScaler") else torch.cuda.amp
            self._patches.around(home.GradScaler, "step", pair)

        self._patches.install(make)

    def uninstall(self) -> None:
        """Restore the original."""
        self._patches.remove()

    def _before(self, _scaler: Any, optimizer: Any, *_args: Any, **_kwargs: Any) -> tuple[int, int]:
        return id(optimizer), self._agent.optimizer_events

    def _after(self, token: tuple[int, int] | None, _result: Any, error: BaseException | None) -> None:
        agent = self._agent
        if token is None or error is not None or agent.optimizer_events != token[1]:
            return
        if agent.accepts(strong=True) and not agent.guard.is_off("optimizer"):
            now = agent.clock.now()
            agent.events.write("scaler_skip", now)
            agent.steps.optimizer_skipped(token[0], now)
