"""The runs that a dashboard shows: what lies in the paths it was given, found by cheap looks and looked at again.

A path is a run folder, an experiment, a sweep, a trace or anything else `analyze` reads, or a folder of these. Of a run
in the list only its manifest and the head of its report are read, each again when it has changed, so that thousands of
runs are no matter. A run is known by an ID made of its name and its place: links to it hold as long as it lies there.
Below stands what runs take of a disk, and giving it back: what we wrote into their folders, and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from stepscope import api, comparing
from stepscope.api import ReadOptions, Run, is_run_folder, open_run
from stepscope.dashboard.server import live
from stepscope.dashboard.server.live import Progress
from stepscope.errors import NotThere, UnreadableInputError
from stepscope.files import open_regular
from stepscope.report import words
from stepscope.report.escape import plain
from stepscope.schema import REDUCED, REDUCED_INDEX

if TYPE_CHECKING:
    from stepscope.comparison.profile import Profile

RUN, TRACE, EXPERIMENT, SWEEP = "run", "trace", "experiment", "sweep"
# What a folder of runs made by one command holds, by its kind; the first is the whole of it.
SEARCHES = {EXPERIMENT: ("experiment.json", "experiment.jsonl"), SWEEP: ("sweep.json",)}
SEARCH_RUNS = "runs"
TRACE_NAMES = (".pt.trace.json", ".pt.trace.json.gz")
LEFT_OUT = frozenset({"node_modules", "site-packages", "venv", "__pycache__", "tables"})
MAX_DEPTH = 3  # of folders below the one given
MAX_FOLDERS = 20_000  # looked at below all paths
MAX_ENTRIES = 10_000
AGAIN_S = 2.0  # between two looks at what there is
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker|trainer|gpu|process|proc|host|node)[-_=. ]?\d{1,7}$", re.IGNORECASE)
_ID = re.compile(r"[^A-Za-z0-9._-]+")


class Place(Struct, frozen=True):
    """Where a run lies. `folder` is what is opened: of an experiment, a run of its baseline, of a sweep, its best; None
    where there is none."""

    key: str
    name: str
    path: Path
    kind: str
    folder: Path | None

    @property
    def recorded(self) -> bool:
        """Whether a recording of ours lies there, which may still go on."""
        return self.kind == RUN


class Catalog:
    """The runs in the paths given, looked for again when some time has passed; `run(key)` is for pages that compare."""

    def __init__(self, paths: Sequence[Path], whole: Callable[[Place], api.Run]) -> None:
        for path in paths:
            if not path.exists():
                raise UnreadableInputError(f"{path}: no such file or folder; name runs, traces or folders of them")
        self._paths = tuple(Path(os.path.abspath(path)) for path in paths)
        self._whole = whole
        self._lock = threading.Lock()
        self._listed: dict[str, Place] = {}
        self._known: dict[str, Place] = {}  # those, and what was once there: a run that is deleted says so itself
        self._looked = -AGAIN_S
        self._profiles: dict[str, tuple[Any, Profile]] = {}  # with what was seen of the run
        self._runs: set[str] = set()  # folders that were seen to be runs: they stay what they are

    def runs(self, text: str = "") -> list[dict[str, Any]]:
        """Entries (RunEntry) whose name, path or command holds all words of `text`, newest first."""
        found: list[dict[str, Any]] = self.document(text)["runs"]
        return found

    def run(self, key: str) -> api.Run:
        """The whole run of an ID; raises `NotThere`."""
        return self._whole(self.place(key))

    def profile(self, key: str) -> Profile:
        """What a history needs of a run, which is kept, so that of many no two need to be held at once."""
        seen = live.signature(self.place(key).path)
        if key not in self._profiles or self._profiles[key][0] != seen:
            self._profiles[key] = seen, comparing.profiled(self.run(key))
        return self._profiles[key][1]

    def experiment(self, key: str) -> Path | None:
        """The folder of an experiment or a sweep, of an entry that is one."""
        place = self.place(key)
        return place.path if place.kind in SEARCHES else None

    def document(self, text: str = "") -> dict[str, Any]:
        """The RunList of what matches `text`."""
        found = self.matching(Filter(text))
        return {"schema": LIST_SCHEMA, "runs": [entry(place) for place in found[:MAX_SHOWN]], "total": len(found)}

    def matching(self, wanted: Filter) -> list[Place]:
        """Where the runs lie that match, newest first."""
        found = []
        for place in self.places():
            manifest = manifest_of(place)
            if wanted.holds(place, manifest):
                found.append((_began(place, manifest), place.name, place))
        return [place for *_, place in sorted(found, key=lambda each: each[:2], reverse=True)]

    def of_script(self, key: str) -> list[Place]:
        """The recorded runs of the script that the run of an ID is of, that one too, newest first."""
        script = manifest_of(self.place(key)).of_script
        return [one for one in self.matching(Filter()) if one.recorded and manifest_of(one).of_script == script]

    def places(self) -> list[Place]:
        """Where every run lies that there is now."""
        with self._lock:
            if time.monotonic() - self._looked >= AGAIN_S:
                self._look()
            return list(self._listed.values())

    def place(self, key: str) -> Place:
        """Where the run of an ID lies, also of one that has been deleted since; raises `NotThere`."""
        with self._lock:
            if key not in self._known:
                self._look()
            if key not in self._known:
                raise NotThere("there is no such run here; go back to the list of runs")
            return self._known[key]

    def _look(self) -> None:
        budget = iter(range(MAX_FOLDERS))
        found = (place for path in self._paths for place in self._in(path, budget))
        self._listed = {place.key: place for place in islice(found, MAX_ENTRIES)}
        self._known |= self._listed
        self._looked = time.monotonic()

    def _in(self, path: Path, budget: Iterator[int]) -> Iterator[Place]:
        found = list(self._below(path, path, MAX_DEPTH, budget)) if path.is_dir() else []
        # a folder in which `analyze` may find something to read; an empty one may fill later
        if not found and (path.is_file() or _children(path, everything=True)):
            found = [_place(path, path, TRACE)]
        yield from found

    def _below(self, folder: Path, top: Path, depth: int, budget: Iterator[int]) -> Iterator[Place]:
        if next(budget, None) is None:
            return
        if self._is_run(folder):
            yield _place(folder, top, RUN)
            return
        children = _children(folder)
        kind = next(
            (kind for kind, names in SEARCHES.items() if any(os.path.isfile(folder / name) for name in names)), None
        )
        if kind is not None and (folder / SEARCH_RUNS).is_dir():
            yield _place(folder, top, kind)
            for run in _folders(_children(folder / SEARCH_RUNS)):
                if next(budget, None) is not None and self._is_run(run):
                    yield _place(run, top, RUN, run.name if folder == top else f"{folder.name}/{run.name}")
            return
        inner: list[Place] = []
        for child in children:
            path = Path(child.path)
            if _is_folder(child):
                inner += self._below(path, top, depth - 1, budget) if depth else ()
            elif child.name.endswith(TRACE_NAMES):
                inner.append(_place(path, top, TRACE))
        if inner and all(place.kind == TRACE for place in inner) and _of_one_run(children):
            inner = [_place(folder, top, TRACE)]
        yield from inner

    def _is_run(self, folder: Path) -> bool:
        text = str(folder)
        if text in self._runs:
            return folder.is_dir()
        with contextlib.suppress(OSError):
            if is_run_folder(folder):
                self._runs.add(text)
        return text in self._runs


def opened(place: Place, options: ReadOptions) -> Run:
    """The run of a place; raises `UnreadableInputError`, `NotThere` where an experiment has no run to show."""
    if place.folder is None:
        raise NotThere(f"{place.name}: no run of it is there yet")
    if not place.folder.exists():
        raise NotThere(f"{place.name}: its folder has been deleted or moved")
    return open_run(place.folder, options=options)


def _place(path: Path, top: Path, kind: str, name: str = "") -> Place:
    """What lies at a path, named with the folders it lies in where it is not directly in the one given."""
    name = name or (path.name if path == top else path.relative_to(top).as_posix())
    digest = hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()
    slug = _ID.sub("-", name).strip("-.")[:60]
    folder: Path | None = path
    if kind in SEARCHES:  # the run that is shown in full: its pilot or its best, else its first
        runs = _folders(_children(path / SEARCH_RUNS))
        best = (_read(path / SEARCHES[SWEEP][0], _Sweep) or _Sweep()).best if kind == SWEEP else None
        named = (run for run in runs if run.name.endswith("-pilot") or (best and run.name == best.folder))
        folder = next(named, runs[0] if runs else None)
    return Place(f"{slug}-{digest}" if slug else digest, name, path, kind, folder)


def _of_one_run(children: Sequence[os.DirEntry[str]]) -> bool:
    """Whether the traces in a folder belong together: they lie side by side, or in folders named after ranks."""
    if any(child.name.endswith(TRACE_NAMES) for child in children):
        return True
    folders = _folders(children)
    return bool(folders) and all(_RANK.search(folder.name) for folder in folders)


def _children(folder: Path, *, everything: bool = False) -> list[os.DirEntry[str]]:
    """What lies in a folder, by name; without what no run is in, unless it is `everything` that is not hidden."""
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []
    return sorted((each for each in found if everything or each.name not in LEFT_OUT), key=lambda entry: entry.name)


def _folders(children: Sequence[os.DirEntry[str]]) -> list[Path]:
    return [Path(child.path) for child in children if _is_folder(child)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


class Filter(Struct, frozen=True):
    """Which runs are wanted: all words of `text` in name, path, command, tags and knobs, each of `tags`, and each of
    `knobs`, with any value where it has none."""

    text: str = ""
    tags: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()

    def holds(self, place: Place, manifest: _Manifest) -> bool:
        known = "\n".join(map(str, (place.name, place.path, manifest.line, manifest.label, *manifest.knobs))).lower()
        own = {*manifest.knobs, *(knob.partition("=")[0] for knob in manifest.knobs)}
        return (
            all(word in known for word in self.text.lower().split())
            and {*self.tags} <= {*(manifest.tags or ())}
            and {*self.knobs} <= own
        )


LIST_SCHEMA = "stepscope.runs/1"
MAX_SHOWN = 500  # entries of one answer; the search finds the others
MAX_REPORT = 32 * 2**20


class _Steps(Struct):
    count: int | None = None
    mean_ms: float | None = None
    excluded: dict[str, int] = {}


class _Finding(Struct):
    title: str = ""


class _Report(Struct):
    """The little that the list shows of a report; the rest is skipped, not read."""

    steps: _Steps | None = None
    findings: list[_Finding] = []


class _Best(Struct):
    folder: str | None = None


class _Sweep(Struct):
    """What says which run of a sweep is shown."""

    best: _Best | None = None


class _Options(Struct):
    knobs: list[tuple[str, str]] = []


class _Script(Struct):
    path: str | None = None


class _Manifest(Struct):
    command: list[str] | None = None
    name: str | None = None
    tags: list[str] | None = None
    started_ns: int | None = None
    ended_ns: int | None = None
    options: _Options | None = None
    script: _Script | None = None

    @property
    def of_script(self) -> str:
        """The script's path, else the command."""
        return (self.script.path if self.script is not None else None) or self.line or ""

    @property
    def knobs(self) -> list[str]:
        """KNOB=VALUE of each that it was run with."""
        return [f"{knob}={value}" for knob, value in self.options.knobs] if self.options is not None else []

    @property
    def line(self) -> str | None:
        """The command as one text."""
        return " ".join(self.command or ()) or None

    @property
    def label(self) -> str:
        """The name and the tags that it was given."""
        return " ".join((self.name or "", *(self.tags or ()))).strip()


