"""Every trace of a run, taken in or found in the cache; several side by side in processes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from stepscope.errors import UnreadableInputError
from stepscope.read.formats import Limits
from stepscope.tables import cache
from stepscope.tables.cache import Entry
from stepscope.tables.options import BuildOptions

# A process costs about half a second; less than this is quicker without.
_WORTH_BYTES = 8 * 10**6
# Programs whose main module does nothing when a new process imports it.
_GUARDED = ("stepscope", "stepscope.exe", "pytest", "py.test")


@contextmanager
def root(options: BuildOptions) -> Iterator[Path]:
    """The cache, or a folder that is gone afterwards where there is none or it cannot be written to."""
    if options.cache is not None and cache.writable(options.cache):
        yield options.cache
        return
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        yield Path(folder)


def collect(paths: Sequence[Path], folder: Path, options: BuildOptions) -> list[Entry | str]:
    """For each trace its tables, or why there are none."""
    workers = _workers(paths, options)
    if workers < 2:
        return [_alone(path, folder, options) for path in paths]
    found: list[Entry | str] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(_fetch, path, folder, options.limits) for path in paths]
        for path, future in zip(paths, pending, strict=True):
            try:
                found.append(future.result())
            except BrokenProcessPool:
                # A process was killed, mostly for the memory of several at once: what is left goes one by one.
                found.append(_alone(path, folder, options))
            _done(path, options)
    return found


def _fetch(path: Path, folder: Path, limits: Limits | None) -> Entry | str:
    try:
        return Entry(cache.fetch(path, folder, limits))
    except (OSError, UnreadableInputError) as error:
        return str(error)


def _alone(path: Path, folder: Path, options: BuildOptions) -> Entry | str:
    progress = options.progress
    tell = None if progress is None else lambda done, size: progress(path.name, done, size)
    # Of some steps few slices are kept in the end, so all of them had better not be in memory at once.
    keep = options.steps is None
    try:
        if not keep:
            return Entry(cache.fetch(path, folder, options.limits, tell))
        return cache.obtain(path, folder if folder == options.cache else None, options.limits, tell)
    except (OSError, UnreadableInputError) as error:
        return str(error)


def _done(path: Path, options: BuildOptions) -> None:
    if options.progress is not None:
        try:
            size = path.stat().st_size
        except OSError:
            return
        options.progress(path.name, size, size)


def _workers(paths: Sequence[Path], options: BuildOptions) -> int:
    if options.workers is not None:
        return min(options.workers, len(paths))
    if len(paths) < 2 or not _main_is_guarded() or sum(map(_size, paths)) < _WORTH_BYTES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(len(paths), cores)


def _main_is_guarded() -> bool:
    """Whether new processes may be started: they import the main module, and a user's script would run once more."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    module = spec.name.partition(".")[0] if spec is not None else ""
    return file is None or module == "stepscope" or os.path.basename(file) in _GUARDED


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
