"""What the slices of a timeline are collected in: tracks, names, and columns of slices by source.

Ids are positions in one row of all sources: the slices of traces as they stand in `events`, then steps, then five
phases for each step, then stretches of samples. They hold for one reading of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct, field

from stepscope.model.timeline import KINDS, TimelineTrack, TrackKind
from stepscope.tables.arrays import Int8, Int32, Int64

MAX_DEPTH = 128  # slices above each other on one track; what is deeper is not drawn
KIND = {name: number for number, name in enumerate(KINDS)}
# Tracks of a worker in this order: stacks of Python functions are deep, so that streams below them were out of sight.
_ORDER: dict[TrackKind, int] = {"steps": 0, "phases": 1, "stream": 2, "thread": 3, "worker": 4}


class Track(Struct):
    """A track while it is collected. Those of a worker stand by kind, then by `rank`, ascending."""

    key: str
    label: str
    group: str
    kind: TrackKind
    rank: tuple[float, ...] = ()
    depth: int = 1


class Tracks:
    """All tracks, in the order in which they were first named."""

    def __init__(self) -> None:
        self.all: list[Track] = []
        self._numbers: dict[str, int] = {}

    def number(self, group: str, kind: TrackKind, name: str, label: str, rank: tuple[float, ...] = ()) -> int:
        """The number of a track, which is made where it is new."""
        key = f"{group}/{kind}" + (f":{name}" if name else "")
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(Track(key, label, group, kind, rank))
        return self._numbers[key]

    def ordered(self, groups: Sequence[str]) -> list[int]:
        """Numbers of the tracks as they are shown, those of a group together."""
        place = {group: at for at, group in enumerate(groups)}
        return sorted(
            range(len(self.all)),
            key=lambda number: (
                place.get(self.all[number].group, len(place)),
                self.all[number].group,
                _ORDER[self.all[number].kind],
                self.all[number].rank,
                number,
            ),
        )

    def shown(self, order: Sequence[int]) -> tuple[TimelineTrack, ...]:
        """The tracks in `order`."""
        return tuple(
            TimelineTrack(track.key, track.label, track.group, track.kind, track.depth)
            for track in (self.all[number] for number in order)
        )


class Names:
    """Distinct names by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def numbers(self, names: Sequence[str]) -> Int32:
        """Numbers of `names`; one more entry at the end stands for a name that is missing."""
        return np.asarray([*(self.number(name) for name in names), self.number("")], np.int32)

    def all(self) -> list[str]:
        return list(self._numbers)


class Part(Struct, frozen=True):
    """Slices of one source. `track` counts in `Tracks`, `name` in `Names`, `kind` in `KINDS`; times are absolute."""

    id: Int32
    track: Int32
    depth: Int32
    start: Int64
    end: Int64
    name: Int32
    kind: Int8


class Collection(Struct):
    """All parts of a run, with what the reader must know of them."""

    tracks: Tracks = field(default_factory=Tracks)
    names: Names = field(default_factory=Names)
    parts: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Add slices and make their tracks deep enough."""
        if not len(part.id):
            return
        depths = np.zeros(len(self.tracks.all), np.int32)
        np.maximum.at(depths, part.track, part.depth + 1)
        for number in np.flatnonzero(depths):
            track = self.tracks.all[number]
            track.depth = max(track.depth, int(depths[number]))
        self.parts.append(part)
