"""Charts that nobody measured: one of each type, and one of a hundred steps with a stall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.dashboard import blocks

STEPS = list(range(100))
WALL = [12.0 + step % 5 for step in STEPS]
WAIT = [3.0 if step != 40 else 90.0 for step in STEPS]


def steps_chart(**changes: Any) -> dict[str, Any]:
    parts = [
        blocks.series("data wait", "ms", WAIT, role="data_wait"),
        blocks.series("forward", "ms", WALL, role="forward"),
    ]
    return chart("steps", "stacked_bars", STEPS, parts, select="steps", unit="number", **changes)


def chart(
    id: str, type: str, x: Sequence[Any], series: Sequence[Mapping[str, Any]], *, unit: str = "s", **more: Any
) -> dict[str, Any]:
    label = "step" if more.get("select") else "x"
    y = series[0]["unit"] if series else "number"
    made = blocks.chart(
        id, f"Chart {id}", type, sentence=f"This is {id}.", x=(label, unit, x), y=("height", y), series=series, **more
    )
    return dict(made)


def one_of_each() -> list[dict[str, Any]]:
    names = ["short", "aten::a_rather_long_name_of_an_operator", "x"]
    up, down = [1.0, None, 3.0, 2.5], [0.5, 0.25, None, 4.0]
    return [
        chart(
            "line",
            "line",
            [0, 1, 2, 3],
            [blocks.series("up", "share", up), blocks.series("down", "share", down)],
            sync="a",
        ),
        chart("band", "line", [0, 1, 2], [blocks.series("mean", "ms", [5, 6, 7], low=[4, 5, None], high=[6, 7, None])]),
        chart(
            "area",
            "stacked_area",
            [0, 1, 2, 3],
            [blocks.series("up", "bytes", up), blocks.series("down", "bytes", down)],
        ),
        steps_chart(),
        chart("named", "bars", names, [blocks.series("time", "ns", [1e6, 2.5e9, 3])], unit="text"),
        chart("piled", "stacked_bars", names, [blocks.series(name, "ns", [3, 2, 1]) for name in "ab"], unit="text"),
        chart(
            "spread",
            "histogram",
            [0, 2, 4, 6],
            [blocks.series("steady", "count", [3, 9, 1]), blocks.series("others", "count", [0, 0, 2])],
        ),
        chart("cloud", "scatter", [1, 5, 2], [blocks.series("points", "W", [100, 230, 170])]),
        chart(
            "effect",
            "interval",
            names,
            [
                blocks.series(
                    "measured", "pct", [-4, 2, None], low=[-6, -1, None], high=[-1, 5, None], role="measured"
                ),
                blocks.series("ceiling", "pct", [-7, None, -2], role="ceiling"),
            ],
            unit="text",
            help=blocks.help_("What it means."),
            notes=["A note."],
        ),
    ]
