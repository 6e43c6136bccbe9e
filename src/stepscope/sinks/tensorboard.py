"""TensorBoard: event files, a folder for each process, that grow with a run and never hold a point twice.

Tags are our names, the step is ours, the wall time is the one recorded, as TensorBoard has it: seconds in double, so to
a quarter of a microsecond. Values are in single precision, which is all that scalars of event files have room for; NaN
and infinities are kept. What lies in the folder already is read back first and only the rest is written, to a file of
its own, so that an export that was killed, or of a run that has grown, is completed by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from stepscope.errors import UsageError, readable
from stepscope.files import read_small
from stepscope.model.counted import things
from stepscope.read.event_files import is_event_file, read_scalars
from stepscope.read.raw import Losses
from stepscope.read.streams import files_in
from stepscope.report.outputs import write_file
from stepscope.sinks import Sent, Target, library, speaking_for
from stepscope.sinks.exported import MACHINE, PAGE, Exported, missing, moments

ABOUT = "stepscope.json"  # in the folder: whose points these are
MAX_ABOUT = 100_000  # bytes
FINDINGS, CONFIG = "stepscope/findings", "stepscope/run"  # tags of texts
LARGEST = float(np.finfo(np.float32).max)
ADVICE = "look at the folder's permissions and the disk, or name another folder with --out"
PAUSE_S = 5.0  # between two looks at a run that goes on; TensorBoard itself looks every 30 s
SHARE = 0.1  # of the time at most is spent reading a run that goes on
_KEYS = ["folder", "name", "moment", "step"]


class _About(msgspec.Struct):
    run: str
    texts: str = ""  # a digest of what was said of the run last


class _Folder:
    """The folder of a run with its writers, one for each process, opened when there is something to write."""

    def __init__(self, run: Exported, target: Target) -> None:
        self._library = library("tensorboardX.event_file_writer", "tensorboard")
        self._proto = library("tensorboardX.proto.event_pb2", "tensorboard")
        self._summary = library("tensorboardX.summary", "tensorboard")
        self.path = target.folder("tensorboard", run.name)
        self._writers: dict[str, Any] = {}
        self.about = _about(self.path, run.identity)
        self._lock = _locked(self.path)
        self.there = _there(self.path)
        self.outside = 0

    def add(self, run: Exported) -> int:
        """Write what is not there yet; returns the number of points."""
        points, folders = run.points, dict[str, str]()
        for process in points["process"].unique(maintain_order=True).to_list():
            name = re.sub(r"[^\w.\-]", "_", process).lstrip(".")[:100] or MACHINE
            folders[process] = name if name not in folders.values() else f"{name}-{len(folders)}"
        # the moment as it reads back from seconds; not by polars, which divides by a constant in a way of its own
        moment = np.rint(points["time_ns"].to_numpy() / 1e9 * 1e9).astype(np.int64)
        points = points.with_columns(pl.Series("moment", moment), folder=pl.col("process").replace(folders))
        new = missing(points, self.there, _KEYS)
        if new.is_empty():
            return 0
        self._begin()
        for (folder,), part in new.group_by("folder", maintain_order=True):
            self._write(str(folder), part)
        self.there = pl.concat([self.there, new.select(_KEYS)])
        self.outside += new.filter(pl.col("value").is_finite() & (pl.col("value").abs() > LARGEST)).height
        for writer in self._writers.values():
            writer.flush()
        return new.height

    def _begin(self) -> None:
        write_file(self.path / ABOUT, msgspec.json.encode(self.about), make_folder=True)

    def _writer(self, folder: str) -> Any:
        if folder not in self._writers:
            place = self.path / folder
            place.mkdir(parents=True, exist_ok=True)
            # a name of its own: TensorBoard's holds the second alone, and would overwrite that of another export
            suffix = f".{secrets.token_hex(4)}"
            self._writers[folder] = self._library.EventsWriter(str(place / "events"), suffix)
        return self._writers[folder]

    def _write(self, folder: str, points: pl.DataFrame) -> None:
        event, write = self._proto.Event(), self._writer(folder).write_event
        parts = event.summary.value  # one event for all: making each anew takes a quarter longer
        with np.errstate(over="ignore"):  # what single precision cannot hold is infinite in it; it is counted
            values = points["value"].to_numpy().astype(np.float32).astype(np.float64)
        for time_ns, step, own in moments(points.with_columns(value=values)):
            event.wall_time, event.step = time_ns / 1e9, step
            del parts[:]
            for name, value in own.items():
                part = parts.add()
                part.tag, part.simple_value = name, value
            write(event)

    def describe(self, run: Exported) -> None:
        """What the report says, as texts of the first process, and the report beside; left out where it is said."""
        about = run.config | {"summary": run.summary}
        config = "\n".join(f"    {key}: {msgspec.json.encode(value).decode()}" for key, value in about.items())
        texts = {FINDINGS: f"{run.notes}\n\n{run.table}".rstrip(), CONFIG: config}
        digest = hashlib.sha256(repr(texts).encode("utf-8", "backslashreplace")).hexdigest()
        if digest == self.about.texts and (self.path / PAGE).exists():
            return
        self._begin()
        folders = self.there["folder"].unique(maintain_order=True).to_list() or [MACHINE]
        last = run.points["step"].max()
        at = {"wall_time": (run.ended_ns or 0) / 1e9, "step": last or 0}
        for tag, text in texts.items():
            self._writer(folders[0]).write_event(self._proto.Event(summary=self._summary.text(tag, text), **at))
        for writer in self._writers.values():
            writer.flush()
        write_file(self.path / PAGE, run.page)
        self.about.texts = digest
        self._begin()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        os.close(self._lock)

    def sent(self, points: int) -> Sent:
        said = "values are in single precision, as in all event files: six or seven digits"
        large = f"{things(self.outside, 'value')} beyond its largest number kept as infinite"
        return Sent(str(self.path), points, ((said, large) if self.outside else (said,)) if points else ())


def tensorboard(run: Exported, target: Target) -> Sent:
    """All points of the run that the folder does not hold yet, and what the report says of it."""
    with _writing(run, target) as folder:
        added = folder.add(run)
        folder.describe(run)
    return folder.sent(added)


def follow(opened: Callable[[], Exported], target: Target) -> Sent:
    """The same while the run goes on: looks at it again and again until it ends or Ctrl-C, and adds what is new.

    What the report says is added when the run has ended.
    """
    run = opened()
    with _writing(run, target) as folder:
        added = 0
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                goes_on = run.goes_on  # asked before it is read: then this is all of it
                began = time.monotonic()
                run = opened()
                added += folder.add(run) if run.has_begun or not goes_on else 0
                if not goes_on:
                    folder.describe(run)
                    break
                time.sleep(max(PAUSE_S, (time.monotonic() - began) / SHARE))
    return folder.sent(added)


@contextlib.contextmanager
def _writing(run: Exported, target: Target) -> Iterator[_Folder]:
    with speaking_for("TensorBoard", ADVICE):
        folder = _Folder(run, target)
        try:
            yield folder
        finally:
            folder.close()


def _about(path: Path, identity: str) -> _About:
    """What is said of the folder; raises `UsageError` where it is another run's, or not an export of ours."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: a file; name a folder")
    try:
        found = msgspec.json.decode(read_small(path / ABOUT, MAX_ABOUT), type=_About)
    except FileNotFoundError:
        if path.is_dir() and any(map(is_event_file, files_in(path))):
            raise UsageError(f"{path}: holds event files of others; name a folder of its own") from None
        return _About(identity)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise UsageError(f"{path / ABOUT}: {why}; name another folder") from None
    if found.run != identity:
        raise UsageError(f"{path}: holds another run; name a folder of its own")
    return found


def _locked(path: Path) -> int:
    """The folder, opened and held until it is closed; raises `UsageError` where another export holds it."""
    path.mkdir(parents=True, exist_ok=True)
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise UsageError(f"{path}: another export writes to it; wait for its end, or name another folder") from None
    except OSError:  # a file system without locks
        pass
    return held


def _there(path: Path) -> pl.DataFrame:
    """The points in the folder, by where they lie; of a file that was cut off, those before."""
    schema = {"folder": pl.String, "name": pl.String, "moment": pl.Int64, "step": pl.Int64}
    parts = [pl.DataFrame(schema=schema)]
    with readable(path):
        for file in files_in(path) if path.is_dir() else ():
            if is_event_file(file):
                found = read_scalars(file, Losses(), file.name)
                folder = pl.lit(file.parent.name).alias("folder")
                parts.append(found.select(folder, "name", pl.col("time_ns").alias("moment"), "step"))
    return pl.concat(parts)
