"""The agent's files: appended to with plain `os.write`, nothing else buffers.

An event is written at once. Rows of steps are written once they span `BATCH_NS`, several in one write when steps are
short: a `kill -9` or `os._exit` loses at most that much of the run, and no thread is needed to flush. A forked child
drops what is pending, for it is the parent's. A descriptor that the script has closed, or that is another file's by
now, is opened anew. A file that cannot be written (disk full, folder removed) is given up for good, which a block taken
ahead of time says (`last_word`); the training never hears of it.
"""

from __future__ import annotations

import json
import os
import sys
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import Any, Callable, Mapping

from stepscope.record.agent.config import Clock
from stepscope.record.agent.masking import mask_argv
from stepscope.record.agent.segments import StepRow
from stepscope.schema import RANK_SCHEMA, STEP_COLUMNS, STEPS_SCHEMA

STEPS_BYTE_LIMIT = (
    1 << 30
)  # a billion-byte journal is some ten million steps; beyond it a run folder is no longer handy
EVENTS_BYTE_LIMIT = 1 << 29
# A write costs as much as everything else a step costs; only steps shorter than this share one.
BATCH_NS = 100_000_000

_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


# Whole numbers, None and two plain words: half the time the encoder takes.
_ROW_FORMAT = "[" + ",".join('"%s"' if name in ("kind", "signal") else "%s" for name in STEP_COLUMNS) + "]"


class LineFile:
    """An append-only file of lines. `write` returns False once the file is lost or full, and never raises OSError."""

    def __init__(self, path: str, byte_limit: int) -> None:
        self.path = path
        self.full = False
        self.error: str | None = None  # why it was lost
        self.whole = 0  # lines of the write that failed which are there nevertheless
        self._left = byte_limit
        self._descriptor: int | None = None
        self._identity = (0, 0)

    def write(self, line: str) -> bool:
        """Append lines: `line` and its line break, in one write."""
        if self.error or self.full:
            return False
        data = (line + "\n").encode("utf-8", "backslashreplace")
        self._left -= len(data)
        if self._left < 0:
            self.full = True
            return False
        try:
            descriptor = self._opened()
            written = os.write(descriptor, data)
            if written < len(data):  # a full disk can take half a line: readers expect it to be the last
                self.whole = data.count(b"\n", 0, written)
                os.write(descriptor, data[written:])
        except OSError as error:
            self.error = error.strerror or str(error)
        return self.error is None

    def _opened(self) -> int:
        """The file's descriptor. Scripts close all that they know nothing of, and then open files of their own."""
        if self._descriptor is not None:
            try:
                status = os.fstat(self._descriptor)
            except OSError:
                status = None
            if status is not None and (status.st_dev, status.st_ino) == self._identity:
                return self._descriptor
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if descriptor <= 2:  # of a stream that is closed: whatever is printed there would be ours
            descriptor, closed = fcntl(descriptor, F_DUPFD_CLOEXEC, 3), descriptor
            os.close(closed)
        self._descriptor = descriptor
        status = os.fstat(self._descriptor)
        self._identity = (status.st_dev, status.st_ino)
        return self._descriptor


def append_line(path: str, record: dict[str, Any]) -> bool:
    """Append `record` as one JSON line to a file several processes share. False when it could not be written."""
    return _write_at_once(path, (_encode(record) + "\n").encode("utf-8", "backslashreplace"), os.O_APPEND | os.O_CREAT)


def write_whole(path: str, text: str) -> bool:
    """Put a whole file in place in one step. False when it could not be written."""
    try:
        with open(path + ".part", "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.replace(path + ".part", path)
    except OSError:
        return False
    return True


def _write_at_once(path: str, data: bytes, flags: int) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


# (rank, local rank, size of the world) as starters of processes name them, when there is more than one process
_STARTERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)
_LAST_STEP = 0xFFFFFFF0  # from here on, ids of SLURM's own steps: batch, extern, interactive


def rank_identity() -> dict[str, int | None]:
    """`rank`, `local_rank`, `world_size` and `attempt` as the launcher's environment gives them, else None."""
    found = {
        "rank": _environment_int("RANK"),
        "local_rank": _environment_int("LOCAL_RANK"),
        "world_size": _environment_int("WORLD_SIZE"),
        "attempt": _environment_int("TORCHELASTIC_RESTART_COUNT"),
    }
    if found["rank"] is None:
        step = _environment_int("SLURM_STEP_ID")
        starters = list(_STARTERS)
        if step is not None and step < _LAST_STEP:  # in a batch script the same names stand for it, which is no task
            size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
            starters.append(("SLURM_PROCID", "SLURM_LOCALID", size))
        names = next((names for names in starters if (_environment_int(names[2]) or 1) > 1), ())
        for key, name in zip(("rank", "local_rank", "world_size"), names):
            found[key] = _environment_int(name) if found[key] is None else found[key]
    return found


def claim_rank_folder(run: str, rank: int) -> str | None:
    """Make RUN/rank-N, or RUN/rank-N.2, RUN/rank-N.3 … where taken; its path, or None when the run cannot be written.

    Making the folder is the claim: two processes never get the same one, on a shared file system either.
    """
    for attempt in range(1, 10_000):
        name = f"rank-{rank}" if attempt == 1 else f"rank-{rank}.{attempt}"
        path = os.path.join(run, name)
        try:
            os.mkdir(path)
        except FileExistsError:
            continue
        except OSError:
            return None
        return path
    return None


