"""Operators: calls, host and device time, memory and tensor cores, by name or by input shapes; and of one operator that
was clicked on the call stacks behind it and the kernels it launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.dashboard.pages.traced import Chosen
from stepscope.model.views import OperatorRow
from stepscope.report import words

TITLE = "Operators"
NO_OPERATORS = "this trace holds no operators: record with ProfilerActivity.CPU"
GROUPS = (("name", "Name"), ("shapes", "Name and input shapes"))
_COLUMNS = (
    "operator: name; shapes; calls; device self: device_self_ns; device total: device_total_ns; "
    "host self: host_self_ns; host total: host_total_ns; tensor cores: tensor_core_self_pct; line: file; "
    "calls a step: calls_per_step; host self a step: host_self_ns_per_step; "
    "host total a step: host_total_ns_per_step; runtime calls: runtime_ns; host memory: self_memory_bytes; "
    "device memory: self_device_memory_bytes"
)
_LAUNCHED = (
    "kernel: short_name; grid; block; calls; total: total_ns; mean: mean_ns; max: max_ns; blocks/SM: blocks_per_sm; "
    "occupancy: occupancy_pct; tensor cores: tensor_cores; launch delay: launch_delay_ns"
)


def build(context: PageContext) -> list[Block]:
    """The page; raises `UsageError` for a scope that names no span."""
    found = traced.chosen(context, "operators", TITLE)
    lines = traced.device_lines(context, traced.HOST)
    if found.absent is not None:
        return [found.absent, *lines]
    group = context.choice("group", [key for key, _ in GROUPS])
    rows: Sequence[OperatorRow] = found.known(context, "operators")
    if group != "name":
        rows = found.rows(context, "operators", group=group).rows
    if not rows:
        return [traced.absent(context, "operators", TITLE, NO_OPERATORS), *lines]
    one = context.params.get("operator")
    if one is not None:  # long and odd names come as they are shown
        one = next((row.name for row in rows if blocks.cell(row.name) == one), one)
    by = "device_self_ns" if rows[0].device_self_ns is not None else "host_self_ns"
    bars = ("device_self_ns", "host_self_ns")
    link = {"name": blocks.cell_link("operators", "operator", "name", {"group": group})}
    return [
        *found.notes(),
        *(_of_one(context, found, one) if one and not context.embedded else ()),
        *traced.choice(context, "Group by", "group", group, GROUPS),
        _chart(rows, by),
        traced.block(context, "operators", rows, sort=by, columns=_COLUMNS, bars=bars, links=link),
        *lines,
    ]


def _chart(rows: Sequence[OperatorRow], by: str) -> Block:
    top = sorted(rows, key=lambda row: -(getattr(row, by) or 0))[: traced.TOP]
    where = "device" if by == "device_self_ns" else "host"
    first = top[0]
    names = [row.name if row.shapes is None else f"{row.name} {row.shapes}" for row in top]
    most = words.nanoseconds(getattr(first, by))
    host = [row.host_self_ns for row in top]
    device = [("device self time", [row.device_self_ns for row in top], "kernel")] if where == "device" else []
    return blocks.drawn(
        "operators-top",
        f"Operators with most {where} self time",
        "bars",
        f"Of {len(rows)} rows {first.name} has most {where} self time, {most}.",
        ("operator", "text", names),
        ("self time", "ns"),
        [*device, ("host self time", host, "host")],
        ("OperatorRow", by),
    )


def _of_one(context: PageContext, found: Chosen, name: str) -> Iterator[Block]:
    yield blocks.text(f"One operator: {name}")
    stacks = found.rows(context, "stacks", name=name)
    if stacks.rows:
        bars = ("host_self_ns", "device_self_ns")
        yield traced.block(context, "stacks", stacks.rows, title=f"Call stacks behind {name}", bars=bars)
    else:
        yield from traced.paragraphs([stacks.absent])
    launched = [row for row in found.rows(context, "kernels", group="launch").rows if row.operator == name]
    if launched:
        title, most = f"Kernels that {name} launched", ("total_ns",)
        yield traced.block(context, "kernels", launched, id="launched", title=title, columns=_LAUNCHED, bars=most)
