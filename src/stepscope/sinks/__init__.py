"""A run for the tools that teams look at: each file here hands one tool what `exported` makes of the run.

Nothing is sent anywhere but where the user's own settings of a tool lead. Libraries are extras, imported when their
sink is asked for. Whatever one of them raises ends as a sentence: a `StepscopeError`.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from stepscope.errors import EnvironmentRefusal, StepscopeError
from stepscope.report.escape import one_line

FOLDERS = "stepscope-exports"  # where folders are put that nobody named
PROJECT = "stepscope"  # of tools that sort runs into projects, where the user names none
PATIENCE_S = 60.0  # with a library that does not come back: a locked database or a silent server is told in less
AGAIN_S = 10.0  # after that, with what it does to end


class Target(Struct, frozen=True):
    """Where to, as the user gave it: a folder, or for MLflow also a database or an address."""

    out: str | None = None
    project: str | None = None
    resume: str | None = None
    force: bool = False

    def folder(self, sink: str, run: str) -> Path:
        """The folder to write to; absolute, as a name with a colon would mean a remote place to some."""
        return Path(self.out or Path(FOLDERS) / sink / run).absolute()


class Sent(Struct, frozen=True):
    """What an export came to. `points` were added; `remarks` are sentences on what a tool could not hold as it is."""

    where: str
    points: int
    remarks: tuple[str, ...] = ()
    then: str | None = None  # the command that comes next


def library(name: str, extra: str) -> ModuleType:
    """A library of an extra; raises `EnvironmentRefusal` where it is not there or cannot be imported."""
    package = name.partition(".")[0]
    try:
        if getattr(importlib.import_module(package), "__file__", None) is None:  # a folder of that name, as W&B makes
            raise ModuleNotFoundError(name=package)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        raise EnvironmentRefusal(f"{missing} is not installed; pip install 'stepscope[{extra}]'") from None
    except Exception as error:
        raise EnvironmentRefusal(f"{name} cannot be imported ({_said(error)}); install it anew") from error


@contextlib.contextmanager
def speaking_for(tool: str, advice: str) -> Iterator[Callable[[float], None]]:
    """Within, what a library raises is said in one line: an `EnvironmentRefusal`, with what to do.

    So is that it does not come back within `PATIENCE_S`. What is yielded begins that time anew, with the seconds that
    may pass (0: as many as it takes); it is called whenever the library got on, and around work of our own.
    """
    with _patience(lambda seconds: EnvironmentRefusal(f"{tool}: no answer in {seconds:g} s; {advice}")) as wait:
        try:
            yield wait
        except StepscopeError:
            raise
        except Exception as error:
            if isinstance(error.__context__, StepscopeError):  # ours, in words of the library
                raise error.__context__ from None
            raise EnvironmentRefusal(f"{tool}: {_said(error)}; {advice}") from error


@contextlib.contextmanager
def _patience(silent: Callable[[float], Exception]) -> Iterator[Callable[[float], None]]:
    """Raises in the main thread, which alone gets signals; in another one libraries may take as long as they like."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda _: None
        return
    given = 0.0

    def wait(seconds: float) -> None:
        nonlocal given
        given = seconds
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S if seconds else 0.0)

    def ring(*_: Any) -> None:
        raise silent(given)

    left_s, began = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    try:
        wait(PATIENCE_S)
        yield wait
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        if left_s:  # somebody else's
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - began), 0.001))


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Within, no other process exports the same run: two at once would each miss what the other writes.

    The run is opened and locked for that, and nothing of it changed.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # a file system without locks
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _said(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return one_line(f"{type(error).__name__}: {first}" if first else type(error).__name__, 300).rstrip(".;")