class Journal:
    """The rank folder of this process: claimed on first use, then steps.jsonl, events.jsonl and rank.json in it."""

    def __init__(
        self,
        run: str,
        host_dir: str,
        clock: Clock,
        describe: Callable[[], dict[str, Any]],
        current_step: Callable[[], int | None],
    ) -> None:
        self._run = run
        self._host_dir = host_dir
        self._clock = clock
        self._describe = describe
        self._current_step = current_step
        self._pid = os.getpid()
        self._steps: LineFile | None = None
        self._events: LineFile | None = None
        self._early: list[str] = []
        self._pending: list[StepRow] = []
        self._refused = False
        self._last_word: LastWord | None = None
        self._missing = {"steps": 0, "events": 0}  # rows that could not be written
        self.folder: str | None = None

    def claim(self) -> bool:
        """Claim the rank folder. Idempotent; False when it cannot be had or this is a forked child."""
        if self._events is not None:
            return True
        if self._refused or os.getpid() != self._pid:
            return False
        identity = rank_identity()
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            # Ranks of `mp.spawn` inside one task of an MPI or SLURM job, or started by Accelerate, which sets RANK to 0
            # in each: the group knows better, if it is that of the whole job.
            size = distributed.get_world_size()
            if _environment_int("RANK") is None or size == identity["world_size"]:
                identity.update(rank=distributed.get_rank(), world_size=size)
        folder = claim_rank_folder(self._run, identity["rank"] or 0)
        if folder is None:
            self._refused = True
            self._early.clear()
            return False
        self.folder = folder
        self._last_word = LastWord(folder)
        self._steps = LineFile(os.path.join(folder, "steps.jsonl"), STEPS_BYTE_LIMIT)
        self._events = LineFile(os.path.join(folder, "events.jsonl"), EVENTS_BYTE_LIMIT)
        clock = {"epoch_offset_ns": self._clock.epoch_offset_ns}
        record = {"schema": RANK_SCHEMA, **identity, "rank": identity["rank"] or 0, **self._describe(), "clock": clock}
        write_whole(os.path.join(folder, "rank.json"), _encode(record))
        self._steps.write(_encode({"schema": STEPS_SCHEMA, "columns": STEP_COLUMNS}))
        for line in self._early:
            self._events.write(line)
        self._early.clear()
        append_line(
            os.path.join(self._host_dir, "agents.jsonl"),
            {"time_ns": self._clock.now(), "pid": self._pid, "folder": os.path.basename(folder)},
        )
        return True

    def write_steps(self, rows: list[StepRow]) -> None:
        """Append rows (at least one), now or together with those of the next `BATCH_NS`."""
        self._pending += rows
        if rows[-1].start_ns + rows[-1].wall_ns - self._pending[0].start_ns >= BATCH_NS:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait for others."""
        if os.getpid() != self._pid:
            return  # a fork whose own hook has not run yet, struck by the garbage collector: the rows are the parent's
        rows, self._pending = self._pending, []
        if not rows or (self._steps is None and not self.claim()) or self._steps is None:
            return
        was_full = self._steps.full
        if not self._steps.write("\n".join([_ROW_FORMAT % row for row in rows]).replace("None", "null")):
            self._lose("steps", len(rows) - (0 if self._missing["steps"] else self._steps.whole))
        if self._steps.full and not was_full:
            self.write("budget", step=None, file="steps.jsonl", bytes=STEPS_BYTE_LIMIT)

    def write(self, kind: str, time_ns: int | None = None, duration_ns: int | None = None, **fields: Any) -> None:
        """Append an event that started at `time_ns` (now when None) and lasted `duration_ns`. It never raises.

        Its step is the one under way, null outside of steps, where `fields` have no other.
        """
        time_ns = self._clock.now() if time_ns is None else time_ns
        record = {"kind": kind, "time_ns": time_ns, "duration_ns": duration_ns, "step": None, **fields}
        if "step" not in fields:
            record["step"] = self._current_step()
        self.write_event(record)

    def write_event(self, record: dict[str, Any]) -> None:
        """Append an event; kept in memory (at most 1,000) until this process claims a rank folder."""
        line = _encode(record)
        if os.getpid() != self._pid:
            return
        if self._pending:
            self.flush()
        if self._events is not None:
            if not self._events.write(line):
                self._lose("events", 1)
        elif not self._refused and len(self._early) < 1000:
            self._early.append(line)

    def close(self) -> None:
        """Say how much is missing in all, if anything is."""
        if self._last_word is not None and any(self._missing.values()) and os.getpid() == self._pid:
            files = [file for file in (self._steps, self._events) if file is not None and file.error]
            if files:
                reasons = {os.path.basename(file.path): file.error for file in files}
                self._last_word.say({"time_ns": self._clock.now(), "missing": self._missing, "reasons": reasons})

    def _lose(self, what: str, number: int) -> None:
        first = not self._missing[what]
        self._missing[what] += number
        if first:
            self.close()

    def abandon(self) -> None:
        """Write nothing any more: this is a forked child and the files are the parent's."""
        self._refused = True
        self._pending = []
        self._steps = None
        self._events = None
        self.folder = None
        self._early.clear()


def masked_command() -> list[str]:
    """This process's command line, secrets masked."""
    return mask_argv(list(getattr(sys, "orig_argv", None) or sys.argv))


def _environment_int(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


NAME = "last-word.json"
SIZE = 4096  # bytes: a block of most file systems


class LastWord:
    """The file NAME in `folder`; neither making it nor `say` ever raises OSError."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, NAME)
        _write_at_once(self._path, b" " * (SIZE - 1) + b"\n", os.O_CREAT | os.O_EXCL)

    def say(self, record: Mapping[str, Any]) -> None:
        """Replace what was said before; a `record` of more than `SIZE` bytes is not said."""
        data = json.dumps(record, separators=(",", ":")).encode()
        if len(data) < SIZE:
            _write_at_once(self._path, data.ljust(SIZE - 1) + b"\n", 0)
