"""The page with all tracks on one axis, and what the server answers about it: windows, slices, searches, cut traces.

The first window comes with the page, the others as they are looked at. `run` is always the run without a selection of
steps: ids of slices and times (ns from the run's first instant) hold for it alone. Every function returns the document
as `web/src/lib/types.ts` words it and raises `UsageError` for what there is not. `prepare` makes what all of them need,
once per run.
"""

from __future__ import annotations

import contextlib
import json
import re
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from msgspec.structs import asdict

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import MAX_TEXT, Block
from stepscope.errors import StepscopeError, UsageError
from stepscope.report.escape import plain
from stepscope.report.words import Shortener

if TYPE_CHECKING:
    from stepscope.analyze.pictures.timeline import Timeline
    from stepscope.api import Run
    from stepscope.dashboard.pages import PageContext
    from stepscope.model.timeline import StackPlace, TimelineStep, TimelineWindow

_AT = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")
_WHY = "Neither steps nor traces nor samples with times were recorded."
_RECORD = (
    "Record the training with stepscope: steps come from its loop, operators and kernels from the window of a few "
    "steps that it traces."
)
_NO_TRACE = (
    "No trace was recorded, so there are steps but no operators or kernels. `stepscope run` traces a few steps once "
    "their time is steady; `--window` says when."
)


def build(context: PageContext) -> list[Block]:
    """The timeline of the whole run, whose first window stands at the moments, the steps or the span asked for."""
    from stepscope.analyze.pictures.timeline_queries import moments

    run = context.base
    if empty(context):
        return [blocks.empty("No timeline", _WHY, _RECORD, "stepscope run -- python train.py")]
    selection, timeline = context.selection(), run.timeline
    if context.embedded:
        made = _embedded(run, timeline)
    else:
        worker = _worker(timeline, selection.worker)
        at = _moments(context.params.get("at"))
        from_ns, to_ns = at or moments(timeline, worker=worker, span=selection.span, steps=context.scope.steps)
        made = {
            "kind": "timeline",
            "id": "timeline",
            "from_ns": 0,
            "to_ns": max(timeline.length_ns, 1),
            "steps": _steps(timeline, timeline.steps, worker),
            "tracks": _tracks(timeline, worker),
            "window": window(run, from_ns=from_ns, to_ns=to_ns, worker=worker),
            "notes": _notes(timeline, worker),
            "sliceable": not run.tables.traces.is_empty(),
            "details": None,
        }
    return [blocks.text(_NO_TRACE, "note"), made] if run.tables.events.is_empty() else [made]


def empty(context: PageContext) -> bool:
    tables = context.base.tables
    return tables.steps.is_empty() and tables.events.is_empty() and tables.stretches.is_empty()


def _moments(text: str | None) -> tuple[int, int] | None:
    """`FROM:TO` in ns from the run's first instant, None for anything else."""
    match = _AT.fullmatch(text or "")
    if match is None or int(match[2]) <= int(match[1]):
        return None
    return int(match[1]), int(match[2])


Document = dict[str, Any]

WINDOW_SCHEMA = "stepscope.timeline/1"
SLICE_SCHEMA = "stepscope.slice/1"
SEARCH_SCHEMA = "stepscope.search/1"
WIDTH = 1_200  # pixels a window is thinned for where nobody says
MAX_STEPS = 2_000  # on the ruler
MAX_TRACKS = 600
LARGE = 100_000  # slices or stacks from which pages are made before anybody asks
SLOW_PAGES: tuple[tuple[str, dict[str, str]], ...] = (
    ("flame", {}),
    ("flame", {"by": "line"}),
    ("operators", {"group": "shapes"}),
    ("operators", {"operator": "aten::add"}),  # of whichever: what is kept are the calls of all
    ("kernels", {"group": "launch"}),
)
_OF_TRACK = ("key", "label", "group", "kind", "depth")
EMBEDDED_STEPS = 2  # that the single-file report holds
EMBEDDED_WIDTH = 2_400
EMBEDDED_SLICES = 6_000
EMBEDDED_DETAILS = 150
EMBEDDED_DETAIL_CHARS = 250_000  # of them all together
EMBEDDED_FRAMES = 20  # of a stack in them, and slices launched


