"""Memory that one stage left free, given back to the system before the next one begins: of a large trace a quarter.

glibc keeps freed blocks for later, also large ones once large ones were freed. Other C libraries have no such calls;
then nothing is done.
"""

from __future__ import annotations

import ctypes
import sys

MANY_SLICES = 1_000_000  # from here on it is worth the time
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 20  # blocks from this size on are taken from the system and given back


def give_back(slices: int) -> None:
    """Give freed memory back if the trace has many slices, and from then on large blocks at once."""
    if slices <= MANY_SLICES or sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    trim, option = getattr(library, "malloc_trim", None), getattr(library, "mallopt", None)
    if trim is not None and option is not None:
        trim(0)
        option(_M_MMAP_THRESHOLD, _LARGE_BYTES)
