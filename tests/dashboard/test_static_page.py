"""Blocks as plain HTML: every kind is shown, missing figures are said, nothing outside the picture is drawn.

The plain report that is made of them asks for nothing and can be read without seeing it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stepscope.dashboard import blocks, static_page
from stepscope.dashboard.static_page import Section
from stepscope.report.document import build
from tests.dashboard.plain_pages import Page, page_of
from tests.report.fabricate import analysis, diagnosis, write_script
from tests.report.test_terminal import HOSTILE, words_of


def shown(*made: dict[str, Any]) -> Page:
    page = Page(static_page.render("a run", [Section("A page", made)]))
    assert page.open == []
    return page


def chart(kind: str, xs: list[Any], *series: list[Any], **more: Any) -> dict[str, Any]:
    made = [blocks.series(f"s{at}", "ms", values, **more) for at, values in enumerate(series)]
    x = ("step", "text" if isinstance(xs[0], str) else "number", xs)
    return blocks.chart("c", "A chart", kind, sentence="What it says.", x=x, y=("time", "ms"), series=made)


@pytest.mark.parametrize("kind", ["line", "stacked_area", "stacked_bars", "bars", "histogram", "scatter"])
@pytest.mark.parametrize("size", [2, 60])
def test_charts_lie_in_their_picture_and_are_said(kind: str, size: int) -> None:
    values: list[float | None] = [float(at % 7) for at in range(size)]
    values[-1] = None
    page = shown(chart(kind, list(range(size)), values, [1.0] * size))
    numbers = [
        float(number)
        for tag, name, value in page.attributes
        if (tag, name) in (("polyline", "points"), ("polygon", "points"), ("rect", "x"), ("rect", "y"))
        for number in re.split("[ ,]", value)
    ]
    assert numbers
    assert min(numbers) >= 0
    assert max(numbers) <= static_page.WIDTH
    assert ("svg", "aria-label", "What it says.") in page.attributes
    assert ("step s0 s1 0 0.0 ms 1.0 ms 1 – 1.0 ms" in words_of(page.text)) == (size == 2)


def test_a_line_leads_over_no_missing_value() -> None:
    page = shown(chart("line", list(range(40)), [None if at == 20 else 1.0 for at in range(40)]))
    lines = [value for tag, name, value in page.attributes if (tag, name) == ("polyline", "points")]
    assert [len(line.split()) for line in lines] == [20, 19]


@pytest.mark.parametrize("kind", ["heat", "interval"])
def test_names_too_long_for_a_drawing_keep_what_tells_them_apart(kind: str) -> None:
    names = [f"{'encoder.' * 12}{at}.attention{'.projection' * 12}" for at in range(12)]
    x: tuple[str, str, list[Any]] = ("name", "text", names)
    drawn = [blocks.series("gain", "ms", [1.0] * 12, low=[0.5] * 12, high=[2.0] * 12)]
    if kind == "heat":
        x, drawn = ("step", "number", [0, 1]), [blocks.series(name, "ms", [1.0, 2.0]) for name in names]
    page = shown(blocks.chart("c", "A chart", kind, sentence="Said.", x=x, y=("time", "ms"), series=drawn))
    for at in range(12):
        assert f".{at}.att" in page.text
    assert names[0] not in page.text


def test_every_kind_of_block_takes_any_text() -> None:
    figure = blocks.figure(HOSTILE, HOSTILE, note=HOSTILE)
    where = blocks.place(HOSTILE, 3, HOSTILE, shown=HOSTILE, code=HOSTILE)
    columns = [blocks.column("depth", HOSTILE), blocks.column("p", HOSTILE, place=True)]
    rows = [{"depth": 1, "p": where}]
    made = (
        blocks.text(HOSTILE, "warning"),
        blocks.empty(HOSTILE, HOSTILE, HOSTILE, HOSTILE),
        blocks.figures([figure], HOSTILE),
        blocks.facts(HOSTILE, [blocks.fact(HOSTILE, HOSTILE, HOSTILE)]),
        blocks.choice(HOSTILE, "x", HOSTILE, [(HOSTILE, HOSTILE)]),
        blocks.table("t", HOSTILE, columns, rows, limit=1, total=2, notes=[HOSTILE], tree=True),
        chart("interval", [HOSTILE, "b"], [0.1, None], low=[0.0, None], high=[0.2, None]),
        chart("stacked_bars", [HOSTILE, "b"], [0.1, 0.2]),
        blocks.findings((), (), healthy=HOSTILE, abstained=[{"rule": HOSTILE, "needs": HOSTILE}]),
    )
    page = Page(static_page.render(HOSTILE, [Section(HOSTILE, made, opened=False)], HOSTILE))
    assert page.open == []
    assert not {"script", "b", "img"} & set(page.tags)
    assert "<script>x</script>" in page.text
    assert not {"\x1b", "\u202e", "\u2066", "\x9b", "\x07"} & set(page.text)


def test_what_does_not_fit_is_left_out_and_said() -> None:
    columns = [blocks.column("a", "A")]
    table = blocks.table("t", "T", columns, [{"a": "&" * 300} for _ in range(1_000)], limit=1_000)
    sections = [Section("One", [blocks.text("kept")]), *(Section(f"T{at}", [table]) for at in range(200))]
    page = static_page.render("run", sections)
    assert len(page.encode()) <= static_page.MAX_BYTES
    assert "The first 5 of 1000." in page
    small = static_page.body("run", sections, 2_000)
    assert "kept" in small
    assert "T1" not in small
    assert len(small) <= 2_000
    assert static_page.body("run", sections, 3) == ""


PARTS = """pictures|61.3 ms|16.3|522|cut by the loader's next fetch|1 torn line|Paid once 4.2 s|data wait
1. Waiting for the loader|41.2 ms a step, 67 %|train.py:7|Image.open|Load in 4 worker|loader.workers=4
step time does not fall|memory.fragmented|we need every line|aten::conv2d|256 = dim 1 of (8, 256)|trace-0.json.gz
augment|DataLoader|4711|powersave"""


def test_it_says_what_the_terminal_says_asks_for_nothing_and_can_be_read_without_seeing_it(tmp_path: Path) -> None:
    write_script(tmp_path)
    page = Page(page_of(build(analysis(tmp_path), diagnosis(tmp_path))))
    assert [part for part in re.split("[|\n]", PARTS) if part not in " ".join(page.text.split())] == []

    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "form"} & set(page.tags)
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value)
    (style,) = page.contents["style"]
    assert policy == f"default-src 'none'; style-src {static_page.hashes([style])}; base-uri 'none'; form-action 'none'"
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "style")]

    assert ("html", "lang", "en") in page.attributes
    assert page.tags.count("h1") == 1
    assert page.tags.count("table") == page.tags.count("thead")
    heads = [name for tag, name, _ in page.attributes if tag == "th" and name == "scope"]
    assert len(heads) == page.tags.count("th") > 0
    labels = [name for tag, name, _ in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(labels) == page.tags.count("svg") == 2 + 2 + 5  # of the overview, of steps, of metrics
