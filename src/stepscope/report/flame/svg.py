"""One tree as one SVG file: an icicle that stands without a script, and zooms and searches with the one it holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope.model.sampled import FlameFrame, FlameGraph, FlameTree
from stepscope.report.escape import markup, plain
from stepscope.report.flame.document import CHANGES, KINDS, LONGEST_NAME, changes, rounded
from stepscope.report.flame.page import asset

WIDTH = 1200.0
CELL = 17
TOP = 64  # for the title, what the widths mean, and the buttons
LETTER = 6.6  # of the text's average width
NARROWEST = 0.3  # a narrower box cannot be seen
_STYLE = (
    "text{font:12px system-ui,'Segoe UI',Roboto,sans-serif;fill:#14181f}.soft{fill:#566072}.box,.button{cursor:pointer}"
    ".button{fill:#1d4ed8}.box:hover rect{stroke:#14181f}.box text{pointer-events:none}"
)


def render(graph: FlameGraph, tree: FlameTree) -> str:
    """`tree` of `graph` as an SVG document."""
    left, width, depth = layout(tree)
    rows = int(depth[width >= NARROWEST].max(initial=0)) + 1
    height = TOP + rows * CELL + 12
    boxes = "\n".join(_boxes(graph, tree, left, width, depth))
    note = markup(f"{tree.label} · {tree.unit}: {tree.source}", 220)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height}" width="{WIDTH:g}" height="{height}" '
        f'data-width="{WIDTH:g}">\n<title>{markup(graph.title, 160)}</title>\n<style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="4" y="18" style="font-size:15px;font-weight:600">{markup(graph.title, 140)}</text>\n'
        f'<text x="4" y="36" class="soft">{note}</text>\n'
        '<text x="4" y="54" class="button" id="reset">reset</text>'
        '<text x="50" y="54" class="button" id="search">search</text>'
        '<text x="110" y="54" class="soft" id="status"></text>\n'
        f"{boxes}\n<script><![CDATA[\n{asset('picture.js')}]]></script>\n</svg>\n"
    )


def layout(tree: FlameTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(left, width, depth) of every node; of a difference, what is gone has no width."""
    value = np.asarray(tree.value, dtype=np.float64)
    parent = np.asarray(tree.parent, dtype=np.int64)
    scale = WIDTH / value[0] if value[0] > 0 else 0.0
    width = value * scale
    left = np.zeros(len(value))
    depth = np.zeros(len(value), dtype=np.int64)
    filled = np.zeros(len(value))  # of each node, by children drawn so far
    # the largest of a node's children stands first; parents come before children in the outer order
    for node in np.lexsort((-value, parent)).tolist():
        above = parent[node]
        if above >= 0:
            left[node] = filled[above]  # of the parent's own left edge; made absolute below
            filled[above] += width[node]
    for node in range(1, len(value)):
        left[node] += left[parent[node]]
        depth[node] = depth[parent[node]] + 1
    return left, width, depth


def _boxes(graph: FlameGraph, tree: FlameTree, left: np.ndarray, width: np.ndarray, depth: np.ndarray) -> Iterator[str]:
    how = changes(tree)
    for node, frame in enumerate(tree.frame):
        if width[node] < NARROWEST and node:
            continue
        drawn = graph.frames[frame]
        fill = CHANGES[how[node]][1] if how is not None else KINDS.get(drawn.kind, KINDS["native"])[1]
        name = plain(drawn.name, LONGEST_NAME)
        x, y, wide = left[node], TOP + int(depth[node]) * CELL, width[node]
        yield (
            f'<g class="box" data-x="{x:.3f}" data-w="{wide:.3f}" data-d="{depth[node]}" data-n="{markup(name)}">'
            f"<title>{_title(graph, tree, node, drawn)}</title>"
            f'<rect x="{x:.2f}" y="{y}" width="{max(0.0, wide - 0.5):.2f}" height="{CELL - 1}" rx="1.5" fill="{fill}" '
            f'data-fill="{fill}"/><text x="{x + 3:.2f}" y="{y + 12}">{markup(_fit(name, wide))}</text></g>'
        )


def _title(graph: FlameGraph, tree: FlameTree, node: int, frame: FlameFrame) -> str:
    """What a box is, line by line."""
    place = frame.file + (f":{frame.line}" if frame.line is not None else "") if frame.file else ""
    share = tree.value[node] / tree.value[0] if tree.value[0] else 0.0
    lines = [plain(frame.name, LONGEST_NAME), plain(place), f"{rounded(tree.value[node]):,} {tree.unit}, {share:.2%}"]
    if tree.base is not None and graph.sides is not None:
        lines[-1] += f" in {plain(graph.sides[0])}; {rounded(tree.base[node]):,} in {plain(graph.sides[1])}"
    return "\n".join(markup(line, 900) for line in lines)


def _fit(name: str, width: float) -> str:
    letters = int((width - 6) / LETTER)
    if letters < 3:
        return ""
    return name if len(name) <= letters else name[: letters - 1] + "…"
