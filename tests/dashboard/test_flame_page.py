"""The page of a flame graph as text: what it holds reads back, and nothing in it can run, load or be too large."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest

from stepscope.dashboard import bundle, single
from stepscope.model.sampled import FlameFrame, FlameGraph, FlameTree
from stepscope.report.flame import document
from tests.dashboard.plain_pages import Page, embedded
from tests.dashboard.test_single import INDEX, SCRIPT, STYLE

EVIL = "</script><script>alert(1)</script>"
HOSTILE = [EVIL, "<!--", "]]>", "a\u2028b\u2029c", "\x1b[2J", "&lt;", "\u202eevil", "\ud800", '"', "\\", "x" * 5000]


def graph(*names: str, base: bool = False, notes: tuple[str, ...] = ()) -> FlameGraph:
    """One tree whose root holds a box for each name."""
    frames = (FlameFrame("everything", "", None, "root"), *(FlameFrame(name, name, 7, "user") for name in names))
    count = len(names)
    tree = FlameTree(
        key="all",
        label="everything",
        unit="samples",
        parent=(-1, *[0] * count),
        frame=tuple(range(count + 1)),
        value=(float(count * 2), *[2.0] * count),
        base=(float(count * 2), *[2.0] * count) if base else None,
        source="as counted",
        hidden=0.0,
    )
    return FlameGraph(f"run {EVIL}", frames, (tree,), notes, ("this", EVIL) if base else None)


def data(text: str) -> Any:
    """The flame graph that a page of the front end holds."""
    documents = embedded(text)["documents"]
    assert [page["key"] for page in documents["runs/this"]["pages"]] == ["flame"]
    (block,) = documents["runs/this/pages/flame"]["blocks"]
    return block["document"]


@pytest.fixture(params=["front end", "picture"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the page is made of: a front end of two lines, or the picture where none was built."""
    made = bundle.Bundle(INDEX, (SCRIPT,), (STYLE,)) if request.param == "front end" else None
    monkeypatch.setattr(bundle, "load", lambda: made)
    return str(request.param)


@pytest.mark.parametrize("form", ["front end"], indirect=True)
@pytest.mark.usefixtures("form")
def test_the_data_in_the_page_reads_back() -> None:
    drawn = graph("main", "train", base=True, notes=("mind this",))

    held = data(single.flame_page(drawn))
    assert held == json.loads(json.dumps(document(drawn)))
    assert [held["names"][frame[0]] for frame in held["frames"]] == ["everything", "main", "train"]
    assert [(held["files"][frame[1]], frame[2]) for frame in held["frames"]][1] == ("main", 7)
    (tree,) = held["trees"]
    assert (tree["parent"], tree["frame"], tree["value"], tree["base"]) == ([-1, 0, 0], [0, 1, 2], [4, 2, 2], [4, 2, 2])
    assert {held["changes"][change][0] for change in tree["change"]} == {"about the same"}
    assert held["notes"] == ["mind this"]


def test_hostile_names_stay_data(form: str) -> None:
    text = single.flame_page(graph(*HOSTILE, notes=tuple(HOSTILE)))
    plain, hostile = Page(single.flame_page(graph("a", "b"))), Page(text)

    assert hostile.tags.count("script") == plain.tags.count("script") == (2 if form == "front end" else 1)
    assert "alert(1)</script" not in text
    assert not {"\x1b", "\u202e"} & set(text)
    if form == "front end":
        assert EVIL in data(text)["names"]
        assert max(map(len, data(text)["names"])) <= 300


@pytest.mark.usefixtures("form")
def test_the_policy_lets_nothing_run_but_what_the_page_was_made_with() -> None:
    page = Page(single.flame_page(graph("main")))
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy
    assert not [name for _, name, _ in page.attributes if name == "style"]
    for tag in ("style", "script"):
        for text in page.contents[tag]:
            if not text.startswith("{"):
                executed = text.removeprefix("<![CDATA[").removesuffix("]]>")
                digest = base64.b64encode(hashlib.sha256(executed.encode()).digest()).decode()
                assert f"'sha256-{digest}'" in rules[f"{tag}-src"]
