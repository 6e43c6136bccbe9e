"""The profiles of a speedscope file: samples with weights, or frames opened and closed, of which self times are made.

A profile's lists stay text until they are needed, and then a stretch is decoded at a time: samples hold nothing but
lists of numbers, events nothing but flat objects, so that a stretch may end at any closing bracket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.read.raw import Losses
from stepscope.read.stacks.source import MAX_FRAMES, MAX_SAMPLES

STRETCH_BYTES = 2**20
MAX_DISTINCT_BYTES = 64 * 2**20  # of different samples that wait for equal ones
MAX_PATHS = 2_000_000
MICROSECONDS_IN = {"seconds": 1e6, "milliseconds": 1e3, "microseconds": 1.0, "nanoseconds": 1e-3}
BAD_JSON = (msgspec.MsgspecError, ValueError, RecursionError)
_MOST = 2**53

Stacks = Iterator[tuple[tuple[int, ...], int]]


class Profile(msgspec.Struct):
    """A profile's outline."""

    type: str = ""
    name: Any = ""
    unit: str = "none"
    startValue: Any = None
    endValue: Any = None
    samples: msgspec.Raw = msgspec.Raw(b"[]")
    weights: msgspec.Raw = msgspec.Raw(b"[]")
    events: msgspec.Raw = msgspec.Raw(b"[]")


class _Event(msgspec.Struct, gc=False):
    type: str
    at: float
    frame: int


def holds_anything(profile: Profile) -> bool:
    """Whether there is a sample or an event in the profile."""
    raw = profile.events if profile.type == "evented" else profile.samples
    beginning = bytes(memoryview(raw)[:4096]).translate(None, b" \t\r\n")
    return beginning[:1] == b"[" and beginning != b"[]"


class Survey(Struct, frozen=True):
    """What the weights of a profile have in common, and how long it lasted, in the profile's own unit.

    `lowest` is 0 where one of them is no number or negative. Without weights `count` is 0.
    """

    count: int
    lowest: float
    highest: float
    wall: float | None


def survey(profile: Profile) -> Survey:
    """Look at all weights of a sampled profile once."""
    count, lowest, highest = 0, math.inf, 0.0
    if profile.type == "sampled":
        for stretch in _stretches(profile.weights, b","):
            weights = [weight if 0 < weight < _MOST else 0.0 for weight in _numbers(stretch)]
            if weights:
                count += len(weights)
                lowest, highest = min(lowest, *weights), max(highest, *weights)
    start, end = _number(profile.startValue), _number(profile.endValue)
    wall = end - start if start is not None and end is not None and 0 < end - start < _MOST else None
    return Survey(count, lowest, highest, wall)


def sampled_stacks(profile: Profile, factor: float | None, frames: int, losses: Losses, label: str) -> Stacks:
    """Stacks of a sampled profile; equal samples are one, with the sum of their weights times `factor`.

    Without a factor every sample counts one.
    """
    weights = (weight for stretch in _stretches(profile.weights, b",") for weight in _numbers(stretch))
    waiting: dict[bytes, float] = {}
    held = 0
    for stretch in _stretches(profile.samples, b"]"):
        for raw in _raws(stretch, losses, label):
            sample = bytes(raw)
            weight = 1.0 if factor is None else next(weights, math.nan) * factor
            if not 0 <= weight <= MAX_SAMPLES:
                losses.add("skipped_records", label)
                continue
            held += 0 if sample in waiting else len(sample)
            waiting[sample] = waiting.get(sample, 0.0) + weight
            if held > MAX_DISTINCT_BYTES:
                yield from _taken(waiting, frames, losses, label)
                waiting.clear()
                held = 0
    yield from _taken(waiting, frames, losses, label)


def _taken(waiting: dict[bytes, float], frames: int, losses: Losses, label: str) -> Stacks:
    decoder = msgspec.json.Decoder(list[int])
    for text, weight in waiting.items():
        samples = min(_whole(weight), MAX_SAMPLES)
        try:
            stack = decoder.decode(text)
        except BAD_JSON:
            stack = [-1]
        if len(stack) > MAX_FRAMES or (stack and not 0 <= min(stack) <= max(stack) < frames):
            losses.add("skipped_records", label)
            losses.add("skipped_samples", label, samples)
        else:
            yield tuple(stack), samples


