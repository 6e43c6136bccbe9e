"""Commands that an agent started: few at a time, each with a limit of time, a process group of its own, and an end.

The runs below one folder, opened when they are first asked about; nothing outside of it, wherever links lead.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct
from msgspec.structs import replace

from stepscope.api import ReadOptions, Run
from stepscope.dashboard.server import live
from stepscope.dashboard.server.catalog import SEARCHES, TRACE, Catalog, Filter, Place, opened
from stepscope.errors import EnvironmentRefusal, NotThere, UsageError
from stepscope.report.escape import one_line

GRACE_S = 10.0  # between SIGTERM and SIGKILL: a training may write its last checkpoint, we our report
LAST_GRACE_S = 1.0  # the same at our own end: clients kill a server that takes longer than some two seconds
POLL_S = 0.1
TAIL_BYTES = 64 * 2**10  # of a job's output that are kept
MAX_KEPT = 100  # jobs that have ended
MAX_WORDS, MAX_CHARACTERS = 1_000, 100_000  # of a command
RUNNING, FINISHED, FAILED, CANCELLED, TIMED_OUT = "running", "finished", "failed", "cancelled", "timed out"
# ourselves, without the working directory among the places that modules are imported from
OURSELVES = (
    sys.executable,
    "-c",
    "import sys; sys.path[:] = filter(None, sys.path); from stepscope.cli import process; process()",
)


class Limits(Struct, frozen=True):
    """Of what may be started: how long one job may take, and how many there may be at once."""

    seconds: float
    at_once: int


class Job:
    """One command. `wait` returns at its end; what it said last is `tail`."""

    def __init__(self, id: str, words: Sequence[str], cwd: Path, out: Path, seconds: float) -> None:
        self.id, self.out, self.seconds = id, out, seconds
        self._reason = ""  # why we ended it
        self._done, self._took_s = threading.Event(), 0.0
        self._tail = bytearray()
        self._started_s = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [*OURSELVES, *words],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the group that is ended as one
            )
        except (OSError, ValueError) as error:
            raise EnvironmentRefusal(f"{words[0]} could not be started ({one_line(error, 200)})") from None
        for work in (self._read, self._watch):
            threading.Thread(target=work, name=f"stepscope-job-{id}", daemon=True).start()

    @property
    def state(self) -> str:
        if not self.ended:
            return RUNNING
        return self._reason or (FAILED if self._process.returncode else FINISHED)

    @property
    def ended(self) -> bool:
        return self._done.is_set()

    def told(self) -> dict[str, Any]:
        """What is known of it: its state, its exit status, how long it took."""
        took_s = self._took_s if self.ended else time.monotonic() - self._started_s
        status = self._process.returncode if self.ended else None
        return {"job": self.id, "state": self.state, "exit_status": status, "seconds": round(took_s, 1)}

    def tail(self) -> list[str]:
        return bytes(self._tail).decode("utf-8", "replace").replace("\r", "\n").splitlines()

    def stop(self, reason: str, grace_s: float = GRACE_S) -> None:
        """End it, all of its group and what came of it: asked first, and after some seconds not asked any more."""
        if self.ended or self._reason:
            return
        self._reason = reason
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):  # some lead groups of their own
            started = psutil.Process(self._process.pid).children(recursive=True)
        self._signal(signal.SIGTERM)
        until = time.monotonic() + grace_s
        self._done.wait(grace_s)
        while time.monotonic() < until and any(map(_lives, started)):
            time.sleep(POLL_S)
        if not self._done.is_set():
            self._signal(signal.SIGKILL)
        for process in filter(_lives, started):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._done.wait(GRACE_S)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._process.stdout.fileno(), TAIL_BYTES):
                self._tail += data
                del self._tail[:-TAIL_BYTES]

    def _watch(self) -> None:
        """Wait for its end, or bring it about in time. What it leaves in its group goes before its number is free."""
        limit = threading.Timer(self.seconds, self.stop, (TIMED_OUT,))
        limit.daemon = True
        limit.start()
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._signal(signal.SIGKILL)
        self._process.wait()
        limit.cancel()
        self._took_s = time.monotonic() - self._started_s
        self._done.set()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


class Jobs:
    """All jobs of a server. Folders of work and of results lie below `root`."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self._root, self._limits = root, limits
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._started = 0

    def start(self, kind: str, options: Sequence[str], command: Sequence[str], cwd: str, seconds: float | None) -> Job:
        """Start `stepscope KIND OPTIONS -- COMMAND`; raises `UsageError` where that is not allowed."""
        if not command or len(command) > MAX_WORDS or sum(map(len, command)) > MAX_CHARACTERS:
            raise UsageError("argv: give the training command word by word, e.g. ['python', 'train.py']")
        if any("\0" in word for word in (*command, *options, cwd)):
            raise UsageError("a word of the command holds a null character")
        folder = (self._root / cwd).resolve()
        if not folder.is_relative_to(self._root) or not folder.is_dir():
            raise UsageError(f"cwd {one_line(cwd, 200)}: no folder below {self._root}")
        if seconds is not None and not 0 < seconds <= self._limits.seconds:
            raise UsageError(f"max_seconds {seconds:g}: more than 0, at most {self._limits.seconds:g} here")
        parent = (self._root / "stepscope-runs").resolve()
        if not parent.is_relative_to(self._root):
            raise UsageError("stepscope-runs is a link that leads out of the folder; nothing is written there")
        with self._lock:
            running = [job for job in self._jobs.values() if not job.ended]
            if len(running) >= self._limits.at_once:
                names = ", ".join(job.id for job in running)
                raise UsageError(f"{names}: as many jobs as may run at once; wait for one, or cancel it")
            self._started += 1
            id = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{self._started}"
            words = [kind, "--out", str(parent / id), *options, "--", *command]
            job = self._jobs[id] = Job(id, words, folder, parent / id, seconds or self._limits.seconds)
            for old in [each.id for each in self._jobs.values() if each.ended][:-MAX_KEPT]:
                del self._jobs[old]
        return job

    def get(self, id: str) -> Job:
        """Raises `NotThere`."""
        if id not in self._jobs:
            raise NotThere(f"{one_line(id, 100)}: no such job; there are {', '.join(list(self._jobs)[-5:]) or 'none'}")
        return self._jobs[id]

    def close(self) -> None:
        """End all that still run, side by side."""
        ending = [
            threading.Thread(target=job.stop, args=(CANCELLED, LAST_GRACE_S)) for job in list(self._jobs.values())
        ]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()


