"""Kernels: calls, durations, launch configuration, tensor cores, and the user's lines by the device time they cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import traced
from stepscope.dashboard.pages.traced import Chosen
from stepscope.report import words

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext
    from stepscope.model.views import KernelRow

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
    if found.absent is not None:
        return [found.absent, *traced.device_lines(context, traced.DEVICE)]
    group = context.choice("group", [key for key, _ in GROUPS])
    devices = _devices(found)
    device = context.choice("device", [EVERY, *devices])
    options = [(EVERY, "All"), *((number, number) for number in devices)]
    rows = _rows(context, found, group, device)
    operator = context.params.get("operator")
    notes = [*found.notes()]
    if operator and not context.embedded:
        rows = [row for row in rows if blocks.cell(row.operator) == operator]
        notes.append(blocks.text(f"Only kernels that {operator} launched most of.", "note"))
    made = [
        *notes,
        *traced.choice(context, "Group by", "group", group, GROUPS),
        *traced.choice(context, "Device", "device", device, options if len(devices) > 1 else []),
    ]
    if not rows:
        none = blocks.text("No kernel of this choice ran.", "note")
        return [*made, none, *traced.device_lines(context, traced.DEVICE)]
    table = traced.block(
        context,
        "kernels",
        rows,
        columns=_COLUMNS,
        bars=("total_ns",),
        links={"operator": blocks.cell_link("operators", "operator", "operator")},
    )
    return [*made, *_cores(found), _chart(rows), table, *traced.device_lines(context, traced.DEVICE)]


def _rows(context: PageContext, found: Chosen, group: str, device: str) -> Sequence[KernelRow]:
    views = context.run.analysis.views
    if group == "name" and device == EVERY and views is not None:
        one = found.single
        return views.kernels if one is None else one.kernels
    number = int(device) if device != EVERY else None
    rows: Sequence[KernelRow] = traced.rows(context, "kernels", found.selection(group=group, device=number)).rows
    return rows


def _devices(found: Chosen) -> list[str]:
    spans = found.spans if found.single is None else (found.single,)
    return [str(number) for number in sorted({gpu.gpu.device for item in spans for gpu in item.gpus})]


def _cores(found: Chosen) -> Iterator[Block]:
    """How much of the kernels' time tensor cores could take and do, of the one GPU that there is."""
    gpus = [gpu for item in found.spans for gpu in item.gpus]
    if len(gpus) == 1:
        yield blocks.figures(blocks.measures(gpus[0], _CORES, missing="the trace does not tell"))


def _chart(rows: Sequence[KernelRow]) -> Block:
    """The kernels with most time; those on tensor cores set apart."""
    top = sorted(rows, key=lambda row: -row.total_ns)[: traced.TOP]
    first = top[0]
    parts = [
        blocks.series(name, "ns", [row.total_ns if row.tensor_cores is wanted else None for row in top], role=role)
        for name, wanted, role in (
            ("on tensor cores", True, "tensor_cores"),
            ("not on tensor cores", False, "kernel"),
        )
        if any(row.tensor_cores is wanted for row in top)
    ]
    names = [row.short_name if row.grid is None else f"{row.short_name} {row.grid}x{row.block}" for row in top]
    return blocks.chart(
        "kernels-top",
        "Kernels with most time",
        "stacked_bars",
        sentence=(
            f"Of {len(rows)} rows {first.short_name} takes most time, {words.nanoseconds(first.total_ns)}: "
            f"{words.percent(first.share)} of all kernel time."
        ),
        x=("kernel", "text", names),
        y=("total time", "ns"),
        y_min=0,
        series=parts,
        help=blocks.meaning("KernelRow", "total_ns"),
    )
