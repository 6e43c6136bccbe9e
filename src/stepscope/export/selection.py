"""The second pass, for a cut: which entries stay. One byte per entry of the source is all it leaves behind.

- A slice stays whole when it overlaps the window, however little; it is never clipped.
- A cut to steps also keeps device work that was launched in them and ran later, and leaves out the annotations of
  other steps.
- An instant or a counter stays when it lies in the window.
- An arrow stays when slices that stay begin at both its ends. (Kineto writes each end at the start of its slice.)
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from decimal import Decimal

import numpy as np
from msgspec import Struct

from stepscope.errors import UsageError
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
    starts, correlations = (np.array(part, np.int64) for part in survey.launches)
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
        index, arrow, place = (np.array(part, np.int64) for part in (self._index, self._arrow, self._place))
        is_start, slices = np.array(self._is_start, bool), np.array(starts, np.int64)
        placed = np.isin(place, slices)
        whole = np.intersect1d(arrow[placed & is_start], arrow[placed & ~is_start])
        found: list[int] = index[placed & np.isin(arrow, whole)].tolist()
        return found


_TIME = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(ms|s|us)?")
_UNITS_NS = {"us": 1000, "ms": 10**6, "s": 10**9}
FOREVER_NS = 2**63 - 1


class Cut(Struct, frozen=True):
    """`steps` are the first and the last wanted, `range_ns` a start and an end since the trace's start; None is all."""

    steps: tuple[int, int] | None = None
    range_ns: tuple[int, int] | None = None
    ranks: tuple[int, ...] = ()
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps is not None and self.range_ns is not None:
            raise UsageError("--steps and --range exclude each other; give one")

    @property
    def whole(self) -> bool:
        """Whether every event of the chosen ranks is wanted."""
        return self.steps is None and self.range_ns is None and not self.categories


def parse_range(text: str) -> tuple[int, int]:
    """`START:END` in ns; each side has its own unit (us, ms, s) or the other side's, either may be left out."""
    start_text, colon, end_text = text.partition(":")
    start, end = _TIME.fullmatch(start_text.strip()), _TIME.fullmatch(end_text.strip())
    malformed = not colon or (not start and start_text.strip()) or (not end and end_text.strip())
    units = [match[2] for match in (start, end) if match and match[2]]
    if malformed or not (start or end) or not units:
        raise UsageError(f"--range {text}: not a range of time; write --range 100ms:250ms or --range 1.5s:2s")
    start_ns = _nanoseconds(start, units[0]) if start else 0
    end_ns = _nanoseconds(end, units[0]) if end else FOREVER_NS
    if end_ns <= start_ns:
        raise UsageError(f"--range {text}: ends before it begins; write the earlier time first")
    return start_ns, end_ns


def _nanoseconds(match: re.Match[str], unit: str) -> int:
    return int(Decimal(match[1]) * _UNITS_NS[match[2] or unit])


def parse_categories(texts: list[str] | None) -> tuple[str, ...]:
    """Names of categories from options that hold one or several, separated by commas."""
    names = tuple(name.strip() for text in texts or () for name in text.split(","))
    if not all(names):
        raise UsageError("--categories: an empty name; write --categories kernel,cuda_runtime")
    return names
