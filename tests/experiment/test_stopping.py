"""When a candidate needs no further pair."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.comparison.verdicts import effect_of, half_width
from stepscope.experiment.schedule import CLEAR, is_clear, narrow_enough, wanted
from stepscope.model.comparison import Candidate, Protocol
from tests.experiment.fakes import flag, measure
from tests.records import some

CANDIDATE = Candidate("gc=freeze", ())


def protocol(least: int = 5, most: int = 10, width: float = 0.02) -> Protocol:
    return Protocol(("x",), 10, 100, least, most, width, 0.01, 0.05, 0, False, None, 5.0)


def pairs(*ratios: float, spoilt: int = 0):  # type: ignore[no-untyped-def]
    found = []
    for number, ratio in enumerate(ratios):
        flags = (flag("throttled"),) if number < spoilt else ()
        found.append(
            (
                measure("baseline", 100.0, *flags, path=f"{number}a"),
                measure("candidate", 100.0 * ratio, path=f"{number}b"),
            )
        )
    return found


FIXED = {"least": 6, "most": 6}
HALF = (0.5, 0.502, 0.499, 0.5)


@pytest.mark.parametrize(
    ("ratios", "spoilt", "asked", "more"),
    [
        ((), 0, {}, 5),
        ((1.0, 1.001, 0.999, 1.0), 0, {}, 1),  # narrow, but not looked at before five
        ((1.0, 1.001, 0.999, 1.0, 1.001), 0, {}, 0),
        ((0.95, 1.05, 0.98, 1.03, 1.0), 0, {}, 5),
        ((0.5, 0.502), 0, {}, 3),  # two pairs have no interval
        ((0.5, 0.502, 0.499), 0, {}, 0),  # clear
        ((0.5, 0.6, 0.4), 0, {}, 7),  # large, but it could be anything
        ((0.9, 1.1) * 5, 0, {}, 0),  # no pairs are left
        ((*HALF, 0.5), 0, FIXED, 1),  # a fixed number is not cut short
        ((*HALF, 0.5, 0.5), 0, FIXED, 0),
        (HALF, 2, {}, 3),  # spoilt pairs do not count
        (HALF, 1, {}, 0),
    ],
)
def test_enough(ratios: tuple[float, ...], spoilt: int, asked: dict[str, int], more: int) -> None:
    assert wanted(CANDIDATE, pairs(*ratios, spoilt=spoilt), protocol(**asked)) == more


def test_among_many_candidates_a_clear_effect_needs_more() -> None:
    found = some(effect_of([(100.0, 71.0), (100.0, 70.0), (100.0, 73.0)]))
    half = some(half_width(found))
    assert is_clear(found, 0.025)
    assert not is_clear(found, 0.025 / 50)
    assert CLEAR * half < 0.36


@given(st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=12), st.floats(-0.5, 0.5))
def test_the_size_of_the_effect_does_not_matter(logs: list[float], shift: float) -> None:
    """Shifting all pairs alike changes the effect and its p-value, not its width."""
    one = some(effect_of([(1.0, math.exp(value)) for value in logs]))
    other = some(effect_of([(1.0, math.exp(value + shift)) for value in logs]))
    width = 0.02 if one.spread is None or abs((one.spread or 0) - 0.02) > 1e-6 else 0.03
    assert narrow_enough(one, least=3, most=10, width=width) == narrow_enough(other, least=3, most=10, width=width)
