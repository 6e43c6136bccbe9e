"""What a command line asks for: candidates out of `--try`, sizes of runs, and which requests are the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.experiment.plan import (
    FEWEST_STEPS,
    LEAST_STEPS,
    MOST_STEPS,
    MOST_WARMUP,
    candidates_of,
    key,
    sizes,
)
from stepscope.schema import Knob
from tests.experiment.fakes import request
from tests.records import replace


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
