"""Time by nn.Module as a tree, forward and backward, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.model.views import ModuleNode
from stepscope.report import words

TITLE = "Modules"
OPEN_DEPTH = 2  # levels that are unfolded at first
_COLUMNS = (
    "module: name; class: module; calls; calls a step: calls_per_step; device self: device_self_ns; "
    "device total: device_total_ns; device, backward: backward_device_total_ns; host self: host_self_ns; "
    "host total: host_total_ns; host, backward: backward_host_total_ns; operators"
)
_FIGURES = (
    ("Device time: device_ns; Launched by no module: unattributed_device_ns", "no trace holds work of a device"),
    ("Backward pass linked: backward_linked_share", "no operator of the backward pass is linked"),
    ("Profiled steps: steps", "no step is marked"),
)


def build(context: PageContext) -> list[Block]:
    """The page; raises `UsageError` for a scope that names no span."""
    found = traced.chosen(context, "modules", TITLE)
    if found.absent is not None:
        return [found.absent]
    views = context.run.analysis.views
    tree = views.modules if found.whole and views is not None else None  # of all spans together
    nodes: Sequence[ModuleNode] = tree.nodes if tree else found.rows(context, "modules").rows
    if not nodes:
        return [traced.absent(context, "modules", TITLE, "this trace holds no modules: record with with_stack=True")]
    shown, notes = _cut(nodes, context.limit)
    # how much of the device's time the tree explains
    items = [item for text, why in _FIGURES if tree for item in blocks.measures(tree, text, missing=why)]
    made = [*found.notes(), *([blocks.figures(items)] if items else []), _chart(nodes)]
    bars, total = ("device_total_ns", "host_total_ns"), len(nodes)
    given = traced.block(
        context, "modules", shown, columns=_COLUMNS, bars=bars, open_depth=OPEN_DEPTH, total=total, notes=notes
    )
    return [*made, given]


def _cut(nodes: Sequence[ModuleNode], limit: int) -> tuple[Sequence[ModuleNode], list[str]]:
    """As many whole levels as fit, because a row without those above it is in no tree."""
    if len(nodes) <= limit:
        return nodes, []
    depth = max(sorted(node.depth for node in nodes)[limit] - 1, 0)  # above the first level that does not fit
    shown = [node for node in nodes if node.depth <= depth]
    note = f"The first {depth + 1} levels of {len(nodes)} modules; stepscope analyze --table modules lists all."
    return shown[:limit], [note]


def _chart(nodes: Sequence[ModuleNode]) -> Block:
    where = "device" if any(node.device_self_ns for node in nodes) else "host"
    forward, backward = f"{where}_self_ns", f"backward_{where}_self_ns"

    def both(node: ModuleNode) -> int:
        return (getattr(node, forward) or 0) + (getattr(node, backward) or 0)

    top = sorted(nodes, key=lambda node: -both(node))[: traced.TOP]
    first = top[0]
    passes = (("forward", forward), ("backward", backward))
    told = [
        f"{words.nanoseconds(getattr(first, key))} {name}" for name, key in passes if getattr(first, key) is not None
    ]
    names = [node.name for node in top]  # with the module around them where two have one name
    shown = ["/".join(node.path.split("/")[-2:]) if names.count(node.name) > 1 else node.name for node in top]
    return blocks.drawn(
        "modules-top",
        f"Modules with most {where} self time",
        "stacked_bars",
        f"Of {len(nodes)} modules {first.path} has most {where} self time: {' and '.join(told)}.",
        ("module", "text", shown),
        ("self time", "ns"),
        [
            (name, [getattr(node, key) for node in top], name)
            for name, key in passes
            if key == forward or any(getattr(node, key) is not None for node in top)
        ],
        ("ModuleNode", forward),
    )
