"""Lets a child be looked into by py-spy, which is its sibling and not its ancestor, where a kernel asks for that."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def allow_tracing() -> Callable[[], None]:
    """What to call in the child between fork and exec; everything it needs is looked up before the fork.

    Without Yama the kernel refuses the request and nothing is lost. The permission outlives exec, not another fork.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    zero = ctypes.c_ulong(0)

    def allow() -> None:
        if prctl is not None:
            prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, zero, zero, zero)

    return allow
