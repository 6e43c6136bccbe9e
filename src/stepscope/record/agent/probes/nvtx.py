"""NVTX ranges a script already has (`torch.cuda.nvtx`), carried through as regions."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Callable

from stepscope.record.agent import marks
from stepscope.record.agent.compiling import is_compiling_check
from stepscope.record.agent.probes.patch import Patch

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class NvtxProbe:
    """Times `range_push` to `range_pop`, nested, per thread; only the training thread's are written."""

    name = "nvtx"

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._local = threading.local()

    def install(self, agent: Agent) -> None:
        """Wrap `torch.cuda.nvtx.range_push` and `range_pop`; a wrapper others have wrapped since stays in."""
        import torch.cuda.nvtx as nvtx

        self._agent = agent
        if self._patches:
            return
        is_compiling = is_compiling_check()
        pushed = agent.guard.wrap(self.name, self._pushed)
        popped = agent.guard.wrap(self.name, self._popped)

        def wrap_push(original: Callable[..., Any]) -> Callable[..., Any]:
            def range_push(msg: Any) -> Any:
                result = original(msg)
                if not is_compiling():
                    pushed(msg)
                return result

            return range_push

        def wrap_pop(original: Callable[..., Any]) -> Callable[..., Any]:
            def range_pop() -> Any:
                result = original()
                if not is_compiling():
                    popped()
                return result

            return range_pop

        self._patches = [Patch(nvtx, "range_push", wrap_push), Patch(nvtx, "range_pop", wrap_pop)]

    def uninstall(self) -> None:
        """Restore the originals."""
        self._patches = [patch for patch in reversed(self._patches) if not patch.remove()]

    def _stack(self) -> list[tuple[str, int]]:
        stack: list[tuple[str, int]] = self._local.__dict__.setdefault("stack", [])
        return stack

    def _pushed(self, name: Any) -> None:
        self._stack().append((str(name), self._agent.clock.now()))

    def _popped(self) -> None:
        stack = self._stack()
        if stack:
            name, start = stack.pop()
            if self._agent.accepts():
                marks.record_region(name, start, self._agent.clock.now(), "nvtx")
