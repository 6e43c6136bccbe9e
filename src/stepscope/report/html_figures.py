"""The drawings of report.html, as inline SVG: parts of a step, step time over steps, what of it was compiling."""

from __future__ import annotations

from typing import Any

from stepscope.report import words
from stepscope.report.escape import markup
from stepscope.report.html_style import PART_COLOURS

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 180, 64, 22  # of the step series, in units of the drawing
SPARK = 110  # height of the drawing of compiling
LABELLED = 0.12  # share from which a part of the bar has room for its name


def partition(parts: list[dict[str, Any]]) -> str:
    """The bar and its table."""
    shown = [part for part in parts if part["share"] > 0]
    if not shown:
        return ""
    rects, rows, left = [], [], 0.0
    for index, part in enumerate(shown):
        colour = PART_COLOURS[index % len(PART_COLOURS)]
        name, width = markup(words.term(part["category"])), part["share"] * WIDTH
        label = f"{name} {markup(words.percent(part['share']))}"
        rects.append(
            f"<rect x='{left:.1f}' y='0' width='{width:.1f}' height='34' fill='{colour}'><title>{label}</title></rect>"
        )
        if part["share"] >= LABELLED:
            rects.append(f"<text class='on-part' x='{left + 10:.1f}' y='22'>{name}</text>")
        rows.append(
            f"<tr><th scope='row'><span class='swatch part-{index % len(PART_COLOURS)}'></span>{name}</th>"
            f"<td class='right'>{markup(words.milliseconds(part['ms']))}</td>"
            f"<td class='right'>{markup(words.percent(part['share']))}</td></tr>"
        )
        left += width
    return (
        f"<svg class='bar' viewBox='0 0 {WIDTH} 34' role='img' aria-label='Parts of a step, see the table below'>"
        f"{''.join(rects)}</svg>"
        "<table><thead><tr><th scope='col'>Part</th><th scope='col' class='right'>Time a step</th>"
        f"<th scope='col' class='right'>Share</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def series(steps: dict[str, Any]) -> str:
    """Wall time of the steps over their number, with the median dashed."""
    points = [(float(step), float(wall)) for step, wall in steps["series"] if wall is not None]
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    top = max(wall for _, wall in points) or 1.0
    across, high = WIDTH - LEFT - 8, HEIGHT - BOTTOM - 10

    def x(step: float) -> float:
        return LEFT + (step - first) / ((last - first) or 1.0) * across

    def y(wall: float) -> float:
        return 10 + (1 - wall / top) * high

    line = " ".join(f"{x(step):.1f},{y(wall):.1f}" for step, wall in points)
    median = y(min(steps["median_ms"], top))
    floor = y(0)
    return (
        f"<h2>Step time over the run</h2><svg class='series' viewBox='0 0 {WIDTH} {HEIGHT}' role='img' "
        f"aria-label='Step time from step {first:.0f} to {last:.0f}, at most {markup(words.milliseconds(top))}'>"
        f"<line x1='{LEFT}' y1='{floor:.1f}' x2='{WIDTH - 8}' y2='{floor:.1f}'/>"
        f"<line class='median' x1='{LEFT}' y1='{median:.1f}' x2='{WIDTH - 8}' y2='{median:.1f}'/>"
        f"<polyline points='{line}'/>"
        f"<text x='{LEFT - 6}' y='18' text-anchor='end'>{markup(words.milliseconds(top))}</text>"
        f"<text x='{LEFT - 6}' y='{median + 4:.1f}' text-anchor='end'>median</text>"
        f"<text x='{LEFT}' y='{HEIGHT - 5}'>step {first:.0f}</text>"
        f"<text x='{WIDTH - 8}' y='{HEIGHT - 5}' text-anchor='end'>step {last:.0f}</text></svg>"
    )


def compile_series(kind: str, points: list[dict[str, Any]]) -> str:
    """A bar for each step that compiled: its wall time where it is known, and the part of it that was compiling."""
    rows = [(row, row["wall_ms"] or 0.0, row["compile_ms"] or 0.0) for row in points]
    top = max((max(wall, spent) for _, wall, spent in rows), default=0.0)
    if len(rows) < 2 or not top or not any(spent for _, _, spent in rows):
        return ""
    first, last = min(row["step"] for row, _, _ in rows), max(row["step"] for row, _, _ in rows)
    across, high = WIDTH - LEFT - 8, SPARK - BOTTOM - 10
    slot = across / (last - first + 1)
    width = min(max(slot * 0.8, 1.0), 24.0)
    bars = []
    for row, wall, spent in rows:
        left = LEFT + (row["step"] - first) * slot
        title = f"step {row['step']}: {markup(words.milliseconds(row['compile_ms']))} of compiling"
        title += f" in {markup(words.milliseconds(row['wall_ms']))}" if row["wall_ms"] is not None else ""
        for value, style in ((wall, "wall"), (min(spent, wall) if wall else spent, "spent")):
            if value:
                tall = value / top * high
                bars.append(
                    f"<rect class='{style}' x='{left:.1f}' y='{10 + high - tall:.1f}' width='{width:.1f}' "
                    f"height='{tall:.1f}'><title>{title}</title></rect>"
                )
    name = markup(words.term(kind))
    floor = 10 + high
    return (
        f"<h3>Compiling in {name} steps</h3><svg class='compiling' viewBox='0 0 {WIDTH} {SPARK}' role='img' "
        f"aria-label='Steps {first} to {last} that compiled, at most {markup(words.milliseconds(top))}; "
        "the filled part of a bar is compiling'>"
        f"<line x1='{LEFT}' y1='{floor}' x2='{WIDTH - 8}' y2='{floor}'/>{''.join(bars)}"
        f"<text x='{LEFT - 6}' y='18' text-anchor='end'>{markup(words.milliseconds(top))}</text>"
        f"<text x='{LEFT}' y='{SPARK - 5}'>step {first}</text>"
        f"<text x='{WIDTH - 8}' y='{SPARK - 5}' text-anchor='end'>step {last}</text></svg>"
    )
