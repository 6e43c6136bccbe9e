"""Whether a run goes on, and how it ended, from cheap looks at its folder.

A recording says so itself at its end (`ended_ns` and `exit` in the manifest). One that does not is asked after its
processes where they lie on this machine: the launcher's number with its start, which a later process of the same number
does not share, and those of the ranks, which go on when the launcher was killed. Of another machine's, only the age of
what was written last is seen. Nothing here writes, signals or opens anything that a training holds.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.files import open_regular
from stepscope.report import words
from stepscope.schema import REDUCED, REDUCED_INDEX

NAME = "steps.jsonl"
MAX_RANKS = 64  # whose journals, processes and files are looked at; more tell nothing new
MAX_READ = 32 * 2**20  # of one journal at a time
_TRAIN = "train"


class Progress(Struct, frozen=True):
    """How far a run is. `steps` are of the rank that made most; `mean_ms` is of training steps that are neither an
    epoch's first nor in a window of a profiler, over all ranks."""

    steps: int
    last_ms: float
    mean_ms: float | None


class Journal:
    """One rank's steps so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.steps = 0
        self.last_ns = 0
        self.counted = 0
        self.counted_ns = 0
        self._offset = 0
        self._columns: dict[str, int] = {}

    def read(self) -> None:
        """Take in what was written since; a line that is not finished waits, one that is no step is skipped."""
        try:
            with open_regular(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._begin()  # written anew by another attempt
                file.seek(self._offset)
                data = file.read(MAX_READ)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            row = _decoded(line)
            if isinstance(row, dict) and isinstance(row.get("columns"), list):
                self._columns = {name: place for place, name in enumerate(row["columns"]) if isinstance(name, str)}
            elif isinstance(row, list):
                self._count({name: row[place] for name, place in self._columns.items() if place < len(row)})

    def _count(self, row: Mapping[str, Any]) -> None:
        wall = row.get("wall_ns")
        if not isinstance(wall, int) or wall < 0:
            return
        self.steps += 1
        self.last_ns = wall
        if row.get("kind") == _TRAIN and not row.get("first_batch") and not row.get("in_window"):
            self.counted += 1
            self.counted_ns += wall


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):  # a msgspec error is a ValueError, and so is text that is no UTF-8
        return None


class Journals:
    """The journals of all ranks of a run folder, those that appear later included."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._journals: dict[str, Journal] = {}

    def read(self) -> Progress | None:
        """How far the run is now; None before its first step."""
        for name in rank_folders(self._folder):
            self._journals.setdefault(name, Journal(self._folder / name / NAME))
        journals = list(self._journals.values())
        for journal in journals:
            journal.read()
        first = max(journals, key=lambda journal: journal.steps, default=None)
        if first is None or not first.steps:
            return None
        counted = sum(journal.counted for journal in journals)
        mean_ms = sum(journal.counted_ns for journal in journals) / counted / 1e6 if counted else None
        return Progress(first.steps, first.last_ns / 1e6, mean_ms)


