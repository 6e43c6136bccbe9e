"""The devices' part of the terminal report: where their time goes by kind, and which lines of the user's it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope.model import Report
from stepscope.report import sentences, words
from stepscope.report.escape import plain
from stepscope.report.places import Shortener
from stepscope.report.terminal_parts import Glyphs, TextColumn, bar, legend, lines

TRACES = 4  # rows of the table of times
LINES = 5
LINES_BESIDE_FINDINGS = 3
# (heading, key): compute, exposed communication, exposed copies and idle sum to the span
COLUMNS = (
    ("span", "total_ns"),
    ("compute", "compute_ns"),
    ("+ comm.", "exposed_communication_ns"),
    ("+ copies", "exposed_memcpy_ns"),
    ("idle", "idle_ns"),
)


def device_blocks(report: Report, shorten: Shortener, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """The table of times and the lines, each only where there is something to show."""
    rows = sentences.device_rows(report)
    if rows:
        yield Group(*_times(rows, width))
    view = report.views.get("device_lines")
    # what stacks sampled on the host says more about the host than operators do
    if view and view["total_ns"] and (view["basis"] == "device" or not report.views.get("stacks")):
        yield Group(*_lines(report, view, shorten, glyphs))


def _times(rows: list[dict[str, Any]], width: int) -> Iterator[RenderableType]:
    shown = rows[:TRACES]
    columns = [TextColumn("Device time", [plain(row["label"], 80) for row in shown], flexible=True)]
    for name, key in COLUMNS:
        columns.append(TextColumn(name, [words.nanoseconds(row[key]) for row in shown], flexible=False))
    columns.append(TextColumn("busy", [words.percent(row["busy_share"]) for row in shown], flexible=False))
    yield from lines(columns, width)
    said = "+ is what no compute hides; these four sum to the span"
    more = f"{len(rows) - TRACES} more rows in the report's files; " if len(rows) > TRACES else ""
    yield Text(f"{more}{said}", style="dim")


def _lines(report: Report, view: dict[str, Any], shorten: Shortener, glyphs: Glyphs) -> Iterator[RenderableType]:
    yield Text(sentences.DEVICE_LINES[view["basis"]], style="bold")
    for row in view["lines"][: LINES_BESIDE_FINDINGS if report.findings else LINES]:
        place = row["place"]
        text = f"{words.percent(row['share']):>7}  {shorten(place['file'], place['line'])}"
        text += f"  {plain(place['function'] or '', 60)}"
        notes = sentences.line_notes(row)
        line = Text(text, no_wrap=True, overflow="ellipsis")
        yield line + Text(f"  {notes}" if notes else "", style="dim")
        if row.get("code") and row["exact_line"]:
            yield Text(f"{'':9}{glyphs.quote} {plain(row['code'])}", style="dim", no_wrap=True, overflow="ellipsis")
    if not view["lines"]:
        yield Text("no line could be found:", style="dim")
    for why, share in sentences.unattributed(view):
        yield Text(f"{words.percent(share):>7}  {plain(why, 120)}", style="dim", no_wrap=True, overflow="ellipsis")
    footer = sentences.line_footer(view)
    if footer:
        yield Text(footer, style="dim")


SPANS = 3  # shown one by one
GPUS = 6
GPU_COLUMNS = (
    ("utilisation", "utilization_pct"),
    ("SM efficiency", "sm_efficiency_pct"),
    ("occupancy", "achieved_occupancy_pct"),
    ("tensor cores", "tensor_core_pct"),
)
PEAKS = 4
MEMORY_LINES = 3
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
    for line in own[:MEMORY_LINES]:
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
