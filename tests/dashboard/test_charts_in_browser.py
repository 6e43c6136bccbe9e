"""Charts in a real Chromium, on made-up documents: what is drawn, by hand and by keyboard, and what is beside it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.dashboard import blocks
from tests.dashboard.browser import View

HOSTILE = ["<img src=x onerror=alert(1)>", "{a|b}</script>", "a\u202eb\u0000c\x1b[31m", "{value}", "n" * 300]
# the colours that a canvas holds, as many as there are pixels of
COLOURS = """canvas => {
  const copy = document.createElement('canvas');
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const drawing = copy.getContext('2d', { willReadFrequently: true });
  drawing.drawImage(canvas, 0, 0);
  const { data } = drawing.getImageData(0, 0, copy.width, copy.height);
  const seen = {};
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200) {
    const key = [data[at], data[at + 1], data[at + 2]].join();
    seen[key] = (seen[key] ?? 0) + 1;
  }
  return seen;
}"""


@pytest.fixture
def show(show_made_up: Callable[..., View]) -> Callable[..., View]:
    """Shows charts as a page."""
    return lambda *charts, **options: show_made_up("steps", charts, **options)


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
    series, at = blocks.series, [0, 1, 2, 3]
    up, down = [1.0, None, 3.0, 2.5], [0.5, 0.25, None, 4.0]
    counts = [series("steady", "count", [3, 9, 1, 0]), series("others", "count", [0, 0, 2, 0])]
    effects = [
        series("measured", "pct", [-4, 2, None], low=[-6, -1, None], high=[-1, 5, None], role="measured"),
        series("ceiling", "pct", [-7, None, -2], role="ceiling"),
    ]
    told: dict[str, Any] = {"unit": "text", "help": blocks.help_("What it means."), "notes": ["A note."]}
    return [
        chart("line", "line", at, [series("up", "share", up), series("down", "share", down)], sync="a"),
        chart("band", "line", at[:3], [series("mean", "ms", [5, 6, 7], low=[4, 5, None], high=[6, 7, None])]),
        chart("area", "stacked_area", at, [series("up", "bytes", up), series("down", "bytes", down)]),
        steps_chart(),
        chart("named", "bars", names, [series("time", "ns", [1e6, 2.5e9, 3])], unit="text"),
        chart("piled", "stacked_bars", names, [series(name, "ns", [3, 2, 1]) for name in "ab"], unit="text"),
        chart("spread", "histogram", [0, 2, 4, 6], counts),
        chart("cloud", "scatter", [1, 5, 2], [series("points", "W", [100, 230, 170])]),
        chart("effect", "interval", names, effects, **told),
        chart("heat", "heat", at, [series(name, "number", up, odd=[(1, "NaN")]) for name in HOSTILE]),
    ]


def section(view: View, id: str) -> Any:
    return view.page.locator("section.chart").filter(
        has=view.page.get_by_role("heading", name=f"Chart {id}", exact=True)
    )


def drawn(view: View, id: str) -> int:
    """Colours of the picture that cover more than a few pixels."""
    seen = section(view, id).locator("canvas").evaluate(COLOURS)
    return sum(pixels > 12 for pixels in seen.values())


def test_every_type_is_drawn_and_accessible(show: Callable[..., View]) -> None:
    charts = one_of_each()
    view = show(*charts, axe=True)
    for each in charts:
        id = each["id"]
        view.until(lambda id=id: drawn(view, id) >= 2)
        assert section(view, id).get_by_role("img").first.get_attribute("aria-label") == f"This is {id}."
        assert section(view, id).get_by_text(f"This is {id}.").is_visible()
    assert view.violations() == []
    view.page.emulate_media(color_scheme="dark")
    assert view.violations() == []


def test_values_stand_in_a_table_and_in_csv(show: Callable[..., View]) -> None:
    view = show(
        chart("band", "line", [0, 1], [blocks.series("mean", "ms", [5, None], low=[4, None], high=[6.5, None])])
    )
    button = section(view, "band").get_by_role("button", name="Table")
    assert button.get_attribute("aria-expanded") == "false"
    button.click()
    table = view.page.locator("section.table")
    view.until(lambda: table.count() == 1)
    assert "c.band=table" in view.page.url
    assert [row.split("\t") for row in table.locator("tbody tr").all_inner_texts()] == [
        ["0\u202fs", "5\u202fms", "4\u202fms", "6.5\u202fms"],
        ["1\u202fs", "–", "–", "–"],
    ]
    with view.page.expect_download() as waited:
        table.get_by_role("button", name="CSV of").click()
    rows = list(csv.reader(Path(waited.value.path()).read_text().splitlines()))
    assert rows == [
        ["x [s]", "mean [ms]", "mean, low [ms]", "mean, high [ms]"],
        ["0", "5", "4", "6.5"],
        ["1", "", "", ""],
    ]


def test_steps_are_chosen_by_numbers_and_by_keys(show: Callable[..., View]) -> None:
    view = show(steps_chart())
    first, last = section(view, "steps").get_by_role("spinbutton").all()
    assert (first.input_value(), last.input_value()) == ("0", "99")
    first.fill("20")
    last.fill("30")
    last.press("Enter")
    view.until(lambda: "steps=20%3A30" in view.page.url)
    section(view, "steps").get_by_role("button", name="All steps again").click()
    view.until(lambda: "steps=" not in view.page.url)

    plot = section(view, "steps").get_by_role("slider")
    plot.focus()
    plot.press("Home")
    plot.press("Shift+PageDown")
    plot.press("Shift+ArrowRight")
    plot.press("Enter")
    view.until(lambda: "steps=0%3A11" in view.page.url)


def test_charts_zoom_together_and_links_restore_it(show: Callable[..., View]) -> None:
    values = [blocks.series("value", "number", STEPS)]
    charts = [
        chart(id, "line", STEPS, values, sync=sync) for id, sync in (("one", "time"), ("two", "time"), ("alone", None))
    ]
    view = show(*charts)
    one, two, alone = (section(view, id).get_by_role("slider") for id in ("one", "two", "alone"))
    box = one.bounding_box()
    assert box is not None
    view.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    view.page.mouse.down()
    view.page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 50, steps=3)
    view.page.mouse.up()
    view.until(lambda: "z.time=" in view.page.url)

    def ends(plot: Any) -> list[float]:
        plot.focus()
        found = []
        for key in ("Home", "End"):
            plot.press(key)
            found.append(float(plot.get_attribute("aria-valuetext").split()[1].split("\u202f")[0]))
        return found

    assert ends(one) == ends(two)
    assert 40 < ends(two)[0] < ends(two)[1] < 90
    assert ends(alone)[0] == 0

    again = show(*charts, query="?" + view.page.url.partition("?")[2])
    assert ends(section(again, "two").get_by_role("slider")) == ends(two)
    one.dblclick()
    view.until(lambda: "z.time=" not in view.page.url)


def test_hostile_names_are_text(show: Callable[..., View]) -> None:
    made = [
        chart("names", "bars", HOSTILE, [blocks.series("time", "ns", [5, 4, 3, 2, 1])], unit="text"),
        chart("series", "line", [0, 1], [blocks.series(name, "ms", [1, 2]) for name in HOSTILE]),
        steps_chart(marks=[blocks.mark(3, 9, HOSTILE[0])]),
    ]
    for each in made:
        each["title"] = f"Chart {each['id']}"
    view = show(*made, query="?c.names=table&c.series=table", axe=True)
    assert view.page.locator("main :is(img:not([role]), script, iframe)").count() == 0
    assert section(view, "series").get_by_role("button", name=HOSTILE[0]).count() == 1
    plot = section(view, "names").get_by_role("slider")
    plot.focus()
    plot.press("Home")
    assert plot.get_attribute("aria-valuetext").startswith(HOSTILE[0])
    assert view.page.locator("html").evaluate("root => root.scrollWidth") <= 1280
    assert view.violations() == []


def odd(type: str) -> list[dict[str, Any]]:
    """Charts of a type that hold hardly anything, or what no axis is made for."""
    values: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
        "nothing": ([], []),
        "single": ([7], [3]),
        "missing": ([0, 1, 2], [None, None, None]),
        "zero": ([5, 5, 5], [0, 0, 0]),
        "huge": ([0, 1e300], [1e300, -1e300]),
        "tiny": ([0, 1e-12, 2e-12], [1e-15, 2e-15, 3e-15]),
        "backwards": ([9, 3, 6], [1, 2, 3, 4, 5]),
        "mixed": (["a", 1, 2], [1, 2]),
    }
    made = [chart(f"{type} {id}", type, x, [blocks.series("v", "ms", y)]) for id, (x, y) in values.items()]
    many = chart(
        f"{type} many", type, range(5_000), [blocks.series("v", "ms", [at % 7 for at in range(5_000)])], select="steps"
    )
    return [*made, chart(f"{type} none", type, [], []), *([] if type == "interval" else [many])]


def test_odd_values_break_nothing(show: Callable[..., View]) -> None:
    types = ("line", "stacked_area", "stacked_bars", "bars", "histogram", "scatter", "interval", "heat")
    made = [each for type in (*types, "multiples") for each in odd(type)]
    view = show(*made)
    view.until(lambda: view.page.locator("section.chart").count() == len(made))
    for type in types:
        for id in ("tiny", "backwards"):
            plot = section(view, f"{type} {id}").get_by_role("slider")
            plot.focus()
            for key in ("End", "Shift+ArrowLeft", "+", "-", "0", "Escape"):
                plot.press(key)
    assert view.page.locator("[role=alert]").count() == 0
