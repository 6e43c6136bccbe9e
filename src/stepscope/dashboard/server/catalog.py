"""The runs that a dashboard shows: what lies in the paths it was given, found by cheap looks and looked at again.

A path is a run folder, an experiment, a trace or anything else `analyze` reads, or a folder of these. Of a run in the
list only its manifest and the head of its report are read, each again when it has changed, so that thousands of runs
are no matter. A run is known by an ID made of its name and its place: links to it hold as long as it lies there.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stepscope import api
from stepscope.api import ReadOptions, Run, is_run_folder, open_run
from stepscope.dashboard.server import live
from stepscope.dashboard.server.live import Progress
from stepscope.dashboard.server.security import NotThere
from stepscope.errors import UnreadableInputError
from stepscope.files import open_regular
from stepscope.report.escape import plain

RUN, TRACE, EXPERIMENT = "run", "trace", "experiment"
EXPERIMENT_FILES = ("experiment.json", "experiment.jsonl")
EXPERIMENT_RUNS = "runs"
TRACE_NAMES = (".pt.trace.json", ".pt.trace.json.gz")
LEFT_OUT = frozenset({"node_modules", "site-packages", "venv", "__pycache__", "tables"})
MAX_DEPTH = 3  # of folders below the one given
MAX_FOLDERS = 20_000  # looked at below all paths
MAX_ENTRIES = 10_000
AGAIN_S = 2.0  # between two looks at what there is
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker|trainer|gpu|process|proc|host|node)[-_=. ]?\d{1,7}$", re.IGNORECASE)
_ID = re.compile(r"[^A-Za-z0-9._-]+")


class Place(Struct, frozen=True):
    """Where a run lies. `folder` is what is opened: of an experiment, a run of its baseline; None where it has none."""

    key: str
    name: str
    path: Path
    kind: str
    folder: Path | None

    @property
    def recorded(self) -> bool:
        """Whether a recording of ours lies there, which may still go on."""
        return self.kind == RUN


class Places:
    """Finds runs in the paths given, again when some time has passed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if not path.exists():
                raise UnreadableInputError(f"{path}: no such file or folder; name runs, traces or folders of them")
        self._paths = tuple(Path(os.path.abspath(path)) for path in paths)
        self._lock = threading.Lock()
        self._listed: dict[str, Place] = {}
        self._known: dict[str, Place] = {}  # those, and what was once there: a run that is deleted says so itself
        self._looked = -AGAIN_S
        self._runs: set[str] = set()  # folders that were seen to be runs: they stay what they are

    def all(self) -> list[Place]:
        """Every run there is now."""
        with self._lock:
            if time.monotonic() - self._looked >= AGAIN_S:
                self._look()
            return list(self._listed.values())

    def get(self, key: str) -> Place:
        """The run of an ID, also one that has been deleted since; raises `NotThere`."""
        with self._lock:
            if key not in self._known:
                self._look()
            found = self._known.get(key)
        if found is None:
            raise NotThere("there is no such run here; go back to the list of runs")
        return found

    def _look(self) -> None:
        known: dict[str, Place] = {}
        budget = iter(range(MAX_FOLDERS))
        for path in self._paths:
            for place in self._in(path, budget):
                known.setdefault(place.key, place)
                if len(known) >= MAX_ENTRIES:
                    break
        self._listed = known
        self._known = {**self._known, **known}
        self._looked = time.monotonic()

    def _in(self, path: Path, budget: Iterator[int]) -> Iterator[Place]:
        if path.is_dir():
            found = list(self._below(path, path, MAX_DEPTH, budget))
            if not found and _holds_input(path):
                found = [_place(path, path.name, TRACE)]
            yield from found
        elif path.exists():
            yield _place(path, path.name, TRACE)

    def _below(self, folder: Path, top: Path, depth: int, budget: Iterator[int]) -> Iterator[Place]:
        """The runs in a folder that is one, or holds some."""
        if next(budget, None) is None:
            return
        if self._is_run(folder):
            yield _place(folder, _label(folder, top), RUN)
            return
        if _is_experiment(folder):
            yield _place(folder, _label(folder, top), EXPERIMENT)
            yield from self._runs_of(folder, top, budget)
            return
        children = _children(folder)
        inner = [place for child in children for place in self._child(child, top, depth - 1, budget)]
        if inner and all(place.kind == TRACE for place in inner) and _of_one_run(children):
            inner = [_place(folder, _label(folder, top), TRACE)]
        yield from inner

    def _child(self, child: os.DirEntry[str], top: Path, depth: int, budget: Iterator[int]) -> Iterator[Place]:
        if _is_folder(child):
            if depth >= 0:
                yield from self._below(Path(child.path), top, depth, budget)
        elif child.name.endswith(TRACE_NAMES):
            yield _place(Path(child.path), _label(Path(child.path), top), TRACE)

    def _runs_of(self, experiment: Path, top: Path, budget: Iterator[int]) -> Iterator[Place]:
        for child in _children(experiment / EXPERIMENT_RUNS):
            path = Path(child.path)
            if next(budget, None) is not None and _is_folder(child) and self._is_run(path):
                name = f"{experiment.name}/{child.name}" if experiment != top else child.name
                yield _place(path, name, RUN)

    def _is_run(self, folder: Path) -> bool:
        text = str(folder)
        if text in self._runs:
            return folder.is_dir()
        try:
            found = is_run_folder(folder)
        except OSError:
            return False
        if found:
            self._runs.add(text)
        return found


