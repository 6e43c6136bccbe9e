"""Lets the sampler attach: under Yama a process must itself allow being looked at by a process that is no ancestor."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def allow_tracing() -> None:
    """Declare this process traceable by others of the same user; without Yama the kernel just declines."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


class PtracerProbe:
    """Allows tracing once, at the start; there is nothing to take out."""

    name = "ptracer"

    def install(self, agent: Agent) -> None:
        """Declare the process traceable."""
        agent.guard.wrap(self.name, allow_tracing)()

    def uninstall(self) -> None:
        """Nothing: the declaration is harmless and the sampler still needs it."""
