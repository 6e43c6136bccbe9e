"""The runs below one folder, opened when they are first asked about; nothing outside of it, wherever links lead."""

from __future__ import annotations

import gc
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from stepscope.agents.jobs import Jobs
from stepscope.api import ReadOptions, Run
from stepscope.dashboard.server import live
from stepscope.dashboard.server.catalog import SEARCHES, TRACE, Catalog, Filter, Place, opened
from stepscope.errors import NotThere, UsageError
from stepscope.report.escape import one_line

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
