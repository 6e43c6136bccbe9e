"""Whether this process may start others like it, how many are worth it, and work side by side in its threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Programs whose main module does nothing when a new process imports it.
_GUARDED = ("stepscope", "stepscope.exe", "pytest", "py.test")


def main_is_guarded() -> bool:
    """Whether new processes may be started: they import the main module, and a user's script would run once more."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    module = spec.name.partition(".")[0] if spec is not None else ""
    return file is None or module == "stepscope" or os.path.basename(file) in _GUARDED


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What `work` gives of each item, in order, by a thread per core: for what NumPy, Polars or a digest does."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(work, items))
