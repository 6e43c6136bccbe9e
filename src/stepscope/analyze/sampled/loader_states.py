"""What a sampled thread does for the loader, by its call path: the main process, its workers, and their helper threads.

A loader's batch passes a worker (which fetches its items), the worker's feeder thread (which packs and sends it), and
the main process or its pin thread (which unpacks it, over a file descriptor that one more thread of the worker hands
out).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from stepscope.analyze.sampled.loop import is_fetch
from stepscope.analyze.sampled.user_paths import UserPaths, at, is_worker_loop
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE, Bools, Int32
from stepscope.tables.phases import in_file, is_wait, last_part

States = npt.NDArray[np.int8]

# The main thread WAITS for others, or does one of the next three itself; workers and helper threads are in the others.
NOTHING, WAITS, HERE, TRANSFER, PINNING, BUSY, START, IDLE = range(8)

_FETCHER = "torch/utils/data/_utils/fetch.py"
_PIN = "torch/utils/data/_utils/pin_memory.py"
_QUEUES = "multiprocessing/queues.py"
_SHARER = "multiprocessing/resource_sharer.py"
_PACKING = ("torch/multiprocessing/reductions.py", "multiprocessing/reduction.py", _SHARER)
_CONNECTION = "multiprocessing/connection.py"
_MESSAGES = (
    *("recv_bytes", "_recv_bytes", "recv", "_recv", "send_bytes", "_send_bytes", "send", "_send"),
    *("Client", "answer_challenge", "deliver_challenge"),
)


class LoaderStates:
    """States by node, for a thread whose innermost frame that is. `line` is the user's line below the loader, or -1."""

    def __init__(self, users: UserPaths) -> None:
        self._users = users
        self._fetches = users.passes(is_fetch)
        self._makes = users.passes(_is_fetcher)
        self._parked = users.marked(_is_parked) | users.passes(_polls)
        # an innermost `get` takes a message apart in C
        self._unpacks = users.passes(_moves) | users.marked(_gets)
        self._pins = users.passes(_is_pinning)

    @cached_property
    def main(self) -> States:
        """Of the main thread of a rank below its loader's `__next__`."""
        return _first(
            ((self.line >= 0) | self._makes, HERE),
            (self._pins, PINNING),
            (self._unpacks | self._users.passes(_puts), TRANSFER),
            (self._parked | self._users.passes(_takes), WAITS),
            (self._fetches, HERE),
        )

    @cached_property
    def worker(self) -> States:
        """Of the main thread of a loader worker."""
        in_loop, gets = self._users.passes(is_worker_loop), self._users.passes(_gets)
        return _first(
            (self._makes, BUSY),
            (self._parked & (gets | ~in_loop), IDLE),
            (~in_loop | (self._users.innermost >= 0), START),
            (self._unpacks | self._users.passes(_puts), TRANSFER),
            (in_loop, BUSY),
        )

    @cached_property
    def helper(self) -> States:
        """Of other threads of ranks and workers. One that hands out descriptors works while another unpacks."""
        unpacks_here = self._pins & self._unpacks
        return _first(
            (self._parked | (self._users.passes(_hands_out) & ~unpacks_here), NOTHING),
            (self._pins & ~self._unpacks, PINNING),
            (self._pins | self._users.passes(_feeds), TRANSFER),
        )

    @cached_property
    def line(self) -> Int32:
        """The number of the user's innermost line below the loader's fetcher, else below its `__next__`."""
        users = self._users
        fetcher = users.tree.outermost(users.marked(_is_fetcher))
        entry = np.where(fetcher >= 0, fetcher, users.tree.outermost(users.marked(is_fetch)))
        below = users.is_below(users.innermost, entry) & (entry >= 0)
        return np.where(below, at(users.line, users.innermost, NONE), np.int32(NONE))


def _first(*choices: tuple[Bools, int]) -> States:
    """The first state that holds, by node."""
    found: States = np.select([held for held, _ in choices], [state for _, state in choices], NOTHING).astype(np.int8)
    return found


def _is_parked(frame: Frame) -> bool:
    """Whether a thread waits here for something to begin, rather than for the rest of a message on its way."""
    return is_wait(frame, on_device=False) and not _gets(frame) and last_part(frame.function) != "_recv"


def _polls(frame: Frame) -> bool:
    """Whether all that is called here belongs to waiting, too."""
    return _is_parked(frame) and last_part(frame.function) in ("wait", "select", "poll", "_poll")


def _gets(frame: Frame) -> bool:
    return last_part(frame.function) == "get" and in_file(frame.file, _QUEUES)


def _takes(frame: Frame) -> bool:
    """Whether a batch is taken that the pin thread hands over."""
    return last_part(frame.function) == "get" and in_file(frame.file, "queue.py")


def _puts(frame: Frame) -> bool:
    return last_part(frame.function) == "put" and in_file(frame.file, _QUEUES)


def _feeds(frame: Frame) -> bool:
    return last_part(frame.function) == "_feed" and in_file(frame.file, _QUEUES)


def _hands_out(frame: Frame) -> bool:
    return in_file(frame.file, _SHARER)


def _moves(frame: Frame) -> bool:
    if in_file(frame.file, _CONNECTION):
        return last_part(frame.function) in _MESSAGES
    return any(in_file(frame.file, ending) for ending in _PACKING)


def _is_fetcher(frame: Frame) -> bool:
    return in_file(frame.file, _FETCHER)


def _is_pinning(frame: Frame) -> bool:
    return in_file(frame.file, _PIN)
