"""Times one piece of work in a process of its own, and says what it took. Standard library only, any environment.

The result is one JSON object in a file: standard output belongs to whatever is measured. Work that raises leaves no
result but its traceback.
"""

from __future__ import annotations

import builtins
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def measure(work: Callable[[], dict[str, Any]], out: str) -> None:
    """Run `work` once and write what it took to `out`.

    `seconds` is its wall time without imports: those made before, and those libraries make when first used
    (`late_import_seconds`). `cpu_seconds` is this process's, late imports included; `peak_mb` is of the largest of this
    process and its children, all imports included; `before_mb` was the peak before the work. What `work` returned is
    added.
    """
    imports = ImportClock()
    before = peak_mb()
    cpu = time.process_time()
    with imports:
        start = time.perf_counter()
        said = work()
        wall = time.perf_counter() - start
    result = {
        "seconds": wall - imports.seconds,
        "late_import_seconds": imports.seconds,
        "cpu_seconds": time.process_time() - cpu,
        "before_mb": before,
        "peak_mb": max(peak_mb(), _rusage_mb(resource.RUSAGE_CHILDREN)),
        **said,
    }
    Path(out).write_text(json.dumps(result))


class ImportClock:
    """Adds up the time import statements take while it is entered."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._original = builtins.__import__

    def __enter__(self) -> None:
        builtins.__import__ = self._import

    def __exit__(self, *_: object) -> None:
        builtins.__import__ = self._original

    def _import(self, *args: Any, **keywords: Any) -> Any:
        self._depth += 1
        start = time.perf_counter()
        try:
            return self._original(*args, **keywords)
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - start


def peak_mb() -> float:
    """The most memory this process held at once, in MB (1e6 bytes)."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024 / 1e6
    except (OSError, StopIteration):
        # Not Linux. On Linux this figure may be inherited from the process that started us, so it is second choice.
        return _rusage_mb(resource.RUSAGE_SELF)


def _rusage_mb(who: int) -> float:
    peak = resource.getrusage(who).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
