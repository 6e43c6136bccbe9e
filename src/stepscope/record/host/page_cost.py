"""What a page fault costs on this machine, measured beside a run: memory is mapped, written and given back.

The training is never part of it: the launcher measures once the command has ended, at low priority, for some 50 ms.
Counted is processor time, of which other processes take nothing. Huge pages are refused, so that a page is a page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.record.agent.knobs import launched
from stepscope.record.host.hardware import ROOT, read_text

BYTES = 8 << 20  # of one mapping, as large as tensors that glibc maps anew; threads share it as those of an operator do
BUDGET_NS = 20_000_000  # for one thread, and as much for several
MOST_THREADS = 16
NICENESS = 10

_FAILED = ctypes.c_void_p(-1).value


class _Libc:
    """The calls in use; each lets go of the interpreter lock, so that threads fault side by side."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.map = libc.mmap
        self.map.restype = ctypes.c_void_p
        self.map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.unmap, self.advise = libc.munmap, libc.madvise
        self.unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def measure(threads: int) -> dict[str, Any] | None:
    """`ns_alone` of a fault on one thread, `ns_beside` of each where `threads` fault at once, `ns_returned` of a page.

    None where it cannot be measured.
    """
    from concurrent.futures import ThreadPoolExecutor

    def work() -> dict[str, Any] | None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread alone
            libc = _Libc()
            count = max(1, min(threads, MOST_THREADS, len(os.sched_getaffinity(0))))
            alone = _rounds(libc, 1)
            beside = _rounds(libc, count) if count > 1 else alone
        except (OSError, AttributeError, ValueError, statistics.StatisticsError):
            return None
        return {
            "page_bytes": mmap.PAGESIZE,
            "ns_alone": round(alone[0], 1),
            "threads": count,
            "ns_beside": round(beside[0], 1),
            "ns_returned": round(alone[1], 1),
        }

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _rounds(libc: _Libc, count: int) -> tuple[float, float]:
    """Medians over rounds: (ns of a fault to the thread that has it, ns to give a page back)."""
    pages, part = BYTES // mmap.PAGESIZE, BYTES // count
    faults: list[float] = []
    returns: list[float] = []
    end_ns = time.monotonic_ns() + BUDGET_NS
    while not faults or (time.monotonic_ns() < end_ns and len(faults) < 9):
        start = libc.map(None, BYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if start in (None, _FAILED):
            raise OSError("no memory to measure with")
        libc.advise(start, BYTES, getattr(mmap, "MADV_NOHUGEPAGE", 15))
        spent = _beside([partial(_fault_ns, start + i * part, part) for i in range(count)])
        began = time.thread_time_ns()
        libc.unmap(start, BYTES)
        returns.append((time.thread_time_ns() - began) / pages)
        faults.append(max(0.0, statistics.mean(spent)) / (part // mmap.PAGESIZE))
    return statistics.median(faults), statistics.median(returns)


def _fault_ns(start: int, size: int) -> float:
    """Of the first write to a stretch of memory what a second write does not take."""
    began = time.thread_time_ns()
    ctypes.memset(start, 1, size)
    written = time.thread_time_ns()
    ctypes.memset(start, 2, size)
    return 2.0 * written - began - time.thread_time_ns()


def _beside(works: list[Callable[[], float]]) -> list[float]:
    """The results of all, run at once, at the priority of this thread."""
    from concurrent.futures import ThreadPoolExecutor

    gate = threading.Barrier(len(works))

    def run(work: Callable[[], float]) -> float:
        gate.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


def huge_pages(root: Path = ROOT) -> str | None:
    """`always`, `madvise` or `never`, as the kernel is set."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    return text.partition("[")[2].partition("]")[0] or None


def facts(threads: int | None) -> dict[str, Any]:
    """The manifest's `page_faults`: what a fault costs with so many `threads`, and what could be done about it."""
    libc = None  # such as "glibc 2.36"; where it is another C library it is unknown
    with contextlib.suppress(OSError, ValueError, AttributeError):
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    return {
        "cost": None if threads is None else measure(threads),
        "huge_pages": huge_pages(),
        "libc": libc,
        "installed": [name for name in launched.LIBRARIES if launched.installed(name) is not None],
    }
