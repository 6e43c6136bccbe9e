"""host.allocator: where the process gets memory of the host from, and whether it gives it back.

glibc maps a large tensor anew, or gives the end of its heap back, as soon as the tensor is freed; the next step then
faults its pages in again. All of it is settled when a process starts, so the launcher sets variables of the command's
environment, and the agent looks whether they arrived and whether the library is loaded.
"""

from __future__ import annotations

import glob
import os
import sys
from typing import TYPE_CHECKING

from stepscope.record.agent.knobs.base import KnobBase

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.knobs.base import Report

# glibc takes no larger threshold than this; tensors above it are mapped anew whatever it is, unless nothing may be.
LARGEST_THRESHOLD_BYTES = 33_554_432
NO_TRIM_BYTES = 4_294_967_296
KEEP, KEEP_ALL, HUGE = "keep", "keep_all", "huge_pages"
LIBRARIES = ("jemalloc", "tcmalloc")
_TRIM = {"MALLOC_TRIM_THRESHOLD_": str(NO_TRIM_BYTES)}
_VARIABLES = {
    KEEP: {"MALLOC_MMAP_THRESHOLD_": str(LARGEST_THRESHOLD_BYTES), **_TRIM},
    KEEP_ALL: {"MALLOC_MMAP_MAX_": "0", **_TRIM},
    HUGE: {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}
_FOLDERS = ("/usr/lib/*-linux-gnu*", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/lib64")


def installed(name: str) -> str | None:
    """The path of an allocator's shared library, for LD_PRELOAD; None where it is not installed."""
    for folder in _FOLDERS:
        for pattern in (f"lib{name}.so*", f"lib{name}_minimal.so*"):
            found = sorted(glob.glob(f"{folder}/{pattern}"))
            if found:
                return found[0]
    return None


def variables(value: str, preloaded: str | None = None) -> dict[str, str]:
    """What a command's environment needs; empty for a library that is not installed. `preloaded`: LD_PRELOAD so far."""
    if value in _VARIABLES:
        return dict(_VARIABLES[value])
    path = installed(value) if value in LIBRARIES else None
    return {} if path is None else {"LD_PRELOAD": " ".join([path, *([preloaded] if preloaded else [])])}


class HostAllocator(KnobBase):
    """Reads back what the process was started with."""

    def install(self, _agent: Agent, value: str, report: Report) -> None:
        """`value`: KEEP, KEEP_ALL, HUGE or one of `LIBRARIES`."""
        if value in LIBRARIES:
            self._report_library(value, report)
            return
        wanted = variables(value)
        missing = [name for name, text in wanted.items() if os.environ.get(name) != text]
        if not sys.platform.startswith("linux"):
            report(False, reason="these are variables of Linux")
        elif missing:
            report(False, reason=f"the training process does not see {', '.join(missing)} as set")
        else:
            report(True, " ".join(f"{name}={text}" for name, text in wanted.items()))

    @staticmethod
    def _report_library(value: str, report: Report) -> None:
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
                loaded = next((line.split()[-1] for line in maps if f"/lib{value}" in line), None)
        except OSError:
            loaded = None
        if loaded is not None:
            report(True, loaded)
        elif installed(value) is None:
            report(False, reason=f"lib{value}.so is not installed on this machine")
        else:
            report(False, reason=f"the process was started without lib{value}.so: something in between removed it")
