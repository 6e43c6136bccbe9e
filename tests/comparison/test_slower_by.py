"""`--fail-on slower=X%`: what the check of a comparison says, and when it cannot say anything."""

from __future__ import annotations

import pytest

from stepscope.comparison.estimates import effect
from stepscope.comparison.verdicts import SlowerCheck, slower_by, verdict
from stepscope.model.comparison import SLOWER, VOID, Comparison, Outcome, SideFacts, Verdict

NARROW = (0.999, 1.0, 1.001, 1.0)
WIDE = (0.9, 1.1, 1.05, 0.95)
SIDE = SideFacts("a", (), ())


def compared(ratio: float, noise: tuple[float, ...], *, headline: str = "mean_ms") -> Comparison:
    found = effect([(100.0, 100.0 * ratio * factor) for factor in noise])
    assert found is not None
    said = verdict(found, threshold=0.01, width=0.02, more_is_better=headline == "samples_per_second")
    return holding(Outcome((), said, {headline: found}, (), (), headline=headline))


def holding(outcome: Outcome | None, **absent: str) -> Comparison:
    return Comparison(SIDE, SIDE, outcome, (), {name.replace("_", " "): why for name, why in absent.items()})


@pytest.mark.parametrize(
    ("ratio", "noise", "by", "slower"),
    [
        (1.10, NARROW, 0.03, True),
        (1.00, NARROW, 0.03, False),
        (0.80, NARROW, 0.03, False),
        (0.80, WIDE, 0.03, False),  # surely faster, however wide the interval is
        (1.02, NARROW, 0.03, False),  # slower, but by less
        (1.03, (1.004, 0.997, 1.003, 0.999), 0.03, True),
        (1.029, (1.004, 0.997, 1.003, 0.995), 0.03, None),
        (1.04, WIDE, 0.03, None),
        (1.00, WIDE, 0.03, None),
        (1.20, (1.0,), 0.03, None),
        (1.20, (1.0, 1.0), 0.03, None),
    ],
)
def test_the_check(ratio: float, noise: tuple[float, ...], by: float, slower: bool | None) -> None:
    assert slower_by(compared(ratio, noise), by).slower is slower


def test_fewer_samples_per_second_are_slower() -> None:
    assert slower_by(compared(0.8, NARROW, headline="samples_per_second"), 0.03).slower is True
    assert slower_by(compared(1.2, NARROW, headline="samples_per_second"), 0.03).slower is False


def test_a_single_pair_says_how_many_more_are_needed() -> None:
    found = slower_by(compared(1.2, (1.0,)), 0.03)
    assert "+20 %" in found.text
    assert "about 2 more pairs needed" in found.text


def test_an_interval_that_the_limit_lies_in_says_how_many_more_pairs_are_needed() -> None:
    text = slower_by(compared(1.04, WIDE), 0.01).text
    assert "1 % lies in the interval" in text
    assert "more pairs" in text


def test_what_is_void_or_has_no_steps_cannot_be_judged() -> None:
    void = Outcome((), Verdict(VOID, "void: a run failed"), {}, (), ())
    assert slower_by(holding(void), 0.03) == SlowerCheck(None, "void: a run failed")
    assert slower_by(holding(None, step_time="b: no steps"), 0.03) == SlowerCheck(None, "b: no steps")


def test_a_noisy_mean_beside_a_median_that_is_surely_slower_by_less_decides_nothing() -> None:
    mean = effect([(100.0, 100.0 * factor) for factor in (1.15, 0.94, 1.12, 0.96, 1.03)])
    small, large = (effect([(100.0, 100.0 * by * factor) for factor in NARROW]) for by in (1.012, 1.04))
    assert mean is not None
    assert mean.low is not None
    assert mean.low < 1 < 1.03 < mean.ratio
    for median, slower in ((small, None), (large, True)):
        assert median is not None
        found = Outcome((), Verdict(SLOWER, ""), {"mean_ms": mean, "median_ms": median}, (), ())
        assert slower_by(holding(found), 0.03).slower is slower
