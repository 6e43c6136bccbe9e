"""torch.save: how long, how many bytes, from which line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.frames import place_fields, user_place
from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class SavesProbe:
    """Writes a `save` event per call."""

    name = "saves"

    def __init__(self) -> None:
        self._patches = PatchSet()

    def install(self, agent: Agent) -> None:
        """Wrap `torch.save`."""
        self._agent = agent
        pair = agent.guard.pair(self.name, self._before, self._after)

        def make() -> None:
            import torch

            self._patches.around(torch, "save", pair)

        self._patches.install(make)

    def uninstall(self) -> None:
        """Restore the original."""
        self._patches.remove()

    def _before(self, _obj: Any = None, f: Any = None, *_args: Any, **_kwargs: Any) -> tuple[int, Any]:
        return self._agent.clock.now(), f

    def _after(self, token: tuple[int, Any] | None, _result: Any, error: BaseException | None) -> None:
        if token is None or error is not None:
            return
        start, target = token
        end = self._agent.clock.now()
        path = os.path.abspath(os.fsdecode(target)) if isinstance(target, (str, bytes, os.PathLike)) else None
        size = os.path.getsize(path) if path is not None and os.path.isfile(path) else None
        self._agent.last_save_step = self._agent.steps.current_step()
        self._agent.events.write("save", start, end - start, path=path, bytes=size, **place_fields(user_place()))