def opened(place: Place, options: ReadOptions) -> Run:
    """The run of a place; raises `UnreadableInputError`, `NotThere` where an experiment has no run to show."""
    if place.folder is None:
        raise NotThere(f"{place.name}: no run of it is there yet")
    if not place.folder.exists():
        raise NotThere(f"{place.name}: its folder has been deleted or moved")
    return open_run(place.folder, options=options)


def _place(path: Path, name: str, kind: str) -> Place:
    digest = hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()
    slug = _ID.sub("-", name).strip("-.")[:60]
    folder: Path | None = path if kind != EXPERIMENT else _baseline(path)
    return Place(f"{slug}-{digest}" if slug else digest, name, path, kind, folder)


def _baseline(experiment: Path) -> Path | None:
    """The run of an experiment that is shown in full: its pilot, else its first."""
    runs = sorted(Path(child.path) for child in _children(experiment / EXPERIMENT_RUNS) if _is_folder(child))
    pilots = [run for run in runs if run.name.endswith("-pilot")]
    return next(iter((*pilots, *runs)), None)


def _is_experiment(folder: Path) -> bool:
    return (folder / EXPERIMENT_RUNS).is_dir() and any((folder / name).is_file() for name in EXPERIMENT_FILES)


def _of_one_run(children: Sequence[os.DirEntry[str]]) -> bool:
    """Whether the traces in a folder belong together: they lie side by side, or in folders named after ranks."""
    if any(child.name.endswith(TRACE_NAMES) for child in children):
        return True
    folders = [child.name for child in children if _is_folder(child)]
    return bool(folders) and all(_RANK.search(name) for name in folders)


def _holds_input(folder: Path) -> bool:
    """Whether `analyze` finds something to read in a folder in which there is no run; an empty one may fill later."""
    try:
        return any(not entry.name.startswith(".") for entry in os.scandir(folder))
    except OSError:
        return False


def _label(path: Path, top: Path) -> str:
    """The name of a run, with the folders it lies in where it is not directly in the one given."""
    return path.name if path == top else path.relative_to(top).as_posix()


