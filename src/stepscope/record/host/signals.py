"""Signals while the command runs: taken one by one with their origin, so that none is delivered twice.

A key press at the terminal goes to the whole foreground group: the command has it already. A signal from `kill` (or a
batch system) was meant for whoever holds this pid, so it is handed on. Who signals every process of a job one by one
reaches the command twice, as with any launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

_FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP,
    signal.SIGCONT,
    # what would end us, and leave the command behind
    signal.SIGALRM, signal.SIGABRT, signal.SIGXCPU, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR,
)  # fmt: skip
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
# A scheduler kills within about 30 s of its SIGTERM; a command that lives longer was not being killed.
_GRACE_SECONDS = 60.0


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those of these signals that were not ignored when we started (`nohup`)."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


class Interrupted(Exception):
    """SIGTERM or SIGHUP arrived after the command had ended: stop what we are doing and leave."""


class BlockedSignals:
    """Blocks the signals above for the time of a `with`; `wait` takes them.

    Signals that were ignored when we started (`nohup`) stay ignored, for the command too. `original` is the mask to
    give back to the command.
    """

    def __init__(self) -> None:
        self._taken = frozenset((*heeded(_FORWARDED), signal.SIGCHLD))
        self.original: set[int] = set()
        # Whether SIGCHLD was ignored when we started; the command inherits that, we cannot use it.
        self.children_were_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        self._asked_to_end: float | None = None  # monotonic seconds of the last SIGTERM or SIGHUP

    def hurried(self) -> bool:
        """Whether SIGTERM or SIGHUP came so lately that SIGKILL may follow."""
        return self._asked_to_end is not None and time.monotonic() - self._asked_to_end < _GRACE_SECONDS

    def __enter__(self) -> BlockedSignals:
        if self.children_were_ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or the exit status would be lost
        self.original = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)}
        return self

    def __exit__(self, *_: object) -> None:
        while (info := signal.sigtimedwait(self._taken, 0)) is not None:
            # A Ctrl-C that came too late was meant for the command; an order to end is still one.
            if info.si_signo in ENDINGS:
                self._asked_to_end = time.monotonic()
        signal.pthread_sigmask(signal.SIG_SETMASK, self.original)

    def wait(self, child: subprocess.Popen[bytes], timeout: float) -> int | None:
        """Handle at most one signal within `timeout` seconds; returns its number."""
        info = signal.sigtimedwait(self._taken, timeout)
        if info is None:
            return None
        number = info.si_signo
        if number == signal.SIGCHLD:
            return number
        if number in ENDINGS:
            self._asked_to_end = time.monotonic()
        # SI_USER, SI_QUEUE, SI_TKILL: from a process, not from the kernel's terminal. An alarm set before we were
        # started was the command's.
        if info.si_code <= 0 or number == signal.SIGALRM:
            with contextlib.suppress(OSError):  # it runs as another user now
                child.send_signal(number)
        if number == signal.SIGTSTP:
            # We stop too: the shell waits until all of the job has. By the same signal, not SIGSTOP: where no shell
            # could ever continue us (the first process of a container) the kernel ignores it for the command, and so
            # it must for us.
            os.kill(os.getpid(), signal.SIGTSTP)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTSTP,))
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTSTP,))
        return number


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """`handler` takes these signals for the time of a `with`."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)


def interrupted_on_termination() -> contextlib.AbstractContextManager[None]:
    """After the command: SIGTERM and SIGHUP raise `Interrupted`, so that we still end with the command's status."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    return handled(heeded(ENDINGS), interrupt)


MAX_STEPS_MARKER = "max-steps"
AGAIN_SECONDS = 5.0  # twice this at least between two signals: who answers by ending an epoch gets the time for it
MOST = 6


class StepLimit:
    """Asked now and then; calls `interrupt` when the limit is reached, and again while journals grow."""

    def __init__(
        self,
        host_dir: Path,
        ranks: Callable[[], Iterable[Path]],
        interrupt: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._marker = host_dir / MAX_STEPS_MARKER
        self._ranks, self._interrupt, self._clock = ranks, interrupt, clock
        self._sent = 0
        self._due = 0.0
        self._seen: int | None = None  # bytes of the journals right after the latest signal

    @property
    def pending(self) -> bool:
        return self._sent == 0

    def look(self) -> None:
        now = self._clock()
        if self._sent >= MOST or now < self._due or (not self._sent and not self._marker.exists()):
            return
        size = 0
        for folder in self._ranks():
            with contextlib.suppress(OSError):
                size += (folder / "steps.jsonl").stat().st_size
        if self._sent and (self._seen is None or size <= self._seen):
            # the first look after a signal: what was on its way has been written by now
            self._seen, self._due = size, now + AGAIN_SECONDS
            return
        self._interrupt()
        self._sent += 1
        self._seen, self._due = None, now + AGAIN_SECONDS