def prepare(run: Run) -> None:
    """Make the index that windows are cut from; takes seconds for a trace of millions of events.

    Of a large run also what other pages would be slow to make when they are first asked for.
    """
    made = run.timeline
    made.lower_names, made.steps  # noqa: B018  # made when they are first asked for
    base = made.context.base
    for span in base.spans:
        span.links  # noqa: B018
    if max(run.tables.events.height, run.tables.stacks.height) >= LARGE:
        from stepscope.dashboard import pages

        for key, params in SLOW_PAGES:  # whose rows or trees are no part of the analysis: once made, they are kept
            with contextlib.suppress(StepscopeError):  # a page that cannot be made says so to whoever asks for it
                pages.page(pages.PageContext(run=run, base=run, params=params), key)


def window(
    run: Run,
    *,
    from_ns: int | None = None,
    to_ns: int | None = None,
    width: int = WIDTH,
    worker: str | None = None,
    steps: tuple[int, int] | None = None,
) -> Document:
    """The TimelineWindow from `from_ns` to `to_ns`; without them of `steps`, or of the first traces."""
    from stepscope.analyze.pictures import timeline_queries as windows

    timeline = run.timeline
    worker = _worker(timeline, worker)
    first, last = windows.moments(timeline, worker=worker, steps=steps)
    first = first if from_ns is None else max(from_ns, 0)
    last = last if to_ns is None else min(to_ns, max(timeline.length_ns, 1))
    if last <= first:
        raise UsageError(f"from {first} to {last}: not a window of this timeline, which lasts {timeline.length_ns} ns")
    return _window(windows.viewport(timeline, first, last, width, worker=worker))


def detail(run: Run, identifier: int) -> Document:
    """The SliceDetail of one slice; raises `UsageError` where there is none."""
    from stepscope.analyze.pictures.timeline_queries import detail as detail_of

    facts = run.tables.run
    shorten = Shortener({"cwd": facts.cwd, "user_roots": facts.user_roots})
    found = detail_of(run.timeline, identifier)
    told = blocks.cleaned(to_builtins(found))
    operator = found.operator and {"id": found.operator.id, "name": plain(found.operator.name)}
    launched = [{**asdict(each), "name": plain(each.name)} for each in found.launched]
    place = found.place and _place(found.place, shorten)
    stack = [_place(each, shorten) for each in found.stack]
    links = {"operator": operator, "launched": launched, "place": place, "stack": stack}
    return {"schema": SLICE_SCHEMA, **told, **links}


def _place(found: StackPlace, shorten: Shortener) -> Document:
    place = found.place
    shown = shorten(place.file, place.line) if place.file else plain(place.function or "")
    return blocks.place(place.file, place.line, place.function, shown=shown, guess=found.guess, code=found.code)


def search(run: Run, text: str, *, worker: str | None = None, limit: int = 200) -> Document:
    """The SearchResult: slices whose name contains `text`, in order of time, whatever the case of letters."""
    from stepscope.analyze.pictures.timeline_queries import search as search_in

    timeline = run.timeline
    found = search_in(timeline, text[:MAX_TEXT], worker=_worker(timeline, worker), limit=limit)
    hits = [{**asdict(hit), "name": plain(hit.name), "track": plain(hit.track)} for hit in found.hits]
    return {"schema": SEARCH_SCHEMA, "total": found.total, "hits": hits}


def slice_of_trace(run: Run, steps: tuple[int, int] | None, path: Path) -> Path:
    """Write the traces of `steps` as one Chrome trace for Perfetto to `path` (its name ends in .json.gz).

    Raises `UsageError` where the traces hold no such step, `UnreadableInputError` where they cannot be read any more.
    """
    from stepscope.export import Cut, export

    if run.tables.traces.is_empty():
        raise UsageError("this run has no trace to cut; record one with a window")
    try:
        return export(run.paths, path, Cut(steps=steps), force=True).path
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--")) from None


def _worker(timeline: Timeline, key: str | None) -> str | None:
    """The worker behind a key of a RunHead, whose names are made harmless."""
    return next((group for group in timeline.groups() if plain(group) == key), key) if key is not None else None


def _window(found: TimelineWindow) -> Document:
    return {
        "schema": WINDOW_SCHEMA,
        **asdict(found),
        "names": [plain(name) for name in found.names],
        "tracks": [{**asdict(track), "key": plain(track.key)} for track in found.tracks],
        "notes": [blocks.sentence(note) for note in found.notes],
    }


