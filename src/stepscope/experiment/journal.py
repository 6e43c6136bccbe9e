"""experiment.jsonl: what was done, line by line, so that a kill at any moment loses at most the run in progress.

Lines are only appended, each with one write, and flushed to the disk before the next run starts. Reading folds them
into a `State`. A torn last line is dropped when the file is opened again; any other line that cannot be understood is
skipped and counted. Losses may be no finite numbers, so lines are JSON as Python writes it (NaN, Infinity).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.errors import EnvironmentRefusal
from stepscope.experiment.plan import Plan, Screened, Slot
from stepscope.model.comparison import Measure

NAME = "experiment.jsonl"
SCHEMA = "stepscope.experiment_journal/1"

_T = TypeVar("_T")


class Made(Struct, frozen=True):
    """A run that ended. `measure` is None where it had no steps; `failure` says what went wrong with it.

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

    @property
    def wall_s(self) -> float:
        """Seconds spent on finished runs, in all sessions."""
        return sum(made.wall_s for made in self.made)


class Journal(Struct):
    """The open file of one experiment, and the state that its lines add up to."""

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

    def begin(self, key: str, line: str) -> None:
        """The experiment itself; `line` is the command line that asks for it."""
        self._append("experiment", schema=SCHEMA, key=key, line=line)

    def planned(self, plan: Plan) -> None:
        self._append("plan", plan=msgspec.to_builtins(plan))

    def screened(self, screened: Screened) -> None:
        self._append("screened", screened=msgspec.to_builtins(screened))

    def started(self, slot: Slot, folder: str) -> None:
        self._append("started", slot=msgspec.to_builtins(slot), folder=folder)

    def leads(self, folder: str, pid: int, start_ticks: int | None) -> None:
        """The process that leads the run in `folder`, so that a later session can wait for its end."""
        self._append("process", folder=folder, pid=pid, start_ticks=start_ticks)

    def finished(self, made: Made) -> None:
        self._append("finished", made=msgspec.to_builtins(made))

    def dropped(self, folder: str) -> None:
        """A run that was started and never finished is gone."""
        self._append("dropped", folder=folder)

    def completed(self) -> None:
        """Nothing is left to do."""
        self._append("complete")

    def _append(self, kind: str, **fields: Any) -> None:
        assert self._file is not None, "open() comes first"
        row = {"kind": kind, "time_ns": time.time_ns(), **fields}
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
            row = json.loads(line)
            state = _next(state, row)
        except (ValueError, RecursionError, msgspec.ValidationError, KeyError, TypeError):
            state = replace(state, bad_lines=state.bad_lines + 1)
    return state


def _next(state: State, row: Mapping[str, Any]) -> State:
    kind = row["kind"]
    if kind == "experiment":
        return replace(state, key=str(row["key"]))
    if kind == "plan":
        return replace(state, plan=_read(row["plan"], Plan))
    if kind == "screened":
        return replace(state, screened=_read(row["screened"], Screened))
    if kind == "started":
        return replace(state, runs=state.runs + 1, open=(*state.open, (str(row["folder"]), None, None)))
    if kind == "process":
        led = (str(row["folder"]), int(row["pid"]), row["start_ticks"])
        return replace(state, open=tuple(led if each[0] == led[0] else each for each in state.open))
    if kind == "finished":
        made = _read(row["made"], Made)
        return replace(state, made=(*state.made, made), open=_without(state.open, made.folder))
    if kind == "dropped":
        return replace(state, open=_without(state.open, str(row["folder"])))
    if kind == "complete":
        return replace(state, complete=True)
    return state  # of a later version


def _without(
    rows: Iterable[tuple[str, int | None, int | None]], folder: str
) -> tuple[tuple[str, int | None, int | None], ...]:
    return tuple(row for row in rows if row[0] != folder)


def _read(value: Any, kind: type[_T]) -> _T:
    return msgspec.convert(value, type=kind)


def _unwritable(path: Path, error: OSError) -> EnvironmentRefusal:
    return EnvironmentRefusal(f"{path}: cannot be written ({error.strerror}); free space or name another --out")
