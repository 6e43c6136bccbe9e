"""Two sides laid against each other: spans, traces or runs, by name and by the structure of their steps.

A side is made once by `side` and can be compared with any other by `diff`. Values are means per step where both sides
know their steps, else totals. What one side lacks makes its tables absent, with the reason; nothing raises.

The structure of steps is loader, modules, backward pass and optimizer in their order, all steps laid over each other.
An item is a slice that is one of these or an operator between them, below another item or directly below its step. Work
of the device belongs to the item around its launch; in the backward pass also to the module of its forward operator.
Items of equal type and name that follow each other are one node, with as many calls. The second time that others have
come between is a node of its own, so that the micro-batches of a step stay apart. All sums are over all steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field

from stepscope.analyze.views import kernels, operators, overview
from stepscope.engine.device_work import work
from stepscope.engine.module_calls import MAX_LEVELS, ModuleCalls, Paths, module_class
from stepscope.engine.spans import Base, Span
from stepscope.model.counted import things
from stepscope.model.trace import SpanRef
from stepscope.model.views import Diff, DiffRow, KernelRow, ModuleTree, OperatorRow, Overview
from stepscope.tables.arrays import NONE, Bools, Int64, climb, place_among_equals, self_or_ancestor, unique, window_at

_STEP, LOADER, MODULE, BACKWARD, OPTIMIZER, OPERATORS = range(6)
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


def step_tree(spans: Sequence[Span]) -> StepTree | None:
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
    root = StepNode(TYPES[_STEP] if known else "Trace", "", steps, wall_ns)
    nodes = _Nodes(root, every, turns=MAX_TURNS if known else 1)
    nodes.add_inner(inner, paths)
    nodes.add_slices(slices, paths)
    order = [root]
    for node in order:  # grows on the way
        order += node.children
    for node in reversed(order):
        node.device_ns += sum(child.device_ns for child in node.children)
        if node.children and not node.calls:
            node.at_ns = min(node.at_ns, *(child.at_ns for child in node.children))
        node.children.sort(key=lambda child: child.at_ns)
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
        # too deep: what they did counts for the last level
        self.node_of[:-1] = self.node_of[self_or_ancestor(outer, self.node_of[:-1] >= 0)]

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


_PREFIX = re.compile(r"^(enumerate\(Data(Loader|Pipe)\)#|Optimizer\.)")
_LOADERS = ("enumerate(DataLoader)#", "enumerate(DataPipe)#")
_OPTIMIZERS, _STEPS = ("Optimizer.",), ("ProfilerStep#",)


class _Search:
    """The items of a span, and what they are found by. `starts` and `ends` are those of its steps.

    `types` is the type of each row that is an item, else 0. Of each of `rows`, which are the items, `outer` is the row
    of the item around it, and `at_ns` when it starts, from the beginning of its step or outer item. `item_of` is for
    each row, and last for `NONE`, the innermost item around it: its position in `rows`.
    """

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
        self.types = self._types()
        is_item = self.types > 0
        self.rows = np.flatnonzero(is_item)
        self.outer = climb(span.parent, span.parent[self.rows], is_item)
        begins = span.start_ns[self.rows]
        step = np.maximum(self.steps_at(begins), 0)
        self.at_ns = begins - np.where(self.outer >= 0, span.start_ns[np.maximum(self.outer, 0)], self.starts[step])
        place = np.full(len(span) + 1, NONE, np.int64)
        place[self.rows] = np.arange(len(self.rows))
        self.item_of = np.append(place[self_or_ancestor(span.parent, is_item)], NONE)

    def items(self, first_item: int, first_step: int) -> pl.DataFrame:
        """The items, numbered from `first_item` on over all spans.

        `outer` is the item around it, `step` that of items without one, from `first_step` on; both `NONE` without.
        """
        span, rows = self.span, self.rows
        types, codes = self.types[rows], span.names.codes[rows]
        names = [_PREFIX.sub("", name) for name in span.names.values]
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

    def _named(self, beginnings: tuple[str, ...]) -> Bools:
        names = self.span.names
        return names.pick([name.startswith(beginnings) for name in names.values]) & self.host & ~self.span.is_function

    def _types(self) -> npt.NDArray[np.int8]:
        span, calls = self.span, self.calls
        types = np.zeros(len(span), np.int8)
        types[self._named(_LOADERS)] = LOADER
        types[self._named(_OPTIMIZERS)] = OPTIMIZER
        types[calls.is_call] = MODULE
        back = np.flatnonzero(calls.is_backward & self.host)
        around = climb(span.parent, span.parent[back], (types > 0) | calls.is_backward)
        types[back[(around < 0) | (types[np.maximum(around, 0)] > 0)]] = BACKWARD
        main = NONE  # the track with most steps, loaders, modules and optimizers; without any, with most operators
        for chosen in (self._named(_STEPS), (types > 0) & (types != BACKWARD), span.is_operator):
            codes = span.tracks.codes[chosen & self.host]
            if main == NONE and (codes >= 0).any():
                main = int(np.bincount(codes[codes >= 0]).argmax())
        around_any = self_or_ancestor(span.parent, (types > 0) | calls.is_backward | span.is_operator)
        own = np.flatnonzero(span.is_operator & self.host & ~calls.is_backward & (types == 0))
        above = span.parent[own]
        own = own[(above < 0) | (around_any[np.maximum(above, 0)] < 0)]
        # tracks of nothing but the backward pass: what the engine does by itself there, such as sums of gradients
        others = unique(span.tracks.codes[(types > 0) & (types != BACKWARD)])
        engines = np.setdiff1d(unique(span.tracks.codes[types == BACKWARD]), [*others.tolist(), main])
        types[own[np.isin(span.tracks.codes[own], engines)]] = BACKWARD
        types[own[span.tracks.codes[own] == main]] = OPERATORS
        return types

    def steps_at(self, times: Int64) -> Int64:
        return window_at(self.starts, self.ends, times)

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


STEP = "step"
_NEEDS = {
    "overview": "no steps and no slices of the host",
    "tensorboard": "no steps and no slices of the host",
    "operators": "no operators: record with ProfilerActivity.CPU",
    "kernels": "no work of a device: recorded on a CPU, without ProfilerActivity.CUDA, or CUPTI was not allowed",
    "modules": "no modules: record with with_stack=True",
    "tree": "no slices of the host",
}
MAX_CHILDREN = 1000  # of a node that are matched: those of most time
MAX_KERNELS = 200  # rows of kernels
_NAMED = 3  # of a gap's nodes that are named
_Pair = tuple[list[StepNode], list[StepNode]]


class Value(Struct, frozen=True):
    """One side of a row. ns; None: the side has no such thing, or no such figure."""

    calls: float | None
    ns: float | None
    device_ns: float | None = None


NOTHING = Value(None, None)
_Values = dict[str, Value]


class DiffSide(Struct, frozen=True):
    """One side: a span, or all spans of a trace or run together. `steps` is None where the spans have none."""

    label: str
    steps: int | None
    overviews: tuple[Overview, ...]
    operators: tuple[OperatorRow, ...]
    kernels: tuple[KernelRow, ...]
    modules: ModuleTree | None
    tree: StepTree | None
    without_steps: int = 0  # spans that have none while others do


def side(base: Base, span: SpanRef | None = None, label: str = "") -> DiffSide:
    """What is to be compared of a span, or of all spans together.

    Args:
        label: how the side is called; by default the span, or the first one's worker.
    """
    spans = base.chosen(span)
    chosen = {one.ref for one in spans}
    steps = [len(one.steps) for one in spans]
    return DiffSide(
        label=label or (span.label if span else spans[0].ref.worker if spans else "nothing"),
        steps=sum(steps) or None,
        overviews=tuple(item for item in overview.overviews(base) if item.span in chosen),
        operators=operators.table(base, span=span),
        kernels=kernels.table(base, span=span),
        modules=operators.module_tree(base, span),
        tree=step_tree(spans),
        without_steps=steps.count(0) if any(steps) else 0,
    )


def diff(base: DiffSide, other: DiffSide) -> Diff:
    per_step = bool(base.steps and other.steps)
    without = " and ".join(dict.fromkeys(one.label for one in (base, other) if not one.steps))
    tables: dict[str, tuple[DiffRow, ...]] = {}
    absent: dict[str, str] = {}
    notes = [
        f"times and calls per step: {things(base.steps or 0, 'step')} of {base.label}, {other.steps} of {other.label}"
        if per_step
        else f"times and calls in total, because {without} has no steps: their lengths may differ"
    ]
    notes += [
        f"{one.label}: {one.without_steps} of its traces have no steps; only operators, kernels and modules hold them"
        for one in (base, other)
        if one.without_steps
    ]
    found = [_tables(one, (one.steps or 1) if per_step else 1, per_step=per_step) for one in (base, other)]
    levels = {node.path: node.depth for one in (other, base) for node in (one.modules.nodes if one.modules else ())}
    there = {name: [bool(own[name]) for own in found] for name in found[0]}
    there["tree"] = [one.tree is not None for one in (base, other)]
    for name, known in there.items():
        lacking = dict.fromkeys(one.label for one, has in zip((base, other), known, strict=True) if not has)
        if lacking:
            absent[name] = f"{' and '.join(lacking)}: {_NEEDS[name]}"
        elif name in found[0]:
            one, two, known_levels = found[0][name], found[1][name], levels if name == "modules" else {}
            rows = (
                row(key, one.get(key, NOTHING), two.get(key, NOTHING), known_levels.get(key, 0))
                for key in dict.fromkeys((*one, *two))
            )
            tables[name] = tuple(sorted(rows, key=_weight))
    if base.tree is not None and other.tree is not None:
        divisors = [one.tree.steps or 1 if per_step and one.tree else 1 for one in (base, other)]
        alignment = _Alignment((base.tree, divisors[0]), (other.tree, divisors[1]))
        tables["tree"] = tuple(alignment.pair(base.tree.root, other.tree.root, 0))
        notes += alignment.notes()
    return Diff(base.label, other.label, per_step=per_step, tables=tables, absent=absent, notes=tuple(notes))


def _tables(one: DiffSide, steps: int, *, per_step: bool) -> dict[str, _Values]:
    return {
        "overview": _parts(one.overviews, "parts_ns", per_step=per_step),
        "tensorboard": _parts(one.overviews, "plugin_ns", per_step=per_step),
        "operators": {
            item.name: Value(item.calls / steps, item.host_self_ns / steps, _divide(item.device_self_ns, steps))
            for item in one.operators
        },
        "kernels": {item.name: Value(item.calls / steps, item.total_ns / steps) for item in one.kernels},
        "modules": {
            node.path: Value(
                node.calls / steps,
                (node.host_total_ns + (node.backward_host_total_ns or 0)) / steps,
                _divide(node.device_total_ns, steps, node.backward_device_total_ns or 0),
            )
            for node in (one.modules.nodes if one.modules else ())
        },
    }


def _parts(overviews: Iterable[Overview], partition: str, *, per_step: bool) -> _Values:
    steps = [step for item in overviews for step in item.steps]
    if not steps:
        return {}
    count = len(steps) if per_step else 1
    sums = {STEP: sum(step.wall_ns for step in steps)}
    for step in steps:
        parts: Mapping[str, int] = getattr(step, partition)
        for name, ns in parts.items():
            sums[name] = sums.get(name, 0) + ns
    return {name: Value(None, ns / count) for name, ns in sums.items()}


def _divide(ns: int | None, steps: int, more: int = 0) -> float | None:
    return None if ns is None else (ns + more) / steps


def _weight(one: DiffRow) -> tuple[float, float, str]:
    """Largest change first, then most time."""
    change = max(abs(one.delta_ns), abs(one.device_delta_ns or 0))
    return -change, -max(one.base_ns or 0, one.other_ns or 0), one.key


def row(key: str, base: Value, other: Value, level: int = 0) -> DiffRow:
    device = None
    if base.device_ns is not None or other.device_ns is not None:
        device = (other.device_ns or 0) - (base.device_ns or 0)
    return DiffRow(
        key=key,
        level=level,
        base_calls=base.calls,
        other_calls=other.calls,
        base_ns=base.ns,
        other_ns=other.ns,
        delta_ns=(other.ns or 0) - (base.ns or 0),
        ratio=other.ns / base.ns if base.ns and other.ns is not None else None,
        base_device_ns=base.device_ns,
        other_device_ns=other.device_ns,
        device_delta_ns=device,
    )


class _Alignment:
    """The structures of two sides' steps laid against each other, in order, level by level.

    A side is its tree and what its figures are divided by: its steps, or 1 for plain totals.
    """

    def __init__(self, base: tuple[StepTree, int], other: tuple[StepTree, int]) -> None:
        self._sides = base, other
        nodes = [base[0].root, other[0].root]
        for node in nodes:  # grows on the way
            nodes += node.children
        every = sorted((kernel.ns for node in nodes for kernel in node.kernels.values()), reverse=True)
        self._least_ns = every[MAX_KERNELS] if len(every) > MAX_KERNELS else -1
        self._left_out = 0

    def notes(self) -> list[str]:
        found = []
        if self._least_ns >= 0:
            found.append(f"tree: of the kernels only the {MAX_KERNELS} that take most time are shown")
        if self._left_out:
            found.append(f"tree: {self._left_out} short parts beside more than {MAX_CHILDREN} others are not shown")
        return found

    def pair(self, base: StepNode, other: StepNode, level: int) -> Iterator[DiffRow]:
        """Of two nodes that are matched, with all below."""
        key = _title(base)
        if base.type != other.type:  # of steps, and of a trace without any
            key = f"{key} | {_title(other)}"
        elif base.name != other.name:
            key = f"{key} | {other.name}"
        yield row(key, self._value([base], 0), self._value([other], 1), level)
        pairs = {
            place: (base.kernels.get(place), other.kernels.get(place)) for place in (*base.kernels, *other.kernels)
        }
        longest = {place: max(one.ns for one in pair if one) for place, pair in pairs.items()}
        for place in sorted(pairs, key=lambda place: -longest[place]):
            if longest[place] > self._least_ns:
                (operator, position), pair = place, pairs[place]
                names = dict.fromkeys(max(sorted(one.names), key=one.names.__getitem__) for one in pair if one)
                where = f"{operator}, kernel {position + 1}" if operator else "launched outside of operators"
                key = f"{where}: {' | '.join(names)}"
                yield row(key, self._kernel(pair[0], 0), self._kernel(pair[1], 1), level + 1)
        yield from self.rows(base.children, other.children, level + 1)

    def rows(self, base: list[StepNode], other: list[StepNode], level: int) -> Iterator[DiffRow]:
        """Of nodes that stand below matched parents."""
        for ours, theirs in _matched(self._longest(base), self._longest(other)):
            if len(ours) == len(theirs) == 1 and (ours[0].type, ours[0].kind) == (theirs[0].type, theirs[0].kind):
                yield from self.pair(ours[0], theirs[0], level)
                continue
            inside = level + bool(ours and theirs)
            if inside > level:
                key = f"not matched: {_list(ours)} | {_list(theirs)}"
                yield row(key, self._value(ours, 0), self._value(theirs, 1), level)
            for node in ours:
                yield row(_title(node), self._value([node], 0), NOTHING, inside)
            for node in theirs:
                yield row(_title(node), NOTHING, self._value([node], 1), inside)

    def _longest(self, nodes: list[StepNode]) -> list[StepNode]:
        if len(nodes) <= MAX_CHILDREN:
            return nodes
        self._left_out += len(nodes) - MAX_CHILDREN
        by_time = sorted(range(len(nodes)), key=lambda place: -max(nodes[place].host_ns, nodes[place].device_ns))
        return [nodes[place] for place in sorted(by_time[:MAX_CHILDREN])]

    def _value(self, nodes: list[StepNode], side: int) -> Value:
        tree, divisor = self._sides[side]
        calls = sum(node.calls for node in nodes)
        return Value(
            calls=calls / divisor if calls else None,
            ns=sum(node.host_ns for node in nodes) / divisor,
            device_ns=sum(node.device_ns for node in nodes) / divisor if tree.has_device else None,
        )

    def _kernel(self, kernel: KernelSum | None, side: int) -> Value:
        if kernel is None:
            return NOTHING
        divisor = self._sides[side][1]
        return Value(kernel.slices / divisor, None, kernel.ns / divisor)


def _matched(base: list[StepNode], other: list[StepNode]) -> Iterator[_Pair]:
    """Pairs of one node each that match, and gaps in between, in order."""
    for ours, theirs in _aligned(base, other, lambda node: (node.type, node.name)):
        if len(ours) == len(theirs) == 1 and ours[0].name == theirs[0].name and ours[0].type == theirs[0].type:
            yield ours, theirs
        else:
            yield from _aligned(ours, theirs, lambda node: (node.type, node.kind))


def _aligned(
    base: Sequence[StepNode], other: Sequence[StepNode], key: Callable[[StepNode], Hashable]
) -> Iterator[_Pair]:
    matcher = SequenceMatcher(None, [key(node) for node in base], [key(node) for node in other], autojunk=False)
    ours = theirs = 0
    for block in matcher.get_matching_blocks():
        if block.a > ours or block.b > theirs:
            yield list(base[ours : block.a]), list(other[theirs : block.b])
        for offset in range(block.size):
            yield [base[block.a + offset]], [other[block.b + offset]]
        ours, theirs = block.a + block.size, block.b + block.size


def _title(node: StepNode) -> str:
    return f"{node.type} {node.name}".rstrip()


def _list(nodes: list[StepNode]) -> str:
    more = len(nodes) - _NAMED
    return ", ".join(_title(node) for node in nodes[:_NAMED]) + (f" and {more} more" if more > 0 else "")
