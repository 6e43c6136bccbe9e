"""What a command line asks for: candidates, sizes of runs, which requests are the same; and when pairs are enough."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.comparison.verdicts import effect_of, half_width
from stepscope.experiment.plan import (
    FEWEST_STEPS,
    LEAST_STEPS,
    MOST_STEPS,
    MOST_WARMUP,
    candidates_of,
    key,
    sizes,
)
from stepscope.experiment.schedule import CLEAR, is_clear, narrow_enough, wanted
from stepscope.model.comparison import Candidate, Protocol
from stepscope.schema import Knob
from tests.experiment.fakes import flag, measure, request
from tests.records import replace, some


def names(*tries: str, together: bool = False) -> list[str]:
    return [candidate.name for candidate in candidates_of(tries, together=together)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("env:LIST=a,b", "a,b"),
        ('env:QUOTED=it\'s "so", yes', 'it\'s "so", yes'),
        ("arg:--sizes=1,2 3", "1,2 3"),
        ("cpu.affinity=0,2-3", "0,2-3"),
        ("env:EQUALS=a=b", "a=b"),
    ],
)
def test_a_value_that_is_valid_as_a_whole_is_never_split(text: str, value: str) -> None:
    (candidate,) = candidates_of([text])
    assert [knob.value for knob in candidate.knobs] == [value]


def test_together_is_one_candidate_for_each_combination() -> None:
    assert names("loader.num_workers=2,4", "gc=freeze", together=True) == [
        "loader.num_workers=2 + gc=freeze",
        "loader.num_workers=4 + gc=freeze",
    ]


def test_more_time_is_the_same_experiment_and_anything_else_is_not() -> None:
    asked = request("gc=freeze")
    same = key(replace(asked, budget_s=60.0))
    assert key(asked) == same
    others = [
        replace(asked, command=("python", "other.py")),
        replace(asked, cwd="/elsewhere"),
        replace(asked, base_knobs=(Knob("gc", "off"),)),
        replace(asked, steps=50),
        request("gc=off"),
    ]
    assert len({same, key(asked, host="another machine"), *map(key, others)}) == len(others) + 2


@given(st.floats(1e-5, 1e3), st.one_of(st.none(), st.integers(40, 5_000)))
def test_sizes_stay_within_their_limits_and_within_the_training(step_s: float, length: int | None) -> None:
    asked = request("gc=freeze")
    warmup, steps = sizes(asked, step_s, length)
    assert FEWEST_STEPS <= steps <= MOST_STEPS
    assert 0 <= warmup <= MOST_WARMUP
    if length is None:
        assert steps >= LEAST_STEPS
    else:
        assert warmup + steps <= length


# ------------------------------------------------------------------------------------------ when pairs are enough

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
