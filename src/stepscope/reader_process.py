"""Starts the process that reads a trace while this one imports what will look at it: before numpy is imported here.

`stepscope.read.ahead` is what runs there, and who takes its messages here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

# A process takes a tenth of a second to start; less than this is decoded in that time.
WORTH_BYTES = 2**20
WORTH_UNPACKED_BYTES = 20 * WORTH_BYTES
MODULE = "stepscope.read.ahead"
_PIPE_BYTES = 2**20  # a chunk is megabytes
_RECORDED = "STEPSCOPE_RECORD"  # set in a process whose children are to be recorded

# By the thread that asked for it: another one that reads the same file must not have it taken away.
_started: dict[tuple[int, Path], subprocess.Popen[bytes]] = {}


@contextlib.contextmanager
def reading(path: Path) -> Iterator[bool]:
    """Another process reads `path` for who `take`s it within, on this thread; whether one does, as it saves time."""
    key = threading.get_ident(), path
    process = _start(path) if cores() > 1 and key not in _started and _is_large(path) else None
    if process is None:
        yield False
        return
    _started[key] = process
    try:
        yield True
    finally:
        _started.pop(key, None)
        end(process)


def take(path: Path) -> subprocess.Popen[bytes] | None:
    """The process that reads `path`; None where none does, or somebody has it already."""
    return _started.pop((threading.get_ident(), path), None)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process if it has not. Idempotent."""
    if process.stdout is not None:
        process.stdout.close()
    process.kill()
    process.wait()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(path: Path) -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-m", MODULE, str(path)]
    environment = {name: value for name, value in os.environ.items() if name != _RECORDED}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError, ImportError, AttributeError):
        import fcntl

        assert process.stdout is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return process


def _is_large(path: Path) -> bool:
    try:
        least = WORTH_BYTES if path.suffix == ".gz" else WORTH_UNPACKED_BYTES
        return path.is_file() and path.stat().st_size >= least
    except OSError:
        return False
