"""What a sweep is asked for: ranges, choices, metrics, and one line for what makes no sense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import UsageError
from stepscope.model.sweep import Objective, Parameter
from stepscope.sweep.space import grid, key, objective, parameter, shown
from tests.records import replace
from tests.sweep.fakes import request


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("arg:--lr=log:1e-5..1e-2", Parameter("arg:--lr", 1e-5, 1e-2, log=True)),
        ("arg:--drop=0..0.5", Parameter("arg:--drop", 0.0, 0.5)),
        ("arg:--bias=-1.5..-.5", Parameter("arg:--bias", -1.5, -0.5)),
        ("loader.num_workers=0..4", Parameter("loader.num_workers", 0, 4, whole=True)),
        ("arg:--width=log:8..1024", Parameter("arg:--width", 8, 1024, log=True, whole=True)),
        ("arg:--batch-size=8,16,32", Parameter("arg:--batch-size", choices=("8", "16", "32"))),
        ("env:NAME= a , b", Parameter("env:NAME", choices=("a", "b"))),
        ("arg:--betas=0.9..x,0.8", Parameter("arg:--betas", choices=("0.9..x", "0.8"))),
    ],
)
def test_values_are_a_range_or_choices(text: str, found: Parameter) -> None:
    assert parameter(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arg:--lr", "not a parameter"),
        ("=1..2", "not a parameter"),
        ("arg:--lr=", "not a parameter"),
        ("arg:--lr=2..1", "the first number must be below the second"),
        ("arg:--lr=1..1", "the first number must be below the second"),
        ("arg:--lr=log:0..1", "a logarithm needs numbers above 0"),
        ("arg:--lr=log:a..b", "not a range of numbers"),
        ("arg:--lr=nan..1", "not a range of numbers"),
        ("arg:--lr=1..1e999", "too large"),
        ("arg:--lr=-1e308..1e308", "too large"),
        ("arg:--n=0..9007199254740993", "cannot be told apart"),
        ("arg:--lr=1", "set it with --base arg:--lr=1"),
        ("arg:--lr=1,,2", "is empty"),
        ("arg:--lr=1,2,1", "given twice"),
        ("loader.num_workers=0.5..2", "takes a whole number"),
        ("amp.dtype=bf16,fp8", "takes bf16, fp16 or off"),
        ("no.knob=1,2", "is no knob"),
    ],
)
def test_what_no_run_could_be_started_with_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parameter(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_metric_says_what_is_better() -> None:
    assert objective("val/loss:min", "last") == Objective("val/loss", "min", "last")
    assert objective("train/loss/train.py:30:max", "best") == Objective("train/loss/train.py:30", "max", "best")
    assert objective("seconds", "last").direction == "min"
    for text in ("val/loss", "val/loss:low", ":min", ""):
        with pytest.raises(UsageError, match="say what is better"):
            objective(text, "last")
    with pytest.raises(UsageError, match="there are last, best, tail"):
        objective("loss:min", "median")


def test_more_trials_and_time_are_the_same_sweep() -> None:
    asked = request("arg:--a=1,2")
    assert key(asked) == key(replace(asked, trials=99, budget_s=5.0))
    assert key(asked) != key(replace(asked, seed=1))
    assert len(grid(request("arg:--a=1,2", "arg:--b=1..3").params)) == 6


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_command_gets_every_digit(value: float) -> None:
    assert float(shown(value)) == value
