"""The structure of steps: loader, modules, backward pass and optimizer in their order, all steps laid over each other.

An item is a slice that is one of these or an operator between them, below another item or directly below its step. Work
of the device belongs to the item around its launch; in the backward pass also to the module of its forward operator.

Items of equal type and name that follow each other are one node, with as many calls. The second time that others have
come between is a node of its own, so that the micro-batches of a step stay apart. All sums are over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field

from stepscope.engine.device_work import work
from stepscope.engine.module_calls import MAX_LEVELS, ModuleCalls, Paths, module_class
from stepscope.engine.slice_tree import self_or_ancestor
from stepscope.engine.spans import Span
from stepscope.tables.arrays import NONE, Bools, Int64, climb, place_among_equals

STEP, LOADER, MODULE, BACKWARD, OPTIMIZER, OPERATORS = range(6)
TYPES = ("ProfilerStep", "DataLoader", "Module", "Backward", "Optimizer", "Operators")
MAX_TURNS = 16  # nodes of one type and name below one parent; what comes later counts for the last
_IN_RUNS = (BACKWARD, OPERATORS)  # of many slices in a row that are one thing


class KernelSum(Struct):
    """Slices at one position of an operator; `names` to ns."""

    names: dict[str, int] = field(default_factory=dict)
    ns: int = 0
    slices: int = 0


class StepNode(Struct):
    """A part of the steps. Times are sums over steps, `device_ns` with all below; `at_ns` is the mean start.

    `calls` is 0 for the modules of a backward pass, which has no calls of them.
    """

    type: str
    name: str
    calls: int = 0
    host_ns: int = 0
    device_ns: int = 0
    at_ns: float = 0.0
    children: list[StepNode] = field(default_factory=list)
    kernels: dict[tuple[str, int], KernelSum] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What stays of the name where instances are numbered and implementations differ."""
        if self.type == TYPES[LOADER]:
            return ""
        return module_class(self.name) if self.type in (TYPES[MODULE], TYPES[BACKWARD]) else self.name


class StepTree(Struct, frozen=True):
    """`root` stands for the steps: its host time is their wall time. `steps` 0: none are known, it is all there is."""

    root: StepNode
    steps: int
    has_device: bool


def tree(spans: Sequence[Span]) -> StepTree | None:
    """The structure of the steps of these traces; None where there are none. Spans without steps count where no span
    has any.
    """
    chosen = [span for span in spans if len(span.steps)] or [span for span in spans if len(span)]
    if not chosen:
        return None
    known = bool(len(chosen[0].steps))
    paths, parts, has_device = Paths(), [], False
    items = steps = wall_ns = 0
    for span in chosen:
        search = _Search(span)
        # the number among all spans of each way of modules; none of a span without modules
        places = paths.take_in(search.calls.paths) if len(search.calls.rows) else np.empty(0, np.int64)
        parts.append((search.items(items, steps), search.inner(places, items), search.slices(places, items)))
        items += len(search.rows)
        steps += len(search.starts)
        wall_ns += int((search.ends - search.starts).sum())
        has_device |= len(search.work) > 0
    every, inner, slices = (pl.concat(tables) for tables in zip(*parts, strict=True))
    root = StepNode(TYPES[STEP] if known else "Trace", "", steps, wall_ns)
    nodes = _Nodes(root, every, turns=MAX_TURNS if known else 1)
    nodes.add_inner(inner, paths)
    nodes.add_slices(slices, paths)
    _finish(root)
    return StepTree(root, steps if known else 0, has_device)


