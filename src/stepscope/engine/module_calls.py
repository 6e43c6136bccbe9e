"""The calls of modules in a trace as a tree, and which of them every other slice belongs to.

A call of an `nn.Module` is a slice of category python_function whose name begins with "nn.Module: ". A slice belongs to
the innermost call around it. The backward pass stands below no module: an operator that runs an autograd node belongs
to the call around its forward operator. A sum of gradients (AccumulateGrad) has none: it belongs to a parameter.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct, field

from stepscope.engine.spans import Span
from stepscope.engine.user_code import MODULE_CALL
from stepscope.tables.arrays import NONE, Bools, Int32, Int64, Numbers, climb, self_or_ancestor

MAX_LEVELS = 100  # of modules in each other; deeper calls (endless recursion) count for their ancestor there
_ROUNDS = 64  # from a backward operator to its forward operator, of double backward again, and out of nested ones
_NUMBERED = re.compile(r"(.+)_(\d+)", re.DOTALL)
_ENGINE = "autograd::engine::evaluate_function"


class Paths(Struct, frozen=True):
    """Distinct ways from a root module down: for each its parent (before it in the list, or `NONE`) and name."""

    parent: list[int] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    _numbers: Numbers[tuple[int, str]] = field(default_factory=Numbers)

    def number(self, parent: int, name: str) -> int:
        number = self._numbers[parent, name]
        if number == len(self.name):
            self.parent.append(parent)
            self.name.append(name)
        return number

    def take_in(self, other: Paths) -> Int64:
        """The number here of each way of `other`."""
        places: list[int] = []
        for above, name in zip(other.parent, other.name, strict=True):
            places.append(self.number(places[above] if above >= 0 else NONE, name))
        return np.array(places, np.int64)


class Owners(NamedTuple):
    """For each row of a span the path (index) it belongs to, `NONE` for no module, and whether in the backward pass."""

    path: Int32
    backward: Bools


class ModuleCalls:
    """The calls of modules of one span: their `rows`, ascending. Other arrays are made when first asked for."""

    def __init__(self, span: Span) -> None:
        self.span = span

    @cached_property
    def rows(self) -> Int64:
        return np.flatnonzero(self.is_call)

    @cached_property
    def is_call(self) -> Bools:
        return self.span.is_function & self.span.names.starting(MODULE_CALL)

    @cached_property
    def forward(self) -> Int64:
        return self.span.forward

    @cached_property
    def is_backward(self) -> Bools:
        """Operators that run autograd nodes; of those nothing below needs to be one."""
        span = self.span
        engine = span.names.starting(_ENGINE)
        marked = (span.series("forward_thread") > 0).fill_null(False).to_numpy()
        found: Bools = (self.forward >= 0) | ((engine | marked) & span.is_operator)
        return found

    @cached_property
    def outer(self) -> Int64:
        above = climb(self.span.parent, self.span.parent[self.rows], self.is_call)
        return np.where(above >= 0, np.searchsorted(self.rows, above), NONE)

    @cached_property
    def _paths(self) -> tuple[Int32, Paths]:
        codes, names = self._instance_names()
        count = len(names)
        path = np.full(len(self.rows), NONE, np.int32)
        known = Paths()
        level = np.flatnonzero(self.outer < 0)
        inner = np.flatnonzero(self.outer >= 0)
        for _ in range(MAX_LEVELS):
            if not len(level):
                break
            above = np.where(self.outer[level] >= 0, path[self.outer[level]], NONE).astype(np.int64)
            distinct, number = np.unique((above + 1) * count + codes[level], return_inverse=True)
            found = [known.number(way // count - 1, names[way % count]) for way in distinct.tolist()]
            path[level] = np.array(found, np.int32)[number]
            next_level = path[self.outer[inner]] >= 0
            level, inner = inner[next_level], inner[~next_level]
        # what is too deep stands for the last level around it
        path = np.append(path, np.int32(NONE))[self_or_ancestor(self.outer, path >= 0)]
        return path, known

    @property
    def path(self) -> Int32:
        return self._paths[0]

    @property
    def paths(self) -> Paths:
        return self._paths[1]

    @cached_property
    def owners(self) -> Owners:
        near = self.near
        stops = np.flatnonzero(self.is_call | self.is_backward)
        owner, backward = self._resolved(stops)
        # one entry more than there are rows, for `NONE`
        path_at = np.full(len(self.span) + 1, NONE, np.int32)
        back_at = np.zeros(len(self.span) + 1, bool)
        found = owner >= 0
        path_at[stops[found]] = self.path[np.searchsorted(self.rows, owner[found])]
        back_at[stops] = backward & found
        return Owners(path_at[near], back_at[near])

    @cached_property
    def near(self) -> Int32:
        """For each row the innermost call of a module or operator of the backward pass around it, or itself."""
        return self_or_ancestor(self.span.parent, self.is_call | self.is_backward)

    def owners_of(self, links: pl.DataFrame) -> Owners:
        """Which path each device slice belongs to: that of its launch, else of its operator, else of its frame.

        Args:
            links: `Span.links`, or some of its rows.
        """
        path, backward = np.full(links.height, NONE, np.int32), np.zeros(links.height, bool)
        for name in ("launch", "operator", "frame", "forward"):
            rows = links[name].to_numpy()
            left = np.flatnonzero((path < 0) & (rows >= 0))
            path[left] = self.owners.path[rows[left]]
            backward[left] = self.owners.backward[rows[left]] | (name == "forward")
        return Owners(path, backward & (path >= 0))

    def _resolved(self, stops: Int64) -> tuple[Int64, Bools]:
        """From calls and operators of the backward pass to calls, and whether a forward operator led there."""
        at, backward = stops.copy(), np.zeros(len(stops), bool)
        left = np.flatnonzero(~self.is_call[stops])
        for _ in range(_ROUNDS):
            if not len(left):
                return at, backward
            ahead = self.forward[at[left]]
            backward[left[ahead >= 0]] = True
            inside = np.where(ahead >= 0, ahead, self.span.parent[at[left]])
            at[left] = np.where(inside >= 0, self.near[inside], NONE)
            left = left[at[left] >= 0]
            left = left[~self.is_call[at[left]]]
        at[left] = NONE
        return at, backward

    def _instance_names(self) -> tuple[Int64, list[str]]:
        """The number and the name of each call's instance: "Conv2d_3". Where it lacks the number, it stands beside."""
        span = self.span
        codes, back = np.unique(span.names.codes[self.rows], return_inverse=True)
        texts = [span.names.values[code].removeprefix(MODULE_CALL) for code in codes.tolist()]
        if all(_NUMBERED.fullmatch(text) for text in texts):
            return back, texts
        number = span.series("python_module").fill_null(NONE).to_numpy()[self.rows]
        pairs, back = np.unique(np.stack([back, number]), axis=1, return_inverse=True)
        named = [
            text if number < 0 or _NUMBERED.fullmatch(text) else f"{text}_{number}"
            for text, number in ((texts[code], number) for code, number in pairs.T.tolist())
        ]
        place = {name: number for number, name in enumerate(dict.fromkeys(named))}
        return np.array([place[name] for name in named], np.int64)[back.reshape(-1)], list(place)


def module_class(name: str) -> str:
    match = _NUMBERED.fullmatch(name)
    return match[1] if match else name
