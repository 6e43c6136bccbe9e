"""The overview of profiled steps and the GPUs on the terminal, under the names of the TensorBoard plugin too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope.model import Report
from stepscope.report import words
from stepscope.report.escape import plain
from stepscope.report.glyphs import Glyphs
from stepscope.report.places import Shortener
from stepscope.report.terminal_bars import bar, legend
from stepscope.report.text_table import TextColumn, lines

SPANS = 3  # shown one by one
GPUS = 6
GPU_COLUMNS = (
    ("utilisation", "utilization_pct"),
    ("SM efficiency", "sm_efficiency_pct"),
    ("occupancy", "achieved_occupancy_pct"),
    ("tensor cores", "tensor_core_pct"),
)
PEAKS = 4
LINES = 3
SMALLEST = 0.0005  # share of a part that is still shown


def overview_blocks(report: Report, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """Where profiled steps go, where nothing better is known of the run's steps, and how the GPUs were used."""
    overviews = report.views.get("overview") or []
    if any(item["basis"] == "device" for item in overviews) or not _partitioned(report):
        for item in overviews[:SPANS]:
            if item["steps"]:
                yield Group(*_overview(item, width, glyphs, several=len(overviews) > 1))
        if len(overviews) > SPANS:
            yield Text(f"{len(overviews) - SPANS} more spans: --table overview", style="dim")
    gpus = [gpu for gpu in report.views.get("gpus") or [] if gpu["kernels"]]
    if gpus:
        yield Group(*_gpus(gpus, width))


def memory_block(report: Report, shorten: Shortener) -> Iterator[RenderableType]:
    """The peaks of memory and the lines that stood in it then, where it was recorded with what tells them."""
    view = report.views.get("memory")
    curves = [curve for curve in (view or {}).get("curves", ()) if curve["peak_allocated_bytes"]]
    shown = [curve for curve in curves if curve["device"] != "cpu"] or ([] if report.steps else curves)
    if not view or not shown:
        return
    rows = [Text("Memory at its peak", style="bold")]
    rows += [Text(_peak(curve, several=len(shown) > 1)) for curve in shown[:PEAKS]]
    devices = {curve["device"] for curve in shown}
    own = [line for line in view["lines"] if line["device"] in devices and line["at_peak_bytes"] and line["place"]]
    for line in own[:LINES]:
        text = f"{words.size(line['at_peak_bytes']):>10}  {shorten(line['place']['file'], line['place']['line'])}"
        rows.append(Text(text, no_wrap=True, overflow="ellipsis"))
    for state in view["states"][:PEAKS]:
        rows.append(Text(_state(state), style="dim"))
    yield Group(*rows)


def _peak(curve: dict[str, Any], *, several: bool) -> str:
    of = f" ({plain(curve['worker'], 40)}, span {curve['span']})" if several else ""
    parts = [f"{plain(curve['device'], 40)}{of}: {words.size(curve['peak_allocated_bytes'])} allocated"]
    if curve["peak_reserved_bytes"]:
        parts.append(f"{words.size(curve['peak_reserved_bytes'])} reserved")
    if curve["capacity_bytes"]:
        parts.append(f"of {words.size(curve['capacity_bytes'])}")
    if curve["peak_before_bytes"]:
        parts.append(f"{words.size(curve['peak_before_bytes'])} from before the recording")
    return ", ".join(parts)


def _state(state: dict[str, Any]) -> str:
    free, fragmented = words.size(state["free_bytes"]), words.size(state["fragmented_bytes"])
    held = f"{words.size(state['reserved_bytes'])} held, {words.size(state['in_use_bytes'])} in use"
    return f"{plain(state['device'], 40)} in the snapshot: {held}, {free} free, of it {fragmented} fragmented"


def _partitioned(report: Report) -> bool:
    """Whether the steps are split by phases, which a journal of ours tells of all steps and not of profiled ones."""
    parts = [part for part in (report.steps or {}).get("partition", ()) if part["share"] > 0]
    return len(parts) > 1


def _overview(item: dict[str, Any], width: int, glyphs: Glyphs, *, several: bool) -> Iterator[RenderableType]:
    count = len(item["steps"])
    steps = f"mean of {words.things(count, 'step')}" if item["has_steps"] else "no step is marked: the whole trace"
    of = f" in {plain(item['span']['worker'], 60)}, span {item['span']['span']}" if several else ""
    late = f", {item['dropped_steps']} without their device work left out" if item["dropped_steps"] else ""
    yield Text.assemble(
        ("Where a profiled step goes", "bold"),
        f"{of}: {words.nanoseconds(item['wall']['mean_ns'])}",
        (f" ({steps}{late})", "dim"),
    )
    parts = [
        {"category": words.PARTS.get(name, name), "ms": part["mean_ns"] / 1e6, "share": part["share"]}
        for name, part in item["parts"].items()
        if part["share"] >= SMALLEST
    ]
    if parts:
        yield bar(parts, width, glyphs)
        yield legend(parts, width, glyphs)
    plugin = [
        f"{name} {words.percent(part['share'])}" for name, part in item["plugin"].items() if part["share"] >= SMALLEST
    ]
    yield Text(f"As the TensorBoard plugin split it: {', '.join(plugin)}", style="dim")


def _gpus(gpus: list[dict[str, Any]], width: int) -> Iterator[RenderableType]:
    shown = gpus[:GPUS]
    columns = [TextColumn("GPUs", [_gpu_name(gpu, len(gpus) > 1) for gpu in shown], flexible=True)]
    for heading, key in GPU_COLUMNS:
        columns.append(TextColumn(heading, [_percent(gpu[key]) for gpu in shown], flexible=False))
    yield from lines(columns, width)
    more = f"{len(gpus) - GPUS} more in --table gpus; " if len(gpus) > GPUS else ""
    yield Text(f"{more}utilisation says that some kernel ran, not that the GPU was full", style="dim")


def _gpu_name(gpu: dict[str, Any], several: bool) -> str:
    of = f" {plain(gpu['span']['worker'], 40)}, span {gpu['span']['span']}" if several else ""
    return f"{gpu['gpu']['device']} {plain(gpu['gpu']['name'] or '', 60)}{of}".strip()


def _percent(value: float | None) -> str:
    return words.percent(None if value is None else value / 100)
