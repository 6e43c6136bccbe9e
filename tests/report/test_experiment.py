"""An experiment as document and on a terminal: what wins, by how much, what to write, and what no knob reaches."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from stepscope.dashboard.pages import experiments
from stepscope.schema import Knob
from tests.report.fabricate_experiment import (
    BY_HAND,
    experiment,
    hostile,
    shown,
)
from tests.report.test_terminal import HOSTILE


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_but_what_is_copied_is_wider_than_the_screen(width: int) -> None:
    lines = shown(experiment(by_hand=(BY_HAND,)), width=width).splitlines()
    end = next(number for number, line in enumerate(lines) if line.startswith("Next"))

    assert max(map(len, lines[:end])) <= width
    assert not [line for line in lines if line != line.rstrip()]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_hostile_texts_are_shown_and_not_obeyed(tmp_path: Path, encoding: str) -> None:
    text = shown(hostile(HOSTILE, tmp_path), encoding=encoding)

    assert "<script>x</script>" in text
    controls = [letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs") and letter != "\n"]
    assert controls == []


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