class _Paths:
    """Open frames as a path in a tree of paths, and the time spent in each path itself."""

    def __init__(self) -> None:
        self.parent: list[int] = [-1]
        self.frame: list[int] = [-1]
        self.own: list[float] = [0.0]
        self.now = 0
        self.depth = 0
        self._below: dict[tuple[int, int], int] = {}

    def open(self, frame: int) -> bool:
        """Go down; False where bounds are reached."""
        node = self._below.get((self.now, frame))
        if node is None:
            if self.depth >= MAX_FRAMES or len(self.parent) >= MAX_PATHS:
                return False
            node = self._below[(self.now, frame)] = len(self.parent)
            self.parent.append(self.now)
            self.frame.append(frame)
            self.own.append(0.0)
        self.now = node
        self.depth += 1
        return True

    def close(self, frame: int) -> bool:
        """Go up out of `frame`, and out of all that was opened in it; False where it is not open."""
        node, up = self.now, 1
        while node and self.frame[node] != frame:
            node, up = self.parent[node], up + 1
        if not node:
            return False
        self.now = self.parent[node]
        self.depth -= up
        return True

    def path(self, node: int) -> tuple[int, ...]:
        """The frames from the root to `node`."""
        found: list[int] = []
        while node > 0:
            found.append(self.frame[node])
            node = self.parent[node]
        return tuple(reversed(found))


def evented_stacks(profile: Profile, factor: float | None, frames: int, losses: Losses, label: str) -> Stacks:
    """Stacks of an evented profile with the time (or weight) spent in them themselves, not in what they call."""
    paths = _Paths()
    last = _number(profile.startValue)
    for stretch in _stretches(profile.events, b"}"):
        for event in _events(stretch, losses, label):
            if not 0 <= event.frame < frames or not abs(event.at) < _MOST or (last is not None and event.at < last):
                losses.add("skipped_records", label)
                continue
            if last is not None:
                paths.own[paths.now] += event.at - last
            last = event.at
            done = paths.open(event.frame) if event.type == "O" else event.type == "C" and paths.close(event.frame)
            if not done:
                losses.add("skipped_records", label)
    end = _number(profile.endValue)
    if end is not None and last is not None and last < end < _MOST:
        paths.own[paths.now] += end - last
    for node, own in enumerate(paths.own):
        samples = _whole(min(own * (factor or 1.0), MAX_SAMPLES))
        if node and samples:
            yield paths.path(node), samples


# ------------------------------------------------------------------------------------------------- stretches of lists


def _stretches(raw: msgspec.Raw, closing: bytes) -> Iterator[bytes]:
    """A list's text as lists of bounded length; they end behind `closing`, or before it where it is a comma."""
    text = memoryview(raw)
    if len(text) < 2 or text[0] != ord("["):
        return
    position, end = 1, len(text) - 1
    while position < end:
        stop = min(end, position + STRETCH_BYTES)
        stretch = bytes(text[position:stop])
        if stop < end:
            cut = stretch.rfind(closing)
            if cut >= 0:
                stretch = stretch[: cut + 1]
            stop = position + len(stretch)
        position = stop
        yield b"[" + stretch.strip(b" \t\r\n,") + b"]"


def _numbers(stretch: bytes) -> list[float]:
    try:
        return msgspec.json.decode(stretch, type=list[float])
    except BAD_JSON:
        pass
    try:
        return [_number(value) or 0.0 for value in msgspec.json.decode(stretch, type=list[Any])]
    except BAD_JSON:
        return []


def _raws(stretch: bytes, losses: Losses, label: str) -> list[msgspec.Raw]:
    try:
        return msgspec.json.decode(stretch, type=list[msgspec.Raw])
    except BAD_JSON:
        losses.add("skipped_records", label)
        return []


def _events(stretch: bytes, losses: Losses, label: str) -> list[_Event]:
    try:
        return msgspec.json.decode(stretch, type=list[_Event])
    except BAD_JSON:
        pass
    good: list[_Event] = []
    decoder = msgspec.json.Decoder(_Event)
    for raw in _raws(stretch, losses, label):
        try:
            good.append(decoder.decode(raw))
        except BAD_JSON:
            losses.add("skipped_records", label)
    return good


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST:
        return None
    return float(value)


def _whole(weight: float) -> int:
    return math.floor(weight + 0.5)
