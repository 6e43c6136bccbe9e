"""Kernels: calls, durations, launch configuration, tensor cores, and the user's lines by the device time they cause."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.dashboard.pages.traced import Chosen
from stepscope.model.views import KernelRow
from stepscope.report import words

TITLE = "Kernels"
GROUPS = (("name", "Name"), ("launch", "Launch: operator, grid, block, registers"))
EVERY = ""
_COLUMNS = (
    "kernel: short_name; operator; grid; block; registers; shared memory: shared_memory_bytes; calls; total: total_ns; "
    "share; mean: mean_ns; max: max_ns; line: file; min: min_ns; blocks/SM: blocks_per_sm; occupancy: occupancy_pct; "
    "tensor cores: tensor_cores; launch delay: launch_delay_ns"
)
_CORES = (
    "Kernel time on tensor cores: tensor_core_pct; Below operators that could use them: tensor_core_eligible_pct; "
    "Achieved occupancy: achieved_occupancy_pct"
)


def build(context: PageContext) -> list[Block]:
    """The page; raises `UsageError` for a scope that names no span."""
    found = traced.chosen(context, "kernels", TITLE)
    lines = traced.device_lines(context, traced.DEVICE)
    if found.absent is not None:
        return [found.absent, *lines]
    gpus = [gpu for item in found.spans for gpu in item.gpus]
    own = gpus if found.single is None else found.single.gpus
    devices = [str(number) for number in sorted({gpu.gpu.device for gpu in own})]
    group = context.choice("group", [key for key, _ in GROUPS])
    device = context.choice("device", [EVERY, *devices])
    options = [(EVERY, "All"), *((number, number) for number in devices)]
    rows = _rows(context, found, group, device)
    made = found.notes()
    operator = context.params.get("operator")
    if operator and not context.embedded:
        rows = [row for row in rows if blocks.cell(row.operator) == operator]
        made.append(blocks.text(f"Only kernels that {operator} launched most of.", "note"))
    made += traced.choice(context, "Group by", "group", group, GROUPS)
    made += traced.choice(context, "Device", "device", device, options if len(devices) > 1 else [])
    if not rows:
        return [*made, blocks.text("No kernel of this choice ran.", "note"), *lines]
    if len(gpus) == 1:  # how much of the kernels' time tensor cores could take and do
        made.append(blocks.figures(blocks.measures(gpus[0], _CORES, missing="the trace does not tell")))
    link = {"operator": blocks.cell_link("operators", "operator", "operator")}
    table = traced.block(context, "kernels", rows, columns=_COLUMNS, bars=("total_ns",), links=link)
    return [*made, _chart(rows), table, *lines]


def _rows(context: PageContext, found: Chosen, group: str, device: str) -> Sequence[KernelRow]:
    if group == "name" and device == EVERY:
        return found.known(context, "kernels")
    number = int(device) if device != EVERY else None
    rows: Sequence[KernelRow] = found.rows(context, "kernels", group=group, device=number).rows
    return rows


def _chart(rows: Sequence[KernelRow]) -> Block:
    top = sorted(rows, key=lambda row: -row.total_ns)[: traced.TOP]
    first = top[0]
    names = [row.short_name if row.grid is None else f"{row.short_name} {row.grid}x{row.block}" for row in top]
    return blocks.drawn(
        "kernels-top",
        "Kernels with most time",
        "stacked_bars",
        f"Of {len(rows)} rows {first.short_name} takes most time, {words.nanoseconds(first.total_ns)}: "
        f"{words.percent(first.share)} of all kernel time.",
        ("kernel", "text", names),
        ("total time", "ns"),
        [
            (name, [row.total_ns if row.tensor_cores is on else None for row in top], role)
            for name, on, role in (("on tensor cores", True, "tensor_cores"), ("not on tensor cores", False, "kernel"))
            if any(row.tensor_cores is on for row in top)
        ],
        ("KernelRow", "total_ns"),
    )