def rank_folders(folder: Path) -> list[str]:
    """Names of the first ranks' folders, in order; none where the run folder is gone."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in entries if entry.name.startswith("rank-") and entry.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda name: (len(name), name))[:MAX_RANKS]


RUNNING, FINISHED, FAILED, VANISHED = "running", "finished", "failed", "vanished"
GROWING = ("steps.jsonl", "events.jsonl", "system.jsonl", "stacks.jsonl", "agents.jsonl")
FRESH_S = 15.0  # telemetry is written once a second, so what is older than this has stopped, or is cut off from us
FRESH_ELSEWHERE_S = 120.0  # file servers show what other machines write late, with their own clocks
START_SLACK_S = 2.0  # of a process's start as the kernel tells it
MAX_HOSTS = 256
MAX_MANIFEST = 4 * 2**20
LAST_EVENTS = 4096  # bytes at the end of a journal in which its last word stands
GONE = "Its folder has been deleted or moved."
_EXIT = re.compile(rb'"kind":\s?"exit"')


class Standing(Struct, frozen=True):
    """What is known of how a run goes. `text` is a sentence or two."""

    state: str
    text: str


def standing(folder: Path, progress: Progress | None = None) -> Standing:
    """How the run in `folder` goes; never raises for what is missing or torn."""
    if not folder.is_dir():
        return Standing(VANISHED, GONE)
    paths = [path for path in sorted(folder.glob("host-*/manifest.json"))[:MAX_HOSTS] if not path.parent.is_symlink()]
    manifests = [found for found in map(_read, paths) if found] or _reduced_manifests(folder)
    steps = f", {words.things(progress.steps, 'step')}" if progress is not None else ""
    open_ended = [manifest for manifest in manifests if not isinstance(manifest.get("ended_ns"), int)]
    if manifests and not open_ended:
        took = _took(manifests, max(manifest["ended_ns"] for manifest in manifests))
        bad = next(filter(None, map(_ending, manifests)), None)
        return Standing(FAILED if bad else FINISHED, f"{bad or 'Finished'} after {took}{steps}.")
    written = _last_write(folder)
    if any(_is_alive(manifest) for manifest in open_ended) or _ranks_live(folder) or _is_fresh(open_ended, written):
        far = f"{steps} so far" if steps else "; no step yet"
        return Standing(RUNNING, f"Running for {_took(manifests, time.time_ns())}{far}.")
    if not manifests and (folder / "report.json").is_file():
        return Standing(FINISHED, "Finished; how it ended was not kept.")
    if written is None:
        return Standing(VANISHED, "Ended without a word; nothing of it is running.")
    ago = span(time.time() - written)
    text = f"Ended without a word: nothing has been written for {ago}. It was killed, or its machine is gone."
    return Standing(VANISHED, text)


def _reduced_manifests(folder: Path) -> list[dict[str, Any]]:
    """What reduced tables keep of manifests, where nothing else is left of a run."""
    paths = sorted(folder.glob(f"{REDUCED}/host-*/{REDUCED_INDEX}"))[:MAX_HOSTS]
    runs = (_read(path).get("run") for path in paths)
    return [run for run in runs if isinstance(run, dict) and run]


def standing_of_search(file: Path, what: str) -> Standing:
    """How an experiment or a sweep goes: its file says so at its end, and its lock names its process while it works."""
    result = _read(file)
    if result.get("finished") is True:
        return Standing(FINISHED, f"The {what} is finished.")
    try:
        with open_regular(file.with_name("lock")) as lock:
            owner = lock.read(32).strip()
    except OSError:
        owner = b""
    if owner.isdigit() and _process_lives(int(owner), time.time_ns()):
        return Standing(RUNNING, f"The {what} goes on.")
    return Standing(VANISHED, f"The {what} was stopped; the same command line goes on with it.")


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            found = _decoded(file.read(MAX_MANIFEST))
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}


def _last_write(folder: Path) -> float | None:
    """When one of the files that grow was written last, seconds since the epoch."""
    hosts = [path.name for path in folder.glob("host-*")][:MAX_RANKS]
    seen = [_seen(folder / name / file) for name in (*hosts, *rank_folders(folder)) for file in GROWING]
    return max((each[1] for each in seen if each is not None), default=None)


def signature(folder: Path) -> tuple[Any, ...]:
    """Something that changes whenever a page of the run may: how long its journals are, and which traces are there."""
    found: list[Any] = [_seen(folder / "experiment.json")]
    for name in rank_folders(folder):
        rank = folder / name
        sizes = [seen and seen[0] for seen in (_seen(rank / "steps.jsonl"), _seen(rank / "events.jsonl"))]
        found.append((name, sizes, sorted(path.name for path in rank.glob("trace-*"))))
    for host in sorted(folder.glob("host-*"))[:MAX_RANKS]:
        stacks = _seen(host / "stacks.jsonl")
        found.append((host.name, stacks and stacks[0], _seen(host / "manifest.json")))
    return tuple(found)


def _seen(path: Path) -> tuple[int, float] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime


def _is_alive(manifest: dict[str, Any]) -> bool:
    started = manifest.get("started_ns")
    pids = [manifest.get("launcher_pid"), manifest.get("pid")]
    return manifest.get("host") == socket.gethostname() and any(_process_lives(pid, started) for pid in pids)


def _ranks_live(folder: Path) -> bool:
    for name in rank_folders(folder):
        rank = _read(folder / name / "rank.json")
        ours = rank.get("host") == socket.gethostname()
        if ours and not _has_exited(folder / name) and _process_lives(rank.get("pid"), rank.get("started_ns")):
            return True
    return False


def _has_exited(rank: Path) -> bool:
    """Whether a rank wrote its last word (a notebook goes on after the block that was recorded)."""
    try:
        with open_regular(rank / "events.jsonl") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_EVENTS))
            return _EXIT.search(file.read()) is not None
    except OSError:
        return False


def _process_lives(pid: object, started_ns: object) -> bool:
    import psutil

    if not isinstance(pid, int) or not isinstance(started_ns, int) or not 0 < pid < 2**31:
        return False
    try:
        process = psutil.Process(pid)
        began = process.create_time()
        return bool(process.status() != psutil.STATUS_ZOMBIE and began <= started_ns / 1e9 + START_SLACK_S)
    except psutil.Error:
        return False


def _is_fresh(manifests: list[dict[str, Any]], written: float | None) -> bool:
    """Whether something was written so lately that the run must go on, whatever processes we cannot see."""
    if written is None:
        return False
    here = all(manifest.get("host") == socket.gethostname() for manifest in manifests)
    return time.time() - written < (FRESH_S if here and manifests else FRESH_ELSEWHERE_S)


def _ending(manifest: dict[str, Any]) -> str | None:
    left = manifest.get("exit")
    left = left if isinstance(left, dict) else {}
    number, status = left.get("signal"), left.get("shell_status", left.get("status"))
    if isinstance(number, int) and number > 0:
        known = {one.value: one.name for one in signal.Signals}
        return f"Ended by {known.get(number, f'signal {number}')}"
    if isinstance(status, int) and status != 0:
        return f"Ended with exit status {status}"
    return None


def _took(manifests: list[dict[str, Any]], until_ns: int) -> str:
    started = [manifest["started_ns"] for manifest in manifests if isinstance(manifest.get("started_ns"), int)]
    return span((until_ns - min(started)) / 1e9) if started else "an unknown time"


def span(seconds: float) -> str:
    """A duration as people say it: 8 s, 3 min, 2 h 10 min."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
