"""The list of runs as a document, and the runs that pages may lay beside each other.

What an entry says of a run comes from its manifest and its report.json, where there is one; each file is read again
when it has changed, and only for entries that are shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stepscope import api
from stepscope.dashboard.server import live
from stepscope.dashboard.server.catalog import EXPERIMENT, RUN, Place, Places
from stepscope.dashboard.server.journals import Progress
from stepscope.files import open_regular
from stepscope.report.escape import plain

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
        found = [(place, manifest) for place, manifest in self._all() if _matches(place, manifest, wanted)]
        found.sort(key=lambda each: (_age(*each), each[0].name), reverse=True)
        shown = [self.entry(place, manifest) for place, manifest in found[:MAX_SHOWN]]
        return {"schema": LIST_SCHEMA, "runs": shown, "total": len(found)}

    def _all(self) -> list[tuple[Place, _Manifest]]:
        return [(place, self.manifest(place)) for place in self._places.all()]

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
            "duration_s": _duration_s(manifest) if place.recorded else None,
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
    command, started, ended = row.get("command"), row.get("started_ns"), row.get("ended_ns")
    return _Manifest(
        command=" ".join(str(part) for part in command) if isinstance(command, list) else "",
        label=" ".join(str(part) for part in (row.get("name") or "", *_tags(row))).strip(),
        started_ns=started if isinstance(started, int) else None,
        ended_ns=ended if isinstance(ended, int) else None,
    )


def _tags(row: dict[str, Any]) -> list[Any]:
    tags = row.get("tags")
    return tags if isinstance(tags, list) else []


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
    if not wanted:
        return True
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


def _duration_s(manifest: _Manifest) -> float | None:
    if manifest.started_ns is None or manifest.ended_ns is None:
        return None
    return (manifest.ended_ns - manifest.started_ns) / 1e9


def _note(place: Place, manifest: _Manifest, how: live.Standing) -> str | None:
    """What else is worth a word: how a run ended badly, or the name and tags it was given."""
    if how.state in (live.FAILED, live.VANISHED):
        return plain(how.text)
    if manifest.label and manifest.label not in place.name:
        return plain(manifest.label)
    return None
