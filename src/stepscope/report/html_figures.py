"""The two drawings of report.html, as inline SVG: the partition of a step, and step time over steps."""

from __future__ import annotations

from typing import Any

from stepscope.report import words
from stepscope.report.escape import markup
from stepscope.report.html_style import PART_COLOURS

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 180, 64, 22  # of the step series, in units of the drawing
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
            rects.append(f"<text x='{left + 10:.1f}' y='22' style='fill:#fff;font-weight:600'>{name}</text>")
        rows.append(
            f"<tr><th scope='row'><span class='swatch' style='background:{colour}'></span>{name}</th>"
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
