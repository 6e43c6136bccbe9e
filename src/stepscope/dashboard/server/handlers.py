"""What the server answers, as documents: the list, a run's head, its pages and timeline, and how it goes on.

Nothing here knows HTTP. Methods take the texts of a request, which may be anything, and raise errors whose class says
what is wrong with it (`security.status_of`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.api import ReadOptions, Run
from stepscope.dashboard.pages import timeline
from stepscope.dashboard.server import live
from stepscope.dashboard.server.catalog import EXPERIMENT, Catalog, Place, Places, standing
from stepscope.dashboard.server.live import Journals, Progress
from stepscope.dashboard.server.prepare import Prepared, PreparedRuns, is_too_early
from stepscope.dashboard.server.security import NotReady, NotThere, StillPreparing, encoded
from stepscope.errors import StepscopeError, UsageError
from stepscope.report.escape import plain

HEAD_SCHEMA, LIVE_SCHEMA = "stepscope.run/1", "stepscope.live/1"
SCOPE = ("worker", "span", "steps")
COMPARE, WITH = "compare", "with"
WHOLE = ("timeline",)  # shows a range of steps within the whole run
MAX_TEXT = 300  # of one parameter
MAX_WIDTH = 8_000
MAX_HITS = 1_000
AGAIN_S = 2.0  # while a run goes on
SOON_S = 1.0  # while its last revision is being made
_STEPS = re.compile(r"(\d{1,15})(?::(\d{1,15}))?")
_NUMBER = re.compile(r"\d{1,19}")

Params = Mapping[str, str]


class Handlers:
    """Everything there is to ask, of the runs in `paths`."""

    def __init__(self, paths: tuple[Path, ...], options: ReadOptions, *, source: bool = True) -> None:
        self._source = source
        self._places = Places(paths)
        self._prepared_runs = PreparedRuns(options, self._describe, timeline.prepare, self._ahead)
        self._catalog = Catalog(self._places, lambda place: self._prepared_runs.look(place).run)
        self._journals: dict[str, Journals] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        self._prepared_runs.close()

    # ---------------------------------------------------------------------------------------------------------- runs

    def runs(self, params: Params) -> dict[str, Any]:
        """RunList."""
        return self._catalog.document(_text(params, "q") or "")

    def head(self, key: str) -> dict[str, Any]:
        """RunHead; the run begins to be read where it is not yet."""
        from stepscope.dashboard.pages import PAGES

        place = self._places.get(key)
        manifest = self._catalog.manifest(place)
        how = standing(place)
        pages = [{"key": p.key, "title": p.title, "group": p.group, "empty": False} for p in PAGES.values()]
        head = {
            "schema": HEAD_SCHEMA,
            "id": place.key,
            "name": plain(place.name),
            "kind": place.kind,
            "state": how.state,
            "command": plain(manifest.command) if manifest.command else None,
            "started_ns": manifest.started_ns,
            "revision": 0,
            "workers": [],
            "spans": [],
            "steps": None,
            "pages": pages,
            "preparing": None,
            "error": None,
        }
        try:
            prepared = self._prepared_runs.look(place)
        except StillPreparing as still:
            return {**head, "preparing": still.document}
        except StepscopeError as error:
            if how.state == live.RUNNING and is_too_early(error):
                return {**head, "preparing": _early().document}
            state = how.state if how.state == live.VANISHED else "unreadable"
            return {**head, "state": state, "error": plain(error, 2000)}
        return {**head, **prepared.head, "revision": prepared.revision}

    def _describe(self, place: Place, run: Run) -> dict[str, Any]:
        """What a head says once the run has been read."""
        from stepscope.dashboard import pages

        context = pages.PageContext(run=run, base=run, catalog=self._catalog, key=place.key, source=self._source)
        listed = [
            {"key": page.key, "title": page.title, "group": page.group, "empty": page.empty(context)}
            for page in pages.PAGES.values()
        ]
        if place.kind == EXPERIMENT:
            listed = [{**page, "empty": page["empty"] and page["key"] != COMPARE} for page in listed]
        return {
            "workers": pages.workers(run),
            "spans": pages.spans(run),
            "steps": pages.step_range(run),
            "pages": listed,
        }

    # --------------------------------------------------------------------------------------------------------- pages

    def page(self, key: str, page: str, params: Params) -> bytes:
        """PageDocument, encoded; raises `StillPreparing` while the run or its selected steps are being read."""
        from stepscope.dashboard import pages

        if page not in pages.PAGES:
            raise NotThere(f"there is no page {plain(page, 40)}; there are {', '.join(pages.PAGES)}")
        scope = pages.Scope(_text(params, "worker"), _text(params, "span"), _steps(params))
        prepared = self._prepared(key)
        follows = pages.PAGES[page].follows
        narrow = "steps" in follows and page not in WHOLE
        chosen = self._with_steps(prepared, scope.steps) if narrow else prepared
        if prepared.place.kind == EXPERIMENT and page == COMPARE:
            params = {WITH: prepared.place.key, **params}  # an experiment is laid beside itself: what came of it
        asked = tuple(sorted((name, value) for name, value in params.items() if len(value) <= MAX_TEXT))

        def make() -> bytes:
            context = pages.PageContext(
                run=chosen.run,
                base=prepared.run,
                scope=scope,
                params={name: value for name, value in asked if name not in SCOPE},
                catalog=self._catalog,
                key=prepared.place.key,
                revision=prepared.revision,
                source=self._source,
            )
            return encoded(pages.page(context, page))

        # another run may change without this one
        return make() if WITH in params or page == COMPARE else chosen.documents.get((page, asked), make)

    def _ahead(self, place: Place) -> Iterator[Callable[[], object]]:
        """The pages of a run as they are asked for first."""
        from stepscope.dashboard.pages import PAGES

        return (partial(self.page, place.key, page, {}) for page in PAGES if page != COMPARE)

    def _prepared(self, key: str) -> Prepared:
        """The whole run; of one that goes on and has nothing to show yet, that is no error."""
        place = self._places.get(key)
        try:
            return self._prepared_runs.look(place)
        except StillPreparing:
            raise
        except StepscopeError as error:
            if is_too_early(error) and standing(place).state == live.RUNNING:
                raise _early() from None
            raise

    def _with_steps(self, whole: Prepared, steps: tuple[int, int] | None) -> Prepared:
        """The same run with some steps alone, which must be among those it has."""
        known = whole.head.get("steps")
        if steps is None:
            return whole
        if known is None or steps[1] < known["first"] or steps[0] > known["last"]:
            there = f"it has steps {known['first']} to {known['last']}" if known else "it has no steps"
            raise UsageError(f"steps {steps[0]} to {steps[1]}: not in this run; {there}")
        if steps[0] <= known["first"] and steps[1] >= known["last"]:
            return whole
        return self._prepared_runs.look(whole.place, steps)

    # ------------------------------------------------------------------------------------------------------ timeline

    def timeline(self, key: str, params: Params) -> dict[str, Any]:
        """TimelineWindow."""
        width = _number(params, "width") or timeline.WIDTH
        return timeline.window(
            self._prepared(key).run,
            from_ns=_number(params, "from"),
            to_ns=_number(params, "to"),
            width=min(max(width, 1), MAX_WIDTH),
            worker=_text(params, "worker"),
            steps=_steps(params),
        )

    def slice(self, key: str, identifier: str) -> dict[str, Any]:
        """SliceDetail."""
        if _NUMBER.fullmatch(identifier) is None:
            raise NotThere("there is no such slice")
        try:
            return timeline.detail(self._prepared(key).run, int(identifier))
        except UsageError as error:
            raise NotThere(str(error)) from None

    def search(self, key: str, params: Params) -> dict[str, Any]:
        """SearchResult."""
        limit = min(max(_number(params, "limit") or 200, 1), MAX_HITS)
        text = _text(params, "text") or ""
        if not text.strip():
            raise UsageError("text: nothing to look for; give a part of a name")
        return timeline.search(self._prepared(key).run, text, worker=_text(params, "worker"), limit=limit)

    def perfetto(self, key: str, params: Params, folder: Path) -> Path:
        """A trace of the chosen steps, written into `folder`."""
        try:
            prepared = self._prepared(key)
        except StillPreparing:
            raise NotReady("the run is still being read; ask again when its pages are there") from None
        steps = _steps(params)
        name = prepared.place.key + (f"-steps-{steps[0]}-{steps[1]}" if steps else "")
        return timeline.slice_of_trace(prepared.run, steps, folder / f"{name}.json.gz")

    # ---------------------------------------------------------------------------------------------------------- live

    def following(self, key: str) -> dict[str, Any]:
        """Live. Asking for it is what keeps the pages of a run that goes on up to date."""
        place = self._places.get(key)
        progress = self._progress(place) if place.recorded else None
        how = standing(place, progress)
        running = how.state == live.RUNNING
        pending = self._prepared_runs.refresh(place, running=running) if place.recorded else False
        again = AGAIN_S if running else SOON_S if pending else None
        return {
            "schema": LIVE_SCHEMA,
            "state": how.state,
            "revision": self._prepared_runs.revision(place),
            "steps": progress.steps if progress is not None else None,
            "last_step_ms": progress.last_ms if progress is not None else None,
            "mean_ms": progress.mean_ms if progress is not None else None,
            "text": how.text,
            "again_s": again,
        }

    def _progress(self, place: Place) -> Progress | None:
        with self._lock:
            return self._journals.setdefault(place.key, Journals(place.path)).read()


def _early() -> StillPreparing:
    return StillPreparing("Waiting for the first step of the run", None)


def _text(params: Params, name: str) -> str | None:
    """A parameter of reasonable length; an empty one is none."""
    value = params.get(name) or None
    if value is not None and len(value) > MAX_TEXT:
        raise UsageError(f"{name}: longer than {MAX_TEXT} characters")
    return value


def _steps(params: Params) -> tuple[int, int] | None:
    """ "3:9" or "3" as (first, last)."""
    text = _text(params, "steps")
    if text is None:
        return None
    match = _STEPS.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"steps {plain(text, 40)}: not a range; give the first and the last, e.g. 10:20")
    return int(match[1]), int(match[2] or match[1])


def _number(params: Params, name: str) -> int | None:
    text = _text(params, name)
    if text is None:
        return None
    if _NUMBER.fullmatch(text) is None:
        raise UsageError(f"{name} {plain(text, 40)}: not a whole number")
    return int(text)
