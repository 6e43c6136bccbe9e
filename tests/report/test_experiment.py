"""An experiment as document and on a terminal: what wins, by how much, what to write, and what no knob reaches."""

from __future__ import annotations

import pytest

from stepscope.dashboard.pages import experiments
from stepscope.schema import Knob
from tests.report.fabricate_experiment import (
    BY_HAND,
    experiment,
    shown,
)


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_but_what_is_copied_is_wider_than_the_screen(width: int) -> None:
    lines = shown(experiment(by_hand=(BY_HAND,)), width=width).splitlines()
    end = next(number for number, line in enumerate(lines) if line.startswith("Next"))

    assert max(map(len, lines[:end])) <= width
    assert not [line for line in lines if line != line.rstrip()]


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ((), "baseline again"),
        ((Knob("env:A.B", "1"), Knob("env:A.C", "2")), "env:A.B=1 + env:A.C=2"),
        ((Knob("loader.num_workers", "2"), Knob("gc", "off")), "loader.num_workers=2 + gc=off"),
        ((Knob("arg:--a", "x y"),), "arg:--a=x y"),
    ],
)
def test_names_of_candidates(knobs: tuple[Knob, ...], name: str) -> None:
    assert experiments.name([{"knob": knob.knob, "value": knob.value} for knob in knobs]) == name
