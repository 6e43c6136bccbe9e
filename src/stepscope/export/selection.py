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
from decimal import Decimal
from typing import Any

import numpy as np
from msgspec import Struct

from stepscope.errors import UsageError
from stepscope.export.entry import FLOWS, Entry
from stepscope.export.survey import MEMORY, Progress, Source, correlation_of, step_of

_DEVICE = frozenset(("kernel", "memcpy", "memset", "mtia_ccp_events"))


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

    def asks_for(self, category: Any) -> bool:
        """Whether events of a category are wanted."""
        return self.categories is None or (isinstance(category, str) and category.casefold() in self.categories)

    def keeps_slice(self, entry: Entry, start: int, end: int, launched: frozenset[int]) -> bool:
        """Whether a slice stays; `launched` are the correlation ids of what was launched in the window."""
        if not self.asks_for(entry.cat):
            return False
        if self.steps is not None:
            number = step_of(entry)
            if number is not None:
                return self.steps[0] <= number <= self.steps[1]
        # one without length counts where it stands
        if start < self.end_ns and (end > self.start_ns or start == end == self.start_ns):
            return True
        on_device = isinstance(entry.cat, str) and entry.cat.lower().removeprefix("gpu_") in _DEVICE
        return self.of_steps and start >= self.end_ns and on_device and correlation_of(entry) in launched

    def keeps_moment(self, entry: Entry, time: int) -> bool:
        """Whether an instant or a counter stays."""
        asked = self.asks_for(entry.cat) or (entry.name == MEMORY and self.asks_for("memory"))
        return self.start_ns <= time < self.end_ns and asked


def select(source: Source, window: Window, progress: Progress) -> bool:
    """Judge every entry of a source: sets what is `kept` of it. Whether anything is."""
    kept = bytearray()
    starts, correlations = (np.array(part, np.int64) for part in source.launches)
    launched = frozenset(correlations[(starts >= window.start_ns) & (starts < window.end_ns)].tolist())
    slices = array("q")  # where the ones that stay begin
    index, arrow, place, is_start = array("q"), array("q"), array("q"), bytearray()  # of the ends of arrows
    source.tracks = set()
    for entry, start, duration in source.read(progress):
        kept.append(0)
        if entry.ph == "X":
            if window.keeps_slice(entry, start, start + duration, launched):
                kept[-1] = 1
                source.tracks.add(entry.track)
                slices.append(hash((entry.track, start)))
        elif entry.ph in FLOWS:
            category = entry.cat if isinstance(entry.cat, str) else ""
            index.append(len(kept) - 1)
            arrow.append(hash((category, entry.name, bytes(entry.id).strip(b'"'))))
            place.append(hash((entry.track, start)))
            is_start.append(entry.ph == "s")
        elif entry.ph != "M" and window.keeps_moment(entry, start):
            kept[-1] = 1
            source.tracks.add(entry.track)
    # arrows with both ends where a slice that stays begins
    placed, opens, ids = np.isin(np.array(place, np.int64), slices), np.array(is_start, bool), np.array(arrow, np.int64)
    whole = np.intersect1d(ids[placed & opens], ids[placed & ~opens])
    for at in np.array(index, np.int64)[placed & np.isin(ids, whole)].tolist():
        kept[at] = 1
    source.kept, source.slices = kept, len(slices)
    return any(kept)


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
    sides = [side.strip() for side in text.partition(":")[::2]]
    matches = [_TIME.fullmatch(side) for side in sides]
    malformed = ":" not in text or any(side and not match for side, match in zip(sides, matches, strict=True))
    units = [match[2] for match in matches if match and match[2]]
    if malformed or not units:
        raise UsageError(f"--range {text}: not a range of time; write --range 100ms:250ms or --range 1.5s:2s")
    start_ns, end_ns = (
        int(Decimal(match[1]) * _UNITS_NS[match[2] or units[0]]) if match else missing
        for match, missing in zip(matches, (0, FOREVER_NS), strict=True)
    )
    if end_ns <= start_ns:
        raise UsageError(f"--range {text}: ends before it begins; write the earlier time first")
    return start_ns, end_ns


def parse_categories(texts: list[str] | None) -> tuple[str, ...]:
    """Names of categories from options that hold one or several, separated by commas."""
    names = tuple(name.strip() for text in texts or () for name in text.split(","))
    if not all(names):
        raise UsageError("--categories: an empty name; write --categories kernel,cuda_runtime")
    return names
