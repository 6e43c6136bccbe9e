"""One process at a time on the device: what else a start takes (imports, reports) may go on beside it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

TURN = "GPU_TURN"  # names the file whose lock is the turn; without it nobody waits
_held: list[IO[str]] = []


def take_turn() -> None:
    """Wait until no other process of the check works on the device; the turn ends with the process, if not before."""
    name = os.environ.get(TURN)
    if name:
        _held.append(Path(name).open("w"))  # noqa: SIM115 - open until the turn ends
        fcntl.flock(_held[-1], fcntl.LOCK_EX)


def end_turn() -> None:
    """Let the next one have the device."""
    while _held:
        _held.pop().close()