class _Nodes:
    """Items laid over each other, level by level. Node 0 is the root; `node_of` each item, and last `NONE`."""

    def __init__(self, root: StepNode, items: pl.DataFrame, turns: int) -> None:
        self.nodes = [root]
        self.inner: dict[tuple[int, int], StepNode] = {}
        self.node_of = np.full(items.height + 1, NONE, np.int64)
        outer = items["outer"].to_numpy()
        top = items.filter((pl.col("outer") < 0) & (pl.col("step") >= 0))
        level = top.with_columns(parent=pl.lit(0, pl.Int64), group=pl.col("step"))
        for _ in range(MAX_LEVELS):
            if level.is_empty():
                return
            self._add_level(level, turns)
            turns = MAX_TURNS
            inside = self._next_level(outer)
            level = items[inside].with_columns(
                parent=pl.Series(self.node_of[outer[inside]], dtype=pl.Int64), group=pl.col("outer")
            )
        while len(inside := self._next_level(outer)):  # too deep: what they did counts for the last level
            self.node_of[inside] = self.node_of[outer[inside]]

    def _next_level(self, outer: Int64) -> Int64:
        """Items without a node that lie directly in one that has one."""
        return np.flatnonzero((self.node_of[:-1] < 0) & (outer >= 0) & (self.node_of[outer] >= 0))

    def _add_level(self, level: pl.DataFrame, turns: int) -> None:
        """New nodes for items with `parent` (their node's parent) and `group` (the step or item they are part of)."""
        level = level.sort("group", "start_ns").with_columns(
            first=(pl.struct("group", "type", "name") != pl.struct("group", "type", "name").shift()).fill_null(True)
        )
        level = level.with_columns(
            turn=(pl.col("first").cast(pl.Int64).cum_sum().over("group", "type", "name") - 1).clip(0, turns - 1)
        )
        keys = ["parent", "type", "name", "turn"]
        runs = pl.col("type").is_in(_IN_RUNS)
        made = (
            level.group_by(keys, maintain_order=True)
            .agg(
                calls=pl.when(runs).then("first").otherwise(True).sum(),
                host_ns=pl.col("host_ns").sum(),
                at_ns=pl.col("at_ns").mean(),
            )
            .with_row_index("node", offset=len(self.nodes))
        )
        for row in made.iter_rows(named=True):
            node = StepNode(TYPES[row["type"]], row["name"], row["calls"], row["host_ns"], 0, row["at_ns"])
            self.nodes.append(node)
            self.nodes[row["parent"]].children.append(node)
        placed = level.join(made.select(*keys, "node"), on=keys, how="left")
        self.node_of[placed["item"].to_numpy()] = placed["node"].cast(pl.Int64).to_numpy()

    def add_inner(self, inner: pl.DataFrame, paths: Paths) -> None:
        """The modules below nodes of the backward pass."""
        sums = (
            self._by_node(inner)
            .group_by("node", "path", maintain_order=True)
            .agg(pl.col("at_ns").mean(), pl.col("host_ns").sum())
        )
        for number, path, at_ns, host_ns in sums.iter_rows():
            own = self._inner(number, path, paths)
            own.at_ns = at_ns
            own.host_ns += host_ns
            while (path := paths.parent[path]) >= 0:
                self._inner(number, path, paths).host_ns += host_ns

    def _inner(self, number: int, path: int, paths: Paths) -> StepNode:
        known = self.inner.get((number, path))
        if known is None:
            above = paths.parent[path]
            parent = self._inner(number, above, paths) if above >= 0 else self.nodes[number]
            known = self.inner[number, path] = StepNode(TYPES[BACKWARD], paths.name[path], at_ns=np.inf)
            parent.children.append(known)
        return known

    def add_slices(self, slices: pl.DataFrame, paths: Paths) -> None:
        """Work of the device."""
        own = self._by_node(slices)
        sums = own.group_by("node", "path", "operator", "position", "kernel", maintain_order=True).agg(
            pl.col("ns").sum(), pl.len()
        )
        for number, path, operator, position, kernel, ns, count in sums.iter_rows():
            node = self._inner(number, path, paths) if path >= 0 else self.nodes[number]
            node.device_ns += ns
            place = node.kernels.setdefault((operator or "", position), KernelSum())
            place.names[kernel or ""] = place.names.get(kernel or "", 0) + ns
            place.ns += ns
            place.slices += count

    def _by_node(self, rows: pl.DataFrame) -> pl.DataFrame:
        """`rows` of items that have a node, with `node`; the root where there is no item."""
        item = rows["item"].to_numpy()
        node = np.where(item >= 0, self.node_of[item], 0)
        return rows.with_columns(pl.Series("node", node, dtype=pl.Int64)).filter(pl.col("node") >= 0)


def _finish(root: StepNode) -> None:
    order = [root]
    for node in order:  # grows on the way
        order += node.children
    for node in reversed(order):
        node.device_ns += sum(child.device_ns for child in node.children)
        if node.children and not node.calls:
            node.at_ns = min(node.at_ns, *(child.at_ns for child in node.children))
        node.children.sort(key=lambda child: child.at_ns)