def _children(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in LEFT_OUT]
    except OSError:
        return []
    return sorted(found, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


LIST_SCHEMA = "stepscope.runs/1"
MAX_SHOWN = 500  # entries of one answer; the search finds the others
MAX_REPORT = 32 * 2**20


class _Steps(msgspec.Struct):
    count: int | None = None
    mean_ms: float | None = None
    excluded: dict[str, int] = {}


class _Finding(msgspec.Struct):
    title: str = ""


class _Report(msgspec.Struct):
    """The little that the list shows of a report; the rest is skipped, not read."""

    steps: _Steps | None = None
    findings: list[_Finding] = []


_DECODER = msgspec.json.Decoder(_Report)


class _Manifest(Struct, frozen=True):
    """What the first host's manifest says of the run."""

    command: str = ""
    label: str = ""
    started_ns: int | None = None
    ended_ns: int | None = None

    @property
    def duration_s(self) -> float | None:
        if self.started_ns is None or self.ended_ns is None:
            return None
        return (self.ended_ns - self.started_ns) / 1e9


class Catalog:
    """The list, and `run(key)` for pages that compare."""

    def __init__(self, places: Places, whole: Callable[[Place], api.Run]) -> None:
        self._places = places
        self._whole = whole
        self._manifests = _Kept(_manifest)
        self._reports = _Kept(_report)

    def runs(self, text: str = "") -> list[dict[str, Any]]:
        """Entries (RunEntry) whose name, path or command holds all words of `text`, newest first."""
        found: list[dict[str, Any]] = self.document(text)["runs"]
        return found

    def run(self, key: str) -> api.Run:
        """The whole run of an ID; raises `NotThere`."""
        return self._whole(self._places.get(key))

    def experiment(self, key: str) -> Path | None:
        """The folder of an experiment, of an entry that is one."""
        place = self._places.get(key)
        return place.path if place.kind == EXPERIMENT else None

    def document(self, text: str = "") -> dict[str, Any]:
        """The RunList of what matches `text`."""
        wanted = text.lower().split()
        listed = [(place, self.manifest(place)) for place in self._places.all()]
        found = [(place, manifest) for place, manifest in listed if _matches(place, manifest, wanted)]
        found.sort(key=lambda each: (_age(*each), each[0].name), reverse=True)
        shown = [self.entry(place, manifest) for place, manifest in found[:MAX_SHOWN]]
        return {"schema": LIST_SCHEMA, "runs": shown, "total": len(found)}

    def manifest(self, place: Place) -> _Manifest:
        """What the recording says of itself; of a trace, nothing."""
        if place.folder is None or place.kind not in (RUN, EXPERIMENT):
            return _Manifest()
        path = _first_manifest(place.folder)
        return (self._manifests.get(path) if path is not None else None) or _Manifest()

    def entry(self, place: Place, manifest: _Manifest) -> dict[str, Any]:
        """One RunEntry."""
        report = self._reports.get(place.path / "report.json") if place.path.is_dir() else None
        steps = report.steps if report is not None else None
        how = standing(place)
        return {
            "id": place.key,
            "name": plain(place.name),
            "path": plain(place.path, 1000),
            "kind": place.kind,
            "state": how.state,
            "started_ns": manifest.started_ns,
            "duration_s": manifest.duration_s if place.recorded else None,
            "command": plain(manifest.command) if manifest.command else None,
            "steps": (steps.count or 0) + sum(steps.excluded.values()) if steps is not None else None,
            "mean_ms": steps.mean_ms if steps is not None else None,
            "first_finding": plain(report.findings[0].title) if report is not None and report.findings else None,
            "note": _note(place, manifest, how),
        }


def standing(place: Place, progress: Progress | None = None) -> live.Standing:
    """How what lies in a place goes; `progress` of a run, to be named beside it."""
    if place.recorded:
        return live.standing(place.path, progress)
    if not place.path.exists():
        return live.Standing(live.VANISHED, live.GONE)
    if place.kind == EXPERIMENT:
        return live.standing_of_experiment(place.path)
    return live.Standing(live.FINISHED, "A trace, which does not change.")


class _Kept:
    """What files were read as, until they change."""

    def __init__(self, read: Callable[[Path], Any]) -> None:
        self._read = read
        self._kept: dict[Path, tuple[tuple[int, int], Any]] = {}

    def get(self, path: Path) -> Any:
        """What `path` holds, None where it cannot be read."""
        try:
            seen = os.stat(path)
        except OSError:
            self._kept.pop(path, None)
            return None
        stamp = (seen.st_mtime_ns, seen.st_size)
        kept = self._kept.get(path)
        if kept is None or kept[0] != stamp:
            kept = self._kept[path] = (stamp, self._read(path))
        return kept[1]


def _manifest(path: Path) -> _Manifest:
    row = live.read_object(path) or {}
    command, started, ended, tags = (row.get(key) for key in ("command", "started_ns", "ended_ns", "tags"))
    words = (row.get("name") or "", *(tags if isinstance(tags, list) else ()))
    return _Manifest(
        command=" ".join(str(part) for part in command) if isinstance(command, list) else "",
        label=" ".join(map(str, words)).strip(),
        started_ns=started if isinstance(started, int) else None,
        ended_ns=ended if isinstance(ended, int) else None,
    )


def _report(path: Path) -> _Report | None:
    try:
        with open_regular(path) as file:
            return _DECODER.decode(file.read(MAX_REPORT))
    except (OSError, ValueError, RecursionError):  # a msgspec error is a ValueError, and so is text that is no UTF-8
        return None


def _first_manifest(folder: Path) -> Path | None:
    try:
        with os.scandir(folder) as entries:
            hosts = sorted(entry.name for entry in entries if entry.name.startswith("host-"))
    except OSError:
        return None
    return folder / hosts[0] / "manifest.json" if hosts else None


def _matches(place: Place, manifest: _Manifest, wanted: list[str]) -> bool:
    text = f"{place.name}\n{place.path}\n{manifest.command}\n{manifest.label}".lower()
    return all(word in text for word in wanted)


def _age(place: Place, manifest: _Manifest) -> float:
    """When the run began, seconds since the epoch; of a trace, when it was written."""
    if manifest.started_ns is not None:
        return manifest.started_ns / 1e9
    try:
        return place.path.stat().st_mtime
    except OSError:
        return 0.0


def _note(place: Place, manifest: _Manifest, how: live.Standing) -> str | None:
    """What else is worth a word: how a run ended badly, or the name and tags it was given."""
    if how.state in (live.FAILED, live.VANISHED):
        return plain(how.text)
    if manifest.label and manifest.label not in place.name:
        return plain(manifest.label)
    return None
