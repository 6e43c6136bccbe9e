"""Whether this process may start others like it, how many are worth it, and work side by side in threads or a fork.

A command forks before it has imported anything: one thread, little memory, nothing that minds. The child imports what
its work takes while the command imports its own, is told the work once the command knows it (`begin`, `start`), and
hands over pickled values through a pipe; it has no terminal and no output of its own, and ends with its reader.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What `work` gives of each item, in order, by a thread per core: for what NumPy, Polars or a digest does."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(work, items))


Send = Callable[[bytes], None]

_WAITING = 8  # values that were made and not taken: what bounds the child's memory
_PIPE_BYTES = 1 << 20
_LENGTH_BYTES = 8
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ
_begun: list[tuple[Beside, int]] = []  # with the pipe through which its work is told
_started: dict[Path, Beside] = {}


class Ended(Exception):
    """The child ended before it was done, mostly killed for the memory of both."""


class Beside:
    """What a child makes; `values` may be taken once."""

    def __init__(self, child: int, pipe: int) -> None:
        self._child, self._pipe = child, pipe

    def values(self) -> Iterator[Any]:
        """What it hands over, until it is done; raises `Ended`."""
        with os.fdopen(self._pipe, "rb", buffering=_PIPE_BYTES) as pipe:
            while head := pipe.read(_LENGTH_BYTES):
                size = int.from_bytes(head, "little")
                data = pipe.read(size)
                if len(data) < size:
                    raise Ended
                yield pickle.loads(data)  # noqa: S301 - written by our own child

    def stop(self) -> None:
        """Nobody wants it any more."""
        with suppress(OSError):
            os.close(self._pipe)
        with suppress(OSError):
            os.kill(self._child, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        with suppress(OSError):
            os.waitpid(self._child, 0)


def begin(imported: Callable[[], Callable[..., None]]) -> None:
    """Start a child that imports its work and waits for the arguments of it, where a process may fork and there is a
    core for it. What the work is given first takes what it makes.

    Only for a process that has imported nothing: other threads may hold locks that the child would wait for.
    """
    if not sys.platform.startswith("linux") or usable_cores() < 2 or threading.active_count() > 1:
        return
    if None in (sys.stdin, sys.stdout, sys.stderr):
        return  # closed: a pipe would take its number
    try:
        asked, told = os.pipe()
        taken, given = os.pipe()
        child = os.fork()
    except OSError:
        return  # no process or no file is left: the caller does it itself
    if child:
        os.close(asked)
        os.close(given)
        _begun.append((Beside(child, taken), told))
        return
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is of the whole group: it ends at once
        os.close(told)
        os.close(taken)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        work = imported()
        with os.fdopen(asked, "rb") as pipe:
            arguments = pipe.read()
        if arguments:
            _hand_over(given, lambda send: work(send, *pickle.loads(arguments)))  # noqa: S301 - of who forked
        status = 0
    finally:
        os._exit(status)


def start(path: Path, *arguments: Any) -> None:
    """Tell the child, if one was begun, the arguments of its work, which will be asked for by `path`."""
    if _begun:
        child, told = _begun.pop()
        with suppress(OSError):  # it may have ended
            os.write(told, pickle.dumps(arguments))
        os.close(told)
        _started[path.resolve()] = child


def dismiss() -> None:
    """The child that was begun, if one was, is not needed."""
    while _begun:
        child, told = _begun.pop()
        os.close(told)
        child.stop()


def started(path: Path) -> Beside | None:
    """What was started for `path`, once."""
    return _started.pop(path.resolve(), None) if _started else None


def _hand_over(pipe: int, make: Callable[[Send], None]) -> None:
    """Make and write on two threads: what is made waits for no reader, up to a bound."""
    from fcntl import fcntl
    from queue import Queue

    with suppress(OSError):
        fcntl(pipe, _SET_PIPE_SIZE, _PIPE_BYTES)
    waiting: Queue[bytes | None] = Queue(_WAITING)

    def write() -> None:
        try:
            while (value := waiting.get()) is not None:
                for data in (len(value).to_bytes(_LENGTH_BYTES, "little"), value):
                    left = memoryview(data)
                    while left:
                        left = left[os.write(pipe, left) :]
        except OSError:
            os._exit(1)  # the reader is gone

    writer = threading.Thread(target=write)
    writer.start()
    try:
        make(waiting.put)
    finally:
        waiting.put(None)
        writer.join()