KEPT = 3  # runs that stay open: a baseline, a candidate and one more


class OpenRuns:
    """What the tools work on. `jobs` is None where nothing may be started; `source` False quotes no line of source."""

    def __init__(self, root: Path, options: ReadOptions, *, source: bool = True, jobs: Jobs | None = None) -> None:
        self.root = root.resolve()
        self.source = source
        self.jobs = jobs
        self._options = replace(options, keep=False)
        self._catalog = Catalog([self.root], self._opened)
        self._open: OrderedDict[str, tuple[tuple[Any, ...], Run]] = OrderedDict()
        self._lock = threading.RLock()  # facts are made when first asked for, which no two threads may do at once

    def places(self, text: str = "") -> list[Place]:
        """Where runs, traces and experiments lie whose name, path or command holds all of `text`, newest first."""
        found = [place for place in self._catalog.matching(Filter(text)) if self._is_inside(place)]
        # a folder without a run counts as one that may hold traces, which that of a project is not
        project = self.jobs is not None or (self.root / ".git").exists()
        return [place for place in found if not (project and place.kind == TRACE and place.path == self.root)]

    def place(self, name: str) -> Place:
        """The one of a name or an ID; raises `NotThere`."""
        found = [place for place in self.places() if name in (place.name, place.key, str(place.path))]
        if not found:
            raise NotThere(f"{one_line(name, 200)}: no such run below {self.root}; list_runs names them")
        for base, folders, files in os.walk(found[0].path):
            if not all(map(self._holds, (Path(base, each) for each in (*folders, *files)))):
                raise UsageError(f"{found[0].name}: a link in it leads out of {self.root}; it is not opened")
        return found[0]

    @contextmanager
    def run(self, *names: str) -> Iterator[list[Run]]:
        """The runs of these names, for as long as no other request may work on one; raises `StepscopeError`."""
        with self._lock:
            yield [self._opened(self.place(name)) for name in names]

    def _opened(self, place: Place) -> Run:
        folder = place.folder or place.path
        seen = (live.signature(folder), place.kind) if place.kind != TRACE else (_size(folder), place.kind)
        if place.key not in self._open or self._open[place.key][0] != seen:
            self._open[place.key] = seen, opened(place, self._options)
        self._open.move_to_end(place.key)
        while len(self._open) > KEPT:
            self._open.popitem(last=False)
            gc.collect()  # its tables lie in cycles
        return self._open[place.key][1]

    def _is_inside(self, place: Place) -> bool:
        """Whether it lies below the folder, links followed."""
        return all(self._holds(path, follow=True) for path in (place.path, place.folder) if path is not None)

    def _holds(self, path: Path, *, follow: bool = False) -> bool:
        return (not follow and not path.is_symlink()) or path.resolve().is_relative_to(self.root)


def is_search(place: Place) -> bool:
    """Whether it is an experiment or a sweep, of which one run is shown."""
    return place.kind in SEARCHES


def _size(path: Path) -> Any:
    seen = path.stat()
    return seen.st_size, seen.st_mtime_ns
