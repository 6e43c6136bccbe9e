"""The words for effects, and that each stands where it may."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.comparison.estimates import effect, half_width
from stepscope.comparison.verdicts import percent, step_verdict, verdict
from stepscope.model.comparison import FASTER, NO_DIFFERENCE, SLOWER, UNDECIDED, Effect, Verdict

logs = st.lists(st.floats(min_value=-1, max_value=1), min_size=1, max_size=10)


def judge(*ratios: float, threshold: float = 0.01, width: float = 0.02, more_is_better: bool = False) -> Verdict:
    found = effect([(100.0, 100.0 * ratio) for ratio in ratios])
    return verdict(found, threshold=threshold, width=width, more_is_better=more_is_better)


def test_faster() -> None:
    said = judge(0.70, 0.72, 0.73, 0.71, 0.74)
    assert said.word == FASTER
    assert said.text == "faster by 28 % (95 %: 26 to 30 %), 5 pairs"


def test_slower() -> None:
    said = judge(1.030, 1.034, 1.028, 1.031)
    assert said.word == SLOWER
    assert said.text == "slower by 3.1 % (95 %: 2.7 to 3.5 %), 4 pairs"


def test_no_difference_says_how_large_a_difference_it_excludes() -> None:
    said = judge(1.01, 0.99, 1.005, 0.995, 1.0)
    assert said.word == NO_DIFFERENCE
    assert said.resolution == pytest.approx(0.0098, abs=0.0002)
    assert said.text == "no difference larger than 1 %, 5 pairs"


def test_a_certain_effect_that_does_not_matter_is_no_difference() -> None:
    ratios = (0.994, 0.9945, 0.9935, 0.994)
    assert judge(*ratios).word == NO_DIFFERENCE
    assert judge(*ratios, threshold=0.005).word == FASTER


def test_undecided_says_how_many_more_pairs() -> None:
    said = judge(0.95, 1.04, 0.98, 1.03, 0.99)
    assert said.word == UNDECIDED
    assert said.text.startswith("undecided: -0.3 % (95 %: -4.8 to +4.5 %), 5 pairs; about ")
    assert said.pairs_needed is not None
    assert 3 <= said.pairs_needed <= 10


def test_a_single_pair_gets_no_verdict() -> None:
    said = judge(0.5)
    assert said.word == UNDECIDED
    assert said.text == "undecided: -50 % in one run each; how much runs of the same program differ is not known"
    assert said.pairs_needed == 2


def test_two_pairs_get_none_either() -> None:
    assert judge(0.5, 0.5).text == "undecided: -50 % in 2 pairs; an interval needs 3"


def test_nothing_to_compare() -> None:
    assert verdict(None, threshold=0.01, width=0.02).word == UNDECIDED


def test_hopeless_noise_names_no_number() -> None:
    said = judge(0.5, 2.0, 0.6, 1.9)
    assert said.word == UNDECIDED
    assert "over 100 more pairs" in said.text


def test_throughput_is_better_when_it_grows() -> None:
    more = judge(1.40, 1.41, 1.39, more_is_better=True)
    assert more.word == FASTER
    assert more.text == "faster: 40 % more samples per second (95 %: 38 to 43 %), 3 pairs"
    fewer = judge(0.90, 0.905, 0.895, more_is_better=True)
    assert fewer.word == SLOWER
    assert fewer.text == "slower: 10 % fewer samples per second (95 %: 8.8 to 11 %), 3 pairs"


def test_among_many_candidates_a_doubtful_effect_is_undecided() -> None:
    alone = effect([(1.0, value) for value in (0.96, 0.99, 0.97, 0.985)])
    assert alone is not None
    assert alone.p_value is not None
    assert alone.p_value < 0.05
    assert verdict(alone, threshold=0.01, width=0.02, alpha=0.05).word == FASTER
    among = Effect(alone.ratio, alone.low, alone.high, alone.pairs, alone.spread, alone.p_value * 8)
    said = verdict(among, threshold=0.01, width=0.02, candidates=8)
    assert said.word == UNDECIDED
    assert "by itself, but one of 8 candidates may show that by chance" in said.text
    assert said.pairs_needed is not None
    assert said.pairs_needed >= 1


NOISY = (0.90, 1.04, 0.93, 1.01, 0.97)
STEADY = (0.969, 0.971, 0.965, 0.974, 0.968)


def judge_step(means: tuple[float, ...], medians: tuple[float, ...]) -> Verdict:
    mean, median = (effect([(1.0, ratio) for ratio in ratios]) for ratios in (means, medians))
    return step_verdict(mean, median, threshold=0.01, width=0.02)


def test_a_certain_mean_needs_no_median() -> None:
    for medians in (STEADY, (1.0,) * 5, NOISY):
        said = judge_step((0.70, 0.72, 0.73, 0.71, 0.74), medians)
        assert (said.word, said.text) == (FASTER, "faster by 28 % (95 %: 26 to 30 %), 5 pairs")


def test_the_median_decides_where_stalls_blur_the_mean() -> None:
    said = judge_step(NOISY, STEADY)
    assert said.word == FASTER
    assert said.text == (
        "faster by 3.1 % by the median step (95 %: 2.6 to 3.5 %), 5 pairs; "
        "the mean, which stalls blur, says 3.1 % (-4.2 to 10 %)"
    )
    assert said.pairs_needed is None


def test_the_median_decides_in_both_directions() -> None:
    said = judge_step(tuple(1 / ratio for ratio in NOISY), tuple(1 / ratio for ratio in STEADY))
    assert said.word == SLOWER
    assert said.text == (
        "slower by 3.2 % by the median step (95 %: 2.7 to 3.6 %), 5 pairs; "
        "the mean, which stalls blur, says 3.2 % (-4 to 11 %)"
    )


@pytest.mark.parametrize("shift", [1.031, 1.05])
def test_the_median_decides_nothing_that_the_mean_does_not_share(shift: float) -> None:
    """The mean points nowhere (0.1 %), or the other way."""
    said = judge_step(tuple(ratio * shift for ratio in NOISY), STEADY)
    assert said.word == UNDECIDED
    assert said.text.endswith(
        "; the median step is faster by 3.1 % (95 %: 2.6 to 3.5 %), 5 pairs, which the mean does not bear out"
    )


def test_where_both_are_certain_and_contradict_each_other_the_mean_decides() -> None:
    """A candidate whose steps are shorter, but whose stalls cost more than that."""
    said = judge_step((1.05, 1.052, 1.049, 1.051, 1.05), STEADY)
    assert said.word == SLOWER
    assert said.text == (
        "slower by 5 % (95 %: 4.9 to 5.2 %), 5 pairs; the typical step went the other way: "
        "the median step is faster by 3.1 % (95 %: 2.6 to 3.5 %), 5 pairs"
    )


def test_no_difference_is_not_said_where_the_median_is_certain() -> None:
    means = (0.986, 0.999, 0.976, 0.997, 0.985)
    assert judge(*means).word == NO_DIFFERENCE
    assert judge_step(means, (1.0,) * 5).word == NO_DIFFERENCE
    assert judge_step(means, STEADY).word == FASTER


def test_a_narrow_mean_says_no_difference_whatever_a_median_shows_that_it_does_not_share() -> None:
    means = (1.001, 0.999, 1.0, 1.002, 0.998)
    said = judge_step(means, STEADY)
    assert said.word == NO_DIFFERENCE
    assert said.text == judge(*means).text


def test_without_a_median_the_mean_decides() -> None:
    mean = effect([(1.0, ratio) for ratio in STEADY])
    assert step_verdict(mean, None, threshold=0.01, width=0.02).word == FASTER
    assert step_verdict(None, mean, threshold=0.01, width=0.02).word == UNDECIDED


def test_fewer_pairs_are_asked_for_where_the_median_will_decide() -> None:
    means, medians = (0.90, 1.04, 0.93, 1.01), (0.93, 0.98, 1.0, 0.95)
    said = judge_step(means, medians)
    assert said.word == UNDECIDED
    assert said.pairs_needed is not None
    assert said.pairs_needed < (judge(*means).pairs_needed or 0)


@given(logs, logs)
def test_the_median_decides_only_with_the_mean(means: list[float], medians: list[float]) -> None:
    mean, median = (effect([(1.0, math.exp(value)) for value in values]) for values in (means, medians))
    assert mean is not None
    alone = verdict(mean, threshold=0.01, width=0.02)
    said = step_verdict(mean, median, threshold=0.01, width=0.02)
    if alone.word in {FASTER, SLOWER}:
        assert said.word == alone.word
        assert said.text.startswith(alone.text)
    elif said.word in {FASTER, SLOWER}:
        assert (mean.ratio > 1) == (said.word == SLOWER)
        assert abs(mean.ratio - 1) >= 0.01
    assert (said.word == UNDECIDED) == (said.pairs_needed is not None)


@given(logs, st.floats(0, 0.1), st.floats(0.001, 0.1))
def test_words_hold_what_they_say(values: list[float], threshold: float, width: float) -> None:
    found = effect([(1.0, math.exp(value)) for value in values])
    assert found is not None
    said = verdict(found, threshold=threshold, width=width)
    assert said.text
    if said.word == FASTER:
        assert found.high is not None
        assert found.high < 1
    if said.word == SLOWER:
        assert found.low is not None
        assert found.low > 1
    if said.word in {FASTER, SLOWER}:
        assert abs(found.ratio - 1) >= threshold
    if said.word == NO_DIFFERENCE:
        assert found.low is not None
        assert found.high is not None
        assert said.resolution is not None
        assert 1 - said.resolution <= found.low + 1e-12
        assert found.high <= 1 + said.resolution + 1e-12
        assert said.resolution <= width + threshold
    assert (said.word == UNDECIDED) == (said.pairs_needed is not None)


@given(st.lists(st.floats(-0.05, 0.05), min_size=3, max_size=8))
def test_the_pairs_asked_for_suffice_if_the_spread_stays(values: list[float]) -> None:
    """Repeating what was seen, until there are as many pairs as were asked for, decides."""
    found = effect([(1.0, math.exp(value)) for value in values])
    assert found is not None
    said = verdict(found, threshold=0.01, width=0.02)
    if said.word != UNDECIDED or said.pairs_needed is None or said.pairs_needed > 500 or not found.spread:
        return
    count = found.pairs + said.pairs_needed
    later = Effect(found.ratio, None, None, count, found.spread)
    half = half_width(later)
    assert half is not None
    size = abs(math.log(found.ratio))
    assert half <= max(0.03 - size, size) + 1e-9


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.28, "28"),
        (0.018, "1.8"),
        (0.03, "3"),
        (0.0004, "0.04"),
        (0.0, "0"),
        (-0.004, "-0.4"),
        (0.0996, "10"),
        (2, "200"),
    ],
)
def test_figures_in_percent(fraction: float, text: str) -> None:
    assert percent(fraction) == text


def test_signs_in_percent() -> None:
    assert percent(0.023, sign=True) == "+2.3"
    assert percent(-0.03, sign=True) == "-3"
    assert percent(0.0, sign=True) == "0"
    assert percent(-1e-9, sign=True) == "0"
