"""The flame graph: sampled stacks, and operators and kernels of traces by who called them; alone or as a difference.

The document is the one that `stepscope flamegraph` puts into its page (stepscope.flame/1). Trees are drawn with as many
boxes as a page can take: the thinnest go first, and their time stays with the boxes that lead to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from stepscope.analyze.host.hotspots import StackSelection
from stepscope.analyze.pictures.sampled_flame import FlameOptions
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.errors import EnvironmentRefusal, StepscopeError, UnreadableInputError, UsageError
from stepscope.model.sampled import FlameGraph
from stepscope.report.escape import plain
from stepscope.report.flame import document

TITLE = "Flame graph"
BY = (("function", "Function"), ("line", "Line"))
NOTHING = "no stack was sampled, and no trace holds Python stacks"
NONE, OTHERS = "", "others"
LEAST_BOXES = 300  # of a tree, however many trees there are
_OPTION = re.compile(r"^--[a-z]+(?: [^:]{0,200})?: ")  # what an error of the command line begins with


def empty(context: PageContext) -> bool:
    if context.run.tables.stacks.height:
        return False
    views = context.run.analysis.views
    return views is None or not any(row.has_call_stack for row in views.operators)


def build(context: PageContext) -> list[Block]:
    """The page. What cannot be drawn or compared is said in a block of its own."""
    by = context.choice("by", [key for key, _ in BY])
    rank, why = _rank(context)
    made = [*traced.choice(context, "A box is", "by", by, BY), *_others(context, rank)]
    if why is not None:
        return [*made, traced.absent(context, "stacks", TITLE, why)]
    other = NONE if context.embedded else context.params.get("with", NONE)
    key = ("flame", by, rank, other, context.boxes, context.source)
    try:  # the last few documents of a run are kept, because drawing takes a while
        drawn = traced.kept(context.run, key, lambda: _document(context, by, rank, other))
    except (UsageError, UnreadableInputError, EnvironmentRefusal) as error:  # that a run is still read is none of these
        return [*made, _refused(context, error)]
    return [*made, blocks.flame("flame", drawn, drawn["trees"][drawn["first"]]["key"])]


def _refused(context: PageContext, error: StepscopeError) -> Block:
    why = _OPTION.sub("", str(error))
    if context.params.get("with"):
        return blocks.empty("No comparison", traced.sentence(why), "Compare runs that were recorded in the same way.")
    return traced.absent(context, "stacks", TITLE, why if context.run.tables.stacks.height else NOTHING)


def _rank(context: PageContext) -> tuple[int | None, str | None]:
    worker = context.selection().worker
    if worker is None:
        return None, None
    views = context.run.analysis.views
    known = {plain(item.span.worker): item.span.rank for item in (views.spans if views is not None else ())}
    known |= {plain(info.process): info.rank for info in context.run.tables.ranks}
    rank = known.get(plain(worker))
    sampled = set(context.run.tables.stacks["rank"].drop_nulls())
    if rank is None or (sampled and rank not in sampled):
        return None, f"no stack of {worker} was sampled: choose another worker, or all"
    return rank, None


def _others(context: PageContext, rank: int | None) -> list[Block]:
    options = [(NONE, "nothing")]
    if rank is not None and context.run.tables.stacks["rank"].drop_nulls().n_unique() > 1:
        options.append((OTHERS, "the mean of the other ranks"))
    options += traced.other_runs(context)
    given = context.params.get("with", NONE)
    if given not in dict(options):
        options.append((given, given))  # further down the list of runs, or no run at all
    return traced.choice(context, "Compare with", "with", given, options)


def _document(context: PageContext, by: str, rank: int | None, other: str) -> dict[str, Any]:
    """The stepscope.flame/1 document with about as many boxes as fit: drawn again with fewer where there are more."""
    options = FlameOptions(selection=StackSelection(rank=rank), by=by, source=context.source)
    graph = _graph(context, options, rank, other)
    sizes = [len(tree.parent) for tree in graph.trees]
    if sum(sizes) > context.boxes:
        fewer = replace(options.limits, max_nodes=_fitting(sizes, context.boxes) - 1)  # beside the root
        graph = _graph(context, replace(options, limits=fewer), rank, other)
    return document(graph)


def _graph(context: PageContext, options: FlameOptions, rank: int | None, other: str) -> FlameGraph:
    if other == OTHERS and rank is not None:
        return context.run.flame_rank_diff(rank, options)
    if other not in (NONE, OTHERS) and context.catalog is not None:
        return context.run.flame_diff(context.catalog.run(other), options)
    return context.run.flame_graph(options)


def _fitting(sizes: Sequence[int], most: int) -> int:
    """The largest number of boxes a tree may have so that all together have `most`."""
    left, count = most, len(sizes)
    for size in sorted(sizes):
        if size * count > left:
            return max(LEAST_BOXES, left // count)
        left -= size
        count -= 1
    return max(sizes)
