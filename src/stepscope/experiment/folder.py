"""The folder of an experiment: which one belongs to a request, and that only one process works in it.

FOLDER/experiment.jsonl      what was done, line by line        FOLDER/experiment.json   what came of it, whole
FOLDER/runs/NNN-NAME/        a run folder                       FOLDER/runs/NNN-NAME.log what the command printed
FOLDER/report.html
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from stepscope.errors import EnvironmentRefusal, UsageError
from stepscope.experiment import journal
from stepscope.experiment.journal import State
from stepscope.record.host.folder import DEFAULT_PARENT, safe_name
from stepscope.record.host.processes import read_stat

RUNS = "runs"
LOCK = "lock"
_MOST_NUMBERS = 10_000
_MOST_NAME = 48


class Place(Struct, frozen=True):
    """Where an experiment lives. `resumed` is True where an unfinished one of the same request is there."""

    folder: Path
    resumed: bool


def find(key: str, script: str, out: Path | None = None, *, fresh: bool = False) -> Place:
    """The folder for the request with `key`: that of its unfinished experiment, else a new one; makes nothing.

    `fresh` continues nothing. Raises `UsageError` where `out` holds something else.
    """
    if out is not None:
        return _named(out.absolute(), key, fresh=fresh)
    base = Path.cwd() / DEFAULT_PARENT / f"experiment-{key[:8]}-{safe_name(script)}"
    for number in range(1, _MOST_NUMBERS):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not folder.exists():
            return Place(folder, resumed=False)
        state = _state(folder)
        if not fresh and state is not None and state.key == key and not state.complete:
            return Place(folder, resumed=True)
    raise EnvironmentRefusal(f"{base} and its numbered successors are all taken; name a folder with --out")


def _named(folder: Path, key: str, *, fresh: bool) -> Place:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; name a folder")
    try:
        used = folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())
    except OSError as error:
        raise EnvironmentRefusal(f"{folder}: {error.strerror}; name another --out") from None
    if not used:
        return Place(folder, resumed=False)
    state = _state(folder)
    if state is None:
        raise UsageError(f"--out {folder} is not empty and holds no experiment; name a new folder")
    if fresh:
        raise UsageError(f"--out {folder} holds an experiment, which --fresh does not remove; name a new folder")
    if state.key != key:
        raise UsageError(f"--out {folder} holds another experiment; name a new folder")
    if state.complete:
        raise UsageError(f"--out {folder} holds this experiment, finished; name a new folder to make it again")
    return Place(folder, resumed=True)


def _state(folder: Path) -> State | None:
    """What the journal in `folder` says; None where there is none."""
    try:
        data = (folder / journal.NAME).read_bytes()
    except OSError:
        return None
    return journal.fold(data[: data.rfind(b"\n") + 1])


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make the folder and be the only process in it while the block runs.

    Raises `UsageError` where another experiment works there, `EnvironmentRefusal` where nothing can be written.
    """
    try:
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise EnvironmentRefusal(f"cannot write {folder} ({error.strerror}); name a writable --out") from None
    try:
        _lock(folder, descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock(folder: Path, descriptor: int) -> None:
    """The kernel's lock, which goes with the process however it ends; without one, the process named in the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) and not _is_alive(owner):
            return  # a file system without locks, and nobody there
        process = f" (process {owner})" if owner else ""
        raise UsageError(f"another experiment{process} works in {folder}; wait for it or name another --out") from None


def _is_alive(owner: str) -> bool:
    return owner.isdecimal() and read_stat(int(owner)) is not None


def run_name(number: int, label: str) -> str:
    """The folder of run `number`, from 1 on."""
    return f"{number:03d}-{safe_name(label.replace('=', '-'))[:_MOST_NAME].rstrip('._-')}"
