"""The structure of steps: loader, modules, backward pass and optimizer in their order, all steps laid over each other.

Items of equal type and name that follow each other are one node, with as many calls. The second time that others have
come between is a node of its own, so that the micro-batches of a step stay apart. All sums are over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from msgspec import Struct, field

from stepscope.analyze.views import step_items
from stepscope.analyze.views.step_items import BACKWARD, LOADER, MODULE, OPERATORS, STEP, Items
from stepscope.engine.module_calls import MAX_LEVELS, Paths, module_class
from stepscope.engine.spans import Span
from stepscope.tables.arrays import NONE, Int64

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
        if self.type == TYPES[MODULE]:
            return module_class(self.name)
        if self.type == TYPES[LOADER]:
            return ""
        return module_class(self.name) if self.type == TYPES[BACKWARD] else self.name


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
    paths, parts = Paths(), list[Items]()
    items = steps = 0
    for span in chosen:
        parts.append(step_items.find(span, paths, items, steps))
        items += parts[-1].items.height
        steps += max(parts[-1].steps, 1)
    known = all(part.steps for part in parts)
    root = StepNode(TYPES[STEP] if known else "Trace", "", steps, sum(part.wall_ns for part in parts))
    nodes = _Nodes(root, pl.concat([part.items for part in parts]), turns=MAX_TURNS if known else 1)
    nodes.add_inner(pl.concat([part.inner for part in parts]), paths)
    nodes.add_slices(pl.concat([part.slices for part in parts]), paths)
    _finish(root)
    return StepTree(root, steps if known else 0, any(part.has_device for part in parts))


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
            while own is not self.nodes[number]:
                own.host_ns += host_ns
                above = paths.parent[path]
                own, path = (self._inner(number, above, paths), above) if above >= 0 else (self.nodes[number], path)

    def _inner(self, number: int, path: int, paths: Paths) -> StepNode:
        """The node of a module's way below a node of the backward pass."""
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
            pl.col("ns").sum(), pl.col("slices").sum()
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
    """Device time with all below, and children in their order."""
    order, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting.extend(node.children)
    for node in reversed(order):
        node.device_ns += sum(child.device_ns for child in node.children)
        if node.children and not node.calls:
            node.at_ns = min(node.at_ns, *(child.at_ns for child in node.children))
        node.children.sort(key=lambda child: child.at_ns)
