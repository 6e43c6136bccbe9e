"""What the server answers, as documents: the list, a run's head, its pages and timeline, and how it goes on.

Nothing here knows HTTP. Methods take the texts of a request, which may be anything, and raise errors whose class says
what is wrong with it (`security.STATUS`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.api import ReadOptions, Run
from stepscope.dashboard import pages
from stepscope.dashboard.pages import timeline
from stepscope.dashboard.server import live
from stepscope.dashboard.server.catalog import EXPERIMENT, Catalog, Place, manifest_of, standing
from stepscope.dashboard.server.live import Journals
from stepscope.dashboard.server.prepare import Prepared, PreparedRuns
from stepscope.dashboard.server.security import NotReady, StillPreparing, encoded
from stepscope.errors import NotThere, StepscopeError, UnreadableInputError, UsageError
from stepscope.report.escape import plain

LIVE_SCHEMA = "stepscope.live/1"
SCOPE = ("worker", "span", "steps")
IN_PATH = ("run", "page")
COMPARE, WITH = "compare", "with"
WHOLE = ("timeline",)  # shows a range of steps within the whole run
MAX_TEXT = 300  # of one parameter
MAX_HITS = 1_000
AGAIN_S = 2.0  # while a run goes on
SOON_S = 1.0  # while its last revision is being made
_STEPS = re.compile(r"(\d{1,15})(?::(\d{1,15}))?")
_NUMBER = re.compile(r"\d{1,19}")

Asked = Mapping[str, str]


class Handlers:
    """Everything there is to ask, of the runs in `paths`. What is asked names a run by its ID, as `run`."""

    def __init__(self, paths: tuple[Path, ...], options: ReadOptions, *, source: bool = True) -> None:
        self._source = source
        self._prepared_runs = PreparedRuns(options, self._describe, self._ahead)
        self._catalog = Catalog(paths, lambda place: self._prepared_runs.look(place).run)
        self._journals: dict[str, Journals] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        self._prepared_runs.close()

    def runs(self, asked: Asked) -> dict[str, Any]:
        """RunList."""
        return self._catalog.document(_text(asked, "q") or "")

    def head(self, asked: Asked) -> dict[str, Any]:
        """RunHead; the run begins to be read where it is not yet."""
        place = self._catalog.place(asked["run"])
        manifest = manifest_of(place)
        head = pages.head(
            pages.PAGES.values(),
            id=place.key,
            name=plain(place.name),
            kind=place.kind,
            state=standing(place).state,
            command=manifest.line and plain(manifest.line),
            started_ns=manifest.started_ns,
        )
        try:
            prepared = self._prepared(place)
        except StillPreparing as still:
            return {**head, "preparing": still.document}
        except StepscopeError as error:
            state = live.VANISHED if head["state"] == live.VANISHED else "unreadable"
            return {**head, "state": state, "error": plain(error, 2000)}
        return {**head, **prepared.head, "revision": prepared.revision}

    def _describe(self, place: Place, run: Run) -> dict[str, Any]:
        context = pages.PageContext(run, run, catalog=self._catalog, key=place.key, source=self._source)
        always = (COMPARE,) if place.kind == EXPERIMENT else ()
        empty = [key for key, page in pages.PAGES.items() if key not in always and page.empty(context)]
        listed = pages.head(pages.PAGES.values(), empty)["pages"]
        return {
            "workers": pages.workers(run),
            "spans": pages.spans(run),
            "steps": pages.step_range(run),
            "pages": listed,
        }

    def page(self, asked: Asked) -> bytes:
        """PageDocument, encoded; raises `StillPreparing` while the run or its selected steps are being read."""
        page = asked["page"]
        if page not in pages.PAGES:
            raise NotThere(f"there is no page {plain(page, 40)}; there are {', '.join(pages.PAGES)}")
        scope = pages.Scope(_text(asked, "worker"), _text(asked, "span"), _steps(asked))
        prepared = self._prepared(self._catalog.place(asked["run"]))
        narrow = "steps" in pages.PAGES[page].follows and page not in WHOLE
        chosen = self._with_steps(prepared, scope.steps) if narrow else prepared
        given = {key: value for key, value in asked.items() if key not in IN_PATH and len(value) <= MAX_TEXT}
        if prepared.place.kind == EXPERIMENT and page == COMPARE:
            given = {WITH: prepared.place.key, **given}  # an experiment is laid beside itself: what came of it

        def make() -> bytes:
            context = pages.PageContext(
                run=chosen.run,
                base=prepared.run,
                scope=scope,
                params={name: value for name, value in given.items() if name not in SCOPE},
                catalog=self._catalog,
                key=prepared.place.key,
                revision=prepared.revision,
                source=self._source,
            )
            return encoded(pages.page(context, page))

        # another run may change without this one
        return (
            make() if WITH in given or page == COMPARE else chosen.documents.get((page, *sorted(given.items())), make)
        )

    def _ahead(self, place: Place) -> Iterator[Callable[[], object]]:
        return (partial(self.page, {"run": place.key, "page": page}) for page in pages.PAGES if page != COMPARE)

    def _prepared(self, place: Place) -> Prepared:
        """The whole run; of one that goes on and has nothing to show yet, that is no error."""
        try:
            return self._prepared_runs.look(place)
        except UnreadableInputError:
            if standing(place).state == live.RUNNING:
                raise StillPreparing("Waiting for the first step of the run", None) from None
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

    def _run(self, asked: Asked) -> Run:
        return self._prepared(self._catalog.place(asked["run"])).run

    def timeline(self, asked: Asked) -> dict[str, Any]:
        """TimelineWindow."""
        return timeline.window(
            self._run(asked),
            from_ns=_number(asked, "from"),
            to_ns=_number(asked, "to"),
            width=_number(asked, "width") or timeline.WIDTH,
            worker=_text(asked, "worker"),
            steps=_steps(asked),
        )

    def slice(self, asked: Asked) -> dict[str, Any]:
        """SliceDetail."""
        if _NUMBER.fullmatch(asked["slice"]) is None:
            raise NotThere("there is no such slice")
        try:
            return timeline.detail(self._run(asked), int(asked["slice"]))
        except UsageError as error:
            raise NotThere(str(error)) from None

    def search(self, asked: Asked) -> dict[str, Any]:
        """SearchResult."""
        limit = min(max(_number(asked, "limit") or 200, 1), MAX_HITS)
        text = _text(asked, "text") or ""
        if not text.strip():
            raise UsageError("text: nothing to look for; give a part of a name")
        return timeline.search(self._run(asked), text, worker=_text(asked, "worker"), limit=limit)

    def perfetto(self, asked: Asked, folder: Path) -> Path:
        """A trace of the chosen steps, written into `folder`."""
        try:
            run = self._run(asked)
        except StillPreparing:
            raise NotReady("the run is still being read; ask again when its pages are there") from None
        steps = _steps(asked)
        name = asked["run"] + (f"-steps-{steps[0]}-{steps[1]}" if steps else "")
        return timeline.slice_of_trace(run, steps, folder / f"{name}.json.gz")

    def following(self, asked: Asked) -> dict[str, Any]:
        """Live. Asking for it is what keeps the pages of a run that goes on up to date."""
        place = self._catalog.place(asked["run"])
        progress, pending = None, False
        if place.recorded:
            with self._lock:
                progress = self._journals.setdefault(place.key, Journals(place.path)).read()
        how = standing(place, progress)
        running = how.state == live.RUNNING
        if place.recorded:
            pending = self._prepared_runs.refresh(place, running=running)
        return {
            "schema": LIVE_SCHEMA,
            "state": how.state,
            "revision": self._prepared_runs.revision(place),
            "steps": progress and progress.steps,
            "last_step_ms": progress and progress.last_ms,
            "mean_ms": progress and progress.mean_ms,
            "text": how.text,
            "again_s": AGAIN_S if running else SOON_S if pending else None,
        }


def _text(asked: Asked, name: str) -> str | None:
    """A parameter of reasonable length; an empty one is none."""
    value = asked.get(name) or None
    if value is not None and len(value) > MAX_TEXT:
        raise UsageError(f"{name}: longer than {MAX_TEXT} characters")
    return value


def _steps(asked: Asked) -> tuple[int, int] | None:
    """ "3:9" or "3" as (first, last)."""
    text = _text(asked, "steps")
    if text is None:
        return None
    match = _STEPS.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"steps {plain(text, 40)}: not a range; give the first and the last, e.g. 10:20")
    return int(match[1]), int(match[2] or match[1])


def _number(asked: Asked, name: str) -> int | None:
    text = _text(asked, name)
    if text is None:
        return None
    if _NUMBER.fullmatch(text) is None:
        raise UsageError(f"{name} {plain(text, 40)}: not a whole number")
    return int(text)
