"""Flame graphs as a picture and in the formats of other viewers."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.pictures.flame_tree import Limits
from stepscope.analyze.pictures.sampled_flame import FlameOptions, flame_diff, flame_graph
from stepscope.model.sampled import FlameGraph
from stepscope.report import flame
from tests.analyze.flame.scenes import PROJECT, context, stack, tree

EVIL = "</script><script>alert(1)</script>"
SVG = "{http://www.w3.org/2000/svg}"
names = st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map(tuple)
sampled = st.dictionaries(names, st.integers(1, 1000), min_size=1, max_size=20)


def graph_of(own: dict[tuple[str, ...], int]) -> FlameGraph:
    options = FlameOptions(limits=Limits(min_share=0))
    return flame_graph(context([stack(*path, samples=count) for path, count in own.items()]), options)


@given(sampled)
@settings(max_examples=40, deadline=None)
def test_collapsed_stacks_hold_every_sample_on_its_path(own: dict[tuple[str, ...], int]) -> None:
    drawn = graph_of(own)

    lines = flame.collapsed(drawn, tree(drawn)).splitlines()
    read = {}
    for line in lines:
        path, _, count = line.rpartition(" ")
        read[tuple(part.split(" (")[0] for part in path.split(";"))] = int(count)
    assert read == own


@given(sampled)
@settings(max_examples=40, deadline=None)
def test_speedscope_holds_every_sample_on_its_path(own: dict[tuple[str, ...], int]) -> None:
    drawn = json.loads(flame.speedscope(graph_of(own), "1.0"))

    frames, profile = drawn["shared"]["frames"], drawn["profiles"][0]
    paths = [tuple(frames[number]["name"] for number in stack) for stack in profile["samples"]]
    assert dict(zip(paths, profile["weights"], strict=True)) == own
    assert profile["endValue"] - profile["startValue"] == sum(own.values())
    assert (profile["type"], profile["unit"]) == ("sampled", "none")


def test_a_difference_has_two_numbers_the_other_sides_first() -> None:
    drawn = flame_diff(context([stack("a", samples=4), stack("b", samples=6)]), context([stack("a", samples=10)]))

    assert sorted(flame.collapsed(drawn, tree(drawn)).splitlines()) == ["a (train.py:1) 10 4", "b (train.py:1) 0 6"]


def test_the_picture_is_well_formed_and_says_what_boxes_are() -> None:
    drawn = flame_graph(
        context(
            [
                stack("main:3", f"{EVIL} ({PROJECT}/train.py:1)", samples=30),
                stack("main:3", "b\x1b[2J", samples=10),
                stack("]]>", samples=60),
            ]
        )
    )

    root = ElementTree.fromstring(flame.picture(drawn, tree(drawn)))
    boxes = {box.get("data-n"): box for box in root.iter(f"{SVG}g") if box.get("class") == "box"}
    assert set(boxes) == {"everything", "main", EVIL, "b\\x1b[2J", "]]>"}
    assert len(list(root.iter(f"{SVG}script"))) == 1
    title = boxes[EVIL].findtext(f"{SVG}title") or ""
    assert title.split("\n") == [EVIL, "train.py:1", "30 samples, 30.00%"]
    width = {name: float(box.get("data-w", "0")) for name, box in boxes.items()}
    assert width["everything"] == pytest.approx(1200)
    assert width[EVIL] == pytest.approx(360)


def test_boxes_of_the_picture_lie_inside_their_parents_side_by_side() -> None:
    drawn = graph_of({("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", "b"): 4, ("b", "a"): 5})
    chosen = tree(drawn)

    left, width, depth = flame.layout(chosen)
    for node, parent in enumerate(chosen.parent):
        if node:
            assert left[node] >= left[parent] - 1e-9
            assert left[node] + width[node] <= left[parent] + width[parent] + 1e-9
            assert depth[node] == depth[parent] + 1
    for level in set(depth.tolist()):
        spans = sorted((left[node], left[node] + width[node]) for node in range(len(depth)) if depth[node] == level)
        assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(spans))


def test_the_picture_loads_nothing() -> None:
    text = flame.picture(graph_of({("a",): 1}), tree(graph_of({("a",): 1})))

    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "href" not in text
