"""Python's garbage collector: how long collections took and which line of the user's code they struck."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, Callable

from stepscope.record.agent.frames import place_fields, user_place

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent

SHORTEST_NS = 1_000_000  # shorter collections of the young generations are only counted


class CollectorProbe:
    """Writes `gc` for full collections and those above a millisecond."""

    name = "collector"

    def __init__(self) -> None:
        self._callback: Callable[[str, dict[str, int]], Any] | None = None
        self._start: int | None = None

    def install(self, agent: Agent) -> None:
        """Add a callback to `gc.callbacks`."""
        self._agent = agent
        user_place()  # loads what it needs: an import from within a collection can break the import it interrupts
        self._callback = agent.guard.wrap(self.name, self._called)
        gc.callbacks.append(self._callback)

    def uninstall(self) -> None:
        """Remove it."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        now = self._agent.clock.now()
        if phase == "start":
            self._start = now
            return
        start, self._start = self._start, None
        if start is None:
            return
        generation = info.get("generation", 0)
        if generation < 2 and now - start < SHORTEST_NS:
            return
        fields = place_fields(user_place())
        self._agent.events.write(
            "gc", start, now - start, generation=generation, collected=info.get("collected"), **fields
        )