def _tracks(timeline: Timeline, worker: str | None) -> list[Document]:
    first, last = timeline.track_range(worker)
    found = timeline.tracks[first:last][:MAX_TRACKS]
    own = ({**{name: getattr(track, name) for name in _OF_TRACK}, "key": plain(track.key)} for track in found)
    return [blocks.cleaned(each) for each in own]


def _notes(timeline: Timeline, worker: str | None) -> list[str]:
    first, last = timeline.track_range(worker)
    notes = [blocks.sentence(note) for note in timeline.notes]
    if last - first > MAX_TRACKS:
        notes.append(f"The first {MAX_TRACKS} of {last - first:,} tracks are listed; choose a worker to see its own.")
    return notes


def _steps(timeline: Timeline, steps: tuple[TimelineStep, ...], worker: str | None) -> list[Document]:
    """Steps for the ruler. Of very many all stay that lie in traces, and the longest of the others."""
    from stepscope.analyze.pictures.series import positions

    group = timeline.workers
    own = [step for step in steps if worker is None or group.get(step.process, step.process) == worker]
    if len(own) > MAX_STEPS:
        own = [own[at] for at in positions([step.to_ns - step.from_ns for step in own], MAX_STEPS)]
    return [blocks.cleaned(asdict(step)) for step in own]


def _embedded(run: Run, timeline: Timeline) -> Document:
    """The block of the single-file report: a few traced steps with as many slices and details as fit."""
    from stepscope.analyze.pictures.timeline_queries import moments, viewport

    from_ns, to_ns = _middle_steps(timeline) or moments(timeline)
    to_ns = max(to_ns, from_ns + 1)
    found = viewport(timeline, from_ns, to_ns, EMBEDDED_WIDTH, limit=EMBEDDED_SLICES)
    inside = tuple(step for step in timeline.steps if step.from_ns < to_ns and step.to_ns > from_ns)
    notes = _notes(timeline, None)
    if (from_ns, to_ns) != (0, timeline.length_ns):
        notes.append("This file holds a part of the timeline; `stepscope view` shows all of it.")
    drawn = {plain(track.key) for track in found.tracks}
    return {
        "kind": "timeline",
        "id": "timeline",
        "from_ns": from_ns,
        "to_ns": to_ns,
        "steps": _steps(timeline, inside, None),
        "tracks": [track for track in _tracks(timeline, None) if track["key"] in drawn],
        "window": _window(found),
        "notes": notes,
        "sliceable": False,
        "details": _details(run, found),
    }


def _middle_steps(timeline: Timeline) -> tuple[int, int] | None:
    """When the middle of the traced steps of the first worker ran, None where no step was traced."""
    steps = timeline.context.tables.steps
    traced = steps.filter(steps["in_window"].fill_null(False)).sort("start_ns", maintain_order=True)
    if traced.is_empty() or timeline.context.tables.events.is_empty():
        return None
    own = traced.filter(traced["process"] == traced["process"][0])
    steps_of_trace = own.select("start_ns", "wall_ns").rows()[max((own.height - EMBEDDED_STEPS) // 2, 0) :]
    start, wall = steps_of_trace[0]
    end = start + wall
    for begin, length in steps_of_trace[1:EMBEDDED_STEPS]:
        if begin <= end + wall:  # else it is in another trace
            end = begin + length
    return start - timeline.origin_ns, end - timeline.origin_ns


def _details(run: Run, found: TimelineWindow) -> dict[str, Document]:
    by_track = [
        sorted((-duration, identifier) for duration, identifier in zip(track.duration, track.id, strict=True))
        for track in found.tracks
    ]
    in_turn = (pair[1] for row in zip_longest(*by_track, fillvalue=(0, -1)) for pair in row if pair[1] >= 0)
    made: dict[str, Document] = {}
    room = EMBEDDED_DETAIL_CHARS
    for identifier in islice(in_turn, EMBEDDED_DETAILS):
        told = detail(run, identifier)
        for name in ("stack", "launched"):
            told[name] = told[name][:EMBEDDED_FRAMES]
        room -= len(json.dumps(told))
        if room < 0:
            break
        made[str(identifier)] = told
    return made
