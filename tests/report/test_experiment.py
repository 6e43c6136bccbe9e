"""An experiment as document and on a terminal: what wins, by how much, what to write, and what no knob reaches."""

from __future__ import annotations

import pytest

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
