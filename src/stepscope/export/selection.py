"""The second pass, for a cut: which entries stay. One byte per entry of the source is all it leaves behind.

- A slice stays whole when it overlaps the window, however little; it is never clipped.
- A cut to steps also keeps device work that was launched in them and ran later, and leaves out the annotations of
  other steps.
- An instant or a counter stays when it lies in the window.
- An arrow stays when slices that stay begin at both its ends. (Kineto writes each end at the start of its slice.)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepscope.export.entry import FLOWS, Entry, Timed
from stepscope.export.survey import MEMORY, Survey, Track, correlation_of, is_device, step_of


class Window(Struct, frozen=True):
    """What is asked of one source; times in ns as its file counts them, `end_ns` is outside.

    `of_steps` says that device work launched in the window belongs to it. `steps` (first, last) are the numbers whose
    annotations stay, `categories` (case folded) the only ones whose slices are wanted; both None for all.
    """

    start_ns: int
    end_ns: int
    of_steps: bool = False
    steps: tuple[int, int] | None = None
    categories: frozenset[str] | None = None

    def overlaps(self, start: int, end: int) -> bool:
        """Whether a slice has any part in the window; one without length counts where it stands."""
        return start < self.end_ns and (end > self.start_ns or start == end == self.start_ns)


class Selection(Struct, frozen=True):
    """`kept[i]` is 1 where entry i of the source stays; metadata events are always 0, they are written anew."""

    kept: bytearray
    tracks: set[Track]
    slices: int
    events: int


def select(entries: Iterable[Timed], window: Window, survey: Survey) -> Selection:
    """Judge every entry of a source."""
    kept = bytearray()
    tracks: set[Track] = set()
    launched = _launched_in(window, survey)
    starts, ends = array("q"), _Ends()
    slices = 0
    for entry, start, duration in entries:
        index = len(kept)
        kept.append(0)
        if entry.ph == "X":
            if _keeps_slice(entry, start, start + duration, window, launched):
                kept[index] = 1
                slices += 1
                tracks.add(entry.track)
                starts.append(hash((entry.track, start)))
        elif entry.ph in FLOWS:
            ends.add(index, entry, start)
        elif entry.ph != "M" and _keeps_moment(entry, start, window):
            kept[index] = 1
            tracks.add(entry.track)
    for index in ends.with_slices_at(starts):
        kept[index] = 1
    return Selection(kept, tracks, slices, sum(kept))


def _launched_in(window: Window, survey: Survey) -> frozenset[int] | None:
    if not window.of_steps:
        return None
    starts, correlations = (_column(part) for part in survey.launches)
    inside = (starts >= window.start_ns) & (starts < window.end_ns)
    return frozenset(correlations[inside].tolist())


def _keeps_slice(entry: Entry, start: int, end: int, window: Window, launched: frozenset[int] | None) -> bool:
    if window.categories is not None and (
        not isinstance(entry.cat, str) or entry.cat.casefold() not in window.categories
    ):
        return False
    if window.steps is not None:
        number = step_of(entry)
        if number is not None:
            return window.steps[0] <= number <= window.steps[1]
    if window.overlaps(start, end):
        return True
    return (
        launched is not None and start >= window.end_ns and is_device(entry.cat) and correlation_of(entry) in launched
    )


def _keeps_moment(entry: Entry, time: int, window: Window) -> bool:
    if not window.start_ns <= time < window.end_ns:
        return False
    if window.categories is None:
        return True
    if entry.name == MEMORY and "memory" in window.categories:
        return True
    return isinstance(entry.cat, str) and entry.cat.casefold() in window.categories


class _Ends:
    """The ends of arrows of a source, in three columns."""

    def __init__(self) -> None:
        self._index, self._arrow, self._place = array("q"), array("q"), array("q")
        self._is_start = bytearray()

    def add(self, index: int, entry: Entry, time: int) -> None:
        self._index.append(index)
        self._arrow.append(
            hash((entry.cat if isinstance(entry.cat, str) else "", entry.name, bytes(entry.id).strip(b'"')))
        )
        self._place.append(hash((entry.track, time)))
        self._is_start.append(entry.ph == "s")

    def with_slices_at(self, starts: array[int]) -> list[int]:
        """Indexes of the ends that lie on a slice of `starts` and have a partner that does, too."""
        index, arrow, place, slices = (_column(part) for part in (self._index, self._arrow, self._place, starts))
        is_start = np.frombuffer(self._is_start, np.uint8).astype(bool) if self._is_start else np.zeros(0, bool)
        placed = np.isin(place, slices)
        whole = np.intersect1d(arrow[placed & is_start], arrow[placed & ~is_start])
        found: list[int] = index[placed & np.isin(arrow, whole)].tolist()
        return found


def _column(part: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(part, np.int64) if part else np.zeros(0, np.int64)
