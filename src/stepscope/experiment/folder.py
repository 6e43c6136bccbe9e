"""The folder of an experiment: which one belongs to a request, that only one process works in it, and its journal.

FOLDER/experiment.jsonl      what was done, line by line        FOLDER/experiment.json   what came of it, whole
FOLDER/runs/NNN-NAME/        a run folder                       FOLDER/runs/NNN-NAME.log what the command printed
FOLDER/report.html

A kill at any moment loses at most the run in progress: lines of the journal are only appended, each with one write, and
flushed to the disk before the next run starts. Losses may be no finite numbers, so lines are JSON as Python writes it
(NaN, Infinity).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.errors import EnvironmentRefusal, UsageError, refuse
from stepscope.experiment.plan import Plan, Screened, Slot
from stepscope.model.comparison import Measure
from stepscope.record.host.folder import DEFAULT_PARENT, safe_name
from stepscope.record.host.processes import read_stat

JOURNAL = "experiment.jsonl"
SCHEMA = "stepscope.experiment_journal/1"
RUNS = "runs"
LOCK = "lock"
EXPERIMENT = "experiment"
_MOST_NUMBERS = 10_000
_MOST_NAME = 48


class Held(NamedTuple):
    """What a folder holds: for which request, and whether it came to its end."""

    key: str | None
    complete: bool


def find(
    key: str,
    script: str,
    out: Path | None = None,
    *,
    fresh: bool = False,
    what: str = EXPERIMENT,
    held: Callable[[Path], Held | None] | None = None,
) -> tuple[Path, bool]:
    """The folder for the request with `key`, and whether unfinished work on it is there; makes nothing.

    It is that of the unfinished experiment, or other work of this kind (`what`, of which `held` says what a folder
    holds), else a new one; `fresh` continues nothing. Raises `UsageError` where `out` holds something else.
    """
    held = held or _held
    if out is not None:
        return out.absolute(), _is_unfinished(out.absolute(), key, held, what, fresh=fresh)
    base = Path.cwd() / DEFAULT_PARENT / f"{what}-{key[:8]}-{safe_name(script)}"
    for number in range(1, _MOST_NUMBERS):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not folder.exists():
            return folder, False
        if not fresh and held(folder) == Held(key, complete=False):
            return folder, True
    raise EnvironmentRefusal(f"{base} and its numbered successors are all taken; name a folder with --out")


def _is_unfinished(folder: Path, key: str, held: Callable[[Path], Held | None], what: str, *, fresh: bool) -> bool:
    """Whether a folder that the user named holds the work, unfinished; raises where it holds something else."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; name a folder")
    try:
        used = folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())
    except OSError as error:
        raise EnvironmentRefusal(f"{folder}: {error.strerror}; name another --out") from None
    if not used:
        return False
    found = held(folder)
    holds, one = f"--out {folder} holds", f"an {what}" if what == EXPERIMENT else f"a {what}"
    refuse(
        {
            f"--out {folder} is not empty and holds no {what}; name a new folder": found is None,
            f"{holds} {one}, which --fresh does not remove; name a new folder": fresh,
            f"{holds} another {what}; name a new folder": found is not None and found.key != key,
            f"{holds} this {what}, finished; name a new folder to make it again": (
                found is not None and found.complete
            ),
        }
    )
    return True


def _held(folder: Path) -> Held | None:
    """What the journal of an experiment in `folder` says; None where there is none."""
    try:
        data = (folder / JOURNAL).read_bytes()
    except OSError:
        return None
    state = fold(data[: data.rfind(b"\n") + 1])
    return Held(state.key, state.complete)


@contextlib.contextmanager
def claimed(folder: Path, what: str = EXPERIMENT) -> Iterator[None]:
    """Make the folder and be the only process in it while the block runs.

    The lock is the kernel's, which goes with the process however it ends; without one, the process named in the file.
    Raises `UsageError` where another one works there, `EnvironmentRefusal` where nothing can be written.
    """
    try:
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise EnvironmentRefusal(f"cannot write {folder} ({error.strerror}); name a writable --out") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            alive = owner.isdecimal() and read_stat(int(owner)) is not None
            # else it is a file system without locks, and nobody is there
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES) or alive:
                who = f"another {what}{f' (process {owner})' if owner else ''} works in {folder}"
                raise UsageError(f"{who}; wait for it or name another --out") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def run_name(number: int, label: str) -> str:
    return f"{number:03d}-{safe_name(label.replace('=', '-'))[:_MOST_NAME].rstrip('._-')}"