_LOADERS = ("enumerate(DataLoader)#", "enumerate(DataPipe)#")
_OPTIMIZERS = ("Optimizer.",)
_STEPS = ("ProfilerStep#",)


class _Search:
    """The items of a span, and what they are found by. `starts` and `ends` are those of its steps."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.calls = ModuleCalls(span)
        self.work = work(span)
        self.host = ~(span.on_device | span.categories.where(["gpu_user_annotation"]))
        self.starts, self.ends = (span.steps[name].to_numpy() for name in ("start_ns", "end_ns"))
        if not len(self.starts):  # the whole span stands for a step
            some = self.host.any()
            self.starts = span.start_ns[self.host].min(keepdims=True) if some else np.zeros(1, np.int64)
            self.ends = span.ends(self.host).max(keepdims=True) if some else np.zeros(1, np.int64)

    def items(self, first_item: int, first_step: int) -> pl.DataFrame:
        """The items, numbered from `first_item` on over all spans.

        `outer` is the item around it, `step` that of items without one, from `first_step` on; both `NONE` without.
        """
        span, rows = self.span, self.rows
        types, codes = self.types[rows], span.names.codes[rows]
        names = [_short(name) for name in span.names.values]
        step = self.steps_at(span.start_ns[rows])
        by_path = np.array([*self.calls.paths.name, ""], object)
        name = np.where(np.isin(types, _IN_RUNS), "", np.array([*names, ""], object)[codes])
        name[types == MODULE] = by_path[self.calls.path]
        return pl.DataFrame(
            {
                "item": np.arange(first_item, first_item + len(rows)),
                "outer": np.where(self.outer >= 0, np.searchsorted(rows, self.outer) + first_item, NONE),
                "step": np.where(step >= 0, step + first_step, NONE),
                "type": types.astype(np.int64),
                "name": pl.Series(name, dtype=pl.String),
                "start_ns": span.start_ns[rows],
                "at_ns": self.at_ns,
                "host_ns": span.duration_ns[rows],
            }
        )

    @cached_property
    def outer(self) -> Int64:
        """The row of the item around each of `rows`."""
        return climb(self.span.parent, self.span.parent[self.rows], self.is_item)

    @cached_property
    def at_ns(self) -> Int64:
        """When each of `rows` starts, from the beginning of its step or outer item."""
        starts = self.span.start_ns[self.rows]
        step = np.maximum(self.steps_at(starts), 0)
        return starts - np.where(self.outer >= 0, self.span.start_ns[np.maximum(self.outer, 0)], self.starts[step])

    def _named(self, beginnings: tuple[str, ...]) -> Bools:
        names = self.span.names
        return names.pick([name.startswith(beginnings) for name in names.values]) & self.host & ~self.span.is_function

    @cached_property
    def types(self) -> npt.NDArray[np.int8]:
        """The type of each row that is an item, else 0."""
        span, calls = self.span, self.calls
        types = np.zeros(len(span), np.int8)
        types[self._named(_LOADERS)] = LOADER
        types[self._named(_OPTIMIZERS)] = OPTIMIZER
        types[calls.is_call] = MODULE
        back = np.flatnonzero(calls.is_backward & self.host)
        around = climb(span.parent, span.parent[back], (types > 0) | calls.is_backward)
        types[back[(around < 0) | (types[np.maximum(around, 0)] > 0)]] = BACKWARD
        main = self._main_track(types)
        around_any = self_or_ancestor(span.parent, (types > 0) | calls.is_backward | span.is_operator)
        own = np.flatnonzero(span.is_operator & self.host & ~calls.is_backward & (types == 0))
        above = span.parent[own]
        own = own[(above < 0) | (around_any[np.maximum(above, 0)] < 0)]
        # tracks of nothing but the backward pass: what the engine does by itself there, such as sums of gradients
        others = np.unique(span.tracks.codes[(types > 0) & (types != BACKWARD)])
        engines = np.setdiff1d(np.unique(span.tracks.codes[types == BACKWARD]), [*others.tolist(), main])
        types[own[np.isin(span.tracks.codes[own], engines)]] = BACKWARD
        types[own[span.tracks.codes[own] == main]] = OPERATORS
        return types

    def _main_track(self, types: npt.NDArray[np.int8]) -> int:
        """The track with most steps, loaders, modules and optimizers; without any, with most operators."""
        span = self.span
        for chosen in (self._named(_STEPS), (types > 0) & (types != BACKWARD), span.is_operator):
            codes = span.tracks.codes[chosen & self.host]
            codes = codes[codes >= 0]
            if len(codes):
                return int(np.bincount(codes).argmax())
        return NONE

    @cached_property
    def is_item(self) -> Bools:
        return np.greater(self.types, 0)

    @cached_property
    def rows(self) -> Int64:
        return np.flatnonzero(self.is_item)

    @cached_property
    def item_of(self) -> Int64:
        """For each row, and last for `NONE`, the innermost item around it: its position in `rows`."""
        near = self_or_ancestor(self.span.parent, self.is_item)
        place = np.full(len(self.span) + 1, NONE, np.int64)
        place[self.rows] = np.arange(len(self.rows))
        return np.append(place[near], NONE)

    def steps_at(self, times: Int64) -> Int64:
        step = np.searchsorted(self.starts, times, side="right") - 1
        inside = (step >= 0) & (times < self.ends[np.maximum(step, 0)])
        return np.where(inside, step, NONE)

    def inner(self, places: Int64, first_item: int) -> pl.DataFrame:
        """Parts of the backward items by module (its path in `places`), from the self times of all slices below."""
        rows = np.flatnonzero(self.calls.owners.backward & self.host) if len(places) else np.empty(0, np.int64)
        item = self.item_of[rows]
        back = self._is_backward_item(item)
        rows, item = rows[back], item[back]
        found = pl.DataFrame(
            {
                "item": item + first_item,
                "path": places[self.calls.owners.path[rows]] if len(rows) else rows,
                "at_ns": self.span.start_ns[rows] - self.span.start_ns[self.rows[item]] + self.at_ns[item],
                "host_ns": self.span.series("self_ns").fill_null(0).to_numpy()[rows],
            }
        )
        return found.group_by("item", "path").agg(pl.col("at_ns").min(), pl.col("host_ns").sum())

    def slices(self, places: Int64, first_item: int) -> pl.DataFrame:
        """Work of the device; of what was launched outside of steps nothing.

        `item` is `NONE` directly below the step, `path` outside of modules' backward passes; `position` counts the
        slices of one call of the operator.
        """
        span, found = self.span, self.work
        duration = np.full(len(span), NONE, np.int64)
        duration[found.rows] = found.end_ns - found.start_ns
        links = span.links.filter(pl.Series(duration[span.links["event"].to_numpy()] >= 0, dtype=pl.Boolean))
        columns = {name: links[name].to_numpy() for name in ("event", "launch", "operator", "frame")}
        item, source = np.full(links.height, NONE, np.int64), np.full(links.height, NONE, np.int64)
        for name in ("launch", "operator", "frame"):
            left = np.flatnonzero((item < 0) & (columns[name] >= 0))
            item[left] = self.item_of[columns[name][left]]
            source[left] = np.where(source[left] < 0, columns[name][left], source[left])
        path = np.full(links.height, NONE, np.int64)
        if len(places):
            owners = self.calls.owners_of(links)
            back = owners.backward & self._is_backward_item(item)
            path[back] = places[owners.path[back]]
        in_step = (source >= 0) & (self.steps_at(span.start_ns[np.maximum(source, 0)]) >= 0)
        kept = np.flatnonzero((item >= 0) | in_step)
        operator = columns["operator"][kept]
        order = np.lexsort((span.start_ns[source[kept]], operator))
        return pl.DataFrame(
            {
                "item": np.where(item >= 0, item + first_item, NONE)[kept],
                "path": path[kept],
                "operator": _name_at(span, operator),
                # how many the same call of an operator launched before; 0 where no operator is known
                "position": np.where(operator < 0, 0, place_among_equals(operator, order)),
                "kernel": _name_at(span, columns["event"][kept]),
                "ns": duration[columns["event"][kept]],
            }
        )

    def _is_backward_item(self, item: Int64) -> Bools:
        return np.append(self.types[self.rows] == BACKWARD, False)[item]


def _name_at(span: Span, rows: Int64) -> pl.Series:
    names = span.series("name").gather(np.maximum(rows, 0)) if len(rows) else pl.Series([], dtype=pl.String)
    return names.set(pl.Series(rows < 0, dtype=pl.Boolean), None)


def _short(name: str) -> str:
    for beginning in (*_LOADERS, *_OPTIMIZERS):
        if name.startswith(beginning):
            return name.removeprefix(beginning)
    return name
