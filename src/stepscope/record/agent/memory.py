"""How much memory this process has resident: now, and at most so far."""

from __future__ import annotations

import os
import resource
import sys


def resident_bytes() -> int:
    """Resident memory of this process; 0 where /proc does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def peak_resident_bytes() -> int:
    """The most memory this process ever had resident (ru_maxrss is in KiB on Linux, in bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
