"""The timeline: what ran when, one window at a time, thinned to what can be drawn.

Times are ns since the first instant of the run (`Window`'s slices: since the window's start), so that they stay exact
in languages whose numbers hold 53 bits. Names and kinds are numbers of lists, because a window repeats them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from stepscope.model.findings import Place

TrackKind = Literal["steps", "phases", "thread", "stream", "worker"]

# What a slice is; decides its colour. "sampled" and "waiting" are what a sampled process did, "sync" waits for a
# device.
KINDS = (
    *("user_function", "library_function", "operator", "runtime", "sync", "annotation"),
    *("kernel", "communication", "copy", "fill", "sampled", "waiting"),
    *("step", "eval_step", "data_wait", "before_forward", "forward", "backward", "optimizer", "other"),
)


class TimelineTrack(Struct, frozen=True):
    """A row of slices; `depth` is how many lie above each other at most, `group` the worker."""

    key: str
    label: str
    group: str
    kind: TrackKind
    depth: int


class TimelineStep(Struct, frozen=True):
    """A step as the ruler shows it."""

    step: int
    process: str
    from_ns: int
    to_ns: int
    kind: str


class TrackSlices(Struct, frozen=True):
    """Slices of one track in a window, one entry each in all lists, by depth and start.

    Where `count` slices too thin to be seen are drawn as one, `id` is -1 and name and kind are those of the longest.
    """

    key: str
    start: tuple[int, ...]
    duration: tuple[int, ...]
    depth: tuple[int, ...]
    name: tuple[int, ...]
    kind: tuple[int, ...]
    id: tuple[int, ...]
    count: tuple[int, ...]


class TimelineWindow(Struct, frozen=True):
    """What there is to draw between two moments; `total` counts its slices before thinning."""

    from_ns: int
    to_ns: int
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    tracks: tuple[TrackSlices, ...]
    total: int
    notes: tuple[str, ...] = ()


class SliceFact(Struct, frozen=True):
    """One more thing that is known of a slice; `unit` is "" of texts."""

    label: str
    value: int | float | str
    unit: str = ""


class SliceRef(Struct, frozen=True):
    """Another slice that has to do with the one shown."""

    id: int
    name: str
    start_ns: int
    duration_ns: int


class StackPlace(Struct, frozen=True):
    """A frame; `guess` marks code of a library that stands in for the user's, `code` is the source line."""

    place: Place
    guess: bool = False
    code: str | None = None


class SliceDetail(Struct, frozen=True):
    """All that is known of one slice. `stack` is innermost first; `launched` is cut, its full number in the notes."""

    id: int
    name: str
    category: str
    track: str
    start_ns: int
    duration_ns: int
    self_ns: int | None
    step: int | None
    facts: tuple[SliceFact, ...] = ()
    operator: SliceRef | None = None
    launched: tuple[SliceRef, ...] = ()
    place: StackPlace | None = None
    stack: tuple[StackPlace, ...] = ()
    notes: tuple[str, ...] = ()


class SearchHit(Struct, frozen=True):
    """A slice whose name holds what was searched."""

    id: int
    name: str
    track: str
    depth: int
    start_ns: int
    duration_ns: int
    step: int | None


class SearchResult(Struct, frozen=True):
    """The first hits in order of time; `total` counts all."""

    total: int
    hits: tuple[SearchHit, ...]
