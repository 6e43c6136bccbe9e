"""The work of a run by operator, by kernel and by nn.Module: calls, host and device time, memory, tensor cores.

Below the tables of operators and kernels stand the user's lines by the time they cause; of one operator that was
clicked on also the call stacks behind it and the kernels it launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.dashboard.pages.traced import Chosen
from stepscope.model.views import KernelRow, ModuleNode, OperatorRow
from stepscope.report import words

NO_OPERATORS = "this trace holds no operators: record with ProfilerActivity.CPU"
NO_MODULES = "this trace holds no modules: record with with_stack=True"
OPERATOR_GROUPS = (("name", "Name"), ("shapes", "Name and input shapes"))
KERNEL_GROUPS = (("name", "Name"), ("launch", "Launch: operator, grid, block, registers"))
EVERY = ""


def operators(context: PageContext) -> list[Block]:
    """The page of operators; raises `UsageError` for a scope that names no span."""
    found = traced.chosen(context, "operators", "Operators")
    lines = traced.device_lines(context, traced.HOST)
    if found.absent is not None:
        return [found.absent, *lines]
    group = context.choice("group", [key for key, _ in OPERATOR_GROUPS])
    rows: Sequence[OperatorRow] = found.known(context, "operators")
    if group != "name":
        rows = found.rows(context, "operators", group=group).rows
    if not rows:
        return [traced.absent(context, "operators", "Operators", NO_OPERATORS), *lines]
    one = context.params.get("operator")
    if one is not None:  # long and odd names come as they are shown
        one = next((row.name for row in rows if blocks.cell(row.name) == one), one)
    where = "device" if rows[0].device_self_ns is not None else "host"
    by = f"{where}_self_ns"
    top = sorted(rows, key=lambda row: -(getattr(row, by) or 0))[: traced.TOP]
    most = words.nanoseconds(getattr(top[0], by))
    device = [("device self time", [row.device_self_ns for row in top], "kernel")] if where == "device" else []
    return [
        *found.notes(),
        *(_of_one(context, found, one) if one and not context.embedded else ()),
        *traced.choice(context, "Group by", "group", group, OPERATOR_GROUPS),
        blocks.drawn(
            "operators-top",
            f"Of {len(rows)} rows {top[0].name} has most {where} self time, {most}.",
            [row.name if row.shapes is None else f"{row.name} {row.shapes}" for row in top],
            [*device, ("host self time", [row.host_self_ns for row in top], "host")],
            title=f"Operators with most {where} self time",
            of=("OperatorRow", by),
        ),
        traced.block(context, "operators", rows, sort=by, given={"group": group}),
        *lines,
    ]


def _of_one(context: PageContext, found: Chosen, name: str) -> Iterator[Block]:
    yield blocks.text(f"One operator: {name}")
    stacks = found.rows(context, "stacks", name=name)
    if stacks.rows:
        yield traced.block(context, "stacks", stacks.rows, title=f"Call stacks behind {name}")
    else:
        yield from traced.paragraphs([stacks.absent])
    launched = [row for row in found.rows(context, "kernels", group="launch").rows if row.operator == name]
    if launched:
        yield traced.block(context, "launched", launched, title=f"Kernels that {name} launched")


def kernels(context: PageContext) -> list[Block]:
    """The page of kernels; raises `UsageError` for a scope that names no span."""
    found = traced.chosen(context, "kernels", "Kernels")
    lines = traced.device_lines(context, traced.DEVICE)
    if found.absent is not None:
        return [found.absent, *lines]
    gpus = [gpu for item in found.spans for gpu in item.gpus]
    own = gpus if found.single is None else found.single.gpus
    devices = [str(number) for number in sorted({gpu.gpu.device for gpu in own})]
    group = context.choice("group", [key for key, _ in KERNEL_GROUPS])
    device = context.choice("device", [EVERY, *devices])
    rows: Sequence[KernelRow] = found.known(context, "kernels")
    if group != "name" or device != EVERY:
        rows = found.rows(context, "kernels", group=group, device=int(device) if device != EVERY else None).rows
    made = found.notes()
    operator = context.params.get("operator")
    if operator and not context.embedded:
        rows = [row for row in rows if blocks.cell(row.operator) == operator]
        made.append(blocks.text(f"Only kernels that {operator} launched most of.", "note"))
    options = [(EVERY, "All"), *((number, number) for number in devices)]
    made += traced.choice(context, "Group by", "group", group, KERNEL_GROUPS)
    made += traced.choice(context, "Device", "device", device, options if len(devices) > 1 else [])
    if not rows:
        return [*made, blocks.text("No kernel of this choice ran.", "note"), *lines]
    if len(gpus) == 1:  # how much of the kernels' time tensor cores could take and do
        made.append(blocks.figures(blocks.measures(gpus[0], "kernels")))
    top = sorted(rows, key=lambda row: -row.total_ns)[: traced.TOP]
    cores = (("on tensor cores", True, "tensor_cores"), ("not on tensor cores", False, "kernel"))
    chart = blocks.drawn(
        "kernels-top",
        f"Of {len(rows)} rows {top[0].short_name} takes most time, {words.nanoseconds(top[0].total_ns)}: "
        f"{words.percent(top[0].share)} of all kernel time.",
        [row.short_name if row.grid is None else f"{row.short_name} {row.grid}x{row.block}" for row in top],
        [
            (name, [row.total_ns if row.tensor_cores is on else None for row in top], role)
            for name, on, role in cores
            if any(row.tensor_cores is on for row in top)
        ],
    )
    return [*made, chart, traced.block(context, "kernels", rows), *lines]


def modules(context: PageContext) -> list[Block]:
    """Time by nn.Module as a tree, forward and backward; raises `UsageError` for a scope that names no span."""
    found = traced.chosen(context, "modules", "Modules")
    if found.absent is not None:
        return [found.absent]
    views = context.run.analysis.views
    tree = views.modules if found.whole and views is not None else None  # of all spans together
    nodes: Sequence[ModuleNode] = tree.nodes if tree else found.rows(context, "modules").rows
    if not nodes:
        return [traced.absent(context, "modules", "Modules", NO_MODULES)]
    shown, notes = nodes, []
    if len(nodes) > context.limit:  # as many whole levels as fit, because a row without those above it is in no tree
        depth = max(sorted(node.depth for node in nodes)[context.limit] - 1, 0)
        shown = [node for node in nodes if node.depth <= depth][: context.limit]
        more = "stepscope analyze --table modules lists all"
        notes = [f"The first {depth + 1} levels of {len(nodes)} modules; {more}."]
    figures = [blocks.figures(blocks.measures(tree, "modules"))] if tree else []  # how much of the time it explains
    table = traced.block(context, "modules", shown, total=len(nodes), notes=notes)
    return [*found.notes(), *figures, _modules_with_most(nodes), table]


def _modules_with_most(nodes: Sequence[ModuleNode]) -> Block:
    where = "device" if any(node.device_self_ns for node in nodes) else "host"
    forward, backward = f"{where}_self_ns", f"backward_{where}_self_ns"
    passes = (("forward", forward), ("backward", backward))
    top = sorted(nodes, key=lambda node: -sum(getattr(node, key) or 0 for _, key in passes))[: traced.TOP]
    first = [(name, getattr(top[0], key)) for name, key in passes]
    told = " and ".join(f"{words.nanoseconds(ns)} {name}" for name, ns in first if ns is not None)
    names = [node.name for node in top]  # with the module around them where two have one name
    return blocks.drawn(
        "modules-top",
        f"Of {len(nodes)} modules {top[0].path} has most {where} self time: {told}.",
        ["/".join(node.path.split("/")[-2:]) if names.count(node.name) > 1 else node.name for node in top],
        [
            (name, [getattr(node, key) for node in top], name)
            for name, key in passes
            if key == forward or any(getattr(node, key) is not None for node in top)
        ],
        title=f"Modules with most {where} self time",
        of=("ModuleNode", forward),
    )