class _Index(Struct):
    """Of a host's reduced tables, what they keep of its manifest."""

    run: _Manifest


def _read(path: Path, kind: Any) -> Any:
    """What a file holds, read again when it has changed; None where there is none, or something else in it."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return _decoded(path, seen.st_mtime_ns, seen.st_size, kind)


@lru_cache(2 * MAX_ENTRIES)
def _decoded(path: Path, _mtime_ns: int, _size: int, kind: Any) -> Any:
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(file.read(MAX_REPORT), type=kind)
    except (OSError, ValueError, RecursionError):  # a msgspec error is a ValueError, and so is text that is no UTF-8
        return None


def manifest_of(place: Place) -> _Manifest:
    """What the recording says of itself, on its first host; of a trace, nothing."""
    if place.folder is None or place.kind == TRACE:
        return _Manifest()
    first = min(place.folder.glob("host-*/manifest.json"), default=None)
    reduced = min(place.folder.glob(f"{REDUCED}/host-*/{REDUCED_INDEX}"), default=None) if first is None else None
    if reduced is not None:
        index: _Index | None = _read(reduced, _Index)
        return _Manifest() if index is None else index.run
    found: _Manifest = _read(first or place.folder / "manifest.json", _Manifest) or _Manifest()
    return found


def entry(place: Place) -> dict[str, Any]:
    """One RunEntry; its note is how a run ended badly, or the name and tags it was given."""
    manifest = manifest_of(place)
    report: _Report = _read(place.path / "report.json", _Report) or _Report()
    steps = report.steps
    how = standing(place)
    started, ended = manifest.started_ns, manifest.ended_ns
    took_s = (ended - started) / 1e9 if place.recorded and started is not None and ended is not None else None
    note = how.text if how.state in (live.FAILED, live.VANISHED) else manifest.label
    return {
        "id": place.key,
        "name": plain(place.name),
        "path": plain(place.path, 1000),
        "kind": place.kind,
        "state": how.state,
        "started_ns": started,
        "duration_s": took_s,
        "command": manifest.line and plain(manifest.line),
        "steps": (steps.count or 0) + sum(steps.excluded.values()) if steps is not None else None,
        "mean_ms": steps.mean_ms if steps is not None else None,
        "first_finding": plain(report.findings[0].title) if report.findings else None,
        "note": plain(note) if note and note not in place.name else None,
        "knobs": [plain(knob) for knob in manifest.knobs],
    }


def standing(place: Place, progress: Progress | None = None) -> live.Standing:
    """How what lies in a place goes; `progress` of a run, to be named beside it."""
    if place.recorded:
        return live.standing(place.path, progress)
    if not place.path.exists():
        return live.Standing(live.VANISHED, live.GONE)
    if place.kind in SEARCHES:
        return live.standing_of_search(place.path / SEARCHES[place.kind][0], place.kind)
    return live.Standing(live.FINISHED, "A trace, which does not change.")


def _began(place: Place, manifest: _Manifest) -> float:
    if manifest.started_ns is not None:
        return manifest.started_ns / 1e9
    try:
        return place.path.stat().st_mtime
    except OSError:
        return 0.0


BLOCK = 512  # bytes of `st_blocks`, whatever the file system
# What lies in folders of ours; a script may have been given the same folder for its checkpoints.
_OURS = re.compile(
    r"(host|rank)-.+|notebook|tables|reduced|(job|replay)\.json|sacct\.txt|\.(.+-reduc|report)ed-by-\d+|"
    r"report\.(json|html)|(experiment|sweep)\.(json|jsonl)|runs|lock|optuna\.jsonl(\.lock)?"
)


class Freed(Struct, frozen=True):
    """What a run takes, and what of its folder stays.

    Attributes:
        bytes: on the disk; files with several names count once.
        others: entries of the folder that are not ours.
        why: the reason why it stays as a whole; None where it goes.
    """

    bytes: int = 0
    others: tuple[str, ...] = ()
    why: str | None = None


def look(place: Place) -> Freed:
    """What deleting a run would free. Links are not followed."""
    if place.kind == TRACE:
        return Freed(why="stepscope did not record it")
    if standing(place).state == live.RUNNING:
        return Freed(why="it goes on")
    if place.path.is_symlink():
        return Freed(why="it is a link")
    above = place.path.parent
    if above.name == SEARCH_RUNS:
        for kind, names in (*SEARCHES.items(), (EXPERIMENT, ("lock",))):
            if any((above.parent / name).exists() for name in names):
                one = "an experiment" if kind == EXPERIMENT else f"a {kind}"
                return Freed(why=f"it belongs to {one}, which goes as a whole")
    own, others = _entries(place.path)
    return Freed(_bytes(own), tuple(entry.name for entry in others))


def delete(place: Place) -> str | None:
    """Delete what `look` counted; what went wrong in a line, None where nothing did."""
    problems: list[str] = []

    def failed(_function: object, path: str, error: tuple[object, BaseException, object]) -> None:
        problems.append(f"{path}: {getattr(error[1], 'strerror', None) or error[1]}")

    for entry in _entries(place.path)[0]:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, onerror=failed)
        else:
            try:
                os.unlink(entry.path)
            except OSError as error:
                problems.append(f"{entry.path}: {error.strerror}")
    with contextlib.suppress(OSError):  # what is not ours keeps it
        place.path.rmdir()
    if not problems:
        return None
    return problems[0] + (f" (and {words.things(len(problems) - 1, 'more such file')})" if problems[1:] else "")


def _entries(folder: Path) -> tuple[Sequence[os.DirEntry[str]], Sequence[os.DirEntry[str]]]:
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        return (), ()
    own = [entry for entry in entries if _OURS.fullmatch(entry.name)]
    return own, [entry for entry in entries if entry not in own]


def _bytes(entries: Sequence[os.DirEntry[str]]) -> int:
    seen: dict[tuple[int, int], int] = {}
    waiting = list(entries)
    while waiting:
        entry = waiting.pop()
        with contextlib.suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            seen[found.st_dev, found.st_ino] = found.st_blocks * BLOCK
            if entry.is_dir(follow_symlinks=False):
                with os.scandir(entry.path) as inner:
                    waiting += inner
    return sum(seen.values())