class Made(Struct, frozen=True):
    """A run that ended, with its `measure` or the `failure` that says what went wrong with it.

    `folder` is relative to the experiment's folder; `wall_s` is of the whole run, its reading included. `length` is how
    many steps it made where it ended by itself, None where we ended it.
    """

    slot: Slot
    folder: str
    wall_s: float
    measure: Measure | None = None
    failure: str | None = None
    length: int | None = None


class State(Struct, frozen=True):
    """All that is known of an experiment. `runs` counts the runs started; `open` are folders of those never finished,
    each with the process that led it: (folder, pid, start of it in clock ticks since boot)."""

    key: str | None = None
    plan: Plan | None = None
    screened: Screened | None = None
    made: tuple[Made, ...] = ()
    runs: int = 0
    open: tuple[tuple[str, int | None, int | None], ...] = ()
    complete: bool = False
    bad_lines: int = 0


class Journal(Struct):
    """The open file of one experiment, and the state that its lines add up to.

    Kinds of lines and their fields: "experiment" (schema, key, line: the command line that asks for it), "plan" (plan),
    "screened" (screened), "started" (slot, folder), "process" (folder, pid, start_ticks: who leads the run, so that a
    later session can wait for its end), "finished" (made), "dropped" (folder: a run that was started and never finished
    is gone) and "complete".
    """

    path: Path
    state: State = field(default_factory=State)
    _file: int | None = None

    def open(self) -> None:
        """Read what is there, cut a torn last line off, and be ready to append. Raises `EnvironmentRefusal`."""
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            self.state = fold(whole)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if len(whole) < len(data):
                os.ftruncate(self._file, len(whole))
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def add(self, kind: str, **fields: Any) -> None:
        """Append a line, and fold it into the state. Raises `EnvironmentRefusal`."""
        assert self._file is not None, "open() comes first"
        row = {"kind": kind, "time_ns": time.time_ns(), **msgspec.to_builtins(fields)}
        line = json.dumps(row, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(28, "no space left on device")
            os.fsync(self._file)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        self.state = _next(self.state, json.loads(line))


def fold(data: bytes) -> State:
    """The state after the whole lines of `data`; never raises."""
    state = State()
    for line in data.splitlines():
        try:
            state = _next(state, json.loads(line))
        except (ValueError, RecursionError, msgspec.ValidationError, KeyError, TypeError):
            state = replace(state, bad_lines=state.bad_lines + 1)
    return state


def _next(state: State, row: Mapping[str, Any]) -> State:
    match row["kind"]:
        case "experiment":
            return replace(state, key=str(row["key"]))
        case "plan":
            return replace(state, plan=msgspec.convert(row["plan"], type=Plan))
        case "screened":
            return replace(state, screened=msgspec.convert(row["screened"], type=Screened))
        case "started":
            return replace(state, runs=state.runs + 1, open=(*state.open, (str(row["folder"]), None, None)))
        case "process":
            led = (str(row["folder"]), int(row["pid"]), row["start_ticks"])
            return replace(state, open=tuple(led if each[0] == led[0] else each for each in state.open))
        case "finished":
            made = msgspec.convert(row["made"], type=Made)
            rest = tuple(each for each in state.open if each[0] != made.folder)
            return replace(state, made=(*state.made, made), open=rest)
        case "dropped":
            return replace(state, open=tuple(each for each in state.open if each[0] != str(row["folder"])))
        case "complete":
            return replace(state, complete=True)
    return state  # of a later version


def _unwritable(path: Path, error: OSError) -> EnvironmentRefusal:
    return EnvironmentRefusal(f"{path}: cannot be written ({error.strerror}); free space or name another --out")
